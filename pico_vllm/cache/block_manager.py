"""BlockManager: which KV block lies where, and how many hold it. Host only; it decides nothing.

A block has a logical id for life. It lies on the device or on the host, at a physical id of that
pool; requests compute on device blocks only. Physical device id 0 is the null block, which takes
padding and is never given to anybody.

Owner of: ref_count, residency and physical id of every block, and both free lists. Invariant
(`check_invariants`): each physical id is free or belongs to exactly one live block; live blocks
have ref_count >= 1; free + live = size, in both pools.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pico_vllm.step import BlockCopy

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
    def __init__(self, num_device_blocks: int, num_host_blocks: int = 0) -> None:
        """Usable blocks of each pool; the null block is not counted and lies before them on the
        device."""
        self.num_device_blocks = num_device_blocks
        self.num_host_blocks = num_host_blocks
        self._free_device = _FreeIds(range(1, num_device_blocks + 1))
        self._free_host = _FreeIds(range(num_host_blocks))
        size = num_device_blocks + num_host_blocks + 1
        self._free_blocks = _FreeIds(range(1, size))
        # By logical id. Lists: callers have lists of ids, and for the hundreds of blocks of a long
        # prompt a loop over them takes less than making an array of them.
        self._ref_counts = [0] * size
        self._is_on_device = [False] * size
        self._physical_ids = [0] * size

    @property
    def num_free_device_blocks(self) -> int:
        return len(self._free_device)

    @property
    def num_free_host_blocks(self) -> int:
        return len(self._free_host)

    def allocate(self, count: int) -> list[int] | None:
        """Give `count` new device blocks with ref_count 1, or None (and nothing changed) if fewer
        are free."""
        if count > len(self._free_device):
            return None
        block_ids: list[int] = self._free_blocks.pop(count).tolist()
        for block_id, physical_id in zip(
            block_ids, self._free_device.pop(count).tolist(), strict=True
        ):
            self._ref_counts[block_id] = 1
            self._is_on_device[block_id] = True
            self._physical_ids[block_id] = physical_id
        return block_ids

    def share(self, block_ids: Sequence[int]) -> None:
        """Count one more holder of each block, each named once."""
        self._check_live(block_ids)
        ref_counts = self._ref_counts
        for block_id in block_ids:
            ref_counts[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Count one holder less of each block, each named once; a block that nobody holds goes back
        to its pool."""
        self._check_live(block_ids)
        ref_counts, gone = self._ref_counts, []
        for block_id in block_ids:
            ref_counts[block_id] -= 1
            if ref_counts[block_id] == 0:
                gone.append(block_id)
        if gone:
            physical_ids: tuple[list[int], list[int]] = ([], [])
            for block_id in gone:
                physical_ids[self._is_on_device[block_id]].append(self._physical_ids[block_id])
            self._free_host.push(physical_ids[False])
            self._free_device.push(physical_ids[True])
            self._free_blocks.push(gone)

    def ref_count(self, block_id: int) -> int:
        """Holders of a block; 0 once it is gone."""
        return self._ref_counts[block_id]

    def is_on_device(self, block_id: int) -> bool:
        self._check_live([block_id])
        return self._is_on_device[block_id]

    def device_ids(self, block_ids: Sequence[int]) -> list[int]:
        """Physical device ids, for block tables and slots."""
        self._check_live(block_ids)
        assert all(map(self._is_on_device.__getitem__, block_ids)), (
            f"a request may not compute on host blocks: {block_ids}"
        )
        return list(map(self._physical_ids.__getitem__, block_ids))

    def swap_out(self, block_ids: Sequence[int]) -> list[BlockCopy] | None:
        """Move blocks to the host pool. None (and nothing changed) if it has too little room.

        The caller copies the returned pairs before the freed device blocks are written again.
        """
        return self._move(block_ids, to_device=False)

    def swap_in(self, block_ids: Sequence[int]) -> list[BlockCopy] | None:
        """Move blocks to the device pool. None (and nothing changed) if it has too little room."""
        return self._move(block_ids, to_device=True)

    def _move(self, block_ids: Sequence[int], *, to_device: bool) -> list[BlockCopy] | None:
        source, target = (
            (self._free_host, self._free_device)
            if to_device
            else (self._free_device, self._free_host)
        )
        self._check_live(block_ids)
        assert all(self._is_on_device[block_id] != to_device for block_id in block_ids), (
            f"already there: {block_ids}"
        )
        if len(block_ids) > len(target):
            return None
        copies = []
        for block_id, target_id in zip(block_ids, target.pop(len(block_ids)).tolist(), strict=True):
            copies.append(BlockCopy(self._physical_ids[block_id], target_id))
            self._physical_ids[block_id] = target_id
            self._is_on_device[block_id] = to_device
        source.push([copy.source for copy in copies])
        return copies

    def _check_live(self, block_ids: Sequence[int]) -> None:
        assert len(set(block_ids)) == len(block_ids), f"a block named twice: {block_ids}"
        if not all(map(self._ref_counts.__getitem__, block_ids)):
            raise KeyError(f"of the blocks {block_ids} some are nobody's")

    def check_invariants(self) -> None:
        assert min(self._ref_counts) >= 0, "fewer holders than none"
        live = [block_id for block_id, count in enumerate(self._ref_counts) if count]
        device, host = (
            [self._physical_ids[i] for i in live if self._is_on_device[i] is of_pool]
            for of_pool in (True, False)
        )
        for name, ids, free, all_ids in (
            ("device pool", device, self._free_device, range(1, self.num_device_blocks + 1)),
            ("host pool", host, self._free_host, range(self.num_host_blocks)),
            ("ids", live, self._free_blocks, range(1, len(self._ref_counts))),
        ):
            assert sorted([*ids, *free.ids()]) == list(all_ids), name
            assert len(free) == len(free.ids()), f"{name}: miscounted"
            assert all(free_id >= free._lowest for free_id in free.ids()), f"{name}: one is hidden"
