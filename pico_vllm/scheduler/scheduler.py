"""Scheduler: which requests compute how many tokens in the next step. Host only, knows no tensor
and no string.

`schedule` makes a StepPlan: decode rows first, then prompt chunks in order of arrival, under a
token budget; then new requests, as long as a row and their blocks are free. `commit` is the only
place where a request grows or ends. A second step may be planned before the first one is
committed: what launched steps will add is counted apart, and an end that is found late costs one
token that nobody sees.

Admission reserves the blocks of prompt + max_tokens, so a running request always finds its next
block; blocks are taken from the pool only when they are first written. First come, first served:
nobody overtakes the head of the line.

Invariant (`check_invariants`): every running request holds exactly ceil(tokens with KV /
block_size) blocks, each block is held once, rows are unique, and the sum of reservations fits the
pool.
"""

from __future__ import annotations

import numpy as np

from pico_vllm.cache.block_manager import BlockManager
from pico_vllm.outputs import StepEvents
from pico_vllm.request import FinishReason, Request, RequestStatus
from pico_vllm.scheduler.queues import WaitingQueue
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
    ) -> None:
        """keeps_kv False computes every sequence from its first token in each step (`--kv
        none`)."""
        self._blocks = blocks
        self._block_size = block_size
        self._budget_tokens = max_num_batched_tokens
        self._keeps_kv = keeps_kv
        self._waiting = WaitingQueue()
        self._running: dict[str, Request] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
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
        # One whose last token is under way has nothing left to compute.
        live = [r for r in self._running.values() if r.num_expected_outputs < r.max_tokens]
        decoding = [r for r in live if r.num_expected_outputs > 0]
        prefilling = [r for r in live if r.num_expected_outputs == 0]
        scheduled: list[tuple[Request, int]] = []
        budget = self._budget_tokens
        for request in decoding + prefilling:
            query_len = (
                request.num_prompt_tokens
                + request.num_expected_outputs
                - request.num_scheduled_tokens
            )
            if self._keeps_kv:
                query_len = min(query_len, budget)
            if query_len > 0:
                scheduled.append((request, query_len))
                budget -= query_len
        if not scheduled:
            return None
        return self._make_plan(scheduled)

    def commit(self, plan: StepPlan, result: StepResult) -> StepEvents:
        """Let the requests of a step grow or end, and say what happened. Requests aborted meanwhile
        are passed over."""
        request_ids: list[str] = []
        token_ids: list[int] = []
        reasons: list[FinishReason | None] = []
        logprobs = {}
        prompt_logprobs = {}
        sampled = result.token_ids.tolist()
        query_lens = plan.query_lens.tolist()
        is_sampled = plan.is_sampled.tolist()
        for index, request_id in enumerate(plan.request_ids):
            request = self._running.get(request_id)
            if request is None:
                continue
            if self._keeps_kv:
                request.num_tokens_in_flight -= query_lens[index]
                request.num_computed_tokens += query_lens[index]
            request.num_samples_in_flight -= is_sampled[index]
            if index in result.prompt_logprobs:
                prompt_logprobs[request_id] = result.prompt_logprobs[index]
            token_id = sampled[index]
            if token_id == NO_TOKEN:
                continue
            if token_id == BAD_LOGITS:
                reason: FinishReason | None = FinishReason.ERROR
            else:
                request.status = RequestStatus.DECODING
                request.output_token_ids.append(token_id)
                reason = _end_of(request, token_id)
                if index in result.logprobs:
                    logprobs[request_id] = result.logprobs[index]
            if reason is not None:
                self._finish(request, reason)
            request_ids.append(request_id)
            token_ids.append(token_id)
            reasons.append(reason)
        return StepEvents(
            request_ids=tuple(request_ids),
            token_ids=tuple(token_ids),
            finish_reasons=tuple(reasons),
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
        while len(self._waiting) > 0 and self._free_rows:
            reserved = self._num_blocks(self._waiting.peek().max_total_tokens)
            if self._num_reserved_blocks + reserved > self._blocks.num_device_blocks:
                return
            request = self._waiting.pop()
            self._num_reserved_blocks += reserved
            request.row = self._free_rows.pop()
            request.status = RequestStatus.PREFILL
            self._running[request.request_id] = request

    def _make_plan(self, scheduled: list[tuple[Request, int]]) -> StepPlan:
        new_rows = [_new_row(request) for request, _ in scheduled if not request.block_ids]
        new_blocks = self._extend_tables(scheduled)
        requests = [request for request, _ in scheduled]
        context_lens = np.array([r.num_scheduled_tokens for r in requests], np.int32)
        query_lens = np.array([query_len for _, query_len in scheduled], np.int32)
        num_tokens = np.array(
            [r.num_prompt_tokens + r.num_expected_outputs for r in requests], np.int32
        )
        is_sampled = context_lens + query_lens == num_tokens
        num_decodes = 0
        if self._keeps_kv:
            num_decodes = sum(r.num_expected_outputs > 0 for r in requests)
        for (request, query_len), samples in zip(scheduled, is_sampled.tolist(), strict=True):
            if self._keeps_kv:
                request.num_tokens_in_flight += query_len
            request.num_samples_in_flight += samples
        return StepPlan(
            request_ids=tuple(r.request_id for r in requests),
            rows=np.array([r.row for r in requests], np.int32),
            context_lens=context_lens,
            query_lens=query_lens,
            is_sampled=is_sampled,
            num_decodes=num_decodes,
            new_rows=tuple(new_rows),
            new_blocks=new_blocks,
        )

    def _extend_tables(self, scheduled: list[tuple[Request, int]]) -> tuple[NewBlocks, ...]:
        """Give the requests the blocks that this step's tokens go to, all taken at once."""
        growing = []
        for request, query_len in scheduled:
            missing = self._num_blocks(request.num_scheduled_tokens + query_len) - len(
                request.block_ids
            )
            if missing > 0:
                growing.append((request, missing))
        if not growing:
            return ()
        block_ids = self._blocks.allocate(sum(missing for _, missing in growing))
        assert block_ids is not None, "reserved blocks were not there"
        physical_ids = self._blocks.device_ids(block_ids)
        new_blocks, at = [], 0
        for request, missing in growing:
            held, taken = len(request.block_ids), slice(at, at + missing)
            new_blocks.append(NewBlocks(row=request.row, index=held, block_ids=physical_ids[taken]))
            request.block_ids.extend(block_ids[taken])
            at += missing
        return tuple(new_blocks)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        if self._running.pop(request.request_id, None) is not None:
            self._num_reserved_blocks -= self._num_blocks(request.max_total_tokens)
            self._blocks.free(request.block_ids)
            request.block_ids = []
            self._free_rows.append(request.row)
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
        if self._keeps_kv:
            for request in running:
                expected = self._num_blocks(request.num_scheduled_tokens)
                assert len(request.block_ids) == expected, (
                    request.request_id,
                    len(request.block_ids),
                    expected,
                )
        rows = [request.row for request in running]
        assert len(set(rows + self._free_rows)) == len(rows) + len(self._free_rows), (
            "a row used twice"
        )
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
