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
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NULL_BLOCK = 0


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """One block's KV has to move from physical id `source` of one pool to `target` of the other."""

    source: int
    target: int


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
        while missing > 0:
            assert at < len(self._is_free), "fewer ids are free than were counted"
            width = max(self._WINDOW, 2 * missing)
            found = np.flatnonzero(self._is_free[at : at + width])[:missing] + at
            parts.append(found)
            missing -= len(found)
            at += width
        ids = parts[-1] if len(parts) == 2 else np.concatenate(parts)
        if count:
            self._is_free[ids] = False
            self._lowest = int(ids[-1]) + 1
            self._count -= count
        return ids

    def push(self, ids: NDArray[np.int64]) -> None:
        if len(ids):
            self._is_free[ids] = True
            self._lowest = min(self._lowest, int(ids.min()))
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
        # By logical id; arrays, since a long prompt has hundreds of blocks.
        self._ref_counts = np.zeros(size, np.int32)
        self._is_on_device = np.zeros(size, np.bool_)
        self._physical_ids = np.zeros(size, np.int64)

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
        blocks = self._free_blocks.pop(count)
        self._ref_counts[blocks] = 1
        self._is_on_device[blocks] = True
        self._physical_ids[blocks] = self._free_device.pop(count)
        block_ids: list[int] = blocks.tolist()
        return block_ids

    def share(self, block_ids: Sequence[int]) -> None:
        """Count one more holder of each block, each named once."""
        self._ref_counts[self._live(block_ids)] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Count one holder less of each block, each named once; a block that nobody holds goes back
        to its pool."""
        blocks = self._live(block_ids)
        self._ref_counts[blocks] -= 1
        gone = blocks[self._ref_counts[blocks] == 0]
        is_on_device = self._is_on_device[gone]
        self._free_device.push(self._physical_ids[gone[is_on_device]])
        self._free_host.push(self._physical_ids[gone[~is_on_device]])
        self._free_blocks.push(gone)

    def ref_count(self, block_id: int) -> int:
        """Holders of a block; 0 once it is gone."""
        return int(self._ref_counts[block_id])

    def is_on_device(self, block_id: int) -> bool:
        return bool(self._is_on_device[self._live([block_id])[0]])

    def device_ids(self, block_ids: Sequence[int]) -> list[int]:
        """Physical device ids, for block tables and slots."""
        blocks = self._live(block_ids)
        assert self._is_on_device[blocks].all(), (
            f"a request may not compute on host blocks: {block_ids}"
        )
        physical_ids: list[int] = self._physical_ids[blocks].tolist()
        return physical_ids

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
        blocks = self._live(block_ids)
        assert (self._is_on_device[blocks] != to_device).all(), f"already there: {block_ids}"
        if len(blocks) > len(target):
            return None
        sources, targets = self._physical_ids[blocks], target.pop(len(blocks))
        source.push(sources)
        self._physical_ids[blocks] = targets
        self._is_on_device[blocks] = to_device
        return [BlockCopy(*pair) for pair in zip(sources.tolist(), targets.tolist(), strict=True)]

    def _live(self, block_ids: Sequence[int]) -> NDArray[np.int64]:
        assert len(set(block_ids)) == len(block_ids), f"a block named twice: {block_ids}"
        blocks = np.array(block_ids, np.int64)
        if (self._ref_counts[blocks] <= 0).any():
            raise KeyError(f"of the blocks {block_ids} some are nobody's")
        return blocks

    def check_invariants(self) -> None:
        assert (self._ref_counts >= 0).all(), "fewer holders than none"
        live = np.flatnonzero(self._ref_counts)
        is_on_device = self._is_on_device[live]
        device, host = (
            self._physical_ids[live[of_pool]].tolist() for of_pool in (is_on_device, ~is_on_device)
        )
        for name, ids, free, all_ids in (
            ("device pool", device, self._free_device, range(1, self.num_device_blocks + 1)),
            ("host pool", host, self._free_host, range(self.num_host_blocks)),
            ("ids", live.tolist(), self._free_blocks, range(1, len(self._ref_counts))),
        ):
            assert sorted([*ids, *free.ids()]) == list(all_ids), name
            assert len(free) == len(free.ids()), f"{name}: miscounted"
            assert all(free_id >= free._lowest for free_id in free.ids()), f"{name}: one is hidden"
