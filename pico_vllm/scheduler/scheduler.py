"""Scheduler: which requests compute how many tokens in the next step. Host only, knows no tensor
and no string.

`schedule` chooses who is in a StepPlan (scheduler/plans.py makes it): decode rows first, then
prompt chunks in order of admission, under a token budget; then new requests in the order of a
policy, as long as a row and the blocks of their tokens are free and a few more (WATERMARK), and
this step and the next have room for them. `commit` is the only place where a request grows or ends.
A second step may be planned before the first one is committed: what launched steps will add is
counted already, and an end that is found late costs one token that nobody sees.

Blocks are taken when they are first written. Where there are too few, running requests are
preempted, the last in line first: they give up row and blocks and wait at their old place, with the
tokens that were committed; when they enter again these are computed anew, like a prompt. The first
in line is never preempted and nobody overtakes the head of the waiting line, so the first always
gets on, and none waits for ever.

A preempted request may be in a step whose result is still to come. Its part of that result is
dropped, as after an abort, also if the request has entered again meanwhile (`Request.entered_at`);
the token is sampled again from the same seed at the same position.

Such a step may still write to blocks that were freed here, by a preemption or an abort, and belong
to somebody else in a later plan. The fence is the order of launches: a runner executes plans in the
order in which they were made, on one stream, and whoever gets a block writes each of its slots, in
a later step, before it reads them. What reads or writes the pool outside of that order must wait
for the steps launched before.

With a prefix cache (scheduler/prefixes.py) a request enters with the blocks that the cache has of
its tokens, and blocks that nobody uses stay until they are needed: available is what is free and
what can be evicted. A published block is full and its step was committed, so no launched step
writes to it: steps under way write behind the committed tokens of their requests. Who has it
evicted and takes it anew does so in a later plan, and that is the fence again. The same holds for
copies, which a runner makes before a plan's forward pass: the source stays locked until the plan
is made, so that it is given to nobody in the same plan; in later ones it may be.

With tiers below the device (cache/tiers/lower.py) evicted blocks are stored in host memory by the
plan that gives them to somebody else, before its forward pass. A request with blocks there is held
in line (scheduler/prefixes.py) while a plan's loads bring them up beside the steps of others; they
are published when a result says that the loads are done, or at once where nobody else runs, and the
plan that follows awaits them. Blocks that loads hold come free, so who
lacks some waits for that rather than being preempted, and a plan without requests lets a runner
wait.

Invariant (`check_invariants`): every running request holds exactly ceil(tokens with KV /
block_size) blocks (fewer by the copy that is still to be planned, where it just entered), each
block has as many holders as requests and loads hold it and the cache does, rows are unique, and who
waits holds nothing.
"""

from __future__ import annotations

import logging
import math
import sys
from collections import Counter, deque
from collections.abc import Callable
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from pico_vllm.cache.block_manager import BlockManager
from pico_vllm.cache.prefix_cache import CacheStats, PrefixCache
from pico_vllm.cache.radix_tree import Match
from pico_vllm.cache.tiers.lower import LowerTiers
from pico_vllm.config.engine import EngineConfig
from pico_vllm.outputs import StepEvents
from pico_vllm.request import FinishReason, Request, RequestStatus
from pico_vllm.scheduler.plans import Plans
from pico_vllm.scheduler.policy import MAX_RANKED, POLICIES, PREEMPTING, RANKED_BY_PREFIX
from pico_vllm.scheduler.prefixes import MAX_WAITS, Prefixes
from pico_vllm.scheduler.queues import WaitingQueue
from pico_vllm.scheduler.rows import Rows
from pico_vllm.step import BAD_LOGITS, NO_TOKEN, StepPlan, StepResult

logger = logging.getLogger(__name__)

WATERMARK = 0.03
"""Part of the pool that must stay free when a request enters beside others: without it, one that
just entered would be preempted for the next block of an older one (docs/log.md has figures)."""
DISK_WAIT_S = 0.005
"""For what is read from disk, before a schedule without anything to do returns."""
ENOUGH_TOKENS = 2048
"""Of other prompts in a step, from which on a prompt is not cut that the next step takes whole: the
time of such steps goes by their tokens, and those of a prompt's second piece take longer."""


