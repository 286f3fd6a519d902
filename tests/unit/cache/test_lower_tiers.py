"""Host tier, disk tier, and what lies between them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pico_vllm.cache.block_manager import BlockManager
from pico_vllm.cache.prefix_cache import PrefixCache
from pico_vllm.cache.tiers import disk as disk_module
from pico_vllm.cache.tiers.chain import MAX_KNOWN, KnownChains, chain_keys, root_key
from pico_vllm.cache.tiers.disk import ALIGNMENT, ENTRY_BYTES, HEADER_BYTES, DiskTier
from pico_vllm.cache.tiers.disk_thread import DiskThread
from pico_vllm.cache.tiers.host import HostTier
from pico_vllm.cache.tiers.lower import LowerTiers, TierCounters
from pico_vllm.errors import ConfigError
from pico_vllm.step import BlockCopies

BLOCK_BYTES = 5000
TOKENS_BYTES = 16
LAYOUT = {"block_size": 4, "dtype": "float32"}
ROOT = root_key(bytes(32), "")


def block(number: int) -> tuple[bytes, bytes, bytes, NDArray[np.uint8]]:
    """Key, parent, tokens and KV of one of a chain of blocks."""
    tokens = np.arange(4 * (number + 1), dtype=np.int32).tobytes()
    keys = [ROOT, *chain_keys(ROOT, tokens, TOKENS_BYTES)]
    kv = np.random.default_rng(number).integers(0, 256, BLOCK_BYTES, np.uint8)
    return keys[-1], keys[-2], tokens[-TOKENS_BYTES:], kv


def put(tiers: LowerTiers, number: int, device_id: int) -> None:
    key, parent, tokens, _ = block(number)
    tiers.put(parent, [key], tokens, [device_id])


def disk_of(folder: Path, *, num_records: int = 8, **others: Any) -> DiskTier:
    settings: dict[str, Any] = {
        "max_bytes": 2 * ALIGNMENT + num_records * (2 * ALIGNMENT + ENTRY_BYTES),
        "layout": LAYOUT,
        "identity": bytes(32),
        "block_tokens_bytes": TOKENS_BYTES,
        "block_bytes": BLOCK_BYTES,
    }
    return DiskTier(str(folder), **(settings | others))


def is_there(disk: DiskTier, number: int) -> bool:
    """Whether a block is read, and bit for bit."""
    key, parent, tokens, kv = block(number)
    out = np.zeros(BLOCK_BYTES, np.uint8)
    is_read = disk.read(key, parent, tokens, out)
    assert not is_read or np.array_equal(out, kv), "garbage"
    return is_read


def which(disk: DiskTier, count: int = 12) -> list[int]:
    return [number for number in range(count) if is_there(disk, number)]


def write(disk: DiskTier, *numbers: int) -> None:
    for number in numbers:
        assert disk.write(*block(number))


def test_chain_keys() -> None:
    """A key stands for all tokens before, for salt and model, and a part of a block has none."""
    tokens = np.arange(11, dtype=np.int32).tobytes()
    keys = chain_keys(ROOT, tokens, TOKENS_BYTES)
    assert len(keys) == 2 and keys[1:] == chain_keys(keys[0], tokens[16:], TOKENS_BYTES)
    others = [root_key(bytes(32), "salt"), root_key(b"m" * 32, "")]
    others = [chain_keys(root, tokens, TOKENS_BYTES)[1] for root in others]
    changed = chain_keys(ROOT, tokens[:3] + b"\1" + tokens[4:], TOKENS_BYTES)
    assert len({keys[0], keys[1], *others, *changed}) == 6


def test_host_slots() -> None:
    """The block whose last use is longest ago goes, no pinned one does, and the slot of one that
    was dropped is free when the last pin goes."""
    gone: list[bytes] = []
    host = HostTier(2, lambda block: gone.append(block.key))
    blocks = [host.take(bytes([i]), b"", b"t") for i in range(2)]
    assert host.take(b"x", b"", b"t") is None, "both are pinned by who fills them"
    assert host.find(b"\0", b"t") is None
    for each in blocks:
        assert each is not None
        each.is_ready = True
        host.unpin(each)
    first, second = (host.find(bytes([i]), b"t") for i in range(2))
    assert first is not None and second is not None and host.find(b"\0", b"u") is None
    host.use([first.key])
    third = host.take(b"x", b"", b"t")
    assert third is not None and third.slot == second.slot and gone == [b"\1"]
    assert host.get(second.key) is None
    host.pin(first)
    host.clear()
    host.check_invariants()
    assert len(host) == 0 and host.take(b"y", b"", b"t") is None
    host.unpin(first)
    assert host.take(b"y", b"", b"t") is not None
    host.check_invariants()


def test_disk_round_trip_and_size(tmp_path: Path) -> None:
    """What was written is read bit for bit; the block whose last use is longest ago makes room, and
    the file grows no further."""
    disk = disk_of(tmp_path, num_records=3)
    write(disk, 0, 1, 2)
    assert not disk.write(*block(1)) and len(disk) == 3
    assert which(disk) == [0, 1, 2]
    assert is_there(disk, 0)
    write(disk, 3, 4)
    assert which(disk) == [0, 3, 4]
    for number in range(5, 12):
        write(disk, number)
    limit = 2 * ALIGNMENT + 3 * (2 * ALIGNMENT + ENTRY_BYTES)
    assert disk.path.stat().st_size <= limit
    key, parent, tokens, _ = block(11)
    out = np.zeros(BLOCK_BYTES, np.uint8)
    for wrong in ((key, ROOT, tokens), (key, parent, b"x" * TOKENS_BYTES)):
        assert not disk.read(*wrong, out), "of another chain"
        assert not is_there(disk, 11)
        write(disk, 11)
    disk.close()


def test_disk_after_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All records are there again, in the order in which they were written, and more are taken in
    their turn; after `clear` none is."""
    disk = disk_of(tmp_path, num_records=4)
    write(disk, 5, 0, 1, 2, 3)
    disk.close()
    disk = disk_of(tmp_path, num_records=4)
    assert len(disk) == 4
    write(disk, 4)
    assert which(disk) == [1, 2, 3, 4]
    disk.clear()
    assert which(disk) == []
    write(disk, 7)
    disk.close()
    disk = disk_of(tmp_path, num_records=4)
    assert which(disk) == [7]
    assert not caplog.records
    disk.close()


