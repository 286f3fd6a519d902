"""Rows: what the scheduler counts of each running request, in arrays by its row. Host only.

A step changes the counts of all its requests at once, so nothing here goes over them in Python but
what one of them does alone: enter, grow by a block, end.

A request that enters again after a preemption brings its outputs as if they were of its prompt: its
row counts from the tokens that it came with.

Invariant (`check_invariants`): a row is free or has exactly one running request; launched steps are
counted already, so a row's tokens are never fewer than its request's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pico_vllm.request import Request

SORTED_FROM = 64
"""Fewer contexts of up to 8 KV heads are attended all at once on an H200."""


class Rows:
    def __init__(self, max_num_seqs: int) -> None:
        self.requests: list[Request] = [None] * max_num_seqs  # type: ignore[list-item]
        """By row; stale where the row is free."""
        self.places = np.zeros(max_num_seqs, np.int64)
        """The policy's."""
        self.num_entered = np.zeros(max_num_seqs, np.int32)
        """Tokens that the request came with: its prompt, and outputs where it enters again."""
        self.max_sampled = np.zeros(max_num_seqs, np.int32)
        """Tokens that it may still sample, counted from then."""
        self.num_scheduled = np.zeros(max_num_seqs, np.int32)
        """Tokens whose KV is in the cache, or on its way there by a launched step."""
        self.num_sampled = np.zeros(max_num_seqs, np.int32)
        """Since it entered, once all launched steps are committed, if nothing ends it before."""
        self.num_blocks = np.zeros(max_num_seqs, np.int32)
        self.is_entering = np.zeros(max_num_seqs, np.bool_)
        """No plan has named it yet."""
        self.num_computed = np.zeros(max_num_seqs, np.int32)
        """Most tokens that were computed before it entered again."""
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._in_use: dict[int, None] = {}
        """In order of arrival."""
        self._in_order: NDArray[np.int32] | None = None
        self._index_in_order = np.zeros(0, np.intp)
        """The same, as numpy's own type of an index, which takes half the time."""
        self._ids_in_order: tuple[str, ...] = ()

    def has_free(self) -> bool:
        return bool(self._free)

    def take(self, request: Request, num_cached: int = 0) -> int:
        """num_cached: tokens whose KV is there; of their blocks it has the whole ones."""
        row = self._free.pop()
        self._in_use[row] = None
        self._in_order = None
        self.requests[row] = request
        self.places[row] = request.place[0]
        self.num_entered[row] = request.num_tokens
        self.max_sampled[row] = request.max_total_tokens - request.num_tokens
        self.num_sampled[row] = 0
        self.num_scheduled[row] = num_cached
        self.num_blocks[row] = len(request.block_ids)
        self.is_entering[row] = True
        self.num_computed[row] = request.num_computed
        return row

    def give_back(self, row: int) -> None:
        del self._in_use[row]
        self._in_order = None
        self._free.append(row)

    def in_order(self) -> NDArray[np.int32]:
        """The rows in use, as they came; of SORTED_FROM and more first those that decode, the
        longest first, since a device is soonest done with attention if the longest contexts begin
        first. Sorted when a row is taken or given back, between which all of them grow alike."""
        if self._in_order is None:
            rows = np.array(list(self._in_use), np.int32)
            if len(rows) >= SORTED_FROM:
                lens = np.where(self.num_sampled[rows] > 0, self.num_scheduled[rows], 0)
                rows = rows[np.argsort(-lens, kind="stable")]
            self._in_order = rows
            self._index_in_order = self._in_order.astype(np.intp)
            self._ids_in_order = self._ids_of(self._in_order)
        return self._in_order

    def decode_all(self) -> None:
        """All rows in use are scheduled to compute one token and sample one."""
        assert self._in_order is not None
        self.num_scheduled[self._index_in_order] += 1
        self.num_sampled[self._index_in_order] += 1

    def num_tokens(self, rows: NDArray[np.int32]) -> NDArray[np.int32]:
        """Prompt and outputs, those of launched steps too."""
        return self.num_entered[rows] + self.num_sampled[rows]

    def is_ending(self, row: int) -> bool:
        """Whether its last token is under way: its blocks will be free once that is committed."""
        return bool(self.num_sampled[row] >= self.max_sampled[row])

    def request_ids(self, rows: NDArray[np.int32]) -> tuple[str, ...]:
        return self._ids_in_order if rows is self._in_order else self._ids_of(rows)

    def _ids_of(self, rows: NDArray[np.int32]) -> tuple[str, ...]:
        return tuple([self.requests[row].request_id for row in rows.tolist()])

    def check_invariants(self, running: Sequence[Request]) -> None:
        assert [request.row for request in running] == list(self._in_use), "order of arrival"
        assert sorted(self.in_order().tolist()) == sorted(self._in_use), "rows of a step"
        assert sorted([*self._in_use, *self._free]) == list(range(len(self.requests))), (
            "a row used twice, or lost"
        )
        for request in running:
            row = request.row
            assert self.requests[row] is request
            assert self.places[row] == request.place[0], request.request_id
            num_tokens = int(self.num_entered[row] + self.num_sampled[row])
            assert request.num_tokens <= num_tokens <= request.max_total_tokens, request.request_id
