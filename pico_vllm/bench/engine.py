"""Times an engine on workloads; other engines run interleaved, repeat by repeat, on the same
prompts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pico_vllm.bench.figures import rounded
from pico_vllm.bench.peers.base import BenchEngine
from pico_vllm.bench.steps import step_error
from pico_vllm.bench.workload import PromptSource, Workload
from pico_vllm.engine.llm import LLM
from pico_vllm.sampling_params import SamplingParams

REPEATS = 3
KEYS = (
    "ms_per_step", "decode_tok_s", "e2e_tok_s", "ttft_ms", "prefill_tok_s", "out_tok_s",
    "cold_ms", "warm_ms", "warm_best_ms", "host_ms_per_step", "pct_of_read_limit",
)  # fmt: skip

Figures = dict[str, float | None]


class PicoEngine:
    def __init__(self, llm: LLM) -> None:
        self.name = "pico-vllm"
        self._llm = llm
        # Elsewhere a launch computes, or waits, and its time is not the host's own.
        is_apart = llm.config.device != "cpu" and llm.config.uses_triton
        self.host_clock = llm.engine.host_clock if is_apart else None

    def generate(self, prompts: Sequence[list[int]], num_output_tokens: Sequence[int]) -> None:
        params = [
            SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False)
            for count in num_output_tokens
        ]
        outputs = self._llm.generate(list(prompts), params)
        for output, count in zip(outputs, num_output_tokens, strict=True):
            if output.outputs[0].finish_reason == "error":
                raise step_error(self._llm.engine)
            assert len(output.outputs[0].token_ids) == count, output.outputs[0].finish_reason


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFloor:
    """The least that a decode step can take: reading all weights once, and the KV of every
    request."""

    weight_bytes: int
    kv_bytes_per_token: int
    limit_bytes_s: float

    def least_ms(self, workload: Workload) -> float:
        kv_bytes = workload.batch * workload.mean_context_tokens * self.kv_bytes_per_token
        return (self.weight_bytes + kv_bytes) / self.limit_bytes_s * 1e3


def run_workloads(
    engines: Sequence[BenchEngine],
    workloads: Sequence[Workload],
    *,
    vocab_size: int,
    seed: int,
    floor: ReadFloor,
) -> Iterator[dict[str, Any]]:
    """One line a workload and engine, as soon as it is measured. The floor is that of our
    weights."""
    source = PromptSource(vocab_size, seed)
    for workload in workloads:
        for engine, figures in zip(engines, measure(engines, workload, source), strict=True):
            if engine is engines[0] and figures.get("ms_per_step"):
                least_ms = floor.least_ms(workload)
                figures["pct_of_read_limit"] = 100 * least_ms / figures["ms_per_step"]
            line = dict.fromkeys(KEYS) | figures
            yield {
                "id": workload.id,
                "engine": engine.name,
                **rounded(line),
                "batch": workload.batch,
                "repeats": REPEATS,
                "seed": seed,
            }


def measure(
    engines: Sequence[BenchEngine], workload: Workload, source: PromptSource
) -> list[Figures]:
    """Medians of REPEATS after one to warm up, the engines in turn."""
    measure_once = {"decode": _decode, "ttft": _ttft, "mixed": _mixed, "prefix": _prefix}[
        workload.kind
    ]
    samples: list[list[Figures]] = [[] for _ in engines]
    for repeat in range(REPEATS + 1):
        for index, engine in enumerate(engines):
            figures = measure_once(engine, workload, source)
            if repeat > 0:  # the first one warms up
                samples[index].append(figures)
    return [{key: _median(sample[key] for sample in each) for key in each[0]} for each in samples]


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


@dataclass(frozen=True, slots=True)
class _Run:
    """What it took to answer some prompts."""

    seconds: float
    host_ms_per_step: float | None
    """None where nobody counted."""
    host_ms_per_decode_step: float | None
    """Of steps in which all requests decoded."""


def _run(engine: BenchEngine, prompts: list[list[int]], counts: list[int]) -> _Run:
    clock = engine.host_clock
    before = None if clock is None else (replace(clock.all_steps), replace(clock.decode_steps))
    start = time.perf_counter()
    engine.generate(prompts, counts)
    seconds = time.perf_counter() - start
    if clock is None or before is None:
        return _Run(seconds, None, None)
    now = clock.all_steps, clock.decode_steps
    return _Run(seconds, *(each.ms_per_step(was) for each, was in zip(now, before, strict=True)))


def _decode(engine: BenchEngine, workload: Workload, source: PromptSource) -> Figures:
    batch, out = workload.batch, source.draw(workload.out)
    prompts = [source.prompt(source.draw(workload.prompt)) for _ in range(batch)]
    again = [source.prompt(len(prompt)) for prompt in prompts]
    first = _run(engine, again, [1] * batch)
    whole = _run(engine, prompts, [out] * batch)
    step_s = (whole.seconds - first.seconds) / (out - 1)
    return {
        "ms_per_step": step_s * 1e3,
        "decode_tok_s": batch / step_s,
        "e2e_tok_s": batch * out / whole.seconds,
        "ttft_ms": first.seconds * 1e3,
        "host_ms_per_step": whole.host_ms_per_decode_step,
    }


def _ttft(engine: BenchEngine, workload: Workload, source: PromptSource) -> Figures:
    prompts = [source.prompt(source.draw(workload.prompt)) for _ in range(workload.batch)]
    seconds = _run(engine, prompts, [1] * workload.batch).seconds
    return {"ttft_ms": seconds * 1e3, "prefill_tok_s": sum(map(len, prompts)) / seconds}


def _mixed(engine: BenchEngine, workload: Workload, source: PromptSource) -> Figures:
    prompts = [source.prompt(source.draw(workload.prompt)) for _ in range(workload.batch)]
    counts = [source.draw(workload.out) for _ in prompts]
    run = _run(engine, prompts, counts)
    return {"out_tok_s": sum(counts) / run.seconds, "host_ms_per_step": run.host_ms_per_step}


def _prefix(engine: BenchEngine, workload: Workload, source: PromptSource) -> Figures:
    shared = source.prompt(workload.shared)
    times_ms = []
    for _ in range(workload.requests):
        prompt = shared + source.prompt(source.draw(workload.suffix))
        times_ms.append(1e3 * _run(engine, [prompt], [1]).seconds)
    warm = times_ms[1:]
    return {"cold_ms": times_ms[0], "warm_ms": statistics.median(warm), "warm_best_ms": min(warm)}
