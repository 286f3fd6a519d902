"""Times an engine on workloads; other engines run interleaved, repeat by repeat, on the same
prompts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from pico_vllm.bench.peers.base import BenchEngine
from pico_vllm.bench.workload import PromptSource, Workload
from pico_vllm.engine.llm import LLM
from pico_vllm.sampling_params import SamplingParams

REPEATS = 3
KEYS = (
    "ms_per_step", "decode_tok_s", "e2e_tok_s", "ttft_ms", "prefill_tok_s", "out_tok_s",
    "cold_ms", "warm_ms", "warm_best_ms", "host_ms_per_step", "pct_of_read_limit",
)  # fmt: skip


class PicoEngine:
    def __init__(self, llm: LLM) -> None:
        self.name = "pico-vllm"
        self._llm = llm

    def generate(self, prompts: Sequence[list[int]], num_output_tokens: Sequence[int]) -> None:
        params = [
            SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False)
            for count in num_output_tokens
        ]
        outputs = self._llm.generate(list(prompts), params)
        for output, count in zip(outputs, num_output_tokens, strict=True):
            assert len(output.outputs[0].token_ids) == count, output.outputs[0].finish_reason


def run_workloads(
    engines: Sequence[BenchEngine],
    workloads: Sequence[Workload],
    *,
    vocab_size: int,
    seed: int,
    weight_bytes: int,
    read_limit_bytes_s: float,
) -> Iterator[dict[str, Any]]:
    """One line a workload and engine, as soon as it is measured. The weights and the limit are
    ours."""
    source = PromptSource(vocab_size, seed)
    for workload in workloads:
        for engine, figures in zip(engines, _measure(engines, workload, source), strict=True):
            if engine is engines[0] and figures.get("ms_per_step"):
                least_ms = weight_bytes / read_limit_bytes_s * 1e3
                figures["pct_of_read_limit"] = 100 * least_ms / figures["ms_per_step"]
            line = dict.fromkeys(KEYS) | figures
            yield {
                "id": workload.id,
                "engine": engine.name,
                **{k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()},
                "batch": workload.batch,
                "repeats": REPEATS,
                "seed": seed,
            }


def _measure(
    engines: Sequence[BenchEngine], workload: Workload, source: PromptSource
) -> list[dict[str, Any]]:
    measure = {"decode": _decode, "ttft": _ttft, "mixed": _mixed, "prefix": _prefix}[workload.kind]
    samples: list[list[dict[str, float]]] = [[] for _ in engines]
    for repeat in range(REPEATS + 1):
        for index, engine in enumerate(engines):
            figures = measure(engine, workload, source)
            if repeat > 0:  # the first one warms up
                samples[index].append(figures)
    return [
        {key: statistics.median(sample[key] for sample in each) for key in each[0]}
        for each in samples
    ]


def _timed(engine: BenchEngine, prompts: list[list[int]], counts: list[int]) -> float:
    start = time.perf_counter()
    engine.generate(prompts, counts)
    return time.perf_counter() - start


def _decode(engine: BenchEngine, workload: Workload, source: PromptSource) -> dict[str, float]:
    batch, out = workload.batch, source.draw(workload.out)
    prompts = [source.prompt(source.draw(workload.prompt)) for _ in range(batch)]
    again = [source.prompt(len(prompt)) for prompt in prompts]
    first_s = _timed(engine, again, [1] * batch)
    whole_s = _timed(engine, prompts, [out] * batch)
    step_s = (whole_s - first_s) / (out - 1)
    return {
        "ms_per_step": step_s * 1e3,
        "decode_tok_s": batch / step_s,
        "e2e_tok_s": batch * out / whole_s,
        "ttft_ms": first_s * 1e3,
    }


def _ttft(engine: BenchEngine, workload: Workload, source: PromptSource) -> dict[str, float]:
    prompts = [source.prompt(source.draw(workload.prompt)) for _ in range(workload.batch)]
    seconds = _timed(engine, prompts, [1] * workload.batch)
    return {"ttft_ms": seconds * 1e3, "prefill_tok_s": sum(map(len, prompts)) / seconds}


def _mixed(engine: BenchEngine, workload: Workload, source: PromptSource) -> dict[str, float]:
    prompts = [source.prompt(source.draw(workload.prompt)) for _ in range(workload.batch)]
    counts = [source.draw(workload.out) for _ in prompts]
    return {"out_tok_s": sum(counts) / _timed(engine, prompts, counts)}


def _prefix(engine: BenchEngine, workload: Workload, source: PromptSource) -> dict[str, float]:
    shared = source.prompt(workload.shared)
    times_ms = []
    for _ in range(workload.requests):
        prompt = shared + source.prompt(source.draw(workload.suffix))
        times_ms.append(1e3 * _timed(engine, [prompt], [1]))
    warm = times_ms[1:]
    return {"cold_ms": times_ms[0], "warm_ms": statistics.median(warm), "warm_best_ms": min(warm)}


def read_limit_bytes_s(device: str) -> float:
    """Bytes a second that this machine reads, measured on 1 GiB with all threads of this run."""
    data = torch.zeros(1 << 28, dtype=torch.float32, device=device)

    def read() -> float:
        start = time.perf_counter()
        data.sum().item()
        return time.perf_counter() - start

    read()
    return data.nbytes / min(read() for _ in range(5))
