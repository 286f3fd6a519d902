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

With tiers below the device (cache/tiers/lower.py) full blocks that are evicted go down under their
chain keys, and what follows a match is brought up again into blocks of its own (`begin_load`). A
`LoadingBlocks` is a holder like a request: it has a lease on the match and its blocks, and puts
them into the tree once they are known to hold what was promised (`end_load`).

A tail's block may still be written to, by the step under way of a request that ended or was
preempted: behind the slots that the tree vouches for, and nobody reads a copy's slots there before
writing them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from pico_vllm.cache.block_manager import BlockManager
from pico_vllm.cache.eviction import EVICTION_POLICIES
from pico_vllm.cache.radix_tree import TOKEN_BYTES, Match, Node, RadixTree, Tokens
from pico_vllm.cache.tiers.chain import Key, KnownChains, chain_keys, root_key
from pico_vllm.cache.tiers.lower import Fetch, Load, LowerTiers, TierStats


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
    num_hit_blocks: int = 0
    """Whole ones that they found."""
    num_host_hit_blocks: int = 0
    """Those of them that had come up from host memory, and that nobody had entered with since."""
    num_disk_hit_blocks: int = 0
    """Likewise from disk."""
    num_copies: int = 0
    """Blocks copied on write."""
    num_evicted_blocks: int = 0
    """From the device."""
    num_blocks: int = 0
    """Of the pool: this and what follows is now, not so far."""
    num_held_blocks: int = 0
    """By running requests."""
    num_cached_blocks: int = 0
    """By the tree, whether or not requests hold them as well."""
    num_nodes: int = 0
    """Of the tree, each with an edge of at least one block."""
    block_size: int = 0
    below: TierStats = field(default_factory=TierStats)

    @property
    def hit_rate(self) -> float | None:
        """Part of the tokens that was found; None where nobody asked."""
        return self._part(self.num_hit_tokens)

    @property
    def num_device_hit_blocks(self) -> int:
        return self.num_hit_blocks - self.num_host_hit_blocks - self.num_disk_hit_blocks

    @property
    def num_device_hit_tokens(self) -> int:
        """Those that were copied included."""
        return self.num_hit_tokens - self.num_host_hit_tokens - self.num_disk_hit_tokens

    @property
    def num_host_hit_tokens(self) -> int:
        return self.num_host_hit_blocks * self.block_size

    @property
    def num_disk_hit_tokens(self) -> int:
        return self.num_disk_hit_blocks * self.block_size

    @property
    def device_hit_rate(self) -> float | None:
        """With the two that follow, `hit_rate`."""
        return self._part(self.num_device_hit_tokens)

    @property
    def host_hit_rate(self) -> float | None:
        return self._part(self.num_host_hit_tokens)

    @property
    def disk_hit_rate(self) -> float | None:
        return self._part(self.num_disk_hit_tokens)

    def _part(self, num_tokens: int) -> float | None:
        return num_tokens / self.num_query_tokens if self.num_query_tokens else None

    def since(self, before: CacheStats) -> CacheStats:
        """What was counted after `before`; what is now stays."""
        counted = {name: getattr(self, name) - getattr(before, name) for name in _COUNTED}
        return replace(self, below=self.below.since(before.below), **counted)


