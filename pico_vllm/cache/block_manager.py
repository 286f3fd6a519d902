"""BlockManager: which KV blocks are free, and how many hold the others. Host only; it decides
nothing.

A block's id is its place in the device pool. Id 0 is the null block, which takes padding and is
never given to anybody. What lies below the device is known by other names (cache/tiers/).

Owner of: ref_count of every block, and the free list. Invariant (`check_invariants`): each id is
free or has ref_count >= 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

NULL_BLOCK = 0


class _FreeIds:
    """Ids nobody uses. The lowest come first, which keeps live blocks close together, so that CPU
    attention reads long runs."""

    _WINDOW = 4096

    def __init__(self, ids: range) -> None:
        self._is_free = np.zeros(ids.stop, np.bool_)
        self._is_free[ids.start :] = True
        self._count = len(ids)
        self._lowest = ids.start
        """No id below is free."""

    def pop(self, count: int) -> NDArray[np.int64]:
        """The lowest `count`, which must be there."""
        assert count <= self._count, (count, self._count)
        parts, missing, at = [np.zeros(0, np.int64)], count, self._lowest
        width = max(self._WINDOW, 2 * missing)
        while missing > 0:
            assert at < len(self._is_free), "fewer ids are free than were counted"
            found = np.flatnonzero(self._is_free[at : at + width])[:missing] + at
            parts.append(found)
            missing -= len(found)
            at += width
            width *= 2  # they may lie far apart
        ids = parts[-1] if len(parts) == 2 else np.concatenate(parts)
        if count:
            self._is_free[ids] = False
            self._lowest = int(ids[-1]) + 1
            self._count -= count
        return ids

    def push(self, ids: list[int]) -> None:
        if ids:
            self._is_free[ids] = True
            self._lowest = min(self._lowest, min(ids))
            self._count += len(ids)

    def __len__(self) -> int:
        return self._count

    def ids(self) -> list[int]:
        found: list[int] = np.flatnonzero(self._is_free).tolist()
        return found


class BlockManager:
    def __init__(self, num_device_blocks: int) -> None:
        """Usable blocks of the pool; the null block is not counted and lies before them."""
        self.num_device_blocks = num_device_blocks
        self._free = _FreeIds(range(1, num_device_blocks + 1))
        # A list: callers have lists of ids, and for the hundreds of blocks of a long prompt a loop
        # over them takes less than making an array of them.
        self._ref_counts = [0] * (num_device_blocks + 1)

    @property
    def num_free_device_blocks(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Give `count` new blocks with ref_count 1, or None (and nothing changed) if fewer are
        free."""
        if count > len(self._free):
            return None
        block_ids: list[int] = self._free.pop(count).tolist()
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def share(self, block_ids: Sequence[int]) -> None:
        """Count one more holder of each block, each named once."""
        _check_distinct(block_ids)
        ref_counts = self._ref_counts
        for index, block_id in enumerate(block_ids):
            count = ref_counts[block_id]
            if count == 0:
                for earlier_id in block_ids[:index]:
                    ref_counts[earlier_id] -= 1
                raise _is_nobodys(block_id, block_ids)
            ref_counts[block_id] = count + 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Count one holder less of each block, each named once; a block that nobody holds is free
        again."""
        _check_distinct(block_ids)
        ref_counts, freed = self._ref_counts, []
        for block_id in block_ids:
            count = ref_counts[block_id]
            if count <= 1:
                if count == 0:
                    raise _is_nobodys(block_id, block_ids)
                freed.append(block_id)
        self._free.push(freed)
        for block_id in block_ids:
            ref_counts[block_id] -= 1

    def ref_count(self, block_id: int) -> int:
        """Holders of a block; 0 once it is gone."""
        return self._ref_counts[block_id]

    def ref_counts(self, block_ids: Sequence[int]) -> list[int]:
        """Of many."""
        return list(map(self._ref_counts.__getitem__, block_ids))

    def device_ids(self, block_ids: Sequence[int]) -> list[int]:
        """For block tables, slots and copies: the same ids, of blocks that somebody holds."""
        _check_distinct(block_ids)
        ref_counts = self._ref_counts
        if not all(map(ref_counts.__getitem__, block_ids)):
            raise _is_nobodys(next(i for i in block_ids if not ref_counts[i]), block_ids)
        return list(block_ids)

    def check_invariants(self) -> None:
        assert min(self._ref_counts) >= 0, "fewer holders than none"
        live = [block_id for block_id, count in enumerate(self._ref_counts) if count]
        free = self._free.ids()
        assert sorted([*live, *free]) == list(range(1, self.num_device_blocks + 1))
        assert len(self._free) == len(free), "miscounted"
        assert all(free_id >= self._free._lowest for free_id in free), "one is hidden"


def _check_distinct(block_ids: Sequence[int]) -> None:
    assert len(set(block_ids)) == len(block_ids), f"a block named twice: {block_ids}"


def _is_nobodys(block_id: int, block_ids: Sequence[int]) -> KeyError:
    return KeyError(f"of the blocks {block_ids} block {block_id} is nobody's")
