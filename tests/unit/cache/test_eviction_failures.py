"""An eviction in which something raises, wherever it is: tree, blocks and tiers stay consistent,
and the next one does what this one should have."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import pico_vllm.cache
from pico_vllm.cache.block_manager import BlockManager
from pico_vllm.cache.prefix_cache import Lease, PrefixCache
from pico_vllm.cache.tiers.lower import LowerTiers

ROOM = str(Path(pico_vllm.cache.__file__ or "").parent)
NUM_BLOCKS, SIZE = 24, 2


class PlantedError(Exception):
    """Nobody else raises it."""


@contextmanager
def failing_at(number: int, seen: list[str]) -> Iterator[None]:
    """The call of that number, of any function of the cache, raises instead. seen: names of those
    that were called."""

    def on_call(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        # What dataclasses make of a class lies in no file.
        is_ours = code.co_filename.startswith(ROOM) or code.co_filename == "<string>"
        if event != "call" or not is_ours:
            return
        if code.co_name == "<genexpr>":  # called to be closed, too
            return
        seen.append(code.co_qualname)
        if len(seen) == number:
            raise PlantedError(code.co_qualname)

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(before)


class Books:
    """Prefixes with much in common in a pool that they fill but for some blocks, of which one
    request holds a part; below it host memory that is full, or nothing."""

    def __init__(self, seed: int, num_host_blocks: int, fraction: float = 1.0) -> None:
        random = np.random.default_rng(seed)
        self.tiers = None
        if num_host_blocks:
            self.tiers = LowerTiers(num_host_blocks, block_size=SIZE, is_threaded=False)
        self.blocks = BlockManager(NUM_BLOCKS)
        self.cache = PrefixCache(
            self.blocks, block_size=SIZE, cow_min_tokens=1, tiers=self.tiers,
            max_cached_fraction=fraction,
        )  # fmt: skip
        self.held: list[int] = []
        self.lease: Lease | None = None
        self.num_plans = 0
        self.seed = seed
        self.prompts: list[bytes] = []
        for _ in range(30):
            ids = random.integers(0, 2, int(random.integers(1, 16))).astype(np.int32)
            self.tokens = ids.tobytes()
            self.prompts.append(self.tokens)
            lease, held = self.enter()
            self.cache.release(lease, held, self.tokens[4 * SIZE * lease.num_blocks :])
            self.commit()
        self.check()

    def enter(self) -> tuple[Lease, list[int]]:
        match = self.cache.match(self.tokens, len(self.tokens) // 4, "")
        lease = self.cache.acquire(match.without_copy(), "", 0)
        num_missing = -(-len(self.tokens) // (4 * SIZE)) - len(match.block_ids)
        own = self.cache.allocate(num_missing)
        assert own is not None
        return lease, [*match.block_ids, *own]

    def commit(self) -> None:
        if self.tiers is not None:
            self.tiers.take_transfers(self.num_plans)
            self.tiers.stored(self.num_plans)
        self.num_plans += 1

    def check(self) -> None:
        self.blocks.check_invariants()
        self.cache.check_invariants()
        holders = Counter(self.cache.block_ids())
        holders.update(self.cache.loading_block_ids())
        holders.update(self.held)
        assert all(self.blocks.ref_count(each) == count for each, count in holders.items())
        num_free = self.blocks.num_free_device_blocks
        assert len(holders) + num_free == NUM_BLOCKS, "blocks that nobody has"
        assert self.cache.num_available_blocks >= num_free
        if self.tiers is not None:
            pinned = {block.slot for block, _ in self.tiers._new_stores}
            pinned |= {each.slot for load in self.tiers._new_loads for each in load.blocks}
            assert pinned == {
                each.slot for each in self.tiers.host._blocks.values() if each.num_pins
            }


def allocate(books: Books) -> None:
    """As a step that needs most of what is left."""
    count = books.cache.num_available_blocks - 1 - 3 * books.seed
    block_ids = books.cache.allocate(max(0, count))
    assert block_ids is not None and len(set(block_ids)) == max(0, count)
    books.held += block_ids


def load(books: Books) -> None:
    """What host memory has of a prompt, in place of others."""
    for tokens in books.prompts if books.tiers is not None else ():
        match = books.cache.match(tokens, len(tokens) // 4, "")
        keys = books.cache.chain(tokens, "")
        first, size = len(match.block_ids), 4 * SIZE
        found, _ = books.tiers.num_found(keys[first:], tokens[first * size : len(keys) * size])
        if found:
            books.cache.begin_load(match, "", 0, tokens, keys[: first + found])
            return


def limit(books: Books) -> None:
    """As the end of a request when less may be cached than is."""
    books.cache._max_evictable = 3
    assert books.lease is not None
    held, books.held = books.held, []
    books.cache.release(books.lease, held)


def save(books: Books) -> None:
    """As the end of an engine with a disk."""
    if books.tiers is not None:
        books.tiers.room_to_save = lambda timeout_s: 7  # type: ignore[method-assign]
        assert books.cache.put_below(1.0)


@pytest.mark.parametrize("num_host_blocks", [0, 3, 50])
@pytest.mark.parametrize("act", [allocate, load, limit, save], ids=lambda each: each.__name__)
def test_whatever_raises(act: Callable[[Books], None], num_host_blocks: int) -> None:
    """At each call, one after another, until all of them are through."""
    called: set[str] = set()
    for seed in range(3):
        for number in range(1, 2000):
            books = Books(seed, num_host_blocks)
            if act is limit:
                books.lease, books.held = books.enter()
                books.commit()
            seen: list[str] = []
            try:
                with failing_at(number, seen):
                    act(books)
            except PlantedError as error:
                before = seen[:-1]
                if act in (limit, load) and (
                    "PrefixCache._evict" not in before or "LowerTiers.begin_load" in before
                ):
                    continue  # before the eviction, or after it
                assert str(error) == seen[-1]
            called.update(seen)
            books.check()
            if books.tiers is not None:
                books.tiers.check_invariants()
            books.commit()
            if len(seen) < number:
                break
            allocate(books)
            books.check()
        else:
            raise AssertionError("it never ends")
    if act in (allocate, limit) or num_host_blocks == 50:
        # A load takes the end of an edge; the others take most of the tree.
        way = "RadixTree._shorten" if act is load else "RadixTree._remove_first"
        assert {"RadixTree.evict", way} <= called
        assert ("LowerTiers.put" in called) == bool(num_host_blocks)
    if act is allocate:
        assert "lru" in called
        assert "HostTier.drop" in called or num_host_blocks != 3


def test_an_order_that_raises() -> None:
    """Where the place of a parent that becomes a leaf cannot be told, its child stays."""
    books = Books(1, 0)

    def no_place(usage: Any) -> tuple[int, int]:
        raise PlantedError

    policy = books.cache._tree._policy
    books.cache._tree._policy = no_place
    num_available = books.cache.num_available_blocks
    with pytest.raises(PlantedError):
        books.cache.allocate(num_available)
    books.cache._tree._policy = policy
    books.check()
    assert books.cache.num_available_blocks == num_available
