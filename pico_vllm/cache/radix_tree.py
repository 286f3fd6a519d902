"""RadixTree: which token prefixes are cached, and in which blocks. Host only; it counts no holders.

Tokens are bytes here, four each (`Tokens`): a long edge is compared in one go, and a block of
tokens is the key of a dictionary. An edge is whole blocks; children are found by their first one.
Each salt has a root of its own, so prefixes of different salts never meet.

Where the next block matches in part, `match` says so: its first slots may be copied into a private
block. Children also lie in a sorted list: the one with the longest part in common stands beside the
place where the wanted block would be. A leaf may also be a tail, a single block that is filled in
part: its key is shorter than a block, so it is never found but to be copied from.

A `Match` is a reading of the tree and good until the tree changes. Who goes on to use its blocks
locks it: then, and only then, the edge is cut where the match ends, and `lock` returns the node
that ends there. Cutting leaves the lower part the node that it was, so a node once locked stands
for the same tokens until it is unlocked. `lock_ref` of a node counts the live requests that have
locked it or a node below.

Invariants (`check_invariants`): lock_ref of a node is that of its children and its own holders
together; the unlocked leaves are those which eviction finds, in the order of its policy;
`num_evictable_blocks` is what all evictions together would give. A node without a lock has none
below either, so leaf by leaf everything unlocked can be evicted.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pico_vllm.cache.eviction import EvictionPolicy, lru

Tokens = bytes
"""Token ids, int32 each."""
TOKEN_BYTES = 4
_AS_NUMBER_BYTES = 1024
"""Up to here one long number is compared faster than an array is made."""


def num_common_tokens(one: Tokens, other: Tokens, first: int = 0) -> int:
    """How many tokens from token `first` on are the same, with which both begin."""
    start = first * TOKEN_BYTES
    stop = min(len(one), len(other))
    ours, theirs = one[start:stop], other[start:stop]
    if ours == theirs:
        return len(ours) // TOKEN_BYTES
    if len(ours) <= _AS_NUMBER_BYTES:
        differ = int.from_bytes(ours, "little") ^ int.from_bytes(theirs, "little")
        return ((differ & -differ).bit_length() - 1) // (8 * TOKEN_BYTES)
    is_other = np.frombuffer(ours, np.int32) != np.frombuffer(theirs, np.int32)
    return int(is_other.argmax())


class Node:
    """An edge and where it ends."""

    __slots__ = (
        "block_ids", "chain", "children", "created", "entry", "keys", "last_used", "lock_ref",
        "num_uses", "parent", "priority", "salt", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        parent: Node | None,
        tokens: Tokens,
        block_ids: list[int],
        clock: int,
        salt: str = "",
    ) -> None:
        self.parent = parent
        """None of a root, which has no edge."""
        self.tokens = tokens
        self.block_ids = block_ids
        self.chain: list[bytes] | None = None
        """One for each block, of whoever names blocks by keys; None until then. The node's own
        list: cut and shortened with its blocks, and gone with it."""
        self.children: dict[Tokens, Node] = {}
        """By their first block of tokens."""
        self.keys: list[Tokens] = []
        """Those of children, sorted."""
        self.lock_ref = 0
        # See Usage of cache/eviction.py.
        self.created = self.last_used = clock
        self.num_uses = self.priority = 0
        self.salt = salt
        """Of a root."""
        self.entry = 0
        """Which entry of the line for eviction is this node's; 0 while it is not evictable."""


@dataclass(slots=True, eq=False)
class Match:
    """The longest cached prefix of some tokens. Nobody changes it; a frozen one would take longer
    to make than to find."""

    path: list[Node]
    """From the root on, the last one perhaps matched in part."""
    num_in_last: int
    """Blocks of the last node's edge that match."""
    block_ids: list[int]
    source: Node | None = None
    """Has the block whose first `num_copied` tokens are those that follow."""
    source_block: int = 0
    num_copied: int = 0

    @property
    def ends_in_edge(self) -> bool:
        return self.num_in_last < len(self.path[-1].block_ids)

    def without_copy(self) -> Match:
        return Match(self.path, self.num_in_last, self.block_ids)

    def num_unlocked(self) -> int:
        """Blocks that a lock would take from those that can be evicted, the source's included."""
        found, last, source = 0, self.path[-1], self.source
        for node in self.path:
            if node.lock_ref == 0:
                found += self.num_in_last if node is last else len(node.block_ids)
        if source is not None and source.lock_ref == 0:
            found += len(source.block_ids) - (self.num_in_last if source is last else 0)
        return found


