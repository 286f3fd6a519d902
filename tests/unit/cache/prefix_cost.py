"""What the prefix cache costs the host for a request, with and without anything to find.

    python tests/unit/cache/prefix_cost.py

First what the cache does for a request, alone: match, acquire and release with all that is to be
published. Then `Scheduler.add`, `schedule` and `commit` of requests with one output, without a
model, in two schedulers in turn, one with the cache and one without; and a step of decoding. Prints
medians in microseconds; no test runs it, for its figures depend on the machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence

import numpy as np

from pico_vllm.cache.block_manager import BlockManager
from pico_vllm.cache.prefix_cache import PrefixCache
from pico_vllm.request import Request
from pico_vllm.sampling_params import SamplingParams
from pico_vllm.scheduler.scheduler import Scheduler
from pico_vllm.step import StepPlan, StepResult

BLOCK_SIZE = 16
NUM_BLOCKS = 40_000
NUM_REQUESTS = 400
PARAMS = SamplingParams(max_tokens=1)
WORKLOADS = {
    "144 shared + 12": (144, 12),
    "2083 shared + 38": (2083, 38),
    "156 shared by nobody": (0, 156),
    "2121 shared by nobody": (0, 2121),
}
"""Tokens in common, and of its own, of each request."""


def make_scheduler(*, has_cache: bool) -> Scheduler:
    blocks = BlockManager(NUM_BLOCKS)
    return Scheduler(
        blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        prefix_cache=PrefixCache(blocks, block_size=BLOCK_SIZE) if has_cache else None,
    )


def answer(scheduler: Scheduler, number: int, prompt: np.ndarray) -> float:
    """Microseconds that the scheduler takes for a request alone."""
    request = Request(
        request_id=str(number),
        prompt_token_ids=prompt,
        params=PARAMS,
        max_tokens=1,
        stop_token_ids=frozenset(),
        seed=0,
    )
    started = time.perf_counter_ns()
    scheduler.add(request)
    plan = scheduler.schedule()
    assert isinstance(plan, StepPlan)
    scheduler.commit(plan, StepResult(token_ids=np.array([5])))
    return (time.perf_counter_ns() - started) / 1e3


def decode_step_us(*, has_cache: bool, num_requests: int = 64, num_steps: int = 300) -> float:
    """A step in which requests only decode: the cache has no part in it."""
    scheduler = make_scheduler(has_cache=has_cache)
    params = SamplingParams(max_tokens=num_steps + 10)
    for number in range(num_requests):
        scheduler.add(
            Request(
                request_id=str(number),
                prompt_token_ids=np.full(20 + number, number, np.int32),
                params=params,
                max_tokens=num_steps + 10,
                stop_token_ids=frozenset(),
                seed=0,
            )
        )
    times = []
    result = StepResult(token_ids=np.full(num_requests, 7))
    for _ in range(num_steps):
        started = time.perf_counter_ns()
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, StepResult(token_ids=result.token_ids[: len(plan.rows)]))
        times.append((time.perf_counter_ns() - started) / 1e3)
    return statistics.median(times)


def prompts(num_shared: int, num_own: int) -> Iterator[np.ndarray]:
    random = np.random.default_rng(0)
    shared = random.integers(0, 150_000, num_shared).astype(np.int32)
    for _ in range(NUM_REQUESTS):
        own = random.integers(0, 150_000, num_own).astype(np.int32)
        yield np.concatenate((shared, own))


def cache_alone_us(num_shared: int, num_own: int) -> float:
    blocks = BlockManager(NUM_BLOCKS)
    cache = PrefixCache(blocks, block_size=BLOCK_SIZE)
    times = []
    for prompt in prompts(num_shared, num_own):
        started = time.perf_counter_ns()
        tokens = prompt.tobytes()
        match = cache.match(tokens, len(prompt) - 1, "")
        lease = cache.acquire(match, "", 0)
        took = time.perf_counter_ns() - started
        missing = -(-len(prompt) // BLOCK_SIZE) - len(match.block_ids)
        block_ids = match.block_ids + (cache.allocate(missing) or [])
        started = time.perf_counter_ns()
        cache.release(lease, block_ids, tokens[lease.num_blocks * BLOCK_SIZE * 4 :])
        times.append((took + time.perf_counter_ns() - started) / 1e3)
    return statistics.median(times[4:])


def scheduler_us(num_shared: int, num_own: int) -> Sequence[float]:
    """Without and with the cache."""
    schedulers = [make_scheduler(has_cache=has_cache) for has_cache in (False, True)]
    times: list[list[float]] = [[], []]
    for number, prompt in enumerate(prompts(num_shared, num_own)):
        for index, scheduler in enumerate(schedulers):
            times[index].append(answer(scheduler, number, prompt))
    return [statistics.median(each[4:]) for each in times]


def main() -> None:
    for name, lengths in WORKLOADS.items():
        alone = cache_alone_us(*lengths)
        off, on = scheduler_us(*lengths)
        print(
            f"{name:24} cache alone {alone:5.1f} us, scheduler off {off:6.1f} us, on {on:6.1f} us"
        )
    off, on = (decode_step_us(has_cache=has_cache) for has_cache in (False, True))
    print(f"{'a step of 64 decoding':24} {'':20} scheduler off {off:6.1f} us, on {on:6.1f} us")


if __name__ == "__main__":
    main()
