"""The radix tree alone: what matches, where edges are cut, what a lock keeps, what goes first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pico_vllm.cache.eviction import EVICTION_POLICIES
from pico_vllm.cache.radix_tree import Match, Node, RadixTree, num_common_tokens


def as_tokens(ids: Sequence[int]) -> bytes:
    return np.array(ids, np.int32).tobytes()


def read(tree: RadixTree, ids: Sequence[int], salt: str = "") -> Match:
    return tree.match(as_tokens(ids), len(ids), salt)


def put(
    tree: RadixTree, ids: Sequence[int], blocks: list[int], size: int = 2, **lock: Any
) -> list[int]:
    """As a request does that enters, computes whole blocks and a tail, and leaves. Returns what was
    there."""
    match = tree.match(as_tokens(ids), len(ids) // size * size, lock.get("salt", ""))
    node = tree.lock(match, **lock)
    first, num_full = len(match.block_ids), len(ids) // size
    tokens = as_tokens(ids[first * size : num_full * size])
    node, found = tree.insert(node, tokens, blocks[first:num_full])
    assert found == []
    if len(ids) % size:
        tree.insert_tail(node, as_tokens(ids[num_full * size :]), blocks[num_full])
    tree.unlock(node)
    tree.check_invariants()
    return match.block_ids


def shape(tree: RadixTree) -> dict[str, list[int]]:
    """Blocks of each node by its tokens."""
    return {
        str(np.frombuffer(node.tokens, np.int32).tolist()): node.block_ids
        for node in tree.nodes()
        if node.parent is not None
    }


def test_an_edge_is_cut_between_blocks_and_only_for_who_uses_it() -> None:
    """Matching leaves the tree as it was; locking cuts the edge at a whole block, and the lower
    part stays the node that it was."""
    tree = RadixTree(2)
    put(tree, [1, 2, 3, 4, 5, 6], [11, 12, 13])
    before = shape(tree)
    match = read(tree, [1, 2, 3, 4, 5, 9])
    assert (match.block_ids, match.source_block, match.num_copied) == ([11, 12], 13, 1)
    assert match.ends_in_edge and shape(tree) == before
    lower = match.path[-1]
    node = tree.lock(match)
    assert shape(tree) == {"[1, 2, 3, 4]": [11, 12], "[5, 6]": [13]}
    assert lower.block_ids == [13] and lower.parent is node and match.source is lower
    assert (node.lock_ref, lower.lock_ref, tree.num_evictable_blocks) == (1, 0, 1)
    tree.unlock(node)
    tree.check_invariants()
    assert tree.num_evictable_blocks == 3


@pytest.mark.parametrize("size", [1, 2, 3, 16])
def test_headers_shorter_than_a_block(size: int) -> None:
    """Three prompts that share fewer tokens than a block hang side by side; each is found, in turn
    locked and unlocked, and nothing is left locked."""
    tree = RadixTree(size)
    header = list(range(size - 1))
    prompts = [header + [100 + i] * (size + 1) for i in range(3)]
    for number, prompt in enumerate(prompts):
        put(tree, prompt, [10 * number + 1, 10 * number + 2], size)
    locked = []
    for number, prompt in enumerate(prompts):
        match = read(tree, prompt[: 2 * size])
        assert match.block_ids[:1] == [10 * number + 1]
        assert num_common_tokens(as_tokens(prompts[0]), as_tokens(prompt)) in (size - 1, 2 * size)
        locked.append(tree.lock(match))
        part = read(tree, header)
        assert part.block_ids == [] and part.num_copied == size - 1
    for node in locked:
        tree.unlock(node)
    tree.check_invariants()
    assert tree.num_evictable_blocks == tree.num_blocks


def test_the_longest_part_is_found_among_many() -> None:
    """Of a thousand children that share a part of the wanted block, one with the longest is the
    source, as a scan of all finds it."""
    random = np.random.default_rng(0)
    tree = RadixTree(8)
    # Ids whose bytes sort otherwise than they do.
    children = {tuple(row) for row in random.choice([0, 1, 256, 65536], (1000, 8)).tolist()}
    for number, child in enumerate(children):
        put(tree, child, [number], 8)
    for wanted in random.choice([0, 1, 256, 65536], (300, 8)).tolist():
        longest = max(next((i for i in range(8) if child[i] != wanted[i]), 8) for child in children)
        match = read(tree, wanted)
        if longest == 8:
            assert len(match.block_ids) == 1
        else:
            assert match.num_copied == longest
            assert (
                match.source is None
                or as_tokens(wanted[:longest]) == (match.source.tokens[: 4 * longest])
            )


def test_a_tail_is_only_copied_from() -> None:
    """A block that is filled in part never matches as a whole, also when all that is wanted is in
    it; a longer one comes beside it, an equal or shorter one is not taken."""
    tree = RadixTree(4)
    put(tree, [1, 2, 3, 4, 5, 6], [1, 2], 4)
    for wanted, copied in (([5, 6], 2), ([5, 6, 7, 8], 2), ([5, 9, 9, 9], 1), ([9], 0)):
        match = read(tree, [1, 2, 3, 4, *wanted])
        assert (match.block_ids, match.num_copied) == ([1], copied)
    put(tree, [1, 2, 3, 4, 5], [1, 7], 4)
    assert tree.num_blocks == 2
    put(tree, [1, 2, 3, 4, 5, 6, 7], [1, 8], 4)
    assert read(tree, [1, 2, 3, 4, 5, 6, 7, 8]).source_block == 8
    put(tree, [1, 2, 3, 4, 5, 6, 7, 8], [1, 9], 4)
    assert read(tree, [1, 2, 3, 4, 5, 6, 7, 8]).block_ids == [1, 9]


def test_salts_never_meet() -> None:
    """Neither whole blocks nor parts of one are found under another salt, nor without one; and a
    salt of which nothing is left leaves nothing behind."""
    tree = RadixTree(2)
    put(tree, [1, 2, 3, 4, 5], [1, 2, 3], salt="a")
    for salt in ("", "b"):
        match = read(tree, [1, 2, 3, 4, 5], salt)
        assert (match.block_ids, match.num_copied) == ([], 0)
    assert read(tree, [1, 2, 3, 4], "a").block_ids == [1, 2]
    put(tree, [1, 2], [4], salt="b")
    assert sorted(tree.evict(9)) == [1, 2, 3, 4] and not tree._roots
    node = tree.lock(read(tree, [1, 2], "c"), "c")
    tree.unlock(node)
    assert not tree._roots


def test_what_others_computed_meanwhile_is_given_back() -> None:
    """Inserting tokens that are there already, in part or as a whole, takes none of the caller's
    blocks for them and locks what is there; where the two part ways the edge is cut."""
    tree = RadixTree(2)
    nodes: list[Node] = [tree.lock(read(tree, [1, 2, 3, 4])) for _ in range(3)]
    nodes[0], found = tree.insert(nodes[0], as_tokens([1, 2, 3, 4]), [1, 2])
    assert found == []
    nodes[1], found = tree.insert(nodes[1], as_tokens([1, 2, 3, 4]), [3, 4])
    assert found == [1, 2] and nodes[1] is nodes[0]
    nodes[2], found = tree.insert(nodes[2], as_tokens([1, 2, 7, 8]), [5, 6])
    assert found == [1]
    assert shape(tree) == {"[1, 2]": [1], "[3, 4]": [2], "[7, 8]": [6]}
    assert (nodes[0].lock_ref, nodes[2].lock_ref, tree.num_evictable_blocks) == (2, 1, 0)
    for node in nodes:
        tree.check_invariants()
        tree.unlock(node)
    assert tree.num_evictable_blocks == 3


def test_only_what_nobody_uses_is_evicted_and_all_of_it() -> None:
    """Leaf by leaf, from the ends of edges: what is locked stays, with all before it, and whatever
    else there is goes when it is asked for."""
    tree = RadixTree(1)
    put(tree, [1, 2, 3, 4, 5], [1, 2, 3, 4, 5], 1)
    put(tree, [1, 2, 9, 9], [1, 2, 6, 7], 1)
    node = tree.lock(read(tree, [1, 2, 3]))
    assert tree.evict(1) == [5]
    assert sorted(tree.evict(2)) in ([4, 7], [6, 7])
    tree.check_invariants()
    tree.evict(99)
    assert shape(tree) == {"[1, 2]": [1, 2], "[3]": [3]} and tree.num_evictable_blocks == 0
    assert tree.evict(1) == []
    tree.unlock(node)
    assert sorted(tree.evict(2)) == [2, 3] and shape(tree) == {"[1]": [1]}
    assert tree.evict(1) == [1] and tree.num_blocks == 0
    tree.check_invariants()


def test_misuse_is_caught() -> None:
    """A lock given back twice is an error of ours."""
    tree = RadixTree(1)
    put(tree, [1], [1], 1)
    node = tree.lock(read(tree, [1]))
    tree.unlock(node)
    with pytest.raises(AssertionError, match="more often"):
        tree.unlock(node)


def test_the_order_of_each_policy() -> None:
    """Who goes first: with lru whose last use is longest ago, with lfu who had fewest, with fifo
    the oldest, with priority what only those of the highest number have used."""
    order = {
        "lru": [4, 1, 3, 2],
        "lfu": [4, 1, 2, 3],
        "fifo": [1, 2, 3, 4],
        "priority": [1, 4, 2, 3],
    }
    assert order.keys() == EVICTION_POLICIES.keys()
    for name, wanted in order.items():
        tree = RadixTree(1, EVICTION_POLICIES[name])
        for block, priority in (
            (1, 5), (2, 0), (3, 0), (4, 0), (3, -1), (1, 5), (3, 0), (3, 3), (2, 7),
        ):  # fmt: skip
            put(tree, [block], [block], 1, priority=priority)
        found = [tree.evict(1)[0] for _ in wanted]
        assert found == wanted, name


def test_what_becomes_a_leaf_stands_where_its_last_use_was() -> None:
    """A node whose children were evicted comes before leaves that were used after it."""
    tree = RadixTree(1)
    put(tree, [1], [1], 1)
    put(tree, [1, 2], [1, 2], 1)
    put(tree, [9], [9], 1)
    assert [tree.evict(1) for _ in range(3)] == [[2], [1], [9]]


def test_the_line_of_leaves_stays_short() -> None:
    """A leaf that is used again and again leaves no pile of entries, and stays within reach."""
    tree = RadixTree(1)
    put(tree, [1], [1], 1)
    for _ in range(1000):
        put(tree, [1], [1], 1)
    assert len(tree._line) < 40
    assert tree.evict(1) == [1]


@pytest.mark.parametrize("length", [1, 5, 255, 256, 257, 5000])
def test_common_tokens(length: int) -> None:
    """The count is that of a loop, wherever two differ, for short and long ones."""
    random = np.random.default_rng(length)
    ids = random.integers(0, 150_000, length).astype(np.int32)
    for at in {0, length // 2, length - 1, length}:
        for bit in (0, 9, 17):
            other = ids.copy()
            if at < length:
                other[at] ^= 1 << bit
            one, two = ids.tobytes(), other.tobytes()
            assert num_common_tokens(one, two) == at
            assert num_common_tokens(one, two + b"1234") == at
            assert num_common_tokens(one, two, at) == 0


def test_keys_go_with_their_blocks() -> None:
    """Whoever puts blocks may give a key for each: cut edges part them, what is evicted takes its
    own along, and what follows later has others."""

    def chains() -> dict[tuple[int, ...], list[bytes] | None]:
        return {tuple(each.block_ids): each.chain for each in tree.nodes() if each.block_ids}

    tree = RadixTree(2)
    keys = [b"a", b"b", b"c", b"d", b"e"]
    root = tree.lock(read(tree, [0]))
    end, _ = tree.insert(root, as_tokens(range(10)), [11, 12, 13, 14, 15], keys)
    assert chains() == {(11, 12, 13, 14, 15): keys} and end.chain is not keys
    cut = tree.lock(read(tree, [0, 1, 2, 3, 4, 9]))
    tree.check_invariants()
    assert chains() == {(11, 12): keys[:2], (13, 14, 15): keys[2:]}
    other, found = tree.insert(cut, as_tokens([4, 5, 9, 9]), [21, 22], [b"c", b"f"])
    tree.check_invariants()
    assert found == [13], "which has its key already"
    assert chains() == {(11, 12): keys[:2], (13,): [b"c"], (14, 15): keys[3:], (22,): [b"f"]}
    last, _ = tree.insert(end, as_tokens([7, 7]), [16])
    assert last.chain is None and end.chain == keys[3:]
    tree.unlock(last)
    tree.evict(2)
    tree.check_invariants()
    assert chains() == {(11, 12): keys[:2], (13,): [b"c"], (14,): keys[3:4], (22,): [b"f"]}
    tree.unlock(other)
    with pytest.raises(AssertionError):
        tree.insert(tree.lock(read(tree, [9], "s"), "s"), as_tokens([1, 2]), [31], [b"g", b"h"])
