"""LowerTiers: KV of whole blocks below the device, in host memory and on disk. Host only: it says
what is to be copied, and runners copy.

    device pool -- stores --> host slots -- written by the disk thread --> disk
                <-- loads --             <-- read by the disk thread --

Blocks are found by their chain keys. A block that is evicted from the device gets a host slot, and
the next plan stores it there, before anybody writes to the device block. Once that plan is
committed the block can be found, and is written to disk in the background. What is on disk alone is
read into host slots first (`Fetch`), then loaded (`Load`).

Owner of: what is under way between the tiers, and the host tier's pins. Invariant: a host slot is
pinned from when a copy to or from it is asked for until that is known to be done; a block that a
copy has not filled, or whose copy may have failed, is never found.

Failures: without a free slot a block is lost as it would be without tiers; a read that fails, or
finds damage, makes that block and those after it a miss; after a step that failed everything under
way is forgotten (`drop_transfers`), which the runner has let end by then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pico_vllm.cache.tiers.chain import Key
from pico_vllm.cache.tiers.disk_thread import DiskThread
from pico_vllm.cache.tiers.host import HostBlock, HostTier
from pico_vllm.step import BlockCopies

CLOSING_TIME_S = 5.0
"""For what is still to be written when an engine ends."""


class Disk(Protocol):
    """What is asked of the tier below host memory: cache/tiers/disk.py has the real one."""

    is_alive: bool
    num_records: int
    num_evicted: int
    num_damaged: int

    def __len__(self) -> int: ...

    def contains(self, key: Key) -> bool: ...

    def write(
        self, key: Key, parent: Key, tokens: bytes, kv: NDArray[np.uint8],
        is_wanted: Callable[[], bool],
    ) -> bool: ...  # fmt: skip

    def read(self, key: Key, parent: Key, tokens: bytes, out: NDArray[np.uint8]) -> bool: ...

    def clear(self) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class Fetch:
    """Blocks on their way from disk to host slots, and those before them, so that they stay."""

    blocks: list[HostBlock]
    num_reads: int = 0
    """Under way."""


@dataclass(slots=True, eq=False)
class Load:
    """Blocks on their way from host slots to the device."""

    blocks: list[HostBlock]
    device_ids: list[int]
    plan_number: int = -1
    """That of the plan that has the copies."""


@dataclass(slots=True)
class TierCounters:
    """Since the tiers began. As a part of TierStats it is not written to."""

    num_lowered_blocks: int = 0
    """Evicted from the device, and in host memory then: stored, or there already."""
    num_stored_blocks: int = 0
    """Device to host."""
    num_loaded_blocks: int = 0
    """Host to device."""
    num_written_blocks: int = 0
    """Host to disk."""
    num_read_blocks: int = 0
    """Disk to host."""
    num_lost_blocks: int = 0
    """Evicted from the device while every host slot was in use."""
    num_host_evicted_blocks: int = 0
    """From host memory, for others."""
    num_host_lost_blocks: int = 0
    """Those of them that are not on disk."""
    num_unwritten_blocks: int = 0
    """Not written to disk, which was behind."""
    num_dropped_blocks: int = 0
    """Whose store was under way when a step failed."""
    num_failed_reads: int = 0
    """Not there any more, or damaged."""
    num_disk_evicted_blocks: int = 0
    num_damaged_blocks: int = 0
    """Found damaged on disk."""

    def since(self, before: TierCounters) -> TierCounters:
        names = self.__dataclass_fields__
        return TierCounters(**{name: getattr(self, name) - getattr(before, name) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """What the tiers below the device did so far, and what they are now. All zero without."""

    so_far: TierCounters = field(default_factory=TierCounters)
    block_bytes: int = 0
    num_host_blocks: int = 0
    """That host memory has room for; 0 is no such tier."""
    num_host_cached_blocks: int = 0
    num_disk_blocks: int = 0
    """That the disk has room for; 0 is no such tier."""
    num_disk_cached_blocks: int = 0

    def since(self, before: TierStats) -> TierStats:
        """What was counted after `before`; what is now stays."""
        return replace(self, so_far=self.so_far.since(before.so_far))


class LowerTiers:
    def __init__(
        self,
        num_host_blocks: int,
        *,
        block_size: int,
        block_bytes: int = 0,
        identity: bytes = b"",
        min_host_tokens: int | None = 1,
        min_disk_tokens: int | None = 1,
        disk: Disk | None = None,
        host_memory: NDArray[np.uint8] | None = None,
        is_threaded: bool = True,
    ) -> None:
        """min_..._tokens: from how many on bringing them up takes less time than computing them;
        None is never. host_memory: [blocks, bytes], which the disk's thread reads and writes."""
        assert disk is None or host_memory is not None
        self.identity = identity
        self.block_bytes = block_bytes
        self.host = HostTier(num_host_blocks, self._note_evicted)
        self.disk = disk
        self._memory = host_memory
        self._block_size = block_size
        self._min_host_tokens = min_host_tokens
        self._min_disk_tokens = min_disk_tokens
        self._thread = DiskThread(is_threaded=is_threaded) if disk is not None else None
        self._new_stores: list[tuple[HostBlock, int]] = []
        self._stores: dict[int, list[HostBlock]] = {}
        """By the number of the plan that has the copies."""
        self._new_loads: list[Load] = []
        self._loads: list[Load] = []
        self._fetches: list[Fetch] = []
        self._ended_fetches: list[Fetch] = []
        self.counters = TierCounters()

    def stats(self) -> TierStats:
        disk = self.disk
        counted = replace(self.counters)
        if disk is not None:
            counted.num_disk_evicted_blocks = disk.num_evicted
            counted.num_damaged_blocks = disk.num_damaged
        return TierStats(
            so_far=counted,
            block_bytes=self.block_bytes,
            num_host_blocks=self.host.num_blocks,
            num_host_cached_blocks=len(self.host),
            num_disk_blocks=0 if disk is None else disk.num_records,
            num_disk_cached_blocks=0 if disk is None else len(disk),
        )

    def _note_evicted(self, block: HostBlock) -> None:
        self.counters.num_host_evicted_blocks += 1
        if self.disk is None or not self.disk.contains(block.key):
            self.counters.num_host_lost_blocks += 1

    # Down.

    def put(self, parent: Key, keys: list[Key], tokens: bytes, device_ids: list[int]) -> None:
        """Keep blocks that are evicted, and that follow each other: the next plan has the copies,
        before the device blocks are written again."""
        host, counters = self.host, self.counters
        if host.has_all(keys):  # as those that once came up
            host.use(keys)
            counters.num_lowered_blocks += len(keys)
            return
        size = len(tokens) // len(keys)
        for index, key in enumerate(keys):
            if host.get(key) is not None:
                host.use([key])
            else:
                of_block = tokens[index * size : (index + 1) * size]
                block = host.take(key, keys[index - 1] if index else parent, of_block)
                if block is None:
                    counters.num_lost_blocks += 1
                    continue
                self._new_stores.append((block, device_ids[index]))
            counters.num_lowered_blocks += 1

    def stored(self, plan_number: int) -> None:
        """The copies of a plan are done."""
        for block in self._stores.pop(plan_number, ()):
            self.counters.num_stored_blocks += 1
            block.is_ready = True
            if not block.is_dropped:
                self._write(block)
            self.host.unpin(block)

    def _write(self, block: HostBlock) -> None:
        """To disk, in the background. Where the disk is behind by half of the host's slots, which
        are pinned, it is let be."""
        disk, thread = self.disk, self._thread
        if disk is None or thread is None or not disk.is_alive or disk.contains(block.key):
            return
        if 2 * thread.num_writes >= self.host.num_blocks:
            self.counters.num_unwritten_blocks += 1
            return
        assert self._memory is not None
        self.host.pin(block)

        def job(kv: NDArray[np.uint8] = self._memory[block.slot]) -> None:
            # It may have been dropped meanwhile, as nobody trusts it any more.
            if disk.write(block.key, block.parent, block.tokens, kv, lambda: not block.is_dropped):
                self.counters.num_written_blocks += 1

        thread.write(job, partial(self.host.unpin, block))

    # Up.

    def num_found(self, keys: list[Key], tokens: bytes) -> tuple[int, int]:
        """How many of the first keys are in host slots; and how many there or on disk. tokens: of
        the keys' blocks."""
        num_host = num_any = self.host.num_found(keys, tokens)
        if self.disk is None or num_host == len(keys):
            return num_host, num_any
        size = len(tokens) // len(keys)
        for index, key in enumerate(keys[num_host:], num_host):
            of_block = tokens[index * size : (index + 1) * size]
            if self.host.find(key, of_block) is None and not self.disk.contains(key):
                break
            num_any += 1
        return num_host, num_any

    def pays_to_load(self, num_tokens: int) -> bool:
        return self._min_host_tokens is not None and num_tokens >= self._min_host_tokens

    def pays_to_fetch(self, num_tokens: int) -> bool:
        return self._min_disk_tokens is not None and num_tokens >= self._min_disk_tokens

    def begin_fetch(self, parent: Key, keys: list[Key], tokens: bytes) -> Fetch | None:
        """Read what is on disk alone of some keys that follow each other. None if there is no room
        for any."""
        assert self._thread is not None and self._memory is not None
        size = len(tokens) // len(keys)
        fetch = Fetch([])
        # Those before what is read must not go for it.
        for index, key in enumerate(keys):
            of_block = tokens[index * size : (index + 1) * size]
            block = self.host.get(key)
            if block is None:
                block = self.host.take(key, keys[index - 1] if index else parent, of_block)
                if block is None:
                    break
                block.is_from_disk = True
                fetch.num_reads += 1
                self._read(fetch, block)
            else:
                self.host.pin(block)
            fetch.blocks.append(block)
        if not fetch.num_reads:
            for block in fetch.blocks:
                self.host.unpin(block)
            return None
        self._fetches.append(fetch)
        return fetch

    def _read(self, fetch: Fetch, block: HostBlock) -> None:
        disk, thread = self.disk, self._thread
        assert disk is not None and thread is not None and self._memory is not None
        is_read = False

        def job(out: NDArray[np.uint8] = self._memory[block.slot]) -> None:
            nonlocal is_read
            is_read = disk.read(block.key, block.parent, block.tokens, out)

        def done() -> None:
            fetch.num_reads -= 1
            block.is_ready = is_read
            if is_read:
                self.counters.num_read_blocks += 1
            else:
                self.counters.num_failed_reads += 1
                self.host.drop(block)
            if not fetch.num_reads:
                for each in fetch.blocks:
                    self.host.unpin(each)
                self._fetches.remove(fetch)
                self._ended_fetches.append(fetch)

        thread.read(job, done)

    def poll(self) -> list[Fetch]:
        """Fetches that have ended, whatever they found."""
        if self._thread is None:
            return []
        self._thread.poll()
        ended, self._ended_fetches = self._ended_fetches, []
        return ended

    @property
    def is_empty(self) -> bool:
        return not len(self.host) and (self.disk is None or not len(self.disk))

    def wait_for_disk(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.wait(timeout_s)

    @property
    def num_fetches(self) -> int:
        return len(self._fetches) + len(self._ended_fetches)

    def pin(self, keys: list[Key]) -> list[HostBlock]:
        """Those in host slots, all of them, for a load that may follow."""
        return self.host.pin_ready(keys)

    def unpin(self, blocks: list[HostBlock]) -> None:
        self.host.unpin_all(blocks)

    def begin_load(self, blocks: list[HostBlock], device_ids: list[int]) -> Load:
        """Have the next plan copy pinned blocks to the device."""
        load = Load(blocks, device_ids)
        self._new_loads.append(load)
        return load

    def take_loaded(self, plan_numbers: tuple[int, ...]) -> list[Load]:
        """The loads of these plans, which are done."""
        if not plan_numbers:
            return []
        done = [load for load in self._loads if load.plan_number in plan_numbers]
        self._loads = [load for load in self._loads if load.plan_number not in plan_numbers]
        for load in done:
            self.counters.num_loaded_blocks += len(load.blocks)
            self.unpin(load.blocks)
        return done

    @staticmethod
    def take_origins(load: Load) -> list[bool]:
        """Which of its blocks were read from disk, and by nobody loaded before. Asked once."""
        found = [block.is_from_disk for block in load.blocks]
        for block in load.blocks:
            block.is_from_disk = False
        return found

    @property
    def num_loads_under_way(self) -> int:
        """Or asked for: their end is not known yet."""
        return len(self._loads) + len(self._new_loads)

    @property
    def has_new_loads(self) -> bool:
        """For the next plan."""
        return bool(self._new_loads)

    # Plans.

    @property
    def has_new_transfers(self) -> bool:
        return bool(self._new_stores or self._new_loads)

    def take_transfers(self, plan_number: int) -> tuple[BlockCopies, BlockCopies]:
        """Stores and loads that a plan is to have."""
        new = self._new_stores
        stores = BlockCopies([device_id for _, device_id in new], [block.slot for block, _ in new])
        if new:
            self._stores[plan_number] = [block for block, _ in new]
            self._new_stores = []
        slots: list[int] = []
        device_ids: list[int] = []
        for load in self._new_loads:
            load.plan_number = plan_number
            slots += [block.slot for block in load.blocks]
            device_ids += load.device_ids
        self._loads += self._new_loads
        self._new_loads = []
        return stores, BlockCopies(slots, device_ids)

    def drop_transfers(self) -> None:
        """Forget what is under way between device and host. All that runners were given of it has
        ended, well or not."""
        stores = [block for blocks in self._stores.values() for block in blocks]
        for block in (*stores, *(block for block, _ in self._new_stores)):
            self.counters.num_dropped_blocks += 1
            self.host.drop(block)
            self.host.unpin(block)
        for load in (*self._loads, *self._new_loads):
            self.unpin(load.blocks)
        self._stores, self._new_stores, self._loads, self._new_loads = {}, [], [], []

    def clear(self) -> None:
        """Forget all blocks, on disk too. What is under way ends, and nobody finds it."""
        for block, _ in self._new_stores:
            self.host.drop(block)
            self.host.unpin(block)
        self._new_stores = []
        self.host.clear()  # first: the thread asks whether a block was dropped
        if self.disk is not None:
            self.disk.clear()

    def room_to_save(self, timeout_s: float) -> int:
        """How many blocks may be put now so that all of them are written; waits for those before to
        be. 0 without a disk."""
        if self.disk is None or self._thread is None or not self.disk.is_alive:
            return 0
        self._thread.wait_until_idle(timeout_s)
        self._thread.poll()
        return max(1, self.host.num_blocks // 4) if not self._thread.num_writes else 0

    def close(self) -> None:
        """Write what is in line, for CLOSING_TIME_S."""
        if self._thread is not None:
            self._thread.close(CLOSING_TIME_S)
        if self.disk is not None:
            self.disk.close()

    def check_invariants(self) -> None:
        self.host.check_invariants()
        pinned = [block for blocks in self._stores.values() for block in blocks]
        pinned += [block for block, _ in self._new_stores]
        assert not any(block.is_ready for block in pinned), "found before it is filled"
        for transfer in (*self._loads, *self._new_loads, *self._fetches):
            pinned += transfer.blocks
        assert all(block.num_pins for block in pinned), "a slot that may be given away"
