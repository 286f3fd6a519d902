"""The counters of the prefix cache against what can be counted from outside."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import numpy as np
import pytest
from simulated import VOCAB, Clients, simulated_engine

from pico_vllm.cache.prefix_cache import CacheStats
from pico_vllm.step import StepPlan

LARGE: dict[str, Any] = {"num_blocks": 200, "block_size": 8, "max_num_seqs": 4, "budget": 64}


def num_common(one: list[int], other: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def random_prompt(random: np.random.Generator, before: list[list[int]]) -> list[int]:
    """Mostly the beginning of an earlier one, and then something else."""
    own: list[int] = random.integers(0, VOCAB, int(random.integers(1, 20))).tolist()
    if not before or random.random() < 0.2:
        return own
    other = before[int(random.integers(len(before)))]
    return other[: int(random.integers(len(other)))] + own


@pytest.mark.parametrize("overlap", [False, True])
def test_hits_of_requests_one_after_another(overlap: bool) -> None:
    """In a pool that nobody fills, each finds the longest beginning that any had before, all but
    its last token; answers but for their last token count as well."""
    random = np.random.default_rng(5)
    clients = Clients(simulated_engine(overlap=overlap, cache={"cow_min_tokens": 1}, **LARGE))
    before: list[list[int]] = []
    hits, num_tokens, num_copies = [], 0, 0
    for _ in range(60):
        prompt = random_prompt(random, before)
        common = max((num_common(prompt, other) for other in before), default=0)
        hits.append(min(common, len(prompt) - 1))
        num_tokens += len(prompt)
        num_copies += hits[-1] % 8 > 0
        request = clients.ask(prompt, int(random.integers(1, 10)))
        clients.run()
        assert request.num_cached_tokens == hits[-1]
        before.append(prompt + clients.answers[request.request_id][:-1])
    stats = clients.engine.cache_stats()
    assert stats.num_queries == 60 and stats.num_hits == sum(hit > 0 for hit in hits) > 20
    assert (stats.num_hit_tokens, stats.num_query_tokens) == (sum(hits), num_tokens)
    assert stats.num_copies == num_copies > 10
    assert stats.hit_rate == sum(hits) / num_tokens
    assert (stats.num_evicted_blocks, stats.num_held_blocks, stats.num_blocks) == (0, 0, 200)
    assert 0 < stats.num_nodes <= stats.num_cached_blocks


@pytest.mark.parametrize("overlap", [False, True])
def test_counts_under_pressure(overlap: bool) -> None:
    """Where blocks are evicted and requests preempted, each request counts once, as its answer will
    say; every block that came into the tree is there or was evicted."""
    random = np.random.default_rng(6)
    small = LARGE | {"num_blocks": 12}
    clients = Clients(simulated_engine(overlap=overlap, cache={"cow_min_tokens": 2}, **small))
    engine, copies = clients.engine, []
    tree: Any = engine._scheduler._prefixes.cache._tree  # type: ignore[union-attr]
    num_added, add = 0, tree._add

    def adding(parent: Any, tokens: bytes, block_ids: list[int]) -> Any:
        nonlocal num_added
        num_added += len(block_ids)
        return add(parent, tokens, block_ids)

    tree._add = adding

    def note_copies(plan: StepPlan) -> None:
        copies.extend(plan.copies)

    engine._runner.on_run = note_copies  # type: ignore[attr-defined]
    prompts: list[list[int]] = []
    for _ in range(80):
        prompts.append(random_prompt(random, prompts)[:60])
        clients.ask(prompts[-1], int(random.integers(1, 30)))
        for _ in range(int(random.integers(0, 12))):
            clients.step()
    clients.run()
    clients.check()
    stats, requests = engine.cache_stats(), clients.requests.values()
    assert engine.num_preemptions > 0 and stats.num_queries == len(prompts)
    assert stats.num_query_tokens == sum(map(len, prompts))
    assert stats.num_hit_tokens == sum(each.num_cached_tokens or 0 for each in requests) > 0
    assert stats.num_hits == sum(bool(each.num_cached_tokens) for each in requests)
    assert stats.num_copies == len(copies) > 0
    assert stats.num_evicted_blocks == num_added - stats.num_cached_blocks > 50


def test_what_is_counted_since() -> None:
    """Counts are differences, what is now stays; without a cache or a question all is nothing."""
    clients = Clients(simulated_engine(overlap=False, cache={"cow_min_tokens": 1}, **LARGE))
    clients.ask(list(range(20)), 2)
    clients.run()
    before = clients.engine.cache_stats()
    assert before.since(before) == CacheStats(
        num_blocks=200, num_cached_blocks=3, num_nodes=2, block_size=8
    )
    clients.ask(list(range(20)), 2)
    clients.run()
    since = clients.engine.cache_stats().since(before)
    assert (since.num_queries, since.num_hits, since.num_query_tokens) == (1, 1, 20)
    assert (since.num_hit_tokens, since.num_copies, since.hit_rate) == (19, 1, 19 / 20)
    # Two whole blocks, and three tokens of a third.
    assert (since.num_hit_blocks, since.num_device_hit_blocks) == (2, 2)
    assert (since.device_hit_rate, since.host_hit_rate, since.disk_hit_rate) == (19 / 20, 0, 0)
    without = Clients(simulated_engine(overlap=False, **LARGE))
    without.ask(list(range(20)), 2)
    without.run()
    assert without.engine.cache_stats() == CacheStats() and CacheStats().hit_rate is None


def test_warming_up_is_not_counted() -> None:
    """What a server shows begins with its first request."""
    engine = simulated_engine(overlap=False, cache={}, **LARGE)
    engine.warm_up(4)
    assert engine.cache_stats() == CacheStats(num_blocks=200, block_size=8)
