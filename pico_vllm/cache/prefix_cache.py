"""PrefixCache: KV of prefixes that may come again. The only one that knows both blocks and tree.
Host only.

A block is published, put into the tree, once it is full and the step that filled it has succeeded;
nobody writes to it from then on. The tree is a holder of its own: with the live requests that have
a block in their tables it makes up `ref_count`. A request that enters takes a `Lease` on what is
there of its tokens: it holds those blocks and locks the node where they end, which moves down as
its own blocks are published. Blocks without a lock have the tree as their only holder: they count
as available and are evicted when somebody needs them.

Whose block is found in the tree already, because two computed the same tokens side by side, goes on
with the one that is there: `publish` exchanges them.

A tail's block may still be written to, by the step under way of a request that ended or was
preempted: behind the slots that the tree vouches for, and nobody reads a copy's slots there before
writing them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pico_vllm.cache.block_manager import BlockManager
from pico_vllm.cache.eviction import EVICTION_POLICIES
from pico_vllm.cache.radix_tree import TOKEN_BYTES, Match, Node, RadixTree, Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """What the cache did so far, and what it is now. All zero without a cache."""

    num_queries: int = 0
    """Requests that entered; who comes back after a preemption is not counted again."""
    num_hits: int = 0
    """Those of them that found any of their tokens."""
    num_query_tokens: int = 0
    """What those requests came with."""
    num_hit_tokens: int = 0
    """What they found of it, to be copied included."""
    num_copies: int = 0
    """Blocks copied on write."""
    num_evicted_blocks: int = 0
    num_blocks: int = 0
    """Of the pool: this and what follows is now, not so far."""
    num_held_blocks: int = 0
    """By running requests."""
    num_cached_blocks: int = 0
    """By the tree, whether or not requests hold them as well."""
    num_nodes: int = 0
    """Of the tree, each with an edge of at least one block."""

    @property
    def hit_rate(self) -> float | None:
        """Part of the tokens that was found; None where nobody asked."""
        return self.num_hit_tokens / self.num_query_tokens if self.num_query_tokens else None

    def since(self, before: CacheStats) -> CacheStats:
        """What was counted after `before`; what is now stays."""
        counted = {name: getattr(self, name) - getattr(before, name) for name in _COUNTED}
        return replace(self, **counted)


_COUNTED = (
    "num_queries", "num_hits", "num_query_tokens", "num_hit_tokens", "num_copies",
    "num_evicted_blocks",
)  # fmt: skip


@dataclass(slots=True, eq=False)
class Lease:
    """What a live request has of the cache."""

    tree: RadixTree
    """Another than the cache's once that was emptied: nothing is put into it any more."""
    node: Node
    num_blocks: int
    """The request's first ones, whose path ends at the node."""
    source: Node | None = None
    """Locked until the step that copies from its block is planned."""
    source_block: int = 0
    num_copied: int = 0