class RadixTree:
    def __init__(
        self, block_size: int, policy: EvictionPolicy = lru, first_version: int = 0
    ) -> None:
        self._block_bytes = block_size * TOKEN_BYTES
        self._policy = policy
        self._roots: dict[str, Node] = {}
        self._clock = 0
        self._line: list[tuple[tuple[int, int], int, Node]] = []
        """A heap of (place by the policy, entry, node). Entries that are not their node's any more
        stay until they are first, or too many."""
        self._num_entries = 0
        self._num_evictable_leaves = 0
        self.num_blocks = 0
        self.num_evictable_blocks = 0
        self.num_nodes = 0
        """Roots, which have no edge, are not counted."""
        self.version = first_version
        """Goes up whenever a match may have become another."""

    def match(self, tokens: Tokens, max_tokens: int, salt: str = "") -> Match:
        """The longest prefix of at most so many tokens that is here, in whole blocks and then in
        part of one. Changes nothing."""
        size = self._block_bytes
        root = self._roots.get(salt)
        if root is None:
            return Match([_NOWHERE], 0, [])
        limit = max_tokens * TOKEN_BYTES
        node, path, block_ids, at = root, [root], [], 0
        while at + size <= limit:
            child = node.children.get(tokens[at : at + size])
            if child is None:
                break
            path.append(child)
            edge = child.tokens
            if at + len(edge) <= limit and tokens.startswith(edge, at):
                block_ids += child.block_ids
                at += len(edge)
                node = child
                continue
            num_matched = num_common_tokens(edge, tokens[at : min(limit, at + len(edge))])
            num_blocks = num_matched * TOKEN_BYTES // size
            block_ids += child.block_ids[:num_blocks]
            at += num_blocks * size
            num_copied = num_matched - num_blocks * size // TOKEN_BYTES
            if num_copied:
                return Match(
                    path, num_blocks, block_ids, child, child.block_ids[num_blocks],
                    num_copied,
                )  # fmt: skip
            return Match(path, num_blocks, block_ids)
        wanted = tokens[at : min(at + size, limit)]
        source, source_block, num_copied = self._best_part(node, wanted)
        return Match(path, len(node.block_ids), block_ids, source, source_block, num_copied)

    def _best_part(self, node: Node, wanted: Tokens) -> tuple[Node | None, int, int]:
        """The block after a node that begins with most of the wanted tokens."""
        found: tuple[Node | None, int, int] = (None, 0, 0)
        if not wanted:
            return found
        index, first_token = bisect_left(node.keys, wanted), wanted[:TOKEN_BYTES]
        for key in node.keys[max(0, index - 1) : index + 1]:
            if not key.startswith(first_token):
                continue  # as with most
            count = num_common_tokens(key, wanted)
            if count > found[2]:
                child = node.children[key]
                found = (child, child.block_ids[0], count)
        return found

    def lock(self, match: Match, salt: str = "", priority: int = 0) -> Node:
        """Count a live request on the blocks of a match, which nothing has come after. The node
        returned is what to unlock. The source is locked apart (`lock_node`)."""
        node = match.path[-1]
        if node is _NOWHERE:
            node = self._roots.get(salt) or Node(None, b"", [], 0, salt)
            self._roots[salt] = node
            self.version += 1
        elif match.ends_in_edge:
            node = self._cut(node, match.num_in_last)
        self.lock_node(node, priority)
        return node

    def lock_node(self, node: Node, priority: int = 0) -> None:
        self._clock += 1
        clock = self._clock
        each: Node | None = node
        while each is not None:
            if each.lock_ref == 0:
                self.num_evictable_blocks -= len(each.block_ids)
                if each.entry:
                    self._leave_line(each)
            each.lock_ref += 1
            each.last_used = clock
            if priority < each.priority or not each.num_uses:
                each.priority = priority
            each.num_uses += 1
            each = each.parent

    def unlock(self, node: Node) -> None:
        each: Node | None = node
        while each is not None:
            assert each.lock_ref > 0, "unlocked more often than locked"
            each.lock_ref -= 1
            if each.lock_ref == 0:
                self.num_evictable_blocks += len(each.block_ids)
                if not each.children:
                    self._become_leaf(each)
            each = each.parent

    def move_lock(self, above: Node, node: Node) -> None:
        """What was locked as `above` goes on as `node` below it."""
        each = node
        while each is not above:
            if each.lock_ref == 0:
                self.num_evictable_blocks -= len(each.block_ids)
                if each.entry:
                    self._leave_line(each)
            each.lock_ref += 1
            each.num_uses += 1
            each.last_used = above.last_used
            each.priority = min(each.priority, above.priority)
            assert each.parent is not None, "not below the other"
            each = each.parent

    def insert(
        self,
        node: Node,
        tokens: Tokens,
        block_ids: list[int],
        chain: Sequence[bytes] | None = None,
    ) -> tuple[Node, list[int]]:
        """Put whole blocks after a locked node. Returns the node where they end, to which the lock
        has moved, and the blocks that were there already, of the first tokens: the caller's are not
        taken for those. chain: of all the blocks, where the caller has it."""
        size = self._block_bytes
        assert len(tokens) == len(block_ids) * size and node.lock_ref > 0
        assert chain is None or len(chain) == len(block_ids)
        start, at, found = node, 0, []
        while at < len(tokens):
            child = node.children.get(tokens[at : at + size])
            if child is None:
                break
            edge = child.tokens
            if not tokens.startswith(edge, at):
                num_blocks = num_common_tokens(edge, tokens[at : at + len(edge)])
                child = self._cut(child, num_blocks * TOKEN_BYTES // size)
            found += child.block_ids
            at += len(child.tokens)
            node = child
        if at < len(tokens):
            node = self._add(node, tokens[at:] if at else tokens, block_ids[len(found) :])
            if chain is not None:
                node.chain = list(chain[len(found) :])
        self.move_lock(start, node)
        return node, found

    def insert_tail(self, node: Node, tokens: Tokens, block_id: int) -> bool:
        """Put a block after a node of which only the first tokens are filled. False if others
        begin with those already."""
        assert 0 < len(tokens) < self._block_bytes
        num_there = self._best_part(node, tokens)[2]
        if num_there * TOKEN_BYTES == len(tokens):
            return False
        tail = self._add(node, tokens, [block_id])
        self._become_leaf(tail)
        return True

    def evict(
        self, count: int, on_evict: Callable[[Node, int], None] = lambda node, first: None
    ) -> list[int]:
        """Take out unlocked blocks, so many if there are, and return them: leaves in the policy's
        order, each from its end.

        on_evict: told of a node whose blocks go, from which on, while it still stands. If it
        raises, they stay; those that it was told of before are gone.
        """
        gone: list[int] = []
        while len(gone) < count and self._num_evictable_leaves:
            _, entry, node = self._line[0]
            if node.entry != entry:
                heapq.heappop(self._line)
                continue
            assert node.lock_ref == 0 and not node.children
            num_kept = max(0, len(node.block_ids) - (count - len(gone)))
            taken = node.block_ids[num_kept:]
            if num_kept:
                self._shorten(node, num_kept, on_evict)
            else:
                self._remove_first(node, on_evict)
            gone += taken
            self.num_blocks -= len(taken)
            self.num_evictable_blocks -= len(taken)
            self.version += 1
        return gone

    def _shorten(self, node: Node, num_kept: int, on_evict: Callable[[Node, int], None]) -> None:
        """It keeps its place in line."""
        tokens = node.tokens[: num_kept * self._block_bytes]
        on_evict(node, num_kept)
        del node.block_ids[num_kept:]
        if node.chain is not None:
            del node.chain[num_kept:]
        node.tokens = tokens

    def _remove_first(self, node: Node, on_evict: Callable[[Node, int], None]) -> None:
        """The leaf that is first in line. Its parent may be one then, and a root without anything
        goes with it. What may raise comes before on_evict, which may too, and nothing after it."""
        parent = node.parent
        assert parent is not None
        key = node.tokens[: self._block_bytes]
        index = bisect_left(parent.keys, key)
        is_leaf_then = len(parent.children) == 1 and parent.lock_ref == 0
        is_in_line_then = is_leaf_then and parent.parent is not None
        place = self._policy(parent) if is_in_line_then else (0, 0)
        on_evict(node, 0)
        node.entry = 0
        node.parent = None
        del parent.children[key]
        del parent.keys[index]
        self.num_nodes -= 1
        if is_in_line_then:
            self._num_entries += 1
            parent.entry = self._num_entries
            heapq.heapreplace(self._line, (place, parent.entry, parent))
            return
        heapq.heappop(self._line)
        self._num_evictable_leaves -= 1
        if is_leaf_then:
            del self._roots[parent.salt]

    def block_ids(self) -> list[int]:
        """All, in no order."""
        return [block_id for node in self.nodes() for block_id in node.block_ids]

    def nodes(self) -> Iterator[Node]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            yield node

    def _add(self, parent: Node, tokens: Tokens, block_ids: list[int]) -> Node:
        self._clock += 1
        node = Node(parent, tokens, block_ids, self._clock)
        node.priority = parent.priority
        if parent.entry:
            self._leave_line(parent)
        self._hang(parent, node)
        self.num_nodes += 1
        self.num_blocks += len(block_ids)
        self.num_evictable_blocks += len(block_ids)
        self.version += 1
        return node

    def _hang(self, parent: Node, node: Node) -> None:
        key = node.tokens[: self._block_bytes]
        parent.children[key] = node
        parent.keys.insert(bisect_left(parent.keys, key), key)

    def _cut(self, node: Node, num_blocks: int) -> Node:
        """Give the first blocks of an edge to a new node above, and return that."""
        assert 0 < num_blocks < len(node.block_ids) and node.parent is not None
        size = num_blocks * self._block_bytes
        upper = Node(node.parent, node.tokens[:size], node.block_ids[:num_blocks], node.created)
        upper.last_used, upper.num_uses = node.last_used, node.num_uses
        upper.priority = node.priority
        upper.lock_ref = node.lock_ref
        if node.chain is not None:
            upper.chain, node.chain = node.chain[:num_blocks], node.chain[num_blocks:]
        # The same key leads to it from above.
        node.parent.children[upper.tokens[: self._block_bytes]] = upper
        node.parent, node.tokens = upper, node.tokens[size:]
        node.block_ids = node.block_ids[num_blocks:]
        self._hang(upper, node)
        self.num_nodes += 1
        self.version += 1
        return upper

    def _become_leaf(self, node: Node) -> None:
        """Unlocked and without children: it can be evicted."""
        if node.parent is None:
            # A root has no blocks: it just goes.
            del self._roots[node.salt]
            self.version += 1
            return
        self._num_entries += 1
        node.entry = self._num_entries
        self._num_evictable_leaves += 1
        heapq.heappush(self._line, (self._policy(node), node.entry, node))
        if len(self._line) > 2 * self._num_evictable_leaves + 16:
            self._line = [each for each in self._line if each[2].entry == each[1]]
            heapq.heapify(self._line)

    def _leave_line(self, node: Node) -> None:
        node.entry = 0
        self._num_evictable_leaves -= 1

    def check_invariants(self) -> None:
        size = self._block_bytes
        num_blocks = num_evictable = num_nodes = 0
        leaves = set()
        for node in self.nodes():
            assert node.lock_ref >= sum(child.lock_ref for child in node.children.values())
            assert node.keys == sorted(node.children)
            is_tail = 0 < len(node.tokens) < size
            assert len(node.tokens) == len(node.block_ids) * size or (
                is_tail and len(node.block_ids) == 1 and not node.children
            )
            assert (node.parent is None) == (not node.block_ids), "an edge without a block"
            for key, child in node.children.items():
                assert child.parent is node and child.tokens[:size] == key
            assert node.chain is None or len(node.chain) == len(node.tokens) // size
            num_blocks += len(node.block_ids)
            num_nodes += node.parent is not None
            if node.lock_ref == 0:
                num_evictable += len(node.block_ids)
                if not node.children:
                    assert node.parent is not None, "a root that nobody needs"
                    leaves.add(node)
            assert bool(node.entry) == (node in leaves), "evictable, or not, and in line, or not"
        entries = [each for each in self._line if each[2].entry == each[1]]
        assert {each[2] for each in entries} == leaves and len(entries) == len(leaves)
        assert all(place == self._policy(node) for place, _, node in entries)
        assert self._num_evictable_leaves == len(leaves)
        assert (self.num_blocks, self.num_evictable_blocks) == (num_blocks, num_evictable)
        assert self.num_nodes == num_nodes


_NOWHERE = Node(None, b"", [], 0)
"""Where a match ends whose salt is not here: nothing hangs there."""
