"""DiskTier: blocks in one file, which outlives the process. Host only.

The file is a header, a table with an entry for each record, and the records: a block's tokens, then
its KV. The header names what the KV was computed with (`identity`) and its layout; a file of
another is begun anew, and a file that is not ours is left alone. An entry is written after its
record and taken back before another record is written there. Both have checksums, so what a crash,
a full disk or somebody else left half done is not found, or found to be damaged when it is read:
a miss. The file is read and written, not mapped: a mapped one that was truncated, or whose disk
fails, ends the process.

Owner of: the file and the order in which its records go. Invariant: an entry in memory is of a
record that was written whole by this process, or whose entry in the table was whole at start. An
error of the system disables the tier, with one line in the log: it holds nothing from then on, and
nobody else notices.

`read` and `write` are for one thread; `contains` may be asked by any, and `clear` waits for the
others.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from pico_vllm.cache.tiers.chain import Key
from pico_vllm.errors import ConfigError

logger = logging.getLogger(__name__)

MAGIC = b"PICOKV\r\n"
VERSION = 1
HEADER_BYTES = 4096
_HEADER = struct.Struct("<8sII32sQ")
"""Magic, version, bytes of the layout, identity, number of records. Then the layout, and a CRC."""
_ENTRY = struct.Struct("<32s32sQI")
"""Key, parent's key, number of the write, CRC of the record. Then a CRC of these."""
ENTRY_BYTES = _ENTRY.size + 4
ENTRIES_AT_ONCE = 1 << 14
_BLANK = bytes(ENTRY_BYTES)
ALIGNMENT = 4096


@dataclass(slots=True)
class _Record:
    index: int
    parent: Key
    crc: int


def num_records_in(max_bytes: int, block_tokens_bytes: int, block_bytes: int) -> int:
    """Blocks that a file of so many bytes holds.

    Raises:
        ConfigError: not one.
    """
    stride = _stride(block_tokens_bytes, block_bytes)
    num_records = (max_bytes - HEADER_BYTES - ALIGNMENT) // (stride + ENTRY_BYTES)
    if num_records < 1:
        raise ConfigError(
            f"kv_disk_gb gives {max_bytes} bytes, and one block takes {stride}; raise it",
            param="kv_disk_gb",
        )
    return num_records


def make_folder(path: str) -> Path:
    """That kv_disk_path names, if it is not there. Raises ConfigError where that cannot be."""
    try:
        folder = Path(path).expanduser()
    except RuntimeError as error:  # nobody's home
        raise ConfigError(f"kv_disk_path {path}: {error}", param="kv_disk_path") from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(folder, error) from error
    return folder


def _unusable(folder: Path, error: OSError) -> ConfigError:
    for each in (folder, *folder.parents):
        # Who may not look is told so by the error.
        with suppress(OSError):
            if each.exists() and not each.is_dir():
                what = "it is a file" if each == folder else f"{each} is a file"
                return ConfigError(
                    f"kv_disk_path {folder} must name a folder, and {what}; name another, or move "
                    "the file away",
                    param="kv_disk_path",
                )
    return ConfigError(
        f"kv_disk_path {folder} cannot be written to: {error.strerror}; name a folder of your own "
        "on a disk with room",
        param="kv_disk_path",
    )