class PrefixCache:
    def __init__(
        self,
        blocks: BlockManager,
        *,
        block_size: int,
        cow_min_tokens: int = 8,
        eviction_policy: str = "lru",
        max_cached_fraction: float = 1.0,
    ) -> None:
        """cow_min_tokens: a block is copied for at least so many of its tokens.
        max_cached_fraction: of the pool, what blocks may take that no request holds."""
        self._blocks = blocks
        self.block_size = block_size
        self._block_bytes = block_size * TOKEN_BYTES
        self._cow_min_tokens = cow_min_tokens
        self._min_tail_bytes = max(1, cow_min_tokens) * TOKEN_BYTES
        self._policy = EVICTION_POLICIES[eviction_policy]
        self._max_evictable = int(max_cached_fraction * blocks.num_device_blocks)
        self._tree = RadixTree(block_size, self._policy)
        # As CacheStats has them.
        self.num_queries = self.num_hits = 0
        self.num_query_tokens = self.num_hit_tokens = 0
        self.num_copies = self.num_evicted_blocks = 0

    def stats(self) -> CacheStats:
        return CacheStats(
            num_queries=self.num_queries,
            num_hits=self.num_hits,
            num_query_tokens=self.num_query_tokens,
            num_hit_tokens=self.num_hit_tokens,
            num_copies=self.num_copies,
            num_evicted_blocks=self.num_evicted_blocks,
            num_blocks=self._blocks.num_device_blocks,
            num_held_blocks=self._blocks.num_device_blocks - self.num_available_blocks,
            num_cached_blocks=self._tree.num_blocks,
            num_nodes=self._tree.num_nodes,
        )

    @property
    def num_available_blocks(self) -> int:
        """Free ones, and those that would be free if they were evicted."""
        return self._blocks.num_free_device_blocks + self._tree.num_evictable_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Held by the tree, by requests as well or not."""
        return self._tree.num_blocks

    @property
    def version(self) -> int:
        """As long as it stays, so does what `match` finds."""
        return self._tree.version

    def allocate(self, count: int) -> list[int] | None:
        """As BlockManager's; what is missing is evicted and changes hands."""
        num_free = self._blocks.num_free_device_blocks
        if count <= num_free:
            return self._blocks.allocate(count)
        if count - num_free > self._tree.num_evictable_blocks:
            return None
        evicted = self._evict(count - num_free)
        return (self._blocks.allocate(num_free) or []) + evicted if num_free else evicted

    def match(self, tokens: Tokens, max_tokens: int, salt: str) -> Match:
        """What is there of the first max_tokens. Changes nothing."""
        match = self._tree.match(tokens, max_tokens, salt)
        return match if match.num_copied >= self._cow_min_tokens else match.without_copy()

    def count(self, num_tokens: int, num_cached_tokens: int) -> None:
        """A request enters for the first time, and so much of it was there."""
        self.num_queries += 1
        self.num_hits += num_cached_tokens > 0
        self.num_query_tokens += num_tokens
        self.num_hit_tokens += num_cached_tokens

    def acquire(self, match: Match, salt: str, priority: int) -> Lease:
        """Let a request hold the blocks of a match, and keep the source for it."""
        node = self._tree.lock(match, salt, priority)
        if match.block_ids:
            self._blocks.share(match.block_ids)
        lease = Lease(self._tree, node, len(match.block_ids))
        if match.source is not None:
            self._tree.lock_node(match.source, priority)
            lease.source, lease.source_block = match.source, match.source_block
            lease.num_copied = match.num_copied
        return lease

    def take_source(self, lease: Lease) -> int:
        """The block to copy from, for a plan that has the copy: others may have it evicted now."""
        self.num_copies += 1
        self.drop_source(lease)
        return lease.source_block

    def drop_source(self, lease: Lease) -> None:
        """The copy is in a plan, or will not be made."""
        if lease.source is not None:
            lease.tree.unlock(lease.source)
            lease.source, lease.num_copied = None, 0

    def publish(self, lease: Lease, tokens: Tokens, block_ids: list[int]) -> list[int]:
        """Put full blocks that follow those of the lease into the tree. Returns the blocks that are
        there already for the first of these tokens: the request holds those now, and no longer its
        own."""
        if lease.tree is not self._tree or not block_ids:
            return []
        lease.node, found = self._tree.insert(lease.node, tokens, block_ids)
        lease.num_blocks += len(block_ids)
        if len(found) < len(block_ids):
            self._blocks.share(block_ids[len(found) :])
        if found:
            self._blocks.share(found)
            self._blocks.free(block_ids[: len(found)])
        return found

    def release(self, lease: Lease, block_ids: list[int], tokens: Tokens = b"") -> None:
        """Take back what a request holds. tokens: those after the lease's blocks whose KV is
        there; what is full of them is published, and the tail kept to be copied from."""
        self.drop_source(lease)
        first, num_taken = lease.num_blocks, 0
        if tokens and lease.tree is self._tree:
            num_found, num_taken = self._keep(lease, tokens, block_ids)
            first += num_found
        lease.tree.unlock(lease.node)
        # What the tree has taken it holds in place of the request.
        freed = block_ids[:first] + block_ids[first + num_taken :] if num_taken else block_ids
        if freed:
            self._blocks.free(freed)
        excess = self._tree.num_evictable_blocks - self._max_evictable
        if excess > 0:
            self._blocks.free(self._evict(excess))

    def _keep(self, lease: Lease, tokens: Tokens, block_ids: list[int]) -> tuple[int, int]:
        """Put what a request leaves into the tree: full blocks and a tail. Returns how many of its
        blocks after the lease's are there already, and how many after those were taken."""
        first = lease.num_blocks
        num_full = len(tokens) // self._block_bytes
        end = num_full * self._block_bytes
        num_found = 0
        if num_full:
            own = block_ids[first : first + num_full]
            lease.node, found = self._tree.insert(lease.node, tokens[:end], own)
            num_found = len(found)
        num_taken = num_full - num_found
        tail = tokens[end:]
        if len(tail) >= self._min_tail_bytes:
            num_taken += self._tree.insert_tail(lease.node, tail, block_ids[first + num_full])
        return num_found, num_taken

    def reset(self) -> None:
        """Forget all. Requests that run keep the blocks that they hold, and publish nothing more.
        No lease has a source."""
        old = self._tree
        self._tree = RadixTree(self.block_size, self._policy, old.version + 1)
        block_ids = old.block_ids()
        if block_ids:
            self._blocks.free(block_ids)

    def _evict(self, count: int) -> list[int]:
        """Take blocks out of the tree: whoever calls this holds them then."""
        gone = self._tree.evict(count)
        assert len(gone) == count and all(self._blocks.ref_count(i) == 1 for i in gone), (
            f"evicted {gone} for {count}, some of which may be held by others"
        )
        self.num_evicted_blocks += count
        return gone

    def block_ids(self) -> set[int]:
        """Those that the tree holds."""
        return set(self._tree.block_ids())

    def check_invariants(self) -> None:
        self._tree.check_invariants()
        block_ids = self._tree.block_ids()
        assert len(set(block_ids)) == len(block_ids), "a block in two nodes"
        for node in self._tree.nodes():
            if node.lock_ref == 0:
                assert all(self._blocks.ref_count(block_id) == 1 for block_id in node.block_ids)
