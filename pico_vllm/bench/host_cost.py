"""What the prefix cache costs the host for a request, with and without anything to find. No model.

First what the cache does for a request, alone: match, acquire and release with all that is to be
published. Then `Scheduler.add`, `schedule` and `commit` of requests with one output, in two
schedulers in turn, one with the cache and one without; and a step of decoding. Medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pico_vllm.cache.block_manager import BlockManager
from pico_vllm.cache.prefix_cache import PrefixCache
from pico_vllm.cache.radix_tree import TOKEN_BYTES
from pico_vllm.config.engine import EngineConfig
from pico_vllm.request import Request
from pico_vllm.sampling_params import SamplingParams
from pico_vllm.scheduler.scheduler import Scheduler
from pico_vllm.step import StepResult

BLOCK_SIZE = 16
NUM_BLOCKS = 40_000
NUM_WARM_UPS = 4
"""Requests of each workload that are not counted."""
NUM_DECODING = 64
WORKLOADS = {"144": (144, 12), "2083": (2083, 38), "156-alone": (0, 156), "2121-alone": (0, 2121)}
"""Tokens in common, and of its own, of each request."""

Figures = dict[str, float | int]


def host_costs(num_requests: int) -> Iterator[tuple[str, Figures]]:
    """Name and figures of each workload, then those of a step in which requests only decode: the
    cache has no part in it."""
    for name, (num_shared, num_own) in WORKLOADS.items():
        prompts = list(_prompts(num_shared, num_own, num_requests + NUM_WARM_UPS))
        off_us, on_us = _scheduler_us(prompts)
        figures: Figures = {"cache_us": _cache_alone_us(prompts)}
        figures |= {"scheduler_off_us": off_us, "scheduler_on_us": on_us}
        yield name, figures | {"shared_tokens": num_shared, "own_tokens": num_own}
    off_us, on_us = (_decode_step_us(has_cache, num_requests) for has_cache in (False, True))
    yield "decode", {"scheduler_off_us": off_us, "scheduler_on_us": on_us, "batch": NUM_DECODING}


def _prompts(num_shared: int, num_own: int, count: int) -> Iterator[NDArray[np.int32]]:
    random = np.random.default_rng(0)
    shared = random.integers(0, 150_000, num_shared).astype(np.int32)
    for _ in range(count):
        own = random.integers(0, 150_000, num_own).astype(np.int32)
        yield np.concatenate((shared, own))


def _cache_alone_us(prompts: list[NDArray[np.int32]]) -> float:
    cache = PrefixCache(BlockManager(NUM_BLOCKS), block_size=BLOCK_SIZE)
    times = []
    for prompt in prompts:
        started = time.perf_counter_ns()
        tokens = prompt.tobytes()
        match = cache.match(tokens, len(prompt) - 1, "")
        lease = cache.acquire(match, "", 0)
        took = time.perf_counter_ns() - started
        missing = -(-len(prompt) // BLOCK_SIZE) - len(match.block_ids)
        block_ids = match.block_ids + (cache.allocate(missing) or [])
        started = time.perf_counter_ns()
        cache.release(lease, block_ids, tokens[lease.num_blocks * BLOCK_SIZE * TOKEN_BYTES :])
        times.append((took + time.perf_counter_ns() - started) / 1e3)
    return statistics.median(times[NUM_WARM_UPS:])


def _scheduler_us(prompts: list[NDArray[np.int32]]) -> tuple[float, float]:
    """Without and with the cache."""
    schedulers = [_scheduler(has_cache) for has_cache in (False, True)]
    times: list[list[float]] = [[], []]
    for number, prompt in enumerate(prompts):
        for index, scheduler in enumerate(schedulers):
            times[index].append(_answer_us(scheduler, number, prompt))
    off_us, on_us = (statistics.median(each[NUM_WARM_UPS:]) for each in times)
    return off_us, on_us


def _answer_us(scheduler: Scheduler, number: int, prompt: NDArray[np.int32]) -> float:
    """What the scheduler takes for a request alone."""
    request = _request(number, prompt, 1)
    started = time.perf_counter_ns()
    scheduler.add(request)
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, StepResult(token_ids=np.array([5])))
    return (time.perf_counter_ns() - started) / 1e3


def _decode_step_us(has_cache: bool, num_steps: int) -> float:
    scheduler = _scheduler(has_cache)
    for number in range(NUM_DECODING):
        prompt = np.full(20 + number, number, np.int32)
        scheduler.add(_request(number, prompt, num_steps + 10))
    token_ids, times = np.full(NUM_DECODING, 7), []
    for _ in range(num_steps):
        started = time.perf_counter_ns()
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, StepResult(token_ids=token_ids[: len(plan.rows)]))
        times.append((time.perf_counter_ns() - started) / 1e3)
    return statistics.median(times)


def _scheduler(has_cache: bool) -> Scheduler:
    return Scheduler.from_config(
        EngineConfig(
            model="none",
            block_size=BLOCK_SIZE,
            num_kv_blocks=NUM_BLOCKS,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            enable_prefix_caching="on" if has_cache else "off",
        )
    )


def _request(number: int, prompt: NDArray[np.int32], max_tokens: int) -> Request:
    return Request(
        request_id=str(number),
        prompt_token_ids=prompt,
        params=SamplingParams(max_tokens=max_tokens),
        max_tokens=max_tokens,
        stop_token_ids=frozenset(),
        seed=0,
    )
