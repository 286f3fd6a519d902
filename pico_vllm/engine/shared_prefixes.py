"""SharedPrefixes: which decoding requests of a step begin with the same blocks. Host only.

Blocks come to be in several tables by the prefix cache alone, always from the first one on, so a
block that two requests hold at the same place is the end of a prefix of theirs. They hold it as
long as they run, and it is full: whoever decodes writes behind it.

Owner of: a copy of the block tables on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pico_vllm.step import NewBlocks


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefix:
    """The one of a step, by which most is saved."""

    lens: NDArray[np.int32]
    """[R] num_tokens for each request that shares it, 0 for others."""
    num_requests: int
    num_tokens: int
    """Whole blocks, in all of which lies KV of earlier steps."""


class SharedPrefixes:
    def __init__(self, num_rows: int, max_num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._table = np.zeros((num_rows, max_num_blocks), np.int32)
        self._num_blocks = np.zeros(num_rows, np.int64)
        self._rows = np.zeros(0, np.int32)
        self._found: SharedPrefix | None = None
        """Of these rows, where nothing has changed since but by blocks appended."""
        self._has_changed = True

    def take(self, new_blocks: Sequence[NewBlocks]) -> None:
        """What a plan adds to the tables, or puts there in place of others."""
        for blocks in new_blocks:
            row, start, stop = blocks.row, blocks.index, blocks.index + len(blocks.block_ids)
            self._table[row, start:stop] = blocks.block_ids
            if start == 0 or start != self._num_blocks[row]:
                self._has_changed = True
            self._num_blocks[row] = stop

    def find(self, rows: NDArray[np.int32], context_lens: NDArray[np.int32]) -> SharedPrefix | None:
        """What decoding requests, in these rows, have in common; None if nobody shares anything.
        Blocks of their plan itself need not have been taken."""
        if self._has_changed or not (rows is self._rows or np.array_equal(rows, self._rows)):
            self._found = self._search(rows, context_lens)
            self._has_changed = False
        self._rows = rows
        return self._found

    def _search(
        self, rows: NDArray[np.int32], context_lens: NDArray[np.int32]
    ) -> SharedPrefix | None:
        num_whole = context_lens // self._block_size  # entries past them are older requests'
        first_blocks = np.where(num_whole > 0, self._table[rows, 0], 0)
        block_ids, counts = np.unique(first_blocks, return_counts=True)
        counts[block_ids == 0] = 0
        most = int(counts.argmax())
        if counts[most] < 2:
            return None
        members = np.flatnonzero(first_blocks == block_ids[most])
        # Blocks that each has in common with the first of them, by bisection.
        of_rows, leader = rows[members], rows[members[0]]
        num_common = np.ones(len(members), np.int32)
        at_most = np.minimum(num_whole[members], num_whole[members[0]])
        while np.count_nonzero(num_common < at_most):
            middle = (num_common + at_most + 1) // 2
            is_common = self._table[of_rows, middle - 1] == self._table[leader, middle - 1]
            num_common = np.where(is_common, middle, num_common)
            at_most = np.where(is_common, at_most, middle - 1)
        # The more share it the shorter it is.
        by_length = np.sort(num_common)[::-1]
        num_blocks = int(by_length[np.argmax(by_length * np.arange(len(members)))])
        lens = np.zeros(len(rows), np.int32)
        sharing = members[num_common >= num_blocks]
        lens[sharing] = num_blocks * self._block_size
        return SharedPrefix(lens, len(sharing), num_blocks * self._block_size)
