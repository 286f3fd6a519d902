"""Scheduler: which requests compute how many tokens in the next step. Host only, knows no tensor
and no string.

`schedule` makes a StepPlan: decode rows first, then prompt chunks in order of admission, under a
token budget; then new requests in the order of a policy, as long as a row and their blocks are
free. `commit` is the only place where a request grows or ends. A second step may be planned before
the first one is committed: what launched steps will add is counted already, and an end that is
found late costs one token that nobody sees.

Admission reserves the blocks of prompt + max_tokens, so a running request always finds its next
block; blocks are taken from the pool only when they are first written. Nobody overtakes the head of
the line, so none waits for ever.

Invariant (`check_invariants`): every running request holds exactly ceil(tokens with KV /
block_size) blocks, each block is held once, rows are unique, and the sum of reservations fits the
pool.
"""

from __future__ import annotations

from itertools import compress

import numpy as np
from numpy.typing import NDArray

from pico_vllm.cache.block_manager import BlockManager
from pico_vllm.outputs import StepEvents
from pico_vllm.request import FinishReason, Request, RequestStatus
from pico_vllm.scheduler.policy import POLICIES
from pico_vllm.scheduler.queues import WaitingQueue
from pico_vllm.scheduler.rows import Rows
from pico_vllm.step import BAD_LOGITS, NO_TOKEN, NewBlocks, NewRow, StepPlan, StepResult


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
    ) -> None:
        """keeps_kv False computes every sequence from its first token in each step (`--kv none`).
        max_prompt_tokens: of one prompt in one step; None leaves only the budget."""
        self._blocks = blocks
        self._block_size = block_size
        self._budget_tokens = max_num_batched_tokens
        self._keeps_kv = keeps_kv
        self._max_prompt_tokens = max_prompt_tokens or max_num_batched_tokens
        self._waiting = WaitingQueue(POLICIES[policy])
        self._running: dict[str, Request] = {}
        self._rows = Rows(max_num_seqs)
        self._num_reserved_blocks = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def has_work(self) -> bool:
        return bool(self._running) or len(self._waiting) > 0

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

    def schedule(self) -> StepPlan | None:
        """What to run next, or None when there is nothing to do."""
        self._admit()
        rows, state = self._rows.in_order(), self._rows
        num_outputs = state.num_outputs[rows]
        # One whose last token is under way has nothing left to compute.
        is_live = num_outputs < state.max_tokens[rows]
        is_decoding = num_outputs > 0
        is_both = is_live & is_decoding
        num_decoding = np.count_nonzero(is_both)
        if num_decoding < len(rows):
            rows = np.concatenate((rows[is_both], rows[is_live & ~is_decoding]))
        context_lens = state.num_scheduled[rows]
        query_lens = state.num_tokens(rows) - context_lens
        # There is always room for a token of each.
        has_prompts = self._keeps_kv and num_decoding < len(rows)
        if has_prompts:
            of_prompts = query_lens[num_decoding:]
            np.minimum(of_prompts, self._max_prompt_tokens, out=of_prompts)
        if has_prompts and query_lens.sum() > self._budget_tokens:
            # Each takes what those before it leave of the budget.
            ends = np.minimum(np.cumsum(query_lens, dtype=np.int32), self._budget_tokens)
            query_lens = np.diff(ends, prepend=np.int32(0))
            num_scheduled = np.count_nonzero(query_lens)
            rows, context_lens, query_lens = (
                each[:num_scheduled] for each in (rows, context_lens, query_lens)
            )
        if not len(rows):
            return None
        return self._make_plan(rows, context_lens, query_lens)

    def commit(self, plan: StepPlan, result: StepResult) -> StepEvents:
        """Let the requests of a step grow or end, and say what happened. Requests aborted meanwhile
        are passed over."""
        token_ids: list[int] = result.token_ids.tolist()
        reasons: list[FinishReason | None] = [None] * len(token_ids)
        has_event = [True] * len(token_ids)
        logprobs, prompt_logprobs = {}, {}
        running = self._running
        for index, (request_id, token_id) in enumerate(
            zip(plan.request_ids, token_ids, strict=True)
        ):
            request = running.get(request_id)
            if request is None:
                has_event[index] = False
                continue
            if index in result.prompt_logprobs:
                prompt_logprobs[request_id] = result.prompt_logprobs[index]
            if token_id < 0:
                if token_id == BAD_LOGITS:
                    reasons[index] = FinishReason.ERROR
                    self._finish(request, FinishReason.ERROR)
                else:
                    has_event[index] = False
                continue
            request.status = RequestStatus.DECODING
            outputs = request.output_token_ids
            outputs.append(token_id)
            if index in result.logprobs:
                logprobs[request_id] = result.logprobs[index]
            if token_id in request.stop_token_ids or len(outputs) >= request.max_tokens:
                reason = reasons[index] = _end_of(request, token_id)
                if reason is not None:
                    self._finish(request, reason)
        return StepEvents(
            request_ids=tuple(compress(plan.request_ids, has_event)),
            token_ids=tuple(compress(token_ids, has_event)),
            finish_reasons=tuple(compress(reasons, has_event)),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def fail(self, plan: StepPlan | None) -> StepEvents:
        """End the requests of a step that raised; without a plan, all that run. What they generated
        before stays theirs.

        Requests that `commit` had ended are named too: nobody was told of them.
        """
        request_ids = tuple(self._running) if plan is None else plan.request_ids
        for request_id in request_ids:
            request = self._running.get(request_id)
            if request is not None:
                self._finish(request, FinishReason.ERROR)
        return StepEvents(
            request_ids=request_ids,
            token_ids=(NO_TOKEN,) * len(request_ids),
            finish_reasons=(FinishReason.ERROR,) * len(request_ids),
        )

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _admit(self) -> None:
        while len(self._waiting) > 0 and self._rows.has_free():
            reserved = self._num_blocks(self._waiting.peek().max_total_tokens)
            if self._num_reserved_blocks + reserved > self._blocks.num_device_blocks:
                return
            request = self._waiting.pop()
            self._num_reserved_blocks += reserved
            request.row = self._rows.take(request)
            request.status = RequestStatus.PREFILL
            self._running[request.request_id] = request

    def _make_plan(
        self,
        rows: NDArray[np.int32],
        context_lens: NDArray[np.int32],
        query_lens: NDArray[np.int32],
    ) -> StepPlan:
        state = self._rows
        ends, num_outputs = context_lens + query_lens, state.num_outputs[rows]
        num_blocks = state.num_blocks[rows]
        is_sampled = ends == state.num_prompt_tokens[rows] + num_outputs
        num_decodes = 0
        if self._keeps_kv:
            num_decodes = int(np.count_nonzero(num_outputs))
            state.num_scheduled[rows] = ends
        state.num_outputs[rows] = num_outputs + is_sampled
        new_rows: list[NewRow] = []
        new_blocks: tuple[NewBlocks, ...] = ()
        if np.count_nonzero(ends > num_blocks * self._block_size):
            is_new = num_blocks == 0
            new_rows = [_new_row(state.requests[row]) for row in rows[is_new].tolist()]
            new_blocks = self._extend_tables(rows, ends)
        return StepPlan(
            request_ids=state.request_ids(rows),
            rows=rows,
            context_lens=context_lens,
            query_lens=query_lens,
            is_sampled=is_sampled,
            num_decodes=num_decodes,
            new_rows=tuple(new_rows),
            new_blocks=new_blocks,
        )

    def _extend_tables(
        self, rows: NDArray[np.int32], ends: NDArray[np.int32]
    ) -> tuple[NewBlocks, ...]:
        """Give the requests the blocks that their tokens up to `ends` go to, all taken at once."""
        num_blocks = self._rows.num_blocks
        missing = -(-ends // self._block_size) - num_blocks[rows]
        growing = np.flatnonzero(missing > 0)
        block_ids = self._blocks.allocate(int(missing[growing].sum()))
        assert block_ids is not None, "reserved blocks were not there"
        physical_ids = self._blocks.device_ids(block_ids)
        new_blocks, at = [], 0
        for row, count in zip(rows[growing].tolist(), missing[growing].tolist(), strict=True):
            taken = slice(at, at + count)
            held = int(num_blocks[row])
            new_blocks.append(NewBlocks(row=row, index=held, block_ids=physical_ids[taken]))
            self._rows.requests[row].block_ids.extend(block_ids[taken])
            num_blocks[row] += count
            at += count
        return tuple(new_blocks)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        if self._running.pop(request.request_id, None) is not None:
            self._num_reserved_blocks -= self._num_blocks(request.max_total_tokens)
            self._blocks.free(request.block_ids)
            request.block_ids = []
            self._rows.give_back(request.row)
            request.row = -1

    def check_invariants(self) -> None:
        self._blocks.check_invariants()
        running = list(self._running.values())
        held = [block_id for request in running for block_id in request.block_ids]
        assert len(set(held)) == len(held), "a block held by two requests"
        assert all(self._blocks.ref_count(block_id) == 1 for block_id in held), (
            "ref_count is not the number of holders"
        )
        assert len(held) + self._blocks.num_free_device_blocks == self._blocks.num_device_blocks, (
            "a block was lost"
        )
        self._rows.check_invariants(running)
        for request in running:
            num_blocks = int(self._rows.num_blocks[request.row])
            num_scheduled = int(self._rows.num_scheduled[request.row])
            assert len(request.block_ids) == num_blocks, request.request_id
            if self._keeps_kv:
                assert num_blocks == self._num_blocks(num_scheduled), request.request_id
        reserved = sum(self._num_blocks(request.max_total_tokens) for request in running)
        assert reserved == self._num_reserved_blocks <= self._blocks.num_device_blocks, (
            "reservations"
        )


def _new_row(request: Request) -> NewRow:
    return NewRow(
        row=request.row,
        token_ids=np.concatenate(
            (request.prompt_token_ids, np.array(request.output_token_ids, np.int32)), dtype=np.int32
        ),
        num_prompt_tokens=request.num_prompt_tokens,
        params=request.params,
        stop_token_ids=request.stop_token_ids,
        seed=request.seed,
        sample_index=request.sample_index,
    )


def _end_of(request: Request, token_id: int) -> FinishReason | None:
    num_output_tokens = len(request.output_token_ids)
    if token_id in request.stop_token_ids and num_output_tokens > request.params.min_tokens:
        return FinishReason.STOP
    if num_output_tokens >= request.max_tokens:
        return FinishReason.LENGTH
    return None
