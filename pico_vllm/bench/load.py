"""An open load on one engine in this process: requests come when they are due, however far behind
the engine is.

Prompts are made and checked before the clock starts. Between two steps everything that has become
due is put in line; what became due amid a step has waited since then, and its TTFT says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pico_vllm.bench.arrivals import Arrivals
from pico_vllm.bench.figures import rounded
from pico_vllm.bench.lengths import LengthSource
from pico_vllm.bench.metrics import LatencyLimits, RequestTimes, summarize
from pico_vllm.bench.tier_figures import tier_figures
from pico_vllm.bench.workload import PromptSource
from pico_vllm.engine.engine import CheckedRequest, Engine
from pico_vllm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class DueRequest:
    arrival_s: float
    request: CheckedRequest


def plan_load(
    engine: Engine,
    arrivals: Arrivals,
    lengths: LengthSource,
    *,
    num_requests: int,
    seed: int,
    prompts: PromptSource,
) -> list[DueRequest]:
    """Requests in order of arrival. The same seed gives the same lengths, and the same arrivals but
    for the rate; prompts are always fresh.

    Raises:
        ContextLengthError: one does not fit the window.
    """
    arrival_random, length_random = (
        np.random.default_rng(each) for each in np.random.SeedSequence(seed % 2**64).spawn(2)
    )
    times_s = arrivals.times_s(num_requests, arrival_random)
    drawn = lengths.draw(num_requests, length_random)
    return [
        DueRequest(
            arrival_s,
            engine.check(prompts.prompt(each.prompt_tokens), greedy(each.output_tokens)),
        )
        for arrival_s, each in zip(times_s.tolist(), drawn, strict=True)
    ]


def greedy(num_tokens: int) -> SamplingParams:
    """To the last token, whatever it is."""
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, detokenize=False)


def warm_up(
    engine: Engine, lengths: LengthSource, *, num_requests: int, seed: int, prompts: PromptSource
) -> None:
    """Run as many at once, so that what is compiled or captured on first use is there."""
    at_once = Arrivals(rate_req_s=1.0, burst_size=num_requests)
    run_load(
        engine,
        plan_load(engine, at_once, lengths, num_requests=num_requests, seed=seed, prompts=prompts),
    )


def run_rates(
    engine: Engine,
    all_arrivals: Sequence[Arrivals],
    lengths: LengthSource,
    limits: LatencyLimits,
    *,
    num_requests: int,
    seed: int,
    prompts: PromptSource,
    on_start: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """One line a rate, as soon as it is measured. on_start is told what is about to run."""
    for arrivals in all_arrivals:
        due = plan_load(
            engine, arrivals, lengths, num_requests=num_requests, seed=seed, prompts=prompts
        )
        last_s, name = due[-1].arrival_s, f"{arrivals.rate_req_s:g}"
        on_start(f"[{name} requests/s: {num_requests} requests, the last due after {last_s:.1f} s]")
        num_before, stats_before = engine.num_preemptions, engine.cache_stats()
        figures = summarize(run_load(engine, due), limits)
        num_preemptions = engine.num_preemptions - num_before
        stats = engine.cache_stats().since(stats_before)
        figures["hit_rate"] = stats.hit_rate
        # What the seed made of the rate; all at once is no rate.
        offered = {"offered_req_s": (num_requests - 1) / last_s if last_s else None}
        yield (
            {"id": f"load-r{name}", "rate_req_s": arrivals.rate_req_s}
            | rounded(offered | figures | tier_figures(stats))
            | {"num_preemptions": num_preemptions, "num_hit_tokens": stats.num_hit_tokens}
            | {"num_evicted_blocks": stats.num_evicted_blocks}
            | {"burstiness": arrivals.burstiness, "burst_size": arrivals.burst_size, "seed": seed}
            | {f"limit_{name}": getattr(limits, name) for name in limits.__dataclass_fields__}
        )


def run_load(engine: Engine, due: Sequence[DueRequest]) -> list[RequestTimes]:
    """Play the requests at their times; returns when the last one has ended. The engine has nothing
    else to do, and holds nothing afterwards, also after an interrupt."""
    all_times = [
        RequestTimes(
            arrival_s=each.arrival_s,
            num_prompt_tokens=len(each.request.token_ids),
            num_output_tokens=each.request.max_tokens,
        )
        for each in due
    ]
    in_engine: dict[str, RequestTimes] = {}
    num_added = 0
    start_s = time.perf_counter()
    try:
        while num_added < len(due) or in_engine:
            now_s = time.perf_counter() - start_s
            while num_added < len(due) and due[num_added].arrival_s <= now_s:
                in_engine[engine.add(due[num_added].request)] = all_times[num_added]
                num_added += 1
            if not in_engine:
                time.sleep(due[num_added].arrival_s - now_s)
                continue
            events = engine.step()
            now_s = time.perf_counter() - start_s
            for request_id, token_id, reason in zip(
                events.request_ids, events.token_ids, events.finish_reasons, strict=True
            ):
                if token_id >= 0:
                    in_engine[request_id].token_s.append(now_s)
                if reason is not None:
                    del in_engine[request_id]
    finally:
        for request_id in in_engine:
            engine.abort(request_id)
        # With overlap one more step is under way; an interrupt leaves news for who is gone.
        while engine.has_work():
            engine.step()
    return all_times