def test_disk_in_use(tmp_path: Path) -> None:
    """A second engine of the same model is refused, and one of another has a file of its own."""
    disk = disk_of(tmp_path)
    with pytest.raises(ConfigError, match="in use by another engine"):
        disk_of(tmp_path)
    write(disk, 1)
    other = disk_of(tmp_path, identity=b"o" * 32)
    assert which(other) == [] and other.path != disk.path
    other.close()
    disk.close()


RECORDS_AT = 2 * ALIGNMENT


def flip(at: int) -> Callable[[bytearray], None]:
    def damage(file: bytearray) -> None:
        file[at] ^= 4

    return damage


def cut(at: int) -> Callable[[bytearray], None]:
    def damage(file: bytearray) -> None:
        del file[at:]

    return damage


def unwritten(file: bytearray) -> None:
    """As after a crash that lost the first page."""
    file[:HEADER_BYTES] = bytes(HEADER_BYTES)


def foreign(file: bytearray) -> None:
    file[:] = b"#!/bin/sh\necho the only copy of somebody's work\n" * 400


DAMAGES: dict[str, tuple[Callable[[bytearray], None], list[int]]] = {
    "KV of one": (flip(RECORDS_AT + 2 * ALIGNMENT + 700), [0, 2]),
    "tokens of one": (flip(RECORDS_AT + 3), [1, 2]),
    "an entry's key": (flip(HEADER_BYTES + 7), [1, 2]),
    "an entry's checksum": (flip(HEADER_BYTES + 2 * ENTRY_BYTES - 1), [0, 2]),
    "the header's layout": (flip(80), []),
    "the header's version": (flip(8), []),
    "the magic": (flip(0), []),
    "half of the last record": (cut(RECORDS_AT + 5 * ALIGNMENT), [0, 1]),
    "all records": (cut(RECORDS_AT), []),
    "half of the table": (cut(HEADER_BYTES + ENTRY_BYTES + 40), []),
    "half of the header": (cut(100), []),
    "half of the magic": (cut(4), []),
    "a header that was never written": (unwritten, []),
    "everything": (cut(0), []),
    "a file of somebody else's": (foreign, []),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_disk_damage(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever happened to the file, what is not whole is a miss, the rest is there, it is said
    once, and a file that is not ours keeps its bytes."""
    disk = disk_of(tmp_path)
    write(disk, 0, 1, 2)
    path = disk.path
    disk.close()
    file = bytearray(path.read_bytes())
    change, wanted = DAMAGES[damage]
    change(file)
    path.write_bytes(file)
    disk = disk_of(tmp_path)
    assert which(disk) == wanted
    assert len(caplog.records) == (damage != "everything")
    is_ours = damage not in ("the magic", "a file of somebody else's")
    assert disk.is_alive is is_ours
    assert disk.write(*block(9)) is is_ours and is_there(disk, 9) is is_ours
    assert which(disk, 8) == wanted
    disk.close()
    if not is_ours:
        assert path.read_bytes() == file


@pytest.mark.parametrize("call", ["pwritev", "preadv", "short"])
def test_disk_errors(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk, or an error of the system, ends the tier with one line: it holds nothing from
    then on, and nothing raises."""

    def failing(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    disk = disk_of(tmp_path)
    write(disk, 0, 1)
    name = "pwritev" if call == "short" else call
    monkeypatch.setattr(disk_module.os, name, (lambda *_: 17) if call == "short" else failing)
    key, parent, tokens, kv = block(2)
    if call == "preadv":
        assert not is_there(disk, 0)
    assert not disk.write(key, parent, tokens, kv)
    assert not disk.is_alive and which(disk) == [] and not disk.contains(key)
    disk.clear()
    disk.close()
    assert [each.message.split()[0] for each in caplog.records] == ["kv_disk_disabled"]
    monkeypatch.undo()
    disk = disk_of(tmp_path)
    assert 0 in which(disk) and 2 not in which(disk)
    disk.close()


def test_disk_settings_that_are_refused(tmp_path: Path) -> None:
    """Each names the setting and the way out."""
    with pytest.raises(ConfigError, match="one block takes 8192; raise it"):
        disk_of(tmp_path, max_bytes=8000)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=rf"kv_disk_path {file} must .* it is a file; name anot"):
        disk_of(file)
    with pytest.raises(ConfigError, match=rf"{file}/a/b must .*, and {file} is a file; name an"):
        disk_of(file / "a" / "b")
    with pytest.raises(ConfigError, match=r"kv_disk_path /proc/kv cannot be written to: .*; name"):
        disk_of(Path("/proc/kv"))
    assert os.listdir(tmp_path) == ["file"]
    disk = disk_of(tmp_path / "kv")
    disk.close()
    path = disk.path
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match=rf"{path} cannot be opened: Is a directory; move it awa"):
        disk_of(tmp_path / "kv")
    path.rmdir()
    path.symlink_to(tmp_path / "nowhere" / "file")
    with pytest.raises(ConfigError, match=rf"{path} cannot be opened: No such file or directory; "):
        disk_of(tmp_path / "kv")


def test_a_size_that_no_file_can_have_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before what is there goes for it."""
    disk = disk_of(tmp_path)
    write(disk, 0)
    disk.close()
    before = disk.path.read_bytes()
    truncate = os.ftruncate

    def limited(fd: int, size: int) -> None:
        if size > 10**6:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        truncate(fd, size)

    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", limited)
        with pytest.raises(
            ConfigError, match=r"kv_disk_gb gives a file of .* GiB, more than .* to"
        ):
            disk_of(tmp_path, max_bytes=10**9)
    assert disk.path.read_bytes() == before
    disk = disk_of(tmp_path)
    assert which(disk) == [0]
    disk.close()


def test_a_folder_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """~ is who runs it, as a shell has it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    disk = disk_of(Path("~/kv"))
    assert disk.path.parent == tmp_path / "kv"
    disk.close()


def test_reads_come_before_writes() -> None:
    """Whoever waits for a read does not wait for the writes in line, and a job that raises stops
    nothing."""
    thread = DiskThread(is_threaded=False)
    order: list[str] = []
    for name in ("a", "b"):
        thread.write(lambda name=name: order.append(f"write {name}"), lambda: None)
    thread.read(lambda: 1 / 0, lambda: order.append("done"))
    thread.read(lambda: order.append("read"), lambda: None)
    thread.poll()
    assert order == ["read", "write a", "write b", "done"]


def tiers_of(num_host_blocks: int, folder: Path | None = None, **others: Any) -> LowerTiers:
    return LowerTiers(
        num_host_blocks,
        block_size=4,
        disk=None if folder is None else disk_of(folder),
        host_memory=np.zeros((num_host_blocks, BLOCK_BYTES), np.uint8),
        is_threaded=False,
        **others,
    )


def test_a_store_is_found_once_it_is_committed(tmp_path: Path) -> None:
    """Neither before nor after a failed step; what was stored goes to disk, and comes back."""
    tiers = tiers_of(3, tmp_path)
    memory = tiers._memory
    assert memory is not None
    keys = [block(number)[0] for number in range(3)]
    tokens = b"".join(block(number)[2] for number in range(3))
    for number in range(4):
        put(tiers, number, number + 7)
    assert tiers.counters.num_lost_blocks == 1, "all slots are being filled"
    stores, loads = tiers.take_transfers(4)
    assert [copy.source for copy in stores] == [7, 8, 9] and not loads
    for number, copy in enumerate(stores):
        memory[copy.target] = block(number)[3]
    assert tiers.num_found(keys, tokens) == (0, 0)
    tiers.stored(3)
    assert tiers.num_found(keys, tokens) == (0, 0)
    tiers.stored(4)
    tiers.check_invariants()
    assert tiers.num_found(keys, tokens) == (3, 3)
    assert tiers.num_found(keys, tokens[::-1]) == (0, 0), "other tokens"
    assert tiers.poll() == [] and tiers.counters.num_written_blocks == 2
    assert tiers.counters.num_unwritten_blocks == 1, "half of the slots wait for the disk"
    put(tiers, 3, 3)
    tiers.take_transfers(5)
    tiers.drop_transfers()
    tiers.check_invariants()
    assert tiers.num_found(keys, tokens) == (0, 3), "the first made room for one that failed"
    memory[:] = 0
    fetch = tiers.begin_fetch(ROOT, keys[:2], tokens[: 2 * TOKENS_BYTES])
    assert fetch is not None and tiers.poll() == [fetch]
    assert tiers.num_found(keys, tokens) == (3, 3)
    found = tiers.pin(keys[:1])
    assert np.array_equal(memory[found[0].slot], block(0)[3])
    load = tiers.begin_load(found, [5])
    assert tiers.take_transfers(6) == (BlockCopies([], []), BlockCopies([found[0].slot], [5]))
    assert tiers.take_loaded((5,)) == [] and tiers.take_loaded((6,)) == [load]
    assert tiers.take_origins(load) == [True] and tiers.stats().so_far.num_dropped_blocks == 1
    again = tiers.begin_load(tiers.pin(keys[:1]), [5])
    tiers.take_transfers(7)
    assert tiers.take_loaded((7,)) == [again] and tiers.take_origins(again) == [False]
    tiers.clear()
    tiers.check_invariants()
    assert tiers.is_empty and tiers.num_found(keys, tokens) == (0, 0)
    tiers.close()


def test_where_evicted_blocks_go(tmp_path: Path) -> None:
    """From the device down or nowhere, from host memory down where the disk has them, from the disk
    away."""
    tiers = tiers_of(2, tmp_path, block_bytes=BLOCK_BYTES)
    for number in range(12):
        for each in {number, max(0, number - 1)}:  # the one before is there already
            put(tiers, each, 1)
        tiers.take_transfers(number)
        tiers.stored(number)
        if number != 5:
            tiers.poll()  # writes it
    moved = tiers.stats().so_far
    tiers.check_invariants()
    assert (moved.num_lowered_blocks, moved.num_stored_blocks, moved.num_lost_blocks) == (23, 12, 0)
    assert (moved.num_written_blocks, moved.num_unwritten_blocks) == (11, 1)
    assert (moved.num_host_evicted_blocks, moved.num_host_lost_blocks) == (10, 1)
    assert moved.num_disk_evicted_blocks == 11 - 8 and tiers.stats().block_bytes == BLOCK_BYTES
    tiers.close()


def test_nothing_is_written_after_a_reset(tmp_path: Path) -> None:
    """What waited for the disk when all was forgotten does not get there."""
    tiers = tiers_of(4, tmp_path)
    assert tiers.disk is not None
    put(tiers, 0, 1)
    tiers.take_transfers(1)
    tiers.stored(1)
    tiers.clear()
    tiers.poll()
    assert tiers.is_empty and not tiers.disk.contains(block(0)[0])
    tiers.check_invariants()
    tiers.close()


def test_a_damaged_record_ends_the_hit(tmp_path: Path) -> None:
    """Those before it come up, and it is asked for no more."""
    tiers = tiers_of(4, tmp_path)
    assert tiers.disk is not None
    write(tiers.disk, 0, 1, 2)
    with tiers.disk.path.open("r+b") as file:
        file.seek(RECORDS_AT + 2 * ALIGNMENT + 700)
        file.write(b"damaged")
    keys = [block(number)[0] for number in range(3)]
    tokens = b"".join(block(number)[2] for number in range(3))
    assert tiers.num_found(keys, tokens) == (0, 3)
    assert tiers.begin_fetch(ROOT, keys, tokens) is not None and len(tiers.poll()) == 1
    assert tiers.num_found(keys, tokens) == (1, 1)
    assert (tiers.counters.num_read_blocks, tiers.counters.num_failed_reads) == (2, 1)
    found = tiers.stats()
    assert (found.so_far.num_damaged_blocks, found.num_disk_cached_blocks) == (1, 2)
    assert (found.num_host_cached_blocks, found.num_host_blocks, found.num_disk_blocks) == (2, 4, 8)
    assert found.since(found) == replace(found, so_far=TierCounters())
    tiers.check_invariants()
    tiers.close()


def test_evicted_blocks_are_named_by_all_their_tokens() -> None:
    """Whatever edges were cut and in whichever order blocks go, each is put under the key of its
    tokens and those before it, and tails are not."""
    tiers = tiers_of(64)
    blocks = BlockManager(16)
    cache = PrefixCache(blocks, block_size=4, cow_min_tokens=1, tiers=tiers)
    random = np.random.default_rng(3)
    wanted: dict[bytes, int] = {}
    for _ in range(60):
        ids = random.integers(0, 2, int(random.integers(1, 30))).astype(np.int32)
        tokens, salt = ids.tobytes(), str(random.choice(["", "salt"]))
        match = cache.match(tokens, len(ids), salt)
        lease = cache.acquire(match.without_copy(), salt, 0)
        own = cache.allocate(-(-len(ids) // 4) - len(match.block_ids))
        assert own is not None
        held = [*match.block_ids, *own]
        first, last = lease.num_blocks, int(random.integers(0, len(ids) // 4 + 1))
        if last > first and random.random() < 0.8:  # by who knows the keys, or does not
            keys = cache.chain(tokens, salt)[first:last] if random.random() < 0.5 else None
            cache.publish(lease, tokens[16 * first : 16 * last], held[first:last], keys)
        cache.release(lease, held, tokens[16 * lease.num_blocks :])
        for block_id in cache.block_ids():
            assert blocks.ref_count(block_id) == 1
        wanted.update(dict.fromkeys(cache.chain(tokens, salt), 1))
        cache.check_invariants()
        tiers.take_transfers(0)
        tiers.stored(0)
    assert cache.num_evicted_blocks > 50 and len(tiers.host) > 30
    assert wanted.keys() >= tiers.host._blocks.keys()
    for each in tiers.host._blocks.values():
        assert chain_keys(each.parent, each.tokens, TOKENS_BYTES) == [each.key]


class CountedKeys:
    """How many keys were made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr("pico_vllm.cache.prefix_cache.chain_keys", self._make)
        monkeypatch.setattr("pico_vllm.cache.tiers.chain.chain_keys", self._make)

    def _make(self, parent: bytes, tokens: bytes, block_bytes: int) -> list[bytes]:
        keys = chain_keys(parent, tokens, block_bytes)
        self.count += len(keys)
        return keys

    def take(self) -> int:
        count, self.count = self.count, 0
        return count


@pytest.mark.parametrize("seed", range(4))
def test_known_chains_equal_those_made_anew(seed: int) -> None:
    """Of prompts that begin like others, go on where they ended, part within a block or come
    again, under two salts, more of them than are kept."""
    random, chains = np.random.default_rng(seed), KnownChains(TOKENS_BYTES)
    texts = [b""]
    for _ in range(400):
        begin = texts[int(random.integers(0, len(texts)))]
        begin = begin[: int(random.integers(0, len(begin) + 1)) // 4 * 4]
        own = random.integers(0, 2, int(random.integers(0, 12))).astype(np.int32).tobytes()
        texts = [*texts[-30:], begin + own]
        root = root_key(bytes(32), str(random.choice(["", "salt"])))
        assert chains.keys(root, texts[-1]) == chain_keys(root, texts[-1], TOKENS_BYTES)
        assert len(chains._known) <= MAX_KNOWN


def test_a_conversation_makes_the_keys_of_its_own_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside others with the same header, whose turns come in between."""
    made, chains = CountedKeys(monkeypatch), KnownChains(TOKENS_BYTES)
    header = np.arange(16, dtype=np.int32).tobytes()  # four blocks
    talks = [header + bytes([number]) * 32 for number in range(8)]
    for talk in talks:
        chains.keys(ROOT, talk)
    assert made.take() == 4 + 8 * 2, "the header once"
    for talk in talks:
        chains.keys(ROOT, talk + bytes([9]) * 48)
        assert made.take() == 3
        chains.keys(ROOT, talk + bytes([9]) * 48)
        assert made.take() == 0, "it comes again"
    chains.keys(bytes(32), talks[0])
    assert made.take() == 6, "of another root"


def test_keys_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a prompt that is looked up, and no more when it is published, evicted, loaded, cut, and
    evicted again; what follows it adds its own."""
    made = CountedKeys(monkeypatch)
    tiers = tiers_of(64)
    blocks = BlockManager(16)
    cache = PrefixCache(blocks, block_size=4, cow_min_tokens=1, tiers=tiers)
    tokens = np.arange(34, dtype=np.int32).tobytes()  # eight blocks and a tail

    def commit(number: int, loaded: tuple[int, ...] = ()) -> None:
        tiers.take_transfers(number)
        cache.transferred(number, loaded)
        cache.check_invariants()
        made.take()  # what the check made

    def crowd_out(count: int) -> list[bytes]:
        """Returns the keys of what goes down."""
        seen: list[bytes] = []
        with monkeypatch.context() as patch:
            put_below = tiers.put

            def put(parent: bytes, keys: list[bytes], *others: Any) -> None:
                seen.extend(keys)
                put_below(parent, keys, *others)

            patch.setattr(tiers, "put", put)
            taken = cache.allocate(blocks.num_free_device_blocks + count)
        assert taken is not None
        blocks.free(taken)
        return seen

    def load(number: int, num_blocks: int) -> None:
        match = cache.match(tokens, 4 * num_blocks, "")
        assert cache.begin_load(match, "", 0, tokens, keys[:num_blocks]) is not None
        tiers.take_transfers(number)
        cache.transferred(number, (number,))

    keys = cache.chain(tokens, "")
    assert made.take() == 8
    lease = cache.acquire(cache.match(tokens, 34, ""), "", 0)
    held = cache.allocate(9)
    assert held is not None
    for first, last in ((0, 3), (3, 7)):
        of_these = tokens[16 * first : 16 * last]
        cache.publish(lease, of_these, held[first:last], keys[first:last])
    assert made.take() == 0
    commit(0)
    cache.release(lease, held, tokens[16 * 7 :])
    # The tail and the block that nobody gave a key for, then a part of an edge.
    assert crowd_out(4) == [keys[7], keys[5], keys[6]] and made.take() == 1
    assert crowd_out(1) == [keys[4]] and made.take() == 0
    commit(1)
    load(2, 6)
    assert made.take() == 0
    commit(3)
    # Cut where another goes on, which has a block of its own there.
    other = tokens[: 16 * 5] + b"x" * 16
    lease = cache.acquire(cache.match(other, 20, "").without_copy(), "", 0)
    own = cache.allocate(1)
    assert own is not None and lease.num_blocks == 5
    cache.release(lease, [*cache.match(other, 20, "").block_ids, *own], other[16 * 5 :])
    assert made.take() == 0
    load(4, 8)  # after the part that the cut left
    assert made.take() == 0
    commit(5)
    down = crowd_out(cache.num_available_blocks - blocks.num_free_device_blocks)
    assert made.take() == 1, "the other's"
    assert sorted(down) == sorted({*keys, *cache.chain(other, "")})


def test_loads_are_trusted_until_their_end_is_known() -> None:
    """Published by a plan that awaits them, beside others that wait or that no plan has yet."""
    tiers, blocks = tiers_of(64), BlockManager(16)
    cache = PrefixCache(blocks, block_size=4, tiers=tiers)
    prompts = [(np.arange(12, dtype=np.int32) + 100 * number).tobytes() for number in range(3)]
    for tokens in prompts:
        lease = cache.acquire(cache.match(tokens, 12, ""), "", 0)
        held = cache.allocate(3)
        assert held is not None
        cache.release(lease, held, tokens)
    taken = cache.allocate(16)
    assert taken is not None
    blocks.free(taken)
    tiers.take_transfers(0)
    cache.transferred(0, ())

    def begin(tokens: bytes) -> None:
        assert cache.begin_load(cache.match(tokens, 12, ""), "", 0, tokens, cache.chain(tokens, ""))

    begin(prompts[0])
    assert cache.publish_loading() == [] and not cache.trusts_loads, "no plan has it"
    tiers.take_transfers(1)
    assert not cache.trusts_loads
    assert len(cache.publish_loading()) == 1 and cache.trusts_loads
    assert len(cache.match(prompts[0], 12, "").block_ids) == 3
    begin(prompts[1])
    assert cache.trusts_loads, "beside one that no plan has"
    tiers.take_transfers(2)
    assert cache.trusts_loads, "beside one under way"
    cache.check_invariants()
    assert cache.transferred(1, (1,)) == [] and not cache.trusts_loads
    assert len(cache.publish_loading()) == 1 and cache.trusts_loads
    assert cache.drop_transfers() == [] and not cache.trusts_loads
    cache.check_invariants()
