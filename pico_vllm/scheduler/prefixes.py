"""Prefixes: what running requests have of the prefix cache, and who waits for whose blocks. Host
only.

A request that leaves the waiting line takes what the cache has of its tokens. As its prompt is
computed its full blocks are published after each committed step; what it generated, when it ends or
is preempted. Nothing is done in steps that only decode.

Who wants what a running request is just about to compute follows it: held in the waiting line,
others pass, until the blocks in common are published or the leader is gone, and then back at its
old place. The leader runs and followers hold nothing, so nobody waits in a circle; and whoever has
as much in common with a follower follows the same leader, so nobody else takes its turn.

Who can have more from tiers below the device than the device has is held likewise while its blocks
are read from disk and copied up; it then enters by what the device has, and whoever wants the same
blocks waits with it. What is under way always ends, and a request waits at most MAX_WAITS times, so
nobody waits for ever, though others may have taken the blocks again.

Owner of: the leases of running requests, and the list of leaders and followers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pico_vllm.cache.prefix_cache import Lease, PrefixCache
from pico_vllm.cache.radix_tree import TOKEN_BYTES, Match, Node, Tokens, num_common_tokens
from pico_vllm.request import Request

MIN_AWAITED_TOKENS = 64
"""For fewer nobody is held: one step more costs about as much as computing them."""
MIN_AWAITED_PART = 0.5
"""Nor where it is less than this part of what a request has to compute."""
MAX_WAITS = 4
"""For disk, for the copy up, and each once more with others."""


@dataclass(slots=True, eq=False)
class _Coming:
    """Blocks on their way up, and who waits for them."""

    keys: list[bytes]
    request_ids: list[str]


@dataclass(slots=True, eq=False)
class _Running:
    lease: Lease
    tokens: Tokens
    """Those that the request came with."""
    keys: list[bytes] | None
    """Chain keys of the whole blocks of those, where tiers below the device were asked for them."""
    key: tuple[Node, Tokens] | None = None
    """Where its next full block will hang."""
    followers: list[tuple[int, str]] = field(default_factory=list)
    """Blocks that they wait for, counted from the first of the prompt; and who."""


class Prefixes:
    def __init__(self, cache: PrefixCache, let_go: Callable[[str], None]) -> None:
        """let_go: puts one that was held back in line; told of some that have left it, too."""
        self.cache = cache
        self._let_go = let_go
        self._block_size = cache.block_size
        self._block_bytes = cache.block_size * TOKEN_BYTES
        self._running: dict[str, _Running] = {}
        self._leaders: dict[tuple[Node, Tokens], str] = {}
        self._last: tuple[tuple[str, int, int], Tokens, Match] | None = None
        """The last match, and what it is good for: the head of the line may ask in each step."""
        self._coming: dict[object, _Coming] = {}
        """By what PrefixCache gave for it."""
        self._coming_by_key: dict[bytes, _Coming] = {}
        self.min_awaited_tokens = MIN_AWAITED_TOKENS

    def match(self, request: Request) -> Match:
        """What the cache has of a request that waits. At least its last token is left to compute,
        and all of a prompt whose log-probabilities are wanted."""
        return self._match(request)[1]

    def _match(self, request: Request) -> tuple[Tokens, Match]:
        key = (request.request_id, request.num_tokens, self.cache.version)
        if self._last is not None and self._last[0] == key:
            return self._last[1:]
        tokens = _tokens(request)
        max_tokens = request.num_tokens - 1
        if request.params.prompt_logprobs is not None:
            max_tokens = 0
        match = self.cache.match(tokens, max_tokens, request.params.cache_salt or "")
        self._last = (key, tokens, match)
        return tokens, match

    def num_cached_tokens(self, match: Match) -> int:
        return len(match.block_ids) * self._block_size + match.num_copied

    def follow(self, request: Request) -> bool:
        """Let a request that waits follow one that runs, if that pays."""
        if not self._leaders or request.params.prompt_logprobs is not None:
            return False
        tokens, match = self._match(request)
        if match.ends_in_edge:
            return False
        first = len(match.block_ids)
        at = first * self._block_bytes
        leader_id = self._leaders.get((match.path[-1], tokens[at : at + self._block_bytes]))
        if leader_id is None:
            return False
        leader = self._running[leader_id]
        num_blocks = len(leader.tokens) // self._block_bytes
        start = first * self._block_size
        num_common = start + num_common_tokens(tokens, leader.tokens, start)
        num_awaited = min(num_common, num_blocks * self._block_size, request.num_tokens - 1)
        num_cached = self.num_cached_tokens(match)
        num_left = request.num_tokens - num_cached
        num_saved = num_awaited - num_cached
        if num_saved < max(self.min_awaited_tokens, MIN_AWAITED_PART * num_left):
            return False
        leader.followers.append((-(-num_awaited // self._block_size), request.request_id))
        return True

    def bring_up(self, request: Request, match: Match) -> bool:
        """Let a request that waits, and for which there is room, wait for what tiers below the
        device have after its match, if that pays."""
        cache, tiers, params = self.cache, self.cache.tiers, request.params
        if tiers is None or request.num_waits >= MAX_WAITS:
            return False
        tokens, salt = self._match(request)[0], params.cache_salt or ""
        keys = self._keys_below(request, tokens)
        if keys is None:
            return False
        # At least the last token is computed.
        keys = keys[: (request.num_tokens - 1) // self._block_size]
        first = len(match.block_ids)
        if first == len(keys):
            return False
        coming = self._coming_by_key.get(keys[first])
        if coming is not None:
            coming.request_ids.append(request.request_id)
            request.num_waits += 1
            return True
        of_blocks = tokens[first * self._block_bytes : len(keys) * self._block_bytes]
        num_host, num_any = tiers.num_found(keys[first:], of_blocks)
        # What is copied within the device takes no time to speak of.
        num_saved = num_any * self._block_size - match.num_copied
        is_on_disk = num_any > num_host and tiers.pays_to_fetch(num_saved)
        under_way: object | None = None
        stop = first + num_any
        if is_on_disk:
            under_way = cache.begin_fetch(tokens, keys[:stop], first, salt)
        num_saved = num_host * self._block_size - match.num_copied
        if under_way is None and num_host and tiers.pays_to_load(num_saved):
            stop = first + num_host
            under_way = cache.begin_load(match, salt, params.priority, tokens, keys[:stop])
        if under_way is None:
            return False
        request.num_waits += 1
        coming = _Coming(keys[first:stop], [request.request_id])
        self._coming[under_way] = coming
        self._coming_by_key.update(dict.fromkeys(coming.keys, coming))
        return True

    def _keys_below(self, request: Request, tokens: Tokens) -> list[bytes] | None:
        """Chain keys of a request's whole blocks, where tiers below the device are asked for them.
        Not to be changed."""
        tiers = self.cache.tiers
        if tiers is None or tiers.is_empty or request.params.prompt_logprobs is not None:
            return None
        return self.cache.chain(tokens, request.params.cache_salt or "")

    @property
    def has_new_transfers(self) -> bool:
        return self.cache.tiers is not None and self.cache.tiers.has_new_transfers

    @property
    def is_waiting_below(self) -> bool:
        """Whether something is on its way up."""
        return bool(self._coming) or self.cache.num_loading_blocks > 0

    def transferred(self, plan_number: int, loaded: tuple[int, ...]) -> None:
        """A plan is committed, and the loads of some are done: who waited for them may enter."""
        if self.cache.tiers is not None:
            self._have_come(self.cache.transferred(plan_number, loaded))

    def enter_behind_loads(self) -> bool:
        """Let those who wait for loads under way enter with a plan that awaits these: its step is
        then launched while they run. Whether there is anybody."""
        if self.cache.tiers is None or not self.cache.num_loading_blocks:
            return False
        published = self.cache.publish_loading()
        self._have_come(published)
        return bool(published)

    def look_at_disk(self, timeout_s: float = 0.0) -> None:
        """Let those enter whose blocks were read; where nobody has anything else to do, wait for
        that."""
        if self.cache.tiers is not None:
            if timeout_s and self.cache.tiers.num_fetches:
                self.cache.tiers.wait_for_disk(timeout_s)
            self._have_come(self.cache.tiers.poll())

    def drop_transfers(self) -> None:
        """After a step that failed: who waits for loads computes, or asks again."""
        if self.cache.tiers is not None:
            self._have_come(self.cache.drop_transfers())

    def _have_come(self, ended: Sequence[object]) -> None:
        for each in ended:
            coming = self._coming.pop(each)
            for key in coming.keys:
                if self._coming_by_key.get(key) is coming:
                    del self._coming_by_key[key]
            for request_id in coming.request_ids:
                self._let_go(request_id)

    def enter(self, request: Request, match: Match) -> int:
        """Give a request what was just matched; returns its number of tokens."""
        params = request.params
        assert self._last is not None and self._last[0][0] == request.request_id
        tokens = self._last[1]
        lease = self.cache.acquire(match, params.cache_salt or "", params.priority)
        keys = self._keys_below(request, tokens)
        running = self._running[request.request_id] = _Running(lease, tokens, keys)
        request.block_ids = list(match.block_ids)
        self._lead(request.request_id, running)
        request.num_waits = 0
        num_cached = self.num_cached_tokens(match)
        num_below = self.cache.first_uses(match.block_ids)
        if request.num_cached_tokens is None:
            num_blocks = len(match.block_ids)
            self.cache.count(request.num_tokens, num_cached, num_blocks, num_below)
        return num_cached

    def take_copy(self, request: Request) -> tuple[int, int] | None:
        """The block to copy from, which may go now, and the request's own that it is copied to: the
        first after its cached ones."""
        lease = self._running[request.request_id].lease
        if lease.source is None:
            return None
        return self.cache.take_source(lease), request.block_ids[lease.num_blocks]

    def drop_source(self, request: Request) -> None:
        self.cache.drop_source(self._running[request.request_id].lease)

    def publish(self, request: Request, num_computed: int) -> tuple[int, list[int]]:
        """Publish what is full of a prompt's computed tokens. Returns where in its table other
        blocks come to stand, and which, none mostly."""
        running = self._running[request.request_id]
        first = running.lease.num_blocks
        last = min(num_computed * TOKEN_BYTES, len(running.tokens)) // self._block_bytes
        if last <= first:
            return first, []
        tokens = running.tokens[first * self._block_bytes : last * self._block_bytes]
        keys = None if running.keys is None else running.keys[first:last]
        found = self.cache.publish(running.lease, tokens, request.block_ids[first:last], keys)
        if found:
            request.block_ids[first : first + len(found)] = found
        self._lead(request.request_id, running)
        if running.followers:
            self._let_go_of(running, running.lease.num_blocks)
        return first, found

    def leave(self, request: Request, num_computed: int) -> None:
        """Take a request's blocks. num_computed: its tokens whose KV is there beyond doubt; what is
        known to be there from before stays published whatever this says."""
        running = self._running.pop(request.request_id)
        self._stop_leading(request.request_id, running)
        start = running.lease.num_blocks * self._block_bytes
        stop = num_computed * TOKEN_BYTES
        tokens = b""
        if stop > start:
            tokens = running.tokens[start:stop]
            num_known = len(running.tokens) // TOKEN_BYTES
            if num_computed > num_known:
                first = num_known - request.num_prompt_tokens
                last = num_computed - request.num_prompt_tokens
                tokens += _packed(request.output_token_ids[first:last])
        block_ids, request.block_ids = request.block_ids, []
        self._let_go_of(running, None)
        # Last: it may evict others, and what raises there shall not cost more than that.
        self.cache.release(running.lease, block_ids, tokens)

    def reset(self, *, with_tiers: bool = True) -> None:
        """Forget what is cached. Of the running none may have a source."""
        for request_id, running in self._running.items():
            self._stop_leading(request_id, running)
            self._let_go_of(running, None)
        self.cache.reset(with_tiers=with_tiers)

    def _lead(self, request_id: str, running: _Running) -> None:
        """Note where the next full block of a prompt will hang."""
        self._stop_leading(request_id, running)
        at = running.lease.num_blocks * self._block_bytes
        block = running.tokens[at : at + self._block_bytes]
        if len(block) == self._block_bytes:
            running.key = (running.lease.node, block)
            self._leaders.setdefault(running.key, request_id)

    def _stop_leading(self, request_id: str, running: _Running) -> None:
        if running.key is not None:
            if self._leaders.get(running.key) == request_id:
                del self._leaders[running.key]
            running.key = None

    def _let_go_of(self, running: _Running, num_blocks: int | None) -> None:
        """Of followers that wait for no more than so many blocks; None for all."""
        kept = []
        for each in running.followers:
            if num_blocks is None or each[0] <= num_blocks:
                self._let_go(each[1])
            else:
                kept.append(each)
        running.followers = kept

    def check_invariants(self, running: list[Request]) -> None:
        self.cache.check_invariants()
        assert self._running.keys() == {request.request_id for request in running}
        for request in running:
            lease = self._running[request.request_id].lease
            path: list[int] = []
            node: Node | None = lease.node
            while node is not None:
                assert node.lock_ref > 0
                path = node.block_ids + path
                node = node.parent
            assert path == request.block_ids[: lease.num_blocks], "a lease on others' blocks"
        for coming in self._coming_by_key.values():
            assert coming in self._coming.values(), "one would wait for ever"
        for key, request_id in self._leaders.items():
            assert self._running[request_id].key == key


def _tokens(request: Request) -> Tokens:
    return request.prompt_token_ids.tobytes() + _packed(request.output_token_ids)


def _packed(token_ids: list[int]) -> Tokens:
    """In half the time of an array of them."""
    return struct.pack(f"{len(token_ids)}i", *token_ids)
