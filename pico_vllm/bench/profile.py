"""Where the time of a step goes: a few steady steps under torch.profiler, and the same without it.

All steps do alike: some requests decode, and beside them prompts may come that end with the step.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from pico_vllm.bench.engine import Figures, PicoEngine, measure
from pico_vllm.bench.load import greedy
from pico_vllm.bench.steps import measured_step
from pico_vllm.bench.trace import STEP, StepsInTrace, steps_in_trace
from pico_vllm.bench.workload import PromptSource, Workload
from pico_vllm.engine.device_batch import TURNS
from pico_vllm.engine.engine import Engine
from pico_vllm.engine.llm import LLM
from pico_vllm.errors import ConfigError

LEAD_IN = 6
"""Steps of this kind before the first one is recorded."""
NUM_REPLAYS = 32 * TURNS
"""In whole rounds of turns, as those to warm up: so the device's count of them stays the host's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyStep:
    batch: int
    """Requests that decode."""
    context: int
    """Tokens of each of them, and somewhat more."""
    prompts: int = 0
    """That come with every step, for one token."""
    prompt_tokens: int = 1
    """Of each."""

    @property
    def num_tokens(self) -> int:
        return self.batch + self.prompts * self.prompt_tokens


@dataclass(frozen=True, slots=True)
class StepProfile:
    figures: Figures
    """Without the profiler; where requests only decode as `bench engine` counts them."""
    steps: StepsInTrace
    replay_ms: float | None
    """A step's graph alone, one after the other; None where steps have no graph."""


