"""pico-vllm bench: measure, print, and keep a record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from pico_vllm.bench.clock import StartupClock
from pico_vllm.cli.lines import Commit, IsJson, Lines, RecordFile
from pico_vllm.cli.options import takes_config
from pico_vllm.cli.terminal import load_llm
from pico_vllm.config.engine import EngineConfig
from pico_vllm.errors import ConfigError

if TYPE_CHECKING:
    from pico_vllm.bench.engine import ReadFloor
    from pico_vllm.bench.peers.base import BenchEngine
    from pico_vllm.bench.workload import Workload
    from pico_vllm.engine.llm import LLM

app = typer.Typer(help="Measure this machine with this engine.", no_args_is_help=True)

PEERS = ("transformers", "llama-cpp")
ENGINE_COLUMNS = (
    "id", "engine", "ms_per_step", "host_ms_per_step", "pct_of_read_limit", "decode_tok_s",
    "ttft_ms", "prefill_tok_s", "out_tok_s", "cold_ms", "warm_ms", "startup_s",
)  # fmt: skip


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
    is_json: IsJson = False,
    record: RecordFile = None,
    commit: Commit = None,
    *,
    engine: EngineConfig,
) -> None:
    """Time decoding, time to first token and throughput on fixed workloads."""
    clock = StartupClock()
    unknown = [peer for peer in compare or () if peer not in PEERS]
    if unknown:
        raise ConfigError(
            f"cannot compare with {', '.join(unknown)}; there are {', '.join(PEERS)}",
            param="compare",
        )
    workloads = _workloads(engine, only)
    with load_llm(engine) as llm:
        from pico_vllm.bench.engine import KEYS, PicoEngine, run_workloads
        from pico_vllm.bench.record import environment
        from pico_vllm.bench.workload import check_workloads

        ours = PicoEngine(llm)
        ours.generate([[0]], [1])
        startup_s = clock.elapsed_s()
        config = llm.config
        check_workloads(
            workloads,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            num_kv_tokens=(config.num_kv_blocks or 0) * config.block_size,
        )
        engines: list[BenchEngine] = [ours, *_peers(llm, workloads, compare or ())]
        floor = _read_floor(llm)
        facts = environment(config, commit=commit) | {
            "weight_bytes": floor.weight_bytes,
            "kv_bytes_per_token": floor.kv_bytes_per_token,
            "read_limit_gb_s": round(floor.limit_bytes_s / 1e9, 2),
        }
        lines = Lines(ENGINE_COLUMNS, is_json=is_json, record=record)
        measured = run_workloads(
            engines,
            workloads,
            vocab_size=llm.engine.vocab_size,
            seed=engine.seed,
            floor=floor,
        )
        first: dict[str, Any] = {
            "id": "startup",
            "engine": ours.name,
            "startup_s": round(startup_s, 3),
            "startup_from": clock.counts_from,
            **dict.fromkeys(KEYS),
        }
        for line in (first, *measured):
            lines.add({"id": line["id"], "model": engine.model} | line | facts)
        lines.show()


def _workloads(engine: EngineConfig, only: str | None) -> list[Workload]:
    """Those to run, checked against what was asked for before anything is loaded."""
    from pico_vllm.bench.workload import check_workloads, read_workloads, select
    from pico_vllm.engine.loading import settle_device

    workloads = select(read_workloads(settle_device(engine.device).type), only)
    check_workloads(workloads, max_model_len=engine.max_model_len, max_num_seqs=engine.max_num_seqs)
    return workloads


def _read_floor(llm: LLM) -> ReadFloor:
    from pico_vllm.bench.engine import ReadFloor
    from pico_vllm.bench.limits import read_limit_bytes_s
    from pico_vllm.engine.loading import TORCH_DTYPES

    config = llm.config
    kv_bytes = llm.model_config.kv_bytes_per_token(TORCH_DTYPES[config.dtype].itemsize)
    return ReadFloor(
        weight_bytes=llm.weight_bytes,
        kv_bytes_per_token=0 if config.kv == "none" else kv_bytes,
        limit_bytes_s=read_limit_bytes_s(config.device),
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
