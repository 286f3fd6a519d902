"""Rows: what the scheduler counts of each running request, in arrays by its row. Host only.

A step changes the counts of all its requests at once, so nothing here goes over them in Python but
what one of them does alone: enter, grow by a block, end.

Invariant (`check_invariants`): a row is free or has exactly one running request; launched steps are
counted already, so num_outputs is never below the outputs that the request has.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pico_vllm.request import Request


class Rows:
    def __init__(self, max_num_seqs: int) -> None:
        self.requests: list[Request] = [None] * max_num_seqs  # type: ignore[list-item]
        """By row; stale where the row is free."""
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int32)
        self.max_tokens = np.zeros(max_num_seqs, np.int32)
        self.num_scheduled = np.zeros(max_num_seqs, np.int32)
        """Tokens whose KV is in the cache, or on its way there by a launched step."""
        self.num_outputs = np.zeros(max_num_seqs, np.int32)
        """Output tokens once all launched steps are committed, if nothing ends it before."""
        self.num_blocks = np.zeros(max_num_seqs, np.int32)
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._in_use: dict[int, None] = {}
        """In order of arrival."""
        self._in_order: NDArray[np.int32] | None = None
        self._ids_in_order: tuple[str, ...] = ()

    def has_free(self) -> bool:
        return bool(self._free)

    def take(self, request: Request) -> int:
        row = self._free.pop()
        self._in_use[row] = None
        self._in_order = None
        self.requests[row] = request
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self.max_tokens[row] = request.max_tokens
        self.num_scheduled[row] = self.num_blocks[row] = 0
        self.num_outputs[row] = len(request.output_token_ids)
        return row

    def give_back(self, row: int) -> None:
        del self._in_use[row]
        self._in_order = None
        self._free.append(row)

    def in_order(self) -> NDArray[np.int32]:
        """The rows in use, those that were taken first first."""
        if self._in_order is None:
            self._in_order = np.array(list(self._in_use), np.int32)
            self._ids_in_order = self._ids_of(self._in_order)
        return self._in_order

    def num_tokens(self, rows: NDArray[np.int32]) -> NDArray[np.int32]:
        """Prompt and outputs, those of launched steps too."""
        return self.num_prompt_tokens[rows] + self.num_outputs[rows]

    def request_ids(self, rows: NDArray[np.int32]) -> tuple[str, ...]:
        return self._ids_in_order if rows is self._in_order else self._ids_of(rows)

    def _ids_of(self, rows: NDArray[np.int32]) -> tuple[str, ...]:
        return tuple([self.requests[row].request_id for row in rows.tolist()])

    def check_invariants(self, running: Sequence[Request]) -> None:
        assert [request.row for request in running] == self.in_order().tolist(), "order of rows"
        assert sorted([*self._in_use, *self._free]) == list(range(len(self.requests))), (
            "a row used twice, or lost"
        )
        for request in running:
            row = request.row
            assert self.requests[row] is request
            assert self.num_outputs[row] >= len(request.output_token_ids), request.request_id