def profile_steps(
    llm: LLM, shape: SteadyStep, *, num_steps: int, trace: Path | None
) -> StepProfile:
    """Profile that many steps.

    Raises:
        ConfigError: the window, the pool, the rows or a step does not hold that.
    """
    config, engine = llm.config, llm.engine
    assert config.max_num_batched_tokens is not None
    # The first requests decode while the last ones' prompts are still computed.
    num_prefills = -(-shape.batch * shape.context // config.max_num_batched_tokens)
    num_timed = num_steps if shape.prompts else 0
    num_all = LEAD_IN + num_timed + num_steps
    out = 2 * num_prefills + num_all + 4
    _check_room(llm, shape, out)
    source = PromptSource(engine.vocab_size, config.seed)
    if not shape.prompts:
        workload = Workload(
            id="profile", kind="decode", batch=shape.batch, prompt=shape.context, out=num_steps + 1
        )
        (figures,) = measure([PicoEngine(llm)], workload, source)
    prompts = [source.prompt(shape.context) for _ in range(shape.batch)]
    step = _Stepping(engine, shape, num_all + 2, source)
    with _decoding(engine, prompts, out):
        for _ in range(LEAD_IN - 2):
            step()
        if shape.prompts:
            figures = _timed(llm, step, num_timed)
        events = _record(llm, step, num_steps, trace)
        replay_ms = _replay_ms(llm, step)
    steps = steps_in_trace(events, is_gpu=config.device != "cpu")
    return StepProfile(figures, steps, replay_ms)


def _check_room(llm: LLM, shape: SteadyStep, out: int) -> None:
    config = llm.config
    assert config.max_num_seqs is not None and config.num_kv_blocks is not None
    assert config.max_num_batched_tokens is not None
    batch, context, block_size = shape.batch, shape.context, config.block_size
    # With overlap prompts hold theirs until the step after theirs is launched.
    num_prompts = 2 * shape.prompts
    num_blocks = batch * -(-(context + out) // block_size)
    num_blocks += num_prompts * -(-(shape.prompt_tokens + 1) // block_size)
    longest = max((context + out) * (batch > 0), (shape.prompt_tokens + 1) * (num_prompts > 0))
    most_of_one = config.long_prefill_token_threshold or config.max_num_batched_tokens
    of_one = shape.prompt_tokens * (num_prompts > 0)
    for param, need, limit, what in (
        ("max_num_seqs", batch + num_prompts, config.max_num_seqs, "requests at once"),
        ("max_model_len", longest, llm.engine.max_model_len, "tokens a request"),
        ("num_kv_blocks", num_blocks, config.num_kv_blocks, "KV blocks"),
        (
            "max_num_batched_tokens",
            shape.num_tokens,
            config.max_num_batched_tokens,
            "tokens a step",
        ),
        ("long_prefill_token_threshold", of_one, most_of_one, "tokens of a prompt in a step"),
    ):
        if need > limit:
            option = f"--{param.replace('_', '-')}"
            asked, lower = f"batch {batch} and context {context}", "--batch, --context or --steps"
            if num_prompts:
                prompts = "1 prompt" if shape.prompts == 1 else f"{shape.prompts} prompts"
                asked += f" with {prompts} of {shape.prompt_tokens} tokens a step"
                lower = "--batch, --context, --prompts, --prompt-tokens or --steps"
            raise ConfigError(
                f"{asked} need {need} {what} and {param} allows {limit}; lower {lower}, or raise "
                f"{option}",
                param=param,
            )


class _Stepping:
    """The next step, with the prompts that come with it."""

    def __init__(
        self, engine: Engine, shape: SteadyStep, num_steps: int, source: PromptSource
    ) -> None:
        self._engine = engine
        # Made beforehand: between two steps it would count as a gap.
        self._coming = iter(
            [
                [
                    engine.check(source.prompt(shape.prompt_tokens), greedy(1))
                    for _ in range(shape.prompts)
                ]
                for _ in range(num_steps)
            ]
        )

    def __call__(self) -> None:
        for request in next(self._coming):
            self._engine.add(request)
        measured_step(self._engine)


@contextmanager
def _decoding(engine: Engine, prompts: list[list[int]], out: int) -> Iterator[None]:
    """All requests decode, and none ends by itself meanwhile."""
    waiting = {engine.add_request(prompt, greedy(out)) for prompt in prompts}
    request_ids = list(waiting)
    try:
        while waiting:
            waiting.difference_update(measured_step(engine).request_ids)
        yield
    finally:
        for request_id in request_ids:
            engine.abort(request_id)
        while engine.has_work():
            engine.step()


def _timed(llm: LLM, step: Callable[[], None], num_steps: int) -> Figures:
    clock = PicoEngine(llm).host_clock
    before = None if clock is None else replace(clock.all_steps)
    start_s = time.perf_counter()
    for _ in range(num_steps):
        step()
    step_ms = 1e3 * (time.perf_counter() - start_s) / num_steps
    host_ms = None
    if clock is not None and before is not None:
        host_ms = clock.all_steps.ms_per_step(before)
    return {"ms_per_step": step_ms, "host_ms_per_step": host_ms}


def _record(
    llm: LLM, step: Callable[[], None], num_steps: int, trace: Path | None
) -> list[dict[str, Any]]:
    """Events of a chrome trace of that many steps."""
    is_gpu = llm.config.device != "cpu"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * is_gpu
    with torch.profiler.profile(activities=activities):
        step()  # the profiler makes much on first use
        _synchronize(is_gpu)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(num_steps):
            with record_function(STEP):
                step()
        _synchronize(is_gpu)
    with tempfile.TemporaryDirectory() if trace is None else nullcontext(trace.parent) as folder:
        path = Path(folder) / ("trace.json" if trace is None else trace.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def _synchronize(is_gpu: bool) -> None:
    if is_gpu:
        torch.cuda.synchronize()


def _replay_ms(llm: LLM, step: Callable[[], None]) -> float | None:
    """Replays the graph of one more step on what that step was given: it writes the same KV again,
    of requests that end thereafter."""
    graphs = getattr(llm.engine._runner, "graphs", None)
    if graphs is None:
        return None
    replay, seen = graphs.replay, []

    def see(*graph: object) -> None:
        seen.append(graph)
        replay(*graph)

    graphs.replay = see
    try:
        step()
    finally:
        del graphs.replay
    if not seen:
        return None
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    for index in range(TURNS + NUM_REPLAYS):
        if index == TURNS:
            start.record()
        replay(*seen[-1])
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / NUM_REPLAYS
