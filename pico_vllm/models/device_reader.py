"""DeviceReader: bytes of weight files straight to a device, by several threads.

    file -> threads (pread) -> ring of pinned buffers -> side stream (copies) -> destination

Reading, which leaves Python's lock alone, and copying go on side by side. Nothing is converted on
the host: where the destination has another dtype, the bytes go to a piece of device memory first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Protocol

import torch
from torch import Tensor

from pico_vllm.models.raw_file import RawFile, bytes_of

NUM_BUFFERS = 8
BUFFER_BYTES = 8 << 20
"""The ring is all the host memory that a load takes: 64 MiB."""
MIN_PIECE_BYTES = 1 << 20
"""Less is not worth a thread."""
STAGE_BYTES = 64 << 20
"""Device memory of bytes that are to be converted."""


def has_own_memory(device: torch.device) -> bool:
    """Whether a DeviceReader serves it: elsewhere the threads of a read would only copy twice."""
    return device.type == "cuda"


class Link(Protocol):
    """How bytes come from the ring to the destination."""

    def buffer(self, num_bytes: int) -> Tensor:
        """Host memory to copy from, uint8."""
        ...

    def begin(self) -> None:
        """What was asked of the device before comes before the copies."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        """Start a copy; what is returned waits for its end."""
        ...

    def end(self) -> None:
        """What is asked of the device from now on comes after the copies."""
        ...


class CudaLink:
    """Asynchronous copies on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def begin(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        done = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            done.record()
        return done.synchronize

    def end(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


class DeviceReader:
    """Owner of the ring, of the threads that fill it and of the stream that empties it.

    Between calls no thread reads, and the device's current stream waits for every copy: memory may
    be used, freed and read again as if a call had copied by itself. A buffer is filled again when
    its copy has ended. After an error the destination holds anything, and the reader goes on.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        num_buffers: int = NUM_BUFFERS,
        buffer_bytes: int = BUFFER_BYTES,
        min_piece_bytes: int = MIN_PIECE_BYTES,
        link: Link | None = None,
    ) -> None:
        self.device = device
        self._link = link or CudaLink(device)
        self._min_piece_bytes = min_piece_bytes
        self._buffers = [self._link.buffer(buffer_bytes) for _ in range(num_buffers)]
        self._is_copied: list[Callable[[], None]] = [_no_wait] * num_buffers
        self._next = 0
        self._threads = ThreadPoolExecutor(num_buffers, thread_name_prefix="weights")

    def read_into(self, file: RawFile, offset: int, out: Tensor, dtype: torch.dtype) -> None:
        """Fill `out`, which has a dimension or more, with as many elements of `dtype`, which lie in
        the file from `offset` on.

        Raises:
            ModelLoadError: the file ends early, or cannot be read.
        """
        if out.dtype == dtype and out.is_contiguous():
            self._read(file, offset, out)
            return
        row_bytes = out[:1].numel() * dtype.itemsize
        rows = max(1, STAGE_BYTES // max(1, row_bytes))
        for first in range(0, len(out), rows):
            part = out[first : first + rows]
            stage = torch.empty(part.shape, dtype=dtype, device=self.device)
            self._read(file, offset + first * row_bytes, stage)
            part.copy_(stage)

    def close(self) -> None:
        self._threads.shutdown()
        for wait_for_copy in self._is_copied:
            wait_for_copy()
        self._buffers.clear()

    def _read(self, file: RawFile, offset: int, out: Tensor) -> None:
        target = out.view(-1).view(torch.uint8)
        num_buffers, total = len(self._buffers), len(target)
        # Every buffer has a part in a tensor that is large enough.
        piece = max(self._min_piece_bytes, -(-total // num_buffers))
        piece = min(piece, len(self._buffers[0]))
        reading: deque[tuple[int, slice, Future[None]]] = deque()
        self._link.begin()
        try:
            for start in range(0, total, piece):
                if len(reading) == num_buffers:
                    self._send(target, *reading.popleft())
                span = slice(start, min(start + piece, total))
                index, self._next = self._next, (self._next + 1) % num_buffers
                self._is_copied[index]()
                view = bytes_of(self._buffers[index][: span.stop - span.start])
                read = self._threads.submit(file.read_into, offset + start, view)
                reading.append((index, span, read))
            while reading:
                self._send(target, *reading.popleft())
        finally:
            # Nobody may write to the ring, or to `out`, when this has raised.
            wait([read for _, _, read in reading])
            self._link.end()

    def _send(self, target: Tensor, index: int, span: slice, read: Future[None]) -> None:
        read.result()
        source = self._buffers[index][: span.stop - span.start]
        self._is_copied[index] = self._link.copy(target[span], source)


def _no_wait() -> None:
    pass
