"""pico-vllm bench: measure, print, and keep a record."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pico_vllm.bench.clock import StartupClock
from pico_vllm.cli.lines import Commit, IsJson, Lines, RecordFile, writable
from pico_vllm.cli.load import bench_interference, bench_load
from pico_vllm.cli.options import field_option, integers, names, takes_config
from pico_vllm.cli.prefix import bench_prefix
from pico_vllm.cli.terminal import load_llm, note
from pico_vllm.config.engine import EngineConfig
from pico_vllm.errors import ConfigError

if TYPE_CHECKING:
    from pico_vllm.bench.engine import ReadFloor
    from pico_vllm.bench.peers.base import BenchEngine
    from pico_vllm.bench.workload import Workload
    from pico_vllm.engine.llm import LLM

app = typer.Typer(help="Measure this machine with this engine.", no_args_is_help=True)
app.command("load")(bench_load)
app.command("interference")(bench_interference)
app.command("prefix")(bench_prefix)

PEERS = ("transformers", "llama-cpp")
ENGINE_COLUMNS = (
    "id", "engine", "ms_per_step", "host_ms_per_step", "pct_of_read_limit", "decode_tok_s",
    "ttft_ms", "prefill_tok_s", "out_tok_s", "cold_ms", "warm_ms", "startup_s",
)  # fmt: skip


KERNEL_COLUMNS = (
    "kernel", "rows", "context", "us", "tb_s", "tflop_s", "pct_of_limit", "twin_us", "torch_us",
    "torch_name",
)  # fmt: skip


@app.command("engine")
@takes_config
def bench_engine(
    only: Annotated[
        str | None, typer.Option(help="Run these workloads only, ids with commas between.")
    ] = None,
    workloads_file: Annotated[
        Path | None,
        typer.Option("--workloads", help="Those of this file instead of our own (JSON)."),
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
    workloads = _workloads(engine, only, workloads_file)
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
            num_kv_blocks=config.num_kv_blocks or 0,
            block_size=config.block_size,
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
        with lines.shown():
            for line in itertools.chain([first], measured):
                lines.add({"id": line["id"], "model": engine.model} | line | facts)
        lines.end()


@app.command("kernels")
def bench_kernels(
    model: Annotated[
        str, typer.Option(help="Whose sizes; its weights are not read.")
    ] = "qwen2.5-1.5b",
    rows: Annotated[
        str, typer.Option(help="Requests that decode, with commas between.")
    ] = "1,8,32",
    context: Annotated[
        str, typer.Option(help="Tokens that each attends to, with commas between.")
    ] = "128,640,16384",
    only: Annotated[
        str | None, typer.Option(help="Time these kernels only, names with commas between.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    block_size: Annotated[int, field_option(EngineConfig, "block_size")] = 16,
    device: Annotated[str, typer.Option(help="auto, cuda or cuda:N.")] = "auto",
    is_json: IsJson = False,
    record: RecordFile = None,
    commit: Commit = None,
) -> None:
    """Time each kernel of a step by itself, beside its plain twin and torch. Needs a GPU."""
    EngineConfig(model=model, dtype=dtype, device=device, block_size=block_size)  # checks them
    all_rows, contexts = integers("rows", rows), integers("context", context)
    from pico_vllm.bench.limits import matmul_limit_flop_s, read_limit_bytes_s, require_gpu

    torch_device = require_gpu(device, "bench kernels")
    from pico_vllm.bench.kernels import KERNELS, MAX_ROWS, GraphTimer, Limits, Sizes, time_kernels
    from pico_vllm.bench.model_sizes import read_model_config
    from pico_vllm.bench.record import machine
    from pico_vllm.engine.loading import TORCH_DTYPES
    from pico_vllm.engine.triton_loading import check_sizes

    chosen = names("only", only, KERNELS)
    if max(all_rows) > MAX_ROWS:
        raise ConfigError(
            f"--rows {max(all_rows)} is more than {MAX_ROWS}; leave larger ones out", param="rows"
        )
    if dtype not in TORCH_DTYPES:
        raise ConfigError(f"--dtype must be one of {', '.join(TORCH_DTYPES)}", param="dtype")
    torch_dtype = TORCH_DTYPES[dtype]
    name = str(torch_device)
    limits = Limits(read_limit_bytes_s(name), matmul_limit_flop_s(name, torch_dtype))
    facts = {
        "model": model,
        "dtype": dtype,
        "block_size": block_size,
        "read_limit_gb_s": round(limits.read_bytes_s / 1e9, 2),
        "matmul_limit_tflop_s": round(limits.matmul_flop_s / 1e12, 2),
    } | machine(name, commit=commit)
    model_config = read_model_config(model)
    check_sizes(model_config.head_dim, block_size)
    sizes = Sizes(model_config, all_rows, contexts, block_size, torch_dtype, torch_device)
    lines = Lines(KERNEL_COLUMNS, is_json=is_json, record=record)
    with lines.shown():
        for line in time_kernels(sizes, chosen, GraphTimer(torch_device), limits):
            lines.add(line | facts)
    lines.end()


@app.command("ladder")
@takes_config
def bench_ladder(
    context: Annotated[
        str, typer.Option(help="Tokens of the prompts, with commas between.")
    ] = "16,64,256,1024,2048,4096",
    only: Annotated[
        str | None, typer.Option(help="Measure these stages only, names with commas between.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw the figures into this file (.png, .svg or .pdf).",
            callback=writable("--plot"),
        ),
    ] = None,
    is_json: IsJson = False,
    record: RecordFile = None,
    commit: Commit = None,
    *,
    engine: EngineConfig,
) -> None:
    """Time a decode step at batch 1 in each stage of the engine's history, from no cache on."""
    contexts = integers("context", context)
    if plot is not None:
        from pico_vllm.bench.plot import check_plot

        check_plot(plot)
    from pico_vllm.bench.ladder import choose_stages, run_ladder
    from pico_vllm.bench.record import environment
    from pico_vllm.engine.loading import settle_device

    stages = choose_stages(settle_device(engine.device).type, only)
    columns = ["stage", *map(str, sorted(set(contexts)))]
    lines = Lines(columns, is_json=is_json, record=record)
    with lines.shown(_pivot):
        for line, config in run_ladder(stages, contexts, engine, load_llm):
            head = {"id": line["id"], "model": engine.model}
            lines.add(head | line | environment(config, commit=commit))
    for line in lines.lines:
        if line["skipped"] is not None:
            note(f"[{line['stage']}, context {line['context']}: skipped, {line['skipped']}]")
    if plot is not None:
        from pico_vllm.bench.plot import plot_ladder

        first = lines.lines[0]
        parts = (engine.model, first["gpu"] or first["cpu"], first["commit"])
        plot_ladder(plot, lines.lines, " · ".join(part for part in parts if part))
        note(f"[plot written to {plot}]")
    lines.end()


def _pivot(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a stage, a column a context, milliseconds a step in the cells."""
    rows: dict[str, dict[str, Any]] = {}
    for line in lines:
        row = rows.setdefault(line["stage"], {"stage": line["stage"]})
        step_ms = line["ms_per_step"]
        row[str(line["context"])] = "skipped" if step_ms is None else step_ms
    return list(rows.values())


def _workloads(engine: EngineConfig, only: str | None, file: Path | None) -> list[Workload]:
    """Those to run, checked against what was asked for before anything is loaded."""
    from pico_vllm.bench.workload import check_workloads, read_workloads, select
    from pico_vllm.engine.loading import settle_device

    workloads = select(read_workloads(settle_device(engine.device).type, file), only)
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