def _stride(block_tokens_bytes: int, block_bytes: int) -> int:
    return -(-(block_tokens_bytes + block_bytes) // ALIGNMENT) * ALIGNMENT


class DiskTier:
    def __init__(
        self,
        folder: str,
        *,
        max_bytes: int,
        layout: Mapping[str, object],
        identity: bytes,
        block_tokens_bytes: int,
        block_bytes: int,
    ) -> None:
        """Find again what the folder has for this identity, or begin.

        layout: of a block, for people and for the header. max_bytes: of the file.

        Raises:
            ConfigError: the folder cannot be used, is in use, max_bytes hold no block, or no file
                there can be as large.
        """
        self._tokens_bytes, self._block_bytes = block_tokens_bytes, block_bytes
        self._stride = _stride(block_tokens_bytes, block_bytes)
        self.num_records = num_records_in(max_bytes, block_tokens_bytes, block_bytes)
        table_end = HEADER_BYTES + self.num_records * ENTRY_BYTES
        self._first = -(-table_end // ALIGNMENT) * ALIGNMENT
        self._records: OrderedDict[Key, _Record] = OrderedDict()
        """The one whose last use is longest ago first."""
        self._num_begun = 0
        """Places from here on were never used."""
        self._free: list[int] = []
        """Of the others."""
        self._num_writes = 0
        self._lock = threading.Lock()
        self._is_noted = False
        self.is_alive = True
        self.num_damaged = 0
        self.num_evicted = 0
        """Records that went for others."""
        name = sha256(identity + json.dumps(layout, sort_keys=True).encode()).hexdigest()[:16]
        self.path = make_folder(folder) / f"pico-vllm-{name}.kv"
        self._fd = self._open()
        try:
            self._find_again(self._header(layout, identity))
        except ConfigError:
            self.close()
            raise
        except OSError as error:
            self._disable(error)

    def _open(self) -> int:
        try:
            # Whoever reads the file reads the prompts.
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno in (errno.EISDIR, errno.ENOENT, errno.ELOOP):
                raise ConfigError(
                    f"{self.path} cannot be opened: {error.strerror}; move it away, or name "
                    "another kv_disk_path",
                    param="kv_disk_path",
                ) from error
            raise _unusable(self.path.parent, error) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise ConfigError(
                f"{self.path} is in use by another engine; name another kv_disk_path, or stop that "
                "one",
                param="kv_disk_path",
            ) from error
        return fd

    def _header(self, layout: Mapping[str, object], identity: bytes) -> bytes:
        text = json.dumps(layout, sort_keys=True).encode()
        fields = _HEADER.pack(MAGIC, VERSION, len(text), identity, self.num_records) + text
        header = fields + struct.pack("<I", crc32(fields))
        assert len(header) <= HEADER_BYTES, "a layout that is too long"
        return header.ljust(HEADER_BYTES, b"\0")

    def _find_again(self, header: bytes) -> None:
        found = os.pread(self._fd, HEADER_BYTES, 0)
        # What only the beginning of a file of ours, or none of it, was written to is no other's.
        is_ours = MAGIC.startswith(found[: len(MAGIC)]) or not any(found)
        if not is_ours:
            self._note("not a file of Pico-vLLM's, which is left alone: delete it to use this path")
            self.is_alive = False
            return
        if found != header:
            self._check_size()
            if found:
                self._note("of another version, model or size, or damaged: begun anew")
            os.ftruncate(self._fd, 0)
            self._write_all([header], 0)
            found = b""
        if found:
            self._read_table()
        taken = {record.index for record in self._records.values()}
        self._num_begun = 1 + max(taken, default=-1)
        self._free = [index for index in range(self._num_begun) if index not in taken]

    def _check_size(self) -> None:
        """Before anything that is there goes for a file that can never be."""
        size, end = os.fstat(self._fd).st_size, self._first + self.num_records * self._stride
        try:
            os.ftruncate(self._fd, max(size, end))
            os.ftruncate(self._fd, size)
        except OSError as error:
            if error.errno not in (errno.EFBIG, errno.EINVAL, errno.EOVERFLOW):
                raise
            raise ConfigError(
                f"kv_disk_gb gives a file of {end / 2**30:.1f} GiB, more than {self.path.parent} "
                f"takes ({error.strerror}); lower it",
                param="kv_disk_gb",
            ) from error

    def _entries(self) -> Iterator[tuple[int, bytes]]:
        """Those that are there, and where; a piece of the table at a time."""
        for first in range(0, self.num_records, ENTRIES_AT_ONCE):
            count = min(ENTRIES_AT_ONCE, self.num_records - first)
            piece = os.pread(self._fd, count * ENTRY_BYTES, self._entry_at(first))
            for at in range(len(piece) // ENTRY_BYTES if any(piece) else 0):
                raw = piece[at * ENTRY_BYTES : (at + 1) * ENTRY_BYTES]
                if raw != _BLANK:
                    yield first + at, raw
            if len(piece) < count * ENTRY_BYTES:
                return

    def _read_table(self) -> None:
        entries = []
        for index, raw in self._entries():
            fields, crc = raw[:-4], int.from_bytes(raw[-4:], "little")
            if crc32(fields) != crc:
                self._note_damage()
                continue
            key, parent, number, record_crc = _ENTRY.unpack(fields)
            entries.append((number, key, _Record(index, parent, record_crc)))
        entries.sort(key=lambda entry: entry[0])
        for number, key, record in entries:
            self._records[key] = record
            self._num_writes = number + 1

    def __len__(self) -> int:
        return len(self._records)

    def contains(self, key: Key) -> bool:
        return key in self._records

    def write(
        self,
        key: Key,
        parent: Key,
        tokens: bytes,
        kv: NDArray[np.uint8],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Keep a block, in place of the one whose last use is longest ago if need be. False if it
        was there, the tier is disabled, or the block is not wanted, which is asked when no `clear`
        can come between."""
        assert len(tokens) == self._tokens_bytes and kv.nbytes == self._block_bytes
        with self._lock:
            if not self.is_alive or key in self._records or not is_wanted():
                return False
            try:
                self._write(key, parent, tokens, kv)
            except OSError as error:
                self._disable(error)
                return False
        return True

    def _write(self, key: Key, parent: Key, tokens: bytes, kv: NDArray[np.uint8]) -> None:
        if self._free:
            index = self._free.pop()
        elif self._num_begun < self.num_records:
            index = self._num_begun
            self._num_begun += 1
        else:
            index = self._records.popitem(last=False)[1].index
            self.num_evicted += 1
        self._write_all([_BLANK], self._entry_at(index))
        self._write_all([tokens, memoryview(kv)], self._record_at(index))
        crc = crc32(kv, crc32(tokens))
        fields = _ENTRY.pack(key, parent, self._num_writes, crc)
        self._num_writes += 1
        entry = fields + struct.pack("<I", crc32(fields))
        self._write_all([entry], self._entry_at(index))
        self._records[key] = _Record(index, parent, crc)

    def read(self, key: Key, parent: Key, tokens: bytes, out: NDArray[np.uint8]) -> bool:
        """Fill `out` with a block's KV. False, and anything in it, if it is not there, or not whole
        and of these tokens."""
        with self._lock:
            record = self._records.get(key)
            if not self.is_alive or record is None:
                return False
            found = bytearray(self._tokens_bytes)
            try:
                count = os.preadv(self._fd, [found, memoryview(out)], self._record_at(record.index))
                is_whole = (
                    count == self._tokens_bytes + self._block_bytes
                    and found == tokens
                    and record.parent == parent
                    and crc32(out, crc32(found)) == record.crc
                )
                if is_whole:
                    self._records.move_to_end(key)
                    return True
                self._note_damage()
                del self._records[key]
                self._free.append(record.index)
                self._write_all([_BLANK], self._entry_at(record.index))
            except OSError as error:
                self._disable(error)
        return False

    def clear(self) -> None:
        """Forget all, also for those who come later."""
        with self._lock:
            if not self.is_alive:
                return
            self._num_begun, self._free = 0, []
            self._records.clear()
            try:
                os.ftruncate(self._fd, HEADER_BYTES)
            except OSError as error:
                self._disable(error)

    def close(self) -> None:
        with self._lock:
            self.is_alive = False
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def __del__(self) -> None:
        # The file is locked as long as it is open, also for whoever tries again in this process.
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)

    def _entry_at(self, index: int) -> int:
        return HEADER_BYTES + index * ENTRY_BYTES

    def _record_at(self, index: int) -> int:
        return self._first + index * self._stride

    def _write_all(self, parts: list[bytes | memoryview], at: int) -> None:
        if os.pwritev(self._fd, parts, at) != sum(memoryview(each).nbytes for each in parts):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _disable(self, error: OSError) -> None:
        self.is_alive = False
        self._records.clear()
        logger.warning(
            "kv_disk_disabled path=%s: %s; requests go on without it", self.path, error.strerror
        )

    def _note_damage(self) -> None:
        self.num_damaged += 1
        self._note("damaged in places, which are computed anew")

    def _note(self, what: str) -> None:
        if not self._is_noted:
            self._is_noted = True
            logger.warning("kv_disk_file path=%s: %s", self.path, what)
