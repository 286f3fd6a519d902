"""Prefix cache, radix tree and blocks together against a brute-force model: a dictionary of what
was published, and for each slot of each block what was written to it last."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from pico_vllm.cache.block_manager import BlockManager
from pico_vllm.cache.eviction import EVICTION_POLICIES
from pico_vllm.cache.prefix_cache import Lease, PrefixCache

Ids = tuple[int, ...]


def as_tokens(ids: Any) -> bytes:
    return np.array(ids, np.int32).tobytes()


def num_common(one: Ids, other: Ids) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@dataclass(eq=False)
class Live:
    """A request as the cache's caller knows it."""

    ids: Ids
    salt: str
    lease: Lease
    block_ids: list[int]
    num_computed: int
    source: tuple[int, int] = field(default=(0, 0))


class CacheMachine(RuleBasedStateMachine):
    """Requests that share beginnings enter, compute, publish and leave in a small pool."""

    @initialize(
        num_blocks=st.integers(3, 12),
        block_size=st.sampled_from([1, 2, 4]),
        cow_min=st.integers(1, 3),
        policy=st.sampled_from(list(EVICTION_POLICIES)),
        fraction=st.sampled_from([1.0, 1.0, 0.5, 0.0]),
    )
    def start(
        self, num_blocks: int, block_size: int, cow_min: int, policy: str, fraction: float
    ) -> None:
        self.blocks = BlockManager(num_blocks)
        self.size, self.cow_min = block_size, cow_min
        self.max_cached = int(fraction * num_blocks)
        self.cache = PrefixCache(
            self.blocks,
            block_size=block_size,
            cow_min_tokens=cow_min,
            eviction_policy=policy,
            max_cached_fraction=fraction,
        )
        self.live: list[Live] = []
        self.published: dict[tuple[str, Ids], int] = {}
        """Block by salt and all tokens up to its end."""
        self.memory: dict[tuple[int, int], tuple[str, Ids]] = {}
        """By block and slot: whose token, and all tokens up to it."""

    # What the model knows.

    def forget_evicted(self) -> None:
        held = self.cache.block_ids()
        self.published = {key: block for key, block in self.published.items() if block in held}
        assert sorted(self.published.values()) == sorted(held), "the tree has what nobody published"

    def note(self, request: Live, end: int, block: int) -> None:
        self.published.setdefault((request.salt, request.ids[:end]), block)

    def wanted_match(self, ids: Ids, most: int, salt: str) -> tuple[list[int], int]:
        """Blocks, and tokens of the next one that can be copied."""
        blocks: list[int] = []
        while (end := (len(blocks) + 1) * self.size) <= most and (
            block := self.published.get((salt, ids[:end]))
        ) is not None:
            blocks.append(block)
        start = len(blocks) * self.size
        after = (
            num_common(key[start:], ids[start:most])
            for of_salt, key in self.published
            if of_salt == salt
            and start < len(key) <= start + self.size
            and key[:start] == ids[:start]
        )
        best = max(after, default=0)
        return blocks, best if best >= self.cow_min else 0

    # Rules.

    @rule(data=st.data(), salt=st.sampled_from(["", "", "other"]), priority=st.integers(-1, 1))
    def enter(self, data: st.DataObject, salt: str, priority: int) -> None:
        ids = tuple(data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=4 * self.size)))
        before = [request.ids for request in self.live] + [key for _, key in self.published]
        if before and data.draw(st.booleans()):
            other = data.draw(st.sampled_from(before))
            ids = other[: data.draw(st.integers(0, len(other)))] + ids
        match = self.cache.match(as_tokens(ids), len(ids) - 1, salt)
        assert (match.block_ids, match.num_copied) == self.wanted_match(ids, len(ids) - 1, salt)
        num_available = self.cache.num_available_blocks
        num_unlocked = match.num_unlocked()
        lease = self.cache.acquire(match, salt, priority)
        assert self.cache.num_available_blocks == num_available - num_unlocked
        end = len(match.block_ids) * self.size
        self.live.append(
            Live(
                ids, salt, lease, list(match.block_ids), end + match.num_copied,
                (match.source_block, match.num_copied),
            )
        )  # fmt: skip
        for position in range(end):
            block = match.block_ids[position // self.size]
            assert self.memory[block, position % self.size] == (salt, ids[: position + 1])

    @rule(data=st.data(), count=st.integers(1, 5))
    def compute(self, data: st.DataObject, count: int) -> None:
        """Some more tokens of a request, and what is full of its blocks is published."""
        if not self.live:
            return
        request = data.draw(st.sampled_from(self.live))
        count = min(count, len(request.ids) - request.num_computed)
        end = request.num_computed + count
        missing = -(-end // self.size) - len(request.block_ids)
        num_available = self.cache.num_available_blocks
        blocks = self.cache.allocate(missing)
        self.forget_evicted()
        if missing > num_available:
            assert blocks is None
            return
        assert blocks is not None
        start = len(request.block_ids) * self.size
        request.block_ids += blocks
        source, num_copied = request.source
        if num_copied and blocks:
            for slot in range(num_copied):
                # Nobody has been given the source, and it holds what was promised.
                assert self.memory[source, slot] == (request.salt, request.ids[: start + slot + 1])
                self.memory[blocks[0], slot] = self.memory[source, slot]
            self.cache.drop_source(request.lease)
            request.source = (0, 0)
        for position in range(request.num_computed, end):
            block = request.block_ids[position // self.size]
            assert block not in self.published.values(), "a published block is written to"
            self.memory[block, position % self.size] = (request.salt, request.ids[: position + 1])
        request.num_computed = end
        first, last = request.lease.num_blocks, end // self.size
        own = request.block_ids[first:last]
        tokens = as_tokens(request.ids[first * self.size : last * self.size])
        was_detached = request.lease.tree is not self.cache._tree
        found = self.cache.publish(request.lease, tokens, own)
        request.block_ids[first : first + len(found)] = found
        if not was_detached:
            for index in range(first, last):
                self.note(request, (index + 1) * self.size, request.block_ids[index])
        assert found == [block for block in request.block_ids[first:last] if block not in own], (
            "others' blocks where there were none"
        )

    @rule(data=st.data(), is_trusted=st.booleans())
    def leave(self, data: st.DataObject, is_trusted: bool) -> None:
        if not self.live:
            return
        request = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        tokens, first = b"", request.lease.num_blocks
        is_attached = request.lease.tree is self.cache._tree
        if is_trusted and not request.source[1]:
            tokens = as_tokens(request.ids[first * self.size : request.num_computed])
        if tokens and is_attached:
            num_full = request.num_computed // self.size
            for index in range(first, num_full):
                self.note(request, (index + 1) * self.size, request.block_ids[index])
            tail = request.ids[num_full * self.size : request.num_computed]
            before = request.ids[: num_full * self.size]
            is_there = any(
                salt == request.salt and ids[: request.num_computed] == before + tail
                for salt, ids in self.published
            )
            if len(tail) >= self.cow_min and not is_there:
                self.note(request, request.num_computed, request.block_ids[num_full])
        self.cache.release(request.lease, request.block_ids, tokens)
        assert self.cache._tree.num_evictable_blocks <= self.max_cached or not is_attached
        if self.max_cached < self.blocks.num_device_blocks:
            held = self.cache.block_ids()
            self.published = {key: b for key, b in self.published.items() if b in held}
        self.forget_evicted()

    @rule()
    def reset(self) -> None:
        for request in self.live:
            if request.source[1]:
                self.cache.drop_source(request.lease)
                request.num_computed = len(request.block_ids) * self.size
                request.source = (0, 0)
        self.cache.reset()
        self.published = {}

    # Invariant I.

    @invariant()
    def books_are_in_order(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.blocks.check_invariants()
        self.cache.check_invariants()
        self.forget_evicted()
        in_tree = self.cache.block_ids()
        holders = Counter(block for request in self.live for block in request.block_ids)
        referenced = len(holders)
        cached_only = len(in_tree - holders.keys())
        free = self.blocks.num_free_device_blocks
        assert free + cached_only + referenced == self.blocks.num_device_blocks
        holders.update(in_tree)
        for block in range(1, self.blocks.num_device_blocks + 1):
            assert self.blocks.ref_count(block) == holders[block]
        assert self.cache.num_cached_blocks == len(in_tree)
        if not self.live:
            assert self.cache.num_available_blocks == self.blocks.num_device_blocks

    @invariant()
    def published_blocks_hold_their_tokens(self) -> None:
        for (salt, ids), block in getattr(self, "published", {}).items():
            start = (len(ids) - 1) // self.size * self.size
            for position in range(start, len(ids)):
                assert self.memory[block, position - start] == (salt, ids[: position + 1])


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=300,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.slow
def test_cache_machine_at_release_size() -> None:
    """The same in longer lives and more of them."""
    run_state_machine_as_test(
        CacheMachine,
        settings=settings(TestCacheMachine.settings, max_examples=20_000, stateful_step_count=200),
    )


def test_what_the_pool_lacks_is_evicted_and_no_more() -> None:
    """allocate takes free blocks first, evicts exactly what is missing, and gives None, changing
    nothing, where even that would not do."""
    blocks = BlockManager(6)
    cache = PrefixCache(blocks, block_size=2)
    ids = (1, 2, 3, 4, 5, 6, 7, 8)
    lease = cache.acquire(cache.match(as_tokens(ids), 7, ""), "", 0)
    own = cache.allocate(4) or []
    cache.release(lease, own, as_tokens(ids))
    assert (blocks.num_free_device_blocks, cache.num_available_blocks) == (2, 6)
    kept = cache.acquire(cache.match(as_tokens(ids), 4, ""), "", 0)
    assert kept.num_blocks == 2 and cache.num_available_blocks == 4
    assert cache.allocate(5) is None and blocks.num_free_device_blocks == 2
    assert len(cache.allocate(3) or []) == 3
    assert cache.num_evicted_blocks == 1
    assert (blocks.num_free_device_blocks, cache.num_cached_blocks) == (0, 3)
    assert cache.match(as_tokens(ids), 8, "").block_ids == own[:3]
    cache.check_invariants()


def test_max_cached_fraction() -> None:
    """What nobody uses takes at most its part of the pool; what is in use is not counted."""
    blocks = BlockManager(8)
    cache = PrefixCache(blocks, block_size=1, max_cached_fraction=0.5)
    ids = tuple(range(8))
    lease = cache.acquire(cache.match(as_tokens(ids), 7, ""), "", 0)
    own = cache.allocate(8) or []
    cache.publish(lease, as_tokens(ids), own)
    assert cache.num_cached_blocks == 8
    cache.release(lease, own)
    assert (cache.num_cached_blocks, blocks.num_free_device_blocks) == (4, 4)
    assert cache.num_evicted_blocks == 4
    assert cache.match(as_tokens(ids), 8, "").block_ids == own[:4]