_COUNTED = (
    "num_queries", "num_hits", "num_query_tokens", "num_hit_tokens", "num_hit_blocks",
    "num_host_hit_blocks", "num_disk_hit_blocks", "num_copies", "num_evicted_blocks",
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


@dataclass(slots=True, eq=False)
class LoadingBlocks:
    """Blocks that are filled from below."""

    lease: Lease
    block_ids: list[int]
    """Those of the lease first."""
    tokens: Tokens
    """Of those after the lease's."""
    load: Load


class PrefixCache:
    def __init__(
        self,
        blocks: BlockManager,
        *,
        block_size: int,
        cow_min_tokens: int = 8,
        eviction_policy: str = "lru",
        max_cached_fraction: float = 1.0,
        tiers: LowerTiers | None = None,
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
        self.tiers = tiers
        self._chains = KnownChains(self._block_bytes)
        self._loading: list[LoadingBlocks] = []
        self._is_from_disk: dict[int, bool] = {}
        """Blocks of the tree that came from below, and that no request has entered with since."""
        # As CacheStats has them.
        self.num_queries = self.num_hits = 0
        self.num_query_tokens = self.num_hit_tokens = 0
        self.num_hit_blocks = self.num_host_hit_blocks = self.num_disk_hit_blocks = 0
        self.num_copies = self.num_evicted_blocks = 0

    def stats(self) -> CacheStats:
        return CacheStats(
            num_queries=self.num_queries,
            num_hits=self.num_hits,
            num_query_tokens=self.num_query_tokens,
            num_hit_tokens=self.num_hit_tokens,
            num_hit_blocks=self.num_hit_blocks,
            num_host_hit_blocks=self.num_host_hit_blocks,
            num_disk_hit_blocks=self.num_disk_hit_blocks,
            num_copies=self.num_copies,
            num_evicted_blocks=self.num_evicted_blocks,
            num_blocks=self._blocks.num_device_blocks,
            num_held_blocks=self._blocks.num_device_blocks - self.num_available_blocks,
            num_cached_blocks=self._tree.num_blocks,
            num_nodes=self._tree.num_nodes,
            block_size=self.block_size,
            below=TierStats() if self.tiers is None else self.tiers.stats(),
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
        evicted: list[int] = []
        try:
            self._evict(count - num_free, evicted.extend)
            return (self._blocks.allocate(num_free) or []) + evicted if num_free else evicted
        except BaseException:
            # Neither the tree nor anybody else has them.
            self._blocks.free(evicted)
            raise

    def match(self, tokens: Tokens, max_tokens: int, salt: str) -> Match:
        """What is there of the first max_tokens. Changes nothing."""
        match = self._tree.match(tokens, max_tokens, salt)
        return match if match.num_copied >= self._cow_min_tokens else match.without_copy()

    def count(
        self, num_tokens: int, num_cached_tokens: int, num_blocks: int, num_below: tuple[int, int]
    ) -> None:
        """A request enters for the first time, and so much of it was there. num_below: of the
        whole blocks, as `first_uses` has them."""
        self.num_queries += 1
        self.num_hits += num_cached_tokens > 0
        self.num_query_tokens += num_tokens
        self.num_hit_tokens += num_cached_tokens
        self.num_hit_blocks += num_blocks
        self.num_host_hit_blocks += num_below[0]
        self.num_disk_hit_blocks += num_below[1]

    def first_uses(self, block_ids: Sequence[int]) -> tuple[int, int]:
        """A request enters with blocks: how many of them came from host memory, and from disk, with
        nobody having entered with them since. Who is next finds them on the device."""
        if not self._is_from_disk:
            return 0, 0
        found = [self._is_from_disk.pop(i) for i in block_ids if i in self._is_from_disk]
        return len(found) - sum(found), sum(found)

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

    def publish(
        self, lease: Lease, tokens: Tokens, block_ids: list[int], keys: list[Key] | None = None
    ) -> list[int]:
        """Put full blocks that follow those of the lease into the tree. Returns the blocks that are
        there already for the first of these tokens: the request holds those now, and no longer its
        own. keys: of these blocks, from `chain`, where the caller has them."""
        if lease.tree is not self._tree or not block_ids:
            return []
        lease.node, found = self._tree.insert(lease.node, tokens, block_ids, keys)
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
        self._give_back(lease, block_ids, tokens)
        excess = self._tree.num_evictable_blocks - self._max_evictable
        if excess > 0:
            self._evict(excess, self._blocks.free)

    def _give_back(
        self,
        lease: Lease,
        block_ids: list[int],
        tokens: Tokens,
        keys: list[Key] | None = None,
    ) -> None:
        self.drop_source(lease)
        first, num_taken = lease.num_blocks, 0
        if tokens and lease.tree is self._tree:
            num_found, num_taken = self._keep(lease, tokens, block_ids, keys)
            first += num_found
        lease.tree.unlock(lease.node)
        # What the tree has taken it holds in place of the request.
        freed = block_ids[:first] + block_ids[first + num_taken :] if num_taken else block_ids
        if freed:
            self._blocks.free(freed)

    def _keep(
        self, lease: Lease, tokens: Tokens, block_ids: list[int], keys: list[Key] | None
    ) -> tuple[int, int]:
        """Put what a request leaves into the tree: full blocks and a tail. Returns how many of its
        blocks after the lease's are there already, and how many after those were taken."""
        first = lease.num_blocks
        num_full = len(tokens) // self._block_bytes
        end = num_full * self._block_bytes
        num_found = 0
        if num_full:
            own = block_ids[first : first + num_full]
            lease.node, found = self._tree.insert(lease.node, tokens[:end], own, keys)
            num_found = len(found)
        num_taken = num_full - num_found
        tail = tokens[end:]
        if len(tail) >= self._min_tail_bytes:
            num_taken += self._tree.insert_tail(lease.node, tail, block_ids[first + num_full])
        return num_found, num_taken

    # From below.

    def chain(self, tokens: Tokens, salt: str) -> list[Key]:
        """Keys of the whole blocks of a prompt, by which tiers below know them."""
        assert self.tiers is not None
        return self._chains.keys(root_key(self.tiers.identity, salt), tokens)

    def parent_key(self, keys: list[Key], index: int, salt: str) -> Key:
        assert self.tiers is not None
        return keys[index - 1] if index else root_key(self.tiers.identity, salt)

    def begin_fetch(self, tokens: Tokens, keys: list[Key], first: int, salt: str) -> Fetch | None:
        """Bring blocks from block `first` on, which follow each other, into host memory."""
        assert self.tiers is not None
        size = self._block_bytes
        parent = self.parent_key(keys, first, salt)
        of_blocks = tokens[first * size : len(keys) * size]
        return self.tiers.begin_fetch(parent, keys[first:], of_blocks)

    def begin_load(
        self, match: Match, salt: str, priority: int, tokens: Tokens, keys: list[Key]
    ) -> LoadingBlocks | None:
        """Bring the blocks after a match up, which are in host memory. keys: of all, the match's
        first. None if there are too few blocks."""
        assert self.tiers is not None
        first = len(match.block_ids)
        # Before anything is evicted: whose slots the evicted ones might get.
        sources = self.tiers.pin(keys[first:])
        lease = self.acquire(match.without_copy(), salt, priority)
        block_ids, load = None, None
        try:
            block_ids = self.allocate(len(sources))
            if block_ids is not None:
                load = self.tiers.begin_load(sources, self._blocks.device_ids(block_ids))
        finally:
            if load is None:
                self.tiers.unpin(sources)
                self._give_back(lease, [*match.block_ids, *(block_ids or [])], b"")
        if block_ids is None or load is None:
            return None
        of_blocks = tokens[first * self._block_bytes : len(keys) * self._block_bytes]
        loading = LoadingBlocks(lease, [*match.block_ids, *block_ids], of_blocks, load)
        self._loading.append(loading)
        return loading

    def transferred(self, plan_number: int, loaded: tuple[int, ...]) -> list[LoadingBlocks]:
        """A plan is committed, and the loads of the named ones are done: returned, and found from
        now on."""
        assert self.tiers is not None
        self.tiers.stored(plan_number)
        loads = self.tiers.take_loaded(loaded)
        done = [each for each in self._loading if each.load in loads]
        for each in done:
            self._end_load(each, is_filled=True)
        return done

    def publish_loading(self) -> list[LoadingBlocks]:
        """The next plan awaits the loads of those before it, so their blocks are found from now on.
        Returns those of which that holds; their host memory stays theirs until the end is known."""
        assert self.tiers is not None
        if self.tiers.has_new_loads:
            return []
        published = list(self._loading)
        for each in published:
            self._end_load(each, is_filled=True)
        return published

    @property
    def trusts_loads(self) -> bool:
        """Whether blocks are published whose loads are not known to be done."""
        return self.tiers is not None and self.tiers.num_loads_under_way > len(self._loading)

    def drop_transfers(self) -> list[LoadingBlocks]:
        """After a step that failed, and when all that was under way has ended."""
        assert self.tiers is not None
        self.tiers.drop_transfers()
        dropped = list(self._loading)
        for each in dropped:
            self._end_load(each, is_filled=False)
        return dropped

    def put_below(self, timeout_s: float) -> bool:
        """Evict cached blocks so that the next plan stores them, as many as are then written to
        disk for sure. False when there is no more to do."""
        if self.tiers is None:
            return False
        num_evictable = self._tree.num_evictable_blocks
        count = min(num_evictable, self.tiers.room_to_save(timeout_s) if num_evictable else 0)
        if count:
            self._evict(count, self._blocks.free)
        return count > 0

    def _end_load(self, loading: LoadingBlocks, *, is_filled: bool) -> None:
        self._loading.remove(loading)
        tokens = loading.tokens if is_filled else b""
        block_ids = loading.block_ids[loading.lease.num_blocks :]
        keys = [block.key for block in loading.load.blocks]
        # No more of the pool than the cache may take is not for these: somebody is about to enter
        # with them.
        self._give_back(loading.lease, loading.block_ids, tokens, keys)
        if is_filled:
            assert self.tiers is not None
            ref_counts = self._blocks.ref_counts(block_ids)
            origins = self.tiers.take_origins(loading.load)
            came = zip(block_ids, origins, ref_counts, strict=True)
            # Those without a holder were there already.
            self._is_from_disk.update({each: is_from_disk for each, is_from_disk, n in came if n})

    @property
    def num_loading_blocks(self) -> int:
        """At most so many become available when the loads under way end."""
        return sum(len(each.block_ids) for each in self._loading)

    def loading_block_ids(self) -> list[int]:
        """A block once for each load that holds it."""
        return [block_id for each in self._loading for block_id in each.block_ids]

    def _chain_of(self, node: Node) -> list[Key]:
        """Keys of a node's blocks; made now, from the nearest above that has any, where nobody who
        put blocks there had them."""
        assert self.tiers is not None
        if node.chain is not None:
            return node.chain
        path = []
        each = node
        while each.parent is not None and each.chain is None:
            path.append(each)
            each = each.parent
        key = root_key(self.tiers.identity, each.salt) if each.chain is None else each.chain[-1]
        for each in reversed(path):
            each.chain = chain_keys(key, each.tokens, self._block_bytes)
            if each.chain:
                key = each.chain[-1]
        return node.chain or []

    def _put_below(self, node: Node, first: int) -> None:
        assert self.tiers is not None and node.parent is not None
        keys, size = self._chain_of(node), self._block_bytes
        if len(keys) <= first:  # a tail
            return
        device_ids = self._blocks.device_ids(node.block_ids[first:])
        parent = keys[first - 1] if first else self._last_key(node.parent)
        self.tiers.put(parent, keys[first:], node.tokens[first * size :], device_ids)

    def _last_key(self, node: Node) -> Key:
        """Of a node with whole blocks, or a root."""
        assert self.tiers is not None
        if node.parent is None:
            return root_key(self.tiers.identity, node.salt)
        return self._chain_of(node)[-1]

    def reset(self, *, with_tiers: bool = True) -> None:
        """Forget all. Requests that run keep the blocks that they hold, and publish nothing more.
        No lease has a source."""
        if self.tiers is not None and with_tiers:
            self.tiers.clear()
        self._is_from_disk.clear()
        old = self._tree
        self._tree = RadixTree(self.block_size, self._policy, old.version + 1)
        block_ids = old.block_ids()
        if block_ids:
            self._blocks.free(block_ids)

    def _evict(self, count: int, take: Callable[[list[int]], None]) -> None:
        """Take blocks out of the tree, and give those of each node to whoever holds them then. When
        anything raises, `take` too, those that it has not got are still the tree's."""

        def on_evict(node: Node, first: int) -> None:
            block_ids = node.block_ids[first:]
            assert self._blocks.ref_counts(block_ids).count(1) == len(block_ids), (
                f"evicted {block_ids}, some of which may be held by others"
            )
            if self.tiers is not None:
                self._put_below(node, first)
            take(block_ids)
            self.num_evicted_blocks += len(block_ids)
            for block_id in block_ids if self._is_from_disk else ():
                self._is_from_disk.pop(block_id, None)

        gone = self._tree.evict(count, on_evict)
        assert len(gone) == count, f"evicted {gone} for {count}"

    def block_ids(self) -> set[int]:
        """Those that the tree holds."""
        return set(self._tree.block_ids())

    def check_invariants(self) -> None:
        self._tree.check_invariants()
        if self.tiers is not None:
            self.tiers.check_invariants()
        block_ids = self._tree.block_ids()
        assert len(set(block_ids)) == len(block_ids), "a block in two nodes"
        assert self._is_from_disk.keys() <= set(block_ids), "one that has left the tree"
        for node in self._tree.nodes():
            if node.lock_ref == 0:
                assert all(self._blocks.ref_count(block_id) == 1 for block_id in node.block_ids)
            assert not node.chain or node.chain == self._chain_anew(node), "another block's key"

    def _chain_anew(self, node: Node) -> list[Key]:
        path, root = [node.tokens], node
        while root.parent is not None:
            root = root.parent
            path.append(root.tokens)
        assert self.tiers is not None
        root_name = root_key(self.tiers.identity, root.salt)
        keys = chain_keys(root_name, b"".join(reversed(path)), self._block_bytes)
        return keys[len(keys) - len(node.tokens) // self._block_bytes :]
