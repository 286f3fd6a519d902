"""BlockManager: which KV block lies where, and how many hold it. Host only; it decides nothing.

A block has a logical id for life. It lies on the device or on the host, at a physical id of that
pool; requests compute on device blocks only. Physical device id 0 is the null block, which takes
padding and is never given to anybody.

Owner of: ref_count, residency and physical id of every block, and both free lists. Invariant
(`check_invariants`): each physical id is free or belongs to exactly one live block; live blocks
have ref_count >= 1; free + live = size, in both pools.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

NULL_BLOCK = 0


@dataclass(slots=True)
class _Block:
    ref_count: int
    is_on_device: bool
    physical_id: int


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """One block's KV has to move from physical id `source` of one pool to `target` of the other."""

    source: int
    target: int


class _FreeIds:
    """Physical ids nobody uses; the lowest comes first, which keeps live blocks close together, so
    that CPU attention reads long runs. Ids never used yet are above all that were: a range holds
    them, and the heap of the others stays small."""

    def __init__(self, fresh: range) -> None:
        self._fresh = fresh
        self._returned: list[int] = []

    def pop(self, count: int) -> list[int]:
        num_returned = min(count, len(self._returned))
        lowest = [heapq.heappop(self._returned) for _ in range(num_returned)]
        num_fresh = count - num_returned
        lowest += self._fresh[:num_fresh]
        self._fresh = self._fresh[num_fresh:]
        return lowest

    def push(self, physical_id: int) -> None:
        heapq.heappush(self._returned, physical_id)

    def __len__(self) -> int:
        return len(self._returned) + len(self._fresh)

    def __iter__(self) -> Iterator[int]:
        return chain(self._returned, self._fresh)


class BlockManager:
    def __init__(self, num_device_blocks: int, num_host_blocks: int = 0) -> None:
        """Usable blocks of each pool; the null block is not counted and lies before them on the
        device."""
        self.num_device_blocks = num_device_blocks
        self.num_host_blocks = num_host_blocks
        self._free_device = _FreeIds(range(1, num_device_blocks + 1))
        self._free_host = _FreeIds(range(num_host_blocks))
        self._blocks: dict[int, _Block] = {}
        self._next_id = 1

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
        block_ids = list(range(self._next_id, self._next_id + count))
        self._next_id += count
        blocks = [_Block(1, True, physical_id) for physical_id in self._free_device.pop(count)]
        self._blocks.update(zip(block_ids, blocks, strict=True))
        return block_ids

    def share(self, block_ids: Sequence[int]) -> None:
        """Count one more holder of each block."""
        for block_id in block_ids:
            self._blocks[block_id].ref_count += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Count one holder less of each block; a block that nobody holds goes back to its pool."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                free = self._free_device if block.is_on_device else self._free_host
                free.push(block.physical_id)
                del self._blocks[block_id]

    def ref_count(self, block_id: int) -> int:
        """Holders of a block; 0 once it is gone."""
        block = self._blocks.get(block_id)
        return 0 if block is None else block.ref_count

    def is_on_device(self, block_id: int) -> bool:
        return self._blocks[block_id].is_on_device

    def device_ids(self, block_ids: Sequence[int]) -> list[int]:
        """Physical device ids, for block tables and slots."""
        blocks = [self._blocks[block_id] for block_id in block_ids]
        assert all(block.is_on_device for block in blocks), (
            f"a request may not compute on host blocks: {block_ids}"
        )
        return [block.physical_id for block in blocks]

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
        moving = [self._blocks[block_id] for block_id in block_ids]
        assert all(block.is_on_device != to_device for block in moving), (
            f"already there: {block_ids}"
        )
        assert len(set(block_ids)) == len(block_ids), f"a block named twice: {block_ids}"
        if len(moving) > len(target):
            return None
        copies = []
        for block in moving:
            (target_id,) = target.pop(1)
            copies.append(BlockCopy(block.physical_id, target_id))
            source.push(block.physical_id)
            block.physical_id, block.is_on_device = target_id, to_device
        return copies

    def check_invariants(self) -> None:
        device = [block.physical_id for block in self._blocks.values() if block.is_on_device]
        host = [block.physical_id for block in self._blocks.values() if not block.is_on_device]
        assert all(block.ref_count >= 1 for block in self._blocks.values()), (
            "a block that nobody holds was kept"
        )
        assert sorted([*device, *self._free_device]) == list(
            range(1, self.num_device_blocks + 1)
        ), "device pool"
        assert sorted([*host, *self._free_host]) == list(range(self.num_host_blocks)), "host pool"
