"""Where the time of a decode step goes: a few steady steps under torch.profiler, and the same
without it."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from pico_vllm.bench.engine import Figures, PicoEngine, measure
from pico_vllm.bench.steps import measured_step
from pico_vllm.bench.trace import STEP, StepsInTrace, steps_in_trace
from pico_vllm.bench.workload import PromptSource, Workload
from pico_vllm.engine.engine import Engine
from pico_vllm.engine.llm import LLM
from pico_vllm.errors import ConfigError
from pico_vllm.sampling_params import SamplingParams

LEAD_IN = 6
"""Steps that all requests decode before the first one is recorded."""
NUM_REPLAYS = 100


@dataclass(frozen=True, slots=True)
class DecodeProfile:
    figures: Figures
    """As `bench engine` counts them, without the profiler."""
    steps: StepsInTrace
    replay_ms: float | None
    """A step's graph alone, one after the other; None where steps have no graph."""


def profile_decode(
    llm: LLM, *, batch: int, context: int, num_steps: int, trace: Path | None
) -> DecodeProfile:
    """Profile steps of `batch` requests with `context` tokens each, and somewhat more.

    Raises:
        ConfigError: the window, the pool or the batch does not hold that.
    """
    config = llm.config
    assert config.max_num_batched_tokens is not None
    # The first requests decode while the last ones' prompts are still computed.
    num_prefills = -(-batch * context // config.max_num_batched_tokens)
    out = 2 * num_prefills + LEAD_IN + num_steps + 4
    _check_room(llm, batch, context, out)
    source = PromptSource(llm.engine.vocab_size, config.seed)
    workload = Workload(id="profile", kind="decode", batch=batch, prompt=context, out=num_steps + 1)
    (figures,) = measure([PicoEngine(llm)], workload, source)
    prompts = [source.prompt(context) for _ in range(batch)]
    with _decoding(llm.engine, prompts, out):
        events = _record(llm, num_steps, trace)
        replay_ms = _replay_ms(llm)
    steps = steps_in_trace(events, is_gpu=config.device != "cpu")
    return DecodeProfile(figures, steps, replay_ms)


def _check_room(llm: LLM, batch: int, context: int, out: int) -> None:
    config = llm.config
    assert config.max_num_seqs is not None and config.num_kv_blocks is not None
    num_blocks = batch * -(-(context + out) // config.block_size)
    for param, need, limit, what in (
        ("max_num_seqs", batch, config.max_num_seqs, "requests at once"),
        ("max_model_len", context + out, llm.engine.max_model_len, "tokens a request"),
        ("num_kv_blocks", num_blocks, config.num_kv_blocks, "KV blocks"),
    ):
        if need > limit:
            option = f"--{param.replace('_', '-')}"
            raise ConfigError(
                f"batch {batch} and context {context} need {need} {what} and {param} allows "
                f"{limit}; lower --batch, --context or --steps, or raise {option}",
                param=param,
            )


@contextmanager
def _decoding(engine: Engine, prompts: list[list[int]], out: int) -> Iterator[None]:
    """All requests decode, and none ends by itself meanwhile."""
    params = SamplingParams(max_tokens=out, temperature=0.0, ignore_eos=True, detokenize=False)
    waiting = {engine.add_request(prompt, params) for prompt in prompts}
    request_ids = list(waiting)
    try:
        while waiting:
            waiting.difference_update(measured_step(engine).request_ids)
        for _ in range(LEAD_IN - 2):
            measured_step(engine)
        yield
    finally:
        for request_id in request_ids:
            engine.abort(request_id)
        while engine.has_work():
            engine.step()


def _record(llm: LLM, num_steps: int, trace: Path | None) -> list[dict[str, Any]]:
    """Events of a chrome trace of that many steps."""
    is_gpu = llm.config.device != "cpu"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * is_gpu
    with torch.profiler.profile(activities=activities):
        measured_step(llm.engine)  # the profiler makes much on first use
        _synchronize(is_gpu)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(num_steps):
            with record_function(STEP):
                measured_step(llm.engine)
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


def _replay_ms(llm: LLM) -> float | None:
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
        measured_step(llm.engine)
    finally:
        del graphs.replay
    if not seen:
        return None
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    for index in range(NUM_REPLAYS + 3):
        if index == 3:
            start.record()
        replay(*seen[-1])
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / NUM_REPLAYS
