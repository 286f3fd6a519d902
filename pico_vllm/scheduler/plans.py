"""Plans: makes the StepPlan of requests that were chosen, and takes the blocks that they lack. Host
only.

A plan counts in Rows what its step will add, so the next one may be made before it is committed.

Owner of: the numbers of plans, and what the next one has to say beside its requests: whose blocks
became others, and whether it awaits loads. Invariant: a request has blocks for all tokens of a plan
that names it, and its table as the runner has it is the request's own once that plan has run, but
for blocks that were exchanged since.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pico_vllm.cache.block_manager import BlockManager
from pico_vllm.request import Request
from pico_vllm.scheduler.prefixes import Prefixes
from pico_vllm.scheduler.rows import Rows
from pico_vllm.step import NO_COPIES, BlockCopy, NewBlocks, NewRow, StepPlan


class Plans:
    def __init__(
        self,
        rows: Rows,
        blocks: BlockManager,
        prefixes: Prefixes | None,
        *,
        block_size: int,
        keeps_kv: bool,
    ) -> None:
        self._rows = rows
        self._blocks = blocks
        self._prefixes = prefixes
        self._block_size = block_size
        self._keeps_kv = keeps_kv
        self.number = 0
        """Of the next."""
        self.awaits_loads = False
        """Whether the next one does."""
        self._exchanged: dict[int, tuple[int, int]] = {}
        """By row: from where to where the blocks of its table became others, as they were
        published."""
        self._last: StepPlan | None = None
        """Where all that run decoded in it."""
        self._num_repeats = 0
        """Steps until one of its requests needs a block or has its last token under way."""
        # What every step of decoding requests alone says; plans are not to be written to.
        self.ones = np.ones(len(rows.requests), np.int32)
        self.ones.flags.writeable = False
        self._all_true = self.ones.astype(np.bool_)
        self._all_true.flags.writeable = False

    def exchange(self, row: int, first: int, stop: int) -> None:
        """Blocks of a row's table became others. A second time before a plan told of the first,
        these come after those in the table."""
        start, _ = self._exchanged.get(row, (first, first))
        self._exchanged[row] = (start, stop)

    def forget(self, row: int) -> None:
        """Its request gave it back."""
        self._exchanged.pop(row, None)

    def repeat(self, rows: NDArray[np.int32]) -> StepPlan | None:
        """The plan after one in which all decoded, if nothing else happened since: most steps of
        few requests, whose time is the host's more than that of many. rows: Rows.in_order.

        Blocks exchanged meanwhile wait for the next plan that takes some: before that nobody writes
        to those which they replace.
        """
        last = self._last
        if last is None or self._num_repeats == 0 or rows is not last.rows:
            return None
        if self._prefixes is not None and self._prefixes.has_new_transfers:
            return None
        self._rows.decode_all()
        self._num_repeats -= 1
        self._last = StepPlan(
            number=self._take_number(),
            request_ids=last.request_ids,
            rows=rows,
            context_lens=last.context_lens + self.ones[: len(rows)],
            query_lens=last.query_lens,
            is_sampled=last.is_sampled,
            num_decodes=last.num_decodes,
            repeats=True,
        )
        return self._last

    def make(
        self,
        rows: NDArray[np.int32],
        context_lens: NDArray[np.int32],
        query_lens: NDArray[np.int32],
        missing: NDArray[np.int32] | None,
    ) -> StepPlan:
        """missing: how many blocks each request needs for this step beside its own, which must be
        available; None where nobody needs any."""
        state = self._rows
        ends, num_sampled = context_lens + query_lens, state.num_sampled[rows]
        num_decodes = 0
        if self._keeps_kv:
            num_decodes = int(np.count_nonzero(num_sampled))
            state.num_scheduled[rows] = ends
        if num_decodes == len(rows):
            is_sampled = self._all_true[:num_decodes]
        else:
            is_sampled = ends == state.num_entered[rows] + num_sampled
        state.num_sampled[rows] = num_sampled + is_sampled
        new_rows: list[NewRow] = []
        new_blocks: list[NewBlocks] = []
        copies: list[BlockCopy] = []
        if self._exchanged:
            new_blocks += self._take_exchanged(rows)
        if missing is not None:
            entering = rows[state.is_entering[rows]].tolist()
            state.is_entering[entering] = False
            new_rows = [_new_row(state.requests[row]) for row in entering]
            new_blocks += self._extend_tables(rows, missing, set(entering))
            if self._prefixes is not None:
                copies = self._copies_for(entering)
        number = self._take_number()
        stores = loads = NO_COPIES
        if self._prefixes is not None and self._prefixes.has_new_transfers:
            assert self._prefixes.cache.tiers is not None
            stores, loads = self._prefixes.cache.tiers.take_transfers(number)
        plan = StepPlan(
            number=number,
            request_ids=state.request_ids(rows),
            rows=rows,
            context_lens=context_lens,
            query_lens=query_lens,
            is_sampled=is_sampled,
            num_decodes=num_decodes,
            new_rows=tuple(new_rows),
            new_blocks=tuple(new_blocks),
            copies=tuple(copies),
            stores=stores,
            loads=loads,
            awaits_loads=self.awaits_loads,
        )
        self.awaits_loads = False
        self._last = None
        if 0 < num_decodes == len(rows) and rows is state.in_order():
            tokens_left = state.max_sampled[rows] - state.num_sampled[rows]
            slots_left = state.num_blocks[rows] * self._block_size - ends
            self._num_repeats = int(np.minimum(tokens_left, slots_left).min())
            self._last = plan
        return plan

    def _take_number(self) -> int:
        self.number += 1
        return self.number - 1

    def _extend_tables(
        self, rows: NDArray[np.int32], missing: NDArray[np.int32], entering: set[int]
    ) -> list[NewBlocks]:
        """Give the requests the blocks that they miss, all taken at once. Those of the cached
        tokens of one that enters come before them."""
        num_blocks = self._rows.num_blocks
        growing = (missing > 0).nonzero()[0]
        allocate = (
            self._blocks.allocate if self._prefixes is None else self._prefixes.cache.allocate
        )
        block_ids = allocate(int(missing.sum()))
        assert block_ids is not None, f"fewer blocks are available than {missing}"
        device_ids = self._blocks.device_ids(block_ids)
        new_blocks, at = [], 0
        for row, count in zip(rows[growing].tolist(), missing[growing].tolist(), strict=True):
            taken = slice(at, at + count)
            held, of_row = int(num_blocks[row]), self._rows.requests[row].block_ids
            if held and row in entering:
                cached = self._blocks.device_ids(of_row)
                new_blocks.append(NewBlocks(row=row, index=0, block_ids=cached + device_ids[taken]))
            else:
                new_blocks.append(NewBlocks(row=row, index=held, block_ids=device_ids[taken]))
            of_row.extend(block_ids[taken])
            num_blocks[row] += count
            at += count
        return new_blocks

    def _copies_for(self, entering: list[int]) -> list[BlockCopy]:
        """Copy what matches a block in part into the request's own, the first after its cached
        ones. All blocks of this plan were taken, so the sources may go."""
        assert self._prefixes is not None
        copies = []
        for row in entering:
            request = self._rows.requests[row]
            pair = self._prefixes.take_copy(request)
            if pair is not None:
                copies.append(BlockCopy(*self._blocks.device_ids(pair)))
        return copies

    def _take_exchanged(self, rows: NDArray[np.int32]) -> list[NewBlocks]:
        """What the tables of these rows have to hold instead."""
        found = []
        for row in rows.tolist():
            if row in self._exchanged:
                start, stop = self._exchanged.pop(row)
                block_ids = self._rows.requests[row].block_ids[start:stop]
                found.append(
                    NewBlocks(row=row, index=start, block_ids=self._blocks.device_ids(block_ids))
                )
        return found


def _new_row(request: Request) -> NewRow:
    token_ids = request.prompt_token_ids
    if request.output_token_ids:
        outputs = np.array(request.output_token_ids, np.int32)
        token_ids = np.concatenate((token_ids, outputs), dtype=np.int32)
    return NewRow(
        row=request.row,
        token_ids=token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        params=request.params,
        stop_token_ids=request.stop_token_ids,
        seed=request.seed,
        sample_index=request.sample_index,
        num_prompt_logprobs=request.num_prompt_logprobs,
    )
