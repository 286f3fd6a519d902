"""Bytes of a weight file, read where they are wanted and never mapped.

Mapped pages count as resident memory of the process, and a file cut short under a mapping kills it
with SIGBUS; pread does neither.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pico_vllm.errors import ModelLoadError

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 2 << 20
"""Staging memory of one conversion; a converted copy of the same rows may lie beside it. Small, as
malloc puts the next norm weight into the hole that a large one leaves: with 16 MiB, loading 2 GB
left 370 MB of such holes."""


class RawFile:
    """A regular file opened for reading at any offset."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            status = os.fstat(self._fd)
        except (OSError, ValueError) as error:
            self.close()
            reason = getattr(error, "strerror", None) or "not a usable path"
            raise ModelLoadError(f"cannot open {path}: {reason}", param="model") from None
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise ModelLoadError(f"{path} is not a regular file", param="model")
        self.size = status.st_size

    def read(self, offset: int, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        self.read_into(offset, memoryview(data))
        return data

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view`; a file that ends early is an error, as it was checked to be long enough."""
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise ModelLoadError(f"reading {self.path}: {error.strerror}") from None
            if count == 0:
                raise ModelLoadError(
                    f"{self.path} ends at byte {offset + done}, expected {offset + len(view)}: "
                    "it was cut while being read; copy it again"
                )
            done += count

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's own memory as writable bytes. Contiguous and on the CPU."""
    import torch  # late: listing models reads small files and must not wait for it

    flat = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)  # type: ignore[arg-type]  # numpy's stubs lack the buffer protocol


def copy_rows(
    read_rows: Callable[[int, int], torch.Tensor], out: torch.Tensor, start: int, row_bytes: int
) -> None:
    """Fill `out` from rows `start`, `start + 1`, ... in chunks, so that temporaries stay small."""
    rows = max(1, CHUNK_BYTES // row_bytes)
    for first in range(0, len(out), rows):
        last = min(len(out), first + rows)
        out[first:last].copy_(read_rows(start + first, start + last))
