"""pico-vllm bench: measure, print, and keep a record."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pico_vllm.cli.options import takes_config
from pico_vllm.cli.terminal import console, load_llm, note
from pico_vllm.config.engine import EngineConfig
from pico_vllm.errors import ConfigError

if TYPE_CHECKING:
    from pico_vllm.bench.peers.base import BenchEngine
    from pico_vllm.bench.workload import Workload
    from pico_vllm.engine.llm import LLM

app = typer.Typer(help="Measure this machine with this engine.", no_args_is_help=True)

PEERS = ("transformers", "llama-cpp")


@app.command("engine")
@takes_config
def bench_engine(
    only: Annotated[
        str | None, typer.Option(help="Run these workloads only, ids with commas between.")
    ] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(help=f"Time a peer beside ours, in the same run: {' or '.join(PEERS)}."),
    ] = None,
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON line a figure.")] = False,
    record: Annotated[
        Path | None, typer.Option(help="Append the lines to this file, with all they depend on.")
    ] = None,
    commit: Annotated[
        str | None, typer.Option(help="The commit that is measured, where there is no git.")
    ] = None,
    *,
    engine: EngineConfig,
) -> None:
    """Time decoding, time to first token and throughput on fixed workloads."""
    unknown = [peer for peer in compare or () if peer not in PEERS]
    if unknown:
        raise ConfigError(
            f"cannot compare with {', '.join(unknown)}; there are {', '.join(PEERS)}",
            param="compare",
        )
    start = time.perf_counter()
    with load_llm(engine) as llm:
        from pico_vllm.bench.engine import PicoEngine, read_limit_bytes_s, run_workloads
        from pico_vllm.bench.record import append_record, environment
        from pico_vllm.bench.workload import read_workloads, select

        ours = PicoEngine(llm)
        ours.generate([[0]], [1])
        startup_s = time.perf_counter() - start
        workloads = select(read_workloads(llm.config.device), only)
        _check_windows(llm, workloads)
        engines: list[BenchEngine] = [ours, *_peers(llm, workloads, compare or ())]
        limit = read_limit_bytes_s(llm.config.device)
        facts = environment(llm.config, commit=commit) | {
            "weight_bytes": llm.weight_bytes,
            "read_limit_gb_s": round(limit / 1e9, 2),
        }
        lines: list[dict[str, Any]] = []
        table = _Table(is_json)
        measured = run_workloads(
            engines,
            workloads,
            vocab_size=llm.model_config.vocab_size,
            seed=engine.seed,
            weight_bytes=llm.weight_bytes,
            read_limit_bytes_s=limit,
        )
        first = {"id": "startup", "engine": ours.name, "startup_s": round(startup_s, 3)}
        for line in (first, *measured):
            lines.append({"id": line["id"], "model": engine.model} | line | facts)
            table.add(lines[-1])
        table.show()
    if record is not None:
        append_record(record, lines)
        note(f"[{len(lines)} lines appended to {record}]")


def _check_windows(llm: LLM, workloads: list[Workload]) -> None:
    for workload in workloads:
        if workload.max_total_tokens > llm.engine.max_model_len:
            raise ConfigError(
                f"{workload.id} needs {workload.max_total_tokens} tokens and the window holds "
                f"{llm.engine.max_model_len}; raise --max-model-len or leave it out with --only",
                param="max_model_len",
            )


def _peers(llm: LLM, workloads: list[Workload], names: tuple[str, ...] | list[str]) -> list[Any]:
    from pico_vllm.engine.loading import TORCH_DTYPES

    peers: list[Any] = []
    if "transformers" in names:
        from pico_vllm.bench.peers.transformers import TransformersEngine

        peers.append(TransformersEngine(llm.config, TORCH_DTYPES[llm.config.dtype]))
    if "llama-cpp" in names:
        from pico_vllm.bench.peers.llama_cpp import LlamaCppEngine

        longest = max(workload.max_total_tokens for workload in workloads)
        peers.append(LlamaCppEngine(llm.config, longest))
    return peers


class _Table:
    """A row a line, or the lines themselves as JSON as soon as they come."""

    COLUMNS = (
        "id", "engine", "ms_per_step", "decode_tok_s", "ttft_ms", "prefill_tok_s", "out_tok_s",
        "cold_ms", "warm_ms", "pct_of_read_limit", "startup_s",
    )  # fmt: skip

    def __init__(self, is_json: bool) -> None:
        self._is_json = is_json
        self._lines: list[dict[str, Any]] = []

    def add(self, line: dict[str, Any]) -> None:
        if self._is_json:
            print(json.dumps(line, allow_nan=False), flush=True)
        self._lines.append(line)

    def show(self) -> None:
        if self._is_json:
            return
        from rich.table import Table

        used = [
            name for name in self.COLUMNS if any(line.get(name) is not None for line in self._lines)
        ]
        table = Table(*used)
        for line in self._lines:
            table.add_row(*(_cell(line.get(name)) for name in used))
        console().print(table)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if isinstance(value, float) else str(value)
