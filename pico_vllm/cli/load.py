"""pico-vllm bench load and bench interference: latency while requests come by themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pico_vllm.cli.lines import Commit, IsJson, Lines, RecordFile, print_table, writable
from pico_vllm.cli.options import integers, takes_config
from pico_vllm.cli.terminal import load_llm, note
from pico_vllm.config.engine import EngineConfig
from pico_vllm.errors import ConfigError

if TYPE_CHECKING:
    from pico_vllm.bench.lengths import LengthSource

LOAD_COLUMNS = (
    "rate_req_s", "offered_req_s", "num_requests", "num_failed", "req_s", "out_tok_s",
    "total_tok_s", "goodput_req_s", "hit_rate", "host_hit_rate", "disk_hit_rate",
)  # fmt: skip
LATENCY_COLUMNS = ("rate_req_s", "figure", "mean", "p50", "p90", "p99")
INTERFERENCE_COLUMNS = (
    "budget_tokens", "idle_itl_ms_p50", "idle_itl_ms_p99", "loaded_itl_ms_p50",
    "loaded_itl_ms_p99", "itl_ratio_p50", "itl_ratio_p99", "ttft_ms_p50", "ttft_ms_p99",
)  # fmt: skip

Limit = Annotated[
    float | None,
    typer.Option(help="For goodput: only requests that keep this limit count as good."),
]


@takes_config
def bench_load(
    rate: Annotated[
        str, typer.Option(help="Requests a second, with commas between: one run for each.")
    ] = "1,2,4",
    num_requests: Annotated[int, typer.Option(min=1, help="Requests of each run.")] = 100,
    burstiness: Annotated[
        float,
        typer.Option(
            help="Shape of the gamma distribution of gaps: 1 is a Poisson process, less is "
            "burstier, more is more regular."
        ),
    ] = 1.0,
    burst_size: Annotated[
        int, typer.Option(help="Requests that arrive at the same moment; the rate stays.")
    ] = 1,
    prompt_tokens: Annotated[
        str, typer.Option(help="Tokens of a prompt: a number, or a range like 100-1024.")
    ] = "128",
    output_tokens: Annotated[
        str, typer.Option(help="Tokens of an answer: a number, or a range like 16-128.")
    ] = "64",
    lengths: Annotated[
        Path | None,
        typer.Option(
            help="Draw both from this file instead: a JSON list, or lines, of objects with "
            "prompt_tokens and output_tokens."
        ),
    ] = None,
    ttft_limit_ms: Limit = None,
    tpot_limit_ms: Limit = None,
    itl_limit_ms: Limit = None,
    e2e_limit_ms: Limit = None,
    num_warmups: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Requests that run at once before the first rate, uncounted.",
            show_default="as many as run at once, at most --num-requests",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw TTFT and ITL against the load (.png, .svg or .pdf).",
            callback=writable("--plot"),
        ),
    ] = None,
    is_json: IsJson = False,
    record: RecordFile = None,
    commit: Commit = None,
    *,
    engine: EngineConfig,
) -> None:
    """Send requests at their own times, whether or not the engine keeps up, and time their
    tokens."""
    from pico_vllm.bench.arrivals import Arrivals
    from pico_vllm.bench.lengths import check_lengths
    from pico_vllm.bench.metrics import LatencyLimits

    all_arrivals = [
        Arrivals(rate_req_s=each, burstiness=burstiness, burst_size=burst_size)
        for each in _rates(rate)
    ]
    limits = LatencyLimits(
        ttft_ms=ttft_limit_ms, tpot_ms=tpot_limit_ms, itl_ms=itl_limit_ms, e2e_ms=e2e_limit_ms
    )
    source = _length_source(lengths, prompt_tokens, output_tokens)
    check_lengths(source, engine.max_model_len)
    if plot is not None:
        from pico_vllm.bench.plot import check_plot

        check_plot(plot)
    asked = {
        "prompt_tokens": None if lengths else prompt_tokens,
        "output_tokens": None if lengths else output_tokens,
        "lengths": None if lengths is None else str(lengths),
    }
    with load_llm(engine) as llm:
        from pico_vllm.bench.load import run_rates, warm_up
        from pico_vllm.bench.record import environment
        from pico_vllm.bench.workload import PromptSource

        check_lengths(source, llm.engine.max_model_len)
        prompts = PromptSource(llm.engine.vocab_size, engine.seed)
        if num_warmups is None:
            assert llm.config.max_num_seqs is not None
            num_warmups = min(num_requests, llm.config.max_num_seqs)
        if num_warmups:
            warm_up(llm.engine, source, num_requests=num_warmups, seed=engine.seed, prompts=prompts)
        lines = Lines(LOAD_COLUMNS, is_json=is_json, record=record)
        facts = environment(llm.config, commit=commit)
        measured = run_rates(
            llm.engine,
            all_arrivals,
            source,
            limits,
            num_requests=num_requests,
            seed=engine.seed,
            prompts=prompts,
            on_start=note,
        )
        with lines.shown():
            for line in measured:
                head = {"id": line["id"], "model": engine.model}
                lines.add(head | line | asked | {"num_warmups": num_warmups} | facts)
    if not is_json:
        print_table(LATENCY_COLUMNS, list(_latencies(lines.lines)))
    if plot is not None:
        from pico_vllm.bench.plot import plot_load

        first = lines.lines[0]
        parts = (engine.model, first["gpu"] or first["cpu"], first["commit"])
        plot_load(plot, lines.lines, " · ".join(part for part in parts if part))
        note(f"[plot written to {plot}]")
    lines.end()


@takes_config
def bench_interference(
    budgets: Annotated[
        str,
        typer.Option(help="Values of max_num_batched_tokens, with commas between: one run each."),
    ] = "512,2048,8192",
    decoding: Annotated[
        int, typer.Option(min=1, help="Requests that decode meanwhile, whose ITL is measured.")
    ] = 32,
    context: Annotated[int, typer.Option(min=1, help="Tokens of their prompts.")] = 128,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of each prompt that arrives.")
    ] = 8192,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts that arrive, in sequence.")] = 8,
    idle_steps: Annotated[
        int, typer.Option(min=1, help="Steps that are timed before the first prompt.")
    ] = 200,
    is_json: IsJson = False,
    record: RecordFile = None,
    commit: Commit = None,
    *,
    engine: EngineConfig,
) -> None:
    """Time what long prompts, one after another, cost the requests that are decoding."""
    all_budgets = integers("budgets", budgets)
    if engine.max_num_batched_tokens is not None:
        raise ConfigError(
            "bench interference runs one engine for each of --budgets; leave "
            "--max-num-batched-tokens out",
            param="max_num_batched_tokens",
        )
    from pico_vllm.bench.interference import Scenario, run_interference
    from pico_vllm.bench.record import environment

    scenario = Scenario(
        num_decoding=decoding,
        context=context,
        prompt_tokens=prompt_tokens,
        num_prompts=prompts,
        idle_steps=idle_steps,
    )
    lines = Lines(INTERFERENCE_COLUMNS, is_json=is_json, record=record)
    with lines.shown():
        for line, config in run_interference(all_budgets, scenario, engine, load_llm):
            head = {"id": line["id"], "model": engine.model}
            lines.add(head | line | environment(config, commit=commit))
    lines.end()


def _rates(text: str) -> list[float]:
    try:
        return [float(each) for each in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--rate {text!r} must be numbers of requests a second, with commas between",
            param="rate",
        ) from None


def _length_source(path: Path | None, prompt_tokens: str, output_tokens: str) -> LengthSource:
    from pico_vllm.bench.lengths import UniformLengths, parse_bounds, read_lengths

    if path is not None:
        return read_lengths(path)
    return UniformLengths(
        prompt_tokens=parse_bounds("prompt-tokens", prompt_tokens),
        output_tokens=parse_bounds("output-tokens", output_tokens),
    )


def _latencies(lines: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row a rate and latency, milliseconds in the cells."""
    for line in lines:
        for key in ("ttft", "itl", "tpot", "e2e"):
            figures = {of: line[f"{key}_ms_{of}"] for of in LATENCY_COLUMNS[2:]}
            yield {"rate_req_s": line["rate_req_s"], "figure": f"{key}_ms"} | figures