class Scheduler:
    def __init__(
        self,
        blocks: BlockManager,
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        keeps_kv: bool = True,
        policy: str = "fcfs",
        max_prompt_tokens: int | None = None,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        """keeps_kv False computes every sequence from its first token in each step (`--kv none`).
        max_prompt_tokens: of one prompt in one step; None leaves only the budget."""
        self._blocks = blocks
        self._block_size = block_size
        self._budget_tokens = max_num_batched_tokens
        self._keeps_kv = keeps_kv
        self._max_prompt_tokens = max_prompt_tokens or max_num_batched_tokens
        self._waiting = WaitingQueue(POLICIES[policy])
        self._preempts_to_admit = policy in PREEMPTING
        self._prefixes: Prefixes | None = None
        if prefix_cache is not None:
            self._prefixes = Prefixes(prefix_cache, self._waiting.let_go)
        self._is_ranked_by_prefix = policy in RANKED_BY_PREFIX
        self._ranked_at: object = None
        """Version of the cache, and of the line, by which those who wait were ranked."""
        self._running: dict[str, Request] = {}
        self._ended: deque[tuple[Request, int]] = deque()
        """Those that still hold their blocks, and how many of their tokens have KV there."""
        self._rows = Rows(max_num_seqs)
        self._plans = Plans(
            self._rows, blocks, self._prefixes, block_size=block_size, keeps_kv=keeps_kv
        )
        self._watermark = int(WATERMARK * blocks.num_device_blocks)
        self._last_return = 0
        """Number of the first plan after a preempted request last entered again."""
        self.num_preemptions = 0
        tokens_per_step = min(self._budget_tokens, self._max_prompt_tokens)
        self._max_fruitless_steps = 2 * max_num_seqs + math.ceil(
            blocks.num_device_blocks * block_size / tokens_per_step
        )
        """The second term: to compute what preempted requests had, at most the pool, once more."""
        if prefix_cache is not None and prefix_cache.tiers is not None:
            # Whoever is next may have to wait so often, and each time begins and ends in a step.
            self._max_fruitless_steps *= 1 + MAX_WAITS
        self._num_fruitless_steps = 0

    @classmethod
    def from_config(cls, config: EngineConfig, tiers: LowerTiers | None = None) -> Scheduler:
        """With a pool and, where that is on, a prefix cache of its own, above these tiers. config:
        resolved, but for what only models and devices need."""
        assert config.num_kv_blocks is not None and config.max_num_seqs is not None
        assert config.max_num_batched_tokens is not None
        blocks = BlockManager(config.num_kv_blocks)
        prefix_cache = None
        if config.enable_prefix_caching == "on":
            prefix_cache = PrefixCache(
                blocks,
                block_size=config.block_size,
                cow_min_tokens=config.cow_min_tokens,
                eviction_policy=config.eviction_policy,
                max_cached_fraction=config.max_cached_fraction,
                tiers=tiers,
            )
        return cls(
            blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            keeps_kv=config.kv != "none",
            policy=config.scheduling_policy,
            max_prompt_tokens=config.long_prefill_token_threshold,
            prefix_cache=prefix_cache,
        )

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def plan_to_save(self, timeout_s: float) -> StepPlan | None:
        """A plan that stores some cached blocks below the device, to be written to disk. None when
        there are no more, no disk, or it takes longer."""
        self.release_ended()
        if self._prefixes is None or not self._prefixes.cache.put_below(timeout_s):
            return None
        nobody = np.zeros(0, np.int32)
        return self._plans.make(nobody, nobody, nobody, None)

    def close(self) -> None:
        """Let the tiers below the device end what they are at."""
        if self._prefixes is not None and self._prefixes.cache.tiers is not None:
            self._prefixes.cache.tiers.close()

    def has_work(self) -> bool:
        if self._running or len(self._waiting) > 0:
            return True
        return self._prefixes is not None and self._prefixes.cache.num_loading_blocks > 0

    def add(self, request: Request) -> None:
        """Put a request in line. It must fit the pool alone: the engine refuses it otherwise."""
        assert self._num_blocks(request.max_total_tokens) <= self._blocks.num_device_blocks, (
            request.request_id
        )
        self._waiting.push(request)

    def abort(self, request_id: str) -> bool:
        """End a request early. False if it is unknown or has ended: that is no error."""
        request = self._waiting.remove(request_id) or self._running.get(request_id)
        if request is None:
            return False
        self._finish(request, FinishReason.ABORT)
        return True

    def reset_prefix_cache(self, *, with_tiers: bool = True) -> None:
        """Forget all cached prefixes, with_tiers those below the device too. Requests that run go
        on with the blocks that they hold."""
        if self._prefixes is None:
            return
        for request in self._running.values():
            if self._rows.is_entering[request.row]:
                self._drop_source(request)
        self._prefixes.reset(with_tiers=with_tiers)

    def cache_stats(self) -> CacheStats:
        return CacheStats() if self._prefixes is None else self._prefixes.cache.stats()

    @property
    def num_held_blocks(self) -> int:
        """By requests that run, or have just ended: neither free nor cached for nobody."""
        return self._blocks.num_device_blocks - self._num_available_blocks

    @property
    def num_cached_blocks(self) -> int:
        """By the prefix cache, whether or not requests hold them as well."""
        return 0 if self._prefixes is None else self._prefixes.cache.num_cached_blocks

    def schedule(self) -> StepPlan | None:
        """What to run next, or None when there is nothing to do before a launched step is
        committed.

        Raises:
            RuntimeError: for many steps no request has got on.
        """
        if self._prefixes is not None:
            self._prefixes.look_at_disk()
        self._watch_progress()
        if len(self._waiting) > 0:
            self.release_ended()
            if self._prefixes is not None and not self._running and not self._waiting.has_next():
                # Nobody else would have the device meanwhile.
                self._plans.awaits_loads |= self._prefixes.enter_behind_loads()
        self._admit()
        rows, state = self._rows.in_order(), self._rows
        plan = self._plans.repeat(rows)
        if plan is not None:
            return plan
        num_sampled = state.num_sampled[rows]
        # One whose last token is under way has nothing left to compute.
        is_live = num_sampled < state.max_sampled[rows]
        is_decoding = num_sampled > 0
        is_both = is_live & is_decoding
        num_decoding = int(np.count_nonzero(is_both))
        if num_decoding == 0:
            rows = rows[is_live]
        elif num_decoding < len(rows):
            rows = np.concatenate((rows[is_both], rows[is_live & ~is_decoding]))
        context_lens = state.num_scheduled[rows]
        has_prompts = self._keeps_kv and num_decoding < len(rows)
        if self._keeps_kv and not has_prompts:
            query_lens = self._plans.ones[: len(rows)]
        else:
            query_lens = state.num_tokens(rows) - context_lens
        # There is always room for a token of each.
        if has_prompts:
            of_prompts = query_lens[num_decoding:]
            np.minimum(of_prompts, self._max_prompt_tokens, out=of_prompts)
        if has_prompts and query_lens.sum() > self._budget_tokens:
            # Each takes what those before it leave of the budget.
            wanted = query_lens
            ends = np.minimum(np.cumsum(wanted, dtype=np.int32), self._budget_tokens)
            query_lens = np.diff(ends, prepend=np.int32(0))
            num_scheduled = int(np.count_nonzero(query_lens))
            if not self._is_last_to_be_cut(wanted, query_lens, num_scheduled, num_decoding):
                num_scheduled -= 1
            rows, context_lens, query_lens = (
                each[:num_scheduled] for each in (rows, context_lens, query_lens)
            )
        ends = context_lens + query_lens
        missing = None
        if np.count_nonzero(ends > state.num_blocks[rows] * self._block_size):
            missing = -(-ends // self._block_size) - state.num_blocks[rows]
            num_missing = int(missing.sum())
            if num_missing > self._num_available_blocks:
                self.release_ended()
            if num_missing > self._num_available_blocks:
                is_kept = self._make_room(rows, missing)
                rows, context_lens, query_lens, missing = (
                    each[is_kept] for each in (rows, context_lens, query_lens, missing)
                )
        if not len(rows) and not self._has_transfers():
            return None
        return self._plans.make(rows, context_lens, query_lens, missing)

    def commit(self, plan: StepPlan, result: StepResult) -> StepEvents:
        """Let the requests of a step grow or end, and say what happened. Requests aborted or
        preempted meanwhile are passed over."""
        token_ids: list[int] = result.token_ids.tolist()
        reasons: list[FinishReason | None] = [None] * len(token_ids)
        has_event = [True] * len(token_ids)
        logprobs, prompt_logprobs = {}, {}
        num_cached: dict[str, int] = {}
        running = self._running
        if plan.number < self._last_return:
            running = {i: r for i, r in running.items() if r.entered_at <= plan.number}
        for index, (request_id, token_id) in enumerate(
            zip(plan.request_ids, token_ids, strict=True)
        ):
            request = running.get(request_id)
            if request is None:
                has_event[index] = False
                continue
            if index in result.prompt_logprobs:
                prompt_logprobs[request_id] = result.prompt_logprobs[index]
                request.num_prompt_logprobs += len(result.prompt_logprobs[index])
            if token_id < 0:
                if token_id == BAD_LOGITS:
                    reasons[index] = FinishReason.ERROR
                    self._finish(request, FinishReason.ERROR)
                else:
                    has_event[index] = False
                continue
            if request.status is not RequestStatus.DECODING:
                request.status = RequestStatus.DECODING
                if request.num_cached_tokens and not request.output_token_ids:
                    num_cached[request_id] = request.num_cached_tokens
            outputs = request.output_token_ids
            outputs.append(token_id)
            if index in result.logprobs:
                logprobs[request_id] = result.logprobs[index]
            if token_id in request.stop_token_ids or len(outputs) >= request.max_tokens:
                reason = reasons[index] = _end_of(request, token_id)
                if reason is not None:
                    self._finish(request, reason, keeps_blocks=True)
        if self._prefixes is not None:
            if plan.num_decodes < len(token_ids):
                self._publish_prompts(plan, running)
            self._prefixes.transferred(plan.number, result.loaded)
        if FinishReason.ERROR in reasons:
            # KV that was published before may be what gave the bad logits.
            self.reset_prefix_cache()
        request_ids = tuple(compress(plan.request_ids, has_event))
        # Chunks alone get on where they go further than before a preemption.
        if (
            request_ids
            or (plan.context_lens + plan.query_lens > self._rows.num_computed[plan.rows]).any()
        ):
            self._num_fruitless_steps = 0
        return StepEvents(
            request_ids=request_ids,
            token_ids=tuple(compress(token_ids, has_event)),
            finish_reasons=tuple(compress(reasons, has_event)),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=num_cached,
        )

    def _has_transfers(self) -> bool:
        """Whether a step without requests is of use: it takes loads along, or waits for some."""
        if self._prefixes is None:
            return False
        if self._prefixes.cache.num_loading_blocks == 0:
            if not self._running:
                self._prefixes.look_at_disk(DISK_WAIT_S)
            return False
        return True

    def _publish_prompts(self, plan: StepPlan, running: dict[str, Request]) -> None:
        """Let others have what a committed step computed of prompts."""
        assert self._prefixes is not None
        ends = (plan.context_lens + plan.query_lens).tolist()
        for index in range(plan.num_decodes, len(ends)):
            request = running.get(plan.request_ids[index])
            if request is None or request.row < 0:
                continue
            first, found = self._prefixes.publish(request, ends[index])
            if found:
                self._plans.exchange(request.row, first, first + len(found))

    def fail(self, plan: StepPlan | None) -> StepEvents:
        """End the requests of a step that raised, preempted meanwhile or not; without a plan, all
        that run, or the head of the line where none does. What they generated before stays theirs.
        Copies to and from lower tiers have ended by now, and nothing that they filled is used: who
        entered behind loads whose end was not known yet ends too, and the cache is emptied.

        Requests that `commit` had ended are named too: nobody was told of them.
        """
        trusts_loads = self._prefixes is not None and self._prefixes.cache.trusts_loads
        if plan is not None:
            request_ids = plan.request_ids
            if trusts_loads:
                request_ids = tuple(dict.fromkeys((*request_ids, *self._running)))
        elif self._running or len(self._waiting) == 0:
            request_ids = tuple(self._running)
        else:
            request_ids = (self._waiting.peek().request_id,)
        for request_id in request_ids:
            request = self._waiting.remove(request_id) or self._running.get(request_id)
            if request is not None:
                self._finish(request, FinishReason.ERROR)
        if self._prefixes is not None:
            self._prefixes.drop_transfers()
            if trusts_loads:
                self.reset_prefix_cache(with_tiers=False)
        return StepEvents(
            request_ids=request_ids,
            token_ids=(NO_TOKEN,) * len(request_ids),
            finish_reasons=(FinishReason.ERROR,) * len(request_ids),
        )

    def _is_last_to_be_cut(
        self,
        wanted: NDArray[np.int32],
        query_lens: NDArray[np.int32],
        num_scheduled: int,
        num_decoding: int,
    ) -> bool:
        """Whether the last of the scheduled requests may get less than it wants. In the next step
        it is the first prompt, which may."""
        before = query_lens[: num_scheduled - 1]
        fits_next = wanted[num_scheduled - 1] + len(before) <= self._budget_tokens
        is_cut = query_lens[num_scheduled - 1] < wanted[num_scheduled - 1]
        return not (is_cut and fits_next and before[num_decoding:].sum() >= ENOUGH_TOKENS)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _watch_progress(self) -> None:
        """Every step but those that compute preempted requests' tokens anew makes a request longer
        than it ever was: plans that nobody gains by would follow each other for ever."""
        if not self.has_work():
            return
        if self._prefixes is not None and self._prefixes.is_waiting_below:
            return  # which ends
        if self._num_fruitless_steps >= self._max_fruitless_steps:
            num_steps, self._num_fruitless_steps = self._num_fruitless_steps, 0
            rows = self._rows.in_order()
            computed = zip(
                self._rows.request_ids(rows), self._rows.num_scheduled[rows].tolist(), strict=True
            )
            raise RuntimeError(
                f"no request has got on for {num_steps} steps: {len(self._running)} run with "
                f"{dict(computed)} tokens computed, {len(self._waiting)} wait, "
                f"{self._num_available_blocks} of {self._blocks.num_device_blocks} blocks are free "
                f"or cached, {self.num_preemptions} preemptions so far"
            )
        self._num_fruitless_steps += 1

    def _admit(self) -> None:
        """Let requests in while there is a row, blocks for their tokens beside those that running
        requests still need for theirs, and room for them in this step or the next: the others may
        enter while the device computes."""
        unclaimed: int | None = None
        self._rank_by_prefix()
        # Without KV all tokens are computed in each step, whatever the budget.
        most = 2 * self._budget_tokens if self._keeps_kv else sys.maxsize
        num_to_compute = 0  # nor is it asked for where nobody can enter
        if self._waiting.has_next() and self._rows.has_free():
            num_to_compute = self._num_to_compute()
        while num_to_compute < most and self._waiting.has_next():
            request = self._waiting.peek()
            watermark = self._watermark * bool(self._running)
            has_room, match, needed = self._rows.has_free(), None, 0
            if has_room:
                if self._prefixes is not None and self._prefixes.follow(request):
                    self._waiting.hold()
                    continue
                if unclaimed is None:
                    unclaimed = self._num_unclaimed_blocks()
                # Its last token needs a block whatever is cached.
                has_room = unclaimed > watermark
                if has_room:
                    match, needed = self._match(request, unclaimed - watermark)
                    has_room = needed + watermark <= unclaimed
            if not has_room:
                if not (self._preempts_to_admit and self._make_way(request)):
                    return
                unclaimed = None
                continue
            if self._prefixes is not None and match is not None:
                is_held = self._prefixes.bring_up(request, match)
                if is_held:
                    self._waiting.hold()
                    unclaimed = None
                    continue
            self._waiting.pop()
            assert unclaimed is not None
            unclaimed -= needed
            if request.status is RequestStatus.PREEMPTED:
                self._last_return = self._plans.number
            request.entered_at = self._plans.number
            num_cached = 0
            if self._prefixes is not None and match is not None:
                num_cached = self._prefixes.enter(request, match)
            if request.num_cached_tokens is None:
                request.num_cached_tokens = num_cached
            request.row = self._rows.take(request, num_cached)
            num_to_compute += min(request.num_tokens - num_cached, self._max_prompt_tokens)
            request.status = RequestStatus.PREFILL
            self._running[request.request_id] = request

    def _num_to_compute(self) -> int:
        """Tokens that running requests could have computed in one step."""
        if not self._running:
            return 0
        rows, state = self._rows.in_order(), self._rows
        left = state.num_tokens(rows) - state.num_scheduled[rows]
        return int(np.minimum(left, self._max_prompt_tokens).sum())

    def _match(self, request: Request, num_available: int) -> tuple[Match | None, int]:
        """What the prefix cache has of a request, and the blocks that it takes from those that are
        available: new ones, and cached ones that could be evicted so far."""
        needed = self._num_blocks(request.num_tokens)
        if self._prefixes is None:
            return None, needed
        match = self._prefixes.match(request)
        needed -= len(match.block_ids)
        if match.source is not None:
            with_copy = needed + match.num_unlocked()
            if with_copy <= num_available:
                return match, with_copy
            # The source may lie in a long edge, which would be kept for it.
            match = match.without_copy()
        return match, needed + match.num_unlocked()

    def _rank_by_prefix(self) -> None:
        """Where the policy goes by cached prefixes: those may have become others."""
        if not self._is_ranked_by_prefix or self._prefixes is None or not self._rows.has_free():
            return
        key = (self._prefixes.cache.version, self._waiting.num_arrivals, len(self._waiting))
        if key != self._ranked_at:
            for request in self._waiting.first_to_come(MAX_RANKED):
                match = self._prefixes.match(request)
                self._waiting.rank(request, self._prefixes.num_cached_tokens(match))
            self._ranked_at = key

    @property
    def _num_available_blocks(self) -> int:
        """Free, or cached and in nobody's use."""
        if self._prefixes is None:
            return self._blocks.num_free_device_blocks
        return self._prefixes.cache.num_available_blocks

    def _num_unclaimed_blocks(self) -> int:
        """Available ones that no running request needs for the tokens that it has now."""
        if not self._running:
            return self._num_available_blocks
        rows, state = self._rows.in_order(), self._rows
        claimed = -(-state.num_tokens(rows) // self._block_size) - state.num_blocks[rows]
        return self._num_available_blocks - int(claimed.sum())

    def _make_way(self, request: Request) -> bool:
        """Preempt running requests of later places for one that waits, the last one first; none if
        all of them would not do."""
        rows = self._rows.in_order()
        if not (self._rows.places[rows] >= request.place[0]).any():
            return False
        later = [each for each in self._live_in_line() if each.place > request.place]
        unclaimed, victims = self._num_unclaimed_blocks(), []
        count_freed = self._freed_counter()
        while later:
            victims.append(later.pop())
            row = victims[-1].row
            num_tokens = int(self._rows.num_entered[row] + self._rows.num_sampled[row])
            unclaimed += self._num_blocks(num_tokens) - int(self._rows.num_blocks[row])
            unclaimed += count_freed(victims[-1])
            watermark = self._watermark * (len(victims) < len(self._running))
            if self._num_blocks(request.num_tokens) + watermark <= unclaimed:
                for victim in victims:
                    self._preempt(victim)
                return True
        return False

    def _freed_counter(self) -> Callable[[Request], int]:
        """A function that says how many blocks a victim's end makes available, after those that it
        was asked for before."""
        if self._prefixes is None:
            return lambda victim: len(victim.block_ids)
        of_tree = self._prefixes.cache.block_ids()
        left: dict[int, int] = {}

        def count_freed(victim: Request) -> int:
            num_freed = 0
            for block_id in victim.block_ids:
                num_holders = left.get(block_id)
                if num_holders is None:
                    num_holders = self._blocks.ref_count(block_id) - (block_id in of_tree)
                left[block_id] = num_holders - 1
                num_freed += num_holders == 1
            return num_freed

        return count_freed

    def _make_room(self, rows: NDArray[np.int32], missing: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Preempt running requests, the last one first, until the blocks are there that the others
        miss in this step. Returns which of `rows` stay in it."""
        state = self._rows
        index_of = {row: index for index, row in enumerate(rows.tolist())}
        is_kept = np.ones(len(rows), np.bool_)
        lacking = int(missing.sum()) - self._num_available_blocks
        # Those that end with a launched step give their blocks back at its commit: who would go
        # on with these waits, rather than computing all its tokens again.
        soon_free = sum(
            int(state.num_blocks[row]) for row in state.in_order().tolist() if state.is_ending(row)
        )
        if self._prefixes is not None:
            soon_free += self._prefixes.cache.num_loading_blocks
        live = self._live_in_line()
        while lacking > soon_free:
            victim = live.pop()
            assert live, (victim.request_id, lacking, soon_free)
            index = index_of.get(victim.row)
            if index is not None:
                is_kept[index] = False
            self._preempt(victim)
            # What it shared with others is not available yet.
            lacking = int(missing[is_kept].sum()) - self._num_available_blocks
        while lacking > 0:
            index = index_of.get(live.pop().row)
            if index is not None and missing[index] > 0:
                is_kept[index] = False
                lacking -= int(missing[index])
        return is_kept

    def _live_in_line(self) -> list[Request]:
        """Running requests that have something left to compute, by their place."""
        live = [each for each in self._running.values() if not self._rows.is_ending(each.row)]
        return sorted(live, key=lambda request: request.place)

    def _preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        num_scheduled = int(self._rows.num_scheduled[request.row])
        num_committed = self._num_committed(request)
        request.num_computed = max(request.num_computed, num_scheduled)
        request.status = RequestStatus.PREEMPTED
        # In this order an interrupt between the two loses nobody.
        self._waiting.put_back(request)
        self._release(request, num_committed)

    def _drop_source(self, request: Request) -> None:
        """Let one that is about to enter compute what it would have had by a copy."""
        assert self._prefixes is not None
        row = request.row
        self._rows.num_scheduled[row] = int(self._rows.num_blocks[row]) * self._block_size
        request.num_cached_tokens = int(self._rows.num_scheduled[row])
        self._prefixes.drop_source(request)

    def _finish(
        self, request: Request, reason: FinishReason, *, keeps_blocks: bool = False
    ) -> None:
        # Of what an error ended nothing more is trusted.
        num_committed = 0 if reason is FinishReason.ERROR else self._num_committed(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        self._num_fruitless_steps = 0
        if request.request_id in self._running:
            self._release(request, num_committed, keeps_blocks=keeps_blocks)

    @staticmethod
    def _num_committed(request: Request) -> int:
        """Tokens of a running request whose KV committed steps have written, where it decodes: all
        but the last, which was sampled. The chunks of a prompt were published as they came."""
        return request.num_tokens - 1 if request.status is RequestStatus.DECODING else 0

    def _release(self, request: Request, num_committed: int, *, keeps_blocks: bool = False) -> None:
        """Take row and blocks from a running request. keeps_blocks: these later (`release_ended`),
        if any other runs."""
        del self._running[request.request_id]
        self._plans.forget(request.row)
        self._rows.give_back(request.row)
        request.row = -1
        self._ended.append((request, num_committed))
        if not (keeps_blocks and self._running):
            self.release_ended()

    def release_ended(self) -> None:
        """Take the blocks of requests that have ended: once the engine has launched a step, whose
        time on the device this work then hides behind, and before anybody lacks blocks.

        Where many end at once it takes longer than a step.
        """
        while self._ended:
            request, num_committed = self._ended.popleft()
            if self._prefixes is None:
                self._blocks.free(request.block_ids)
                request.block_ids = []
                continue
            try:
                self._prefixes.leave(request, num_committed)
            except Exception:
                # In what its cached blocks push out: it has left by then, as the others will.
                logger.exception("eviction_failed behind request %s", request.request_id)

    def check_invariants(self) -> None:
        self._blocks.check_invariants()
        running = list(self._running.values())
        assert running or not self._ended, "nobody would release them"
        holding = [*running, *(request for request, _ in self._ended)]
        holders = Counter(block_id for request in holding for block_id in request.block_ids)
        if self._prefixes is not None:
            self._prefixes.check_invariants(holding)
            holders.update(self._prefixes.cache.block_ids())
            holders.update(self._prefixes.cache.loading_block_ids())
        else:
            assert holders.total() == len(holders), "a block held by two requests"
        for block_id, num_holders in holders.items():
            assert self._blocks.ref_count(block_id) == num_holders, "ref_count is not the holders'"
        assert len(holders) + self._blocks.num_free_device_blocks == (
            self._blocks.num_device_blocks
        ), "a block was lost"
        self._rows.check_invariants(running)
        self._waiting.check_invariants()
        for request in running:
            num_blocks = int(self._rows.num_blocks[request.row])
            num_scheduled = int(self._rows.num_scheduled[request.row])
            assert len(request.block_ids) == num_blocks, request.request_id
            if self._rows.is_entering[request.row]:
                num_scheduled = num_scheduled // self._block_size * self._block_size
            if self._keeps_kv:
                assert num_blocks == self._num_blocks(num_scheduled), request.request_id


def _end_of(request: Request, token_id: int) -> FinishReason | None:
    num_output_tokens = len(request.output_token_ids)
    if token_id in request.stop_token_ids and num_output_tokens > request.params.min_tokens:
        return FinishReason.STOP
    if num_output_tokens >= request.max_tokens:
        return FinishReason.LENGTH
    return None
