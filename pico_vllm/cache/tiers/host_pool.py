"""HostPool: the memory of the host tier, host_pool[B, G, L, 2, S, D] as in cache/kv_pool.py but for
the null block.

For a GPU it is pinned: registered with the driver in one piece, as PyTorch's allocator of pinned
memory would round it up to a power of two. It begins with a page, so that the bus carries whole
lines.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pico_vllm.config.model import ModelConfig
from pico_vllm.errors import ConfigError


class HostPool:
    """Owner of the memory. It is pinned as long as anything refers to this, or until `close`."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        model: ModelConfig,
        *,
        dtype: torch.dtype,
        is_pinned: bool,
    ) -> None:
        """Raises ConfigError where the system does not let so much memory be taken or pinned."""
        self._registered = 0
        shape = (model.num_kv_heads, model.num_layers, 2, block_size, model.head_dim)
        num_bytes = num_blocks * torch.Size(shape).numel() * dtype.itemsize
        try:
            memory = mmap.mmap(-1, num_bytes)
        except OSError as error:
            raise ConfigError(
                f"{num_bytes / 2**30:.2f} GiB of host memory cannot be taken ({error.strerror}); "
                "lower kv_host_gb",
                param="kv_host_gb",
            ) from error
        with suppress(AttributeError, OSError):  # not every system has such pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes: NDArray[np.uint8] = np.frombuffer(memory, np.uint8).reshape(num_blocks, -1)
        """[B, bytes of a block]"""
        self.blocks: Tensor = torch.from_numpy(self.bytes).view(dtype).view(num_blocks, *shape)
        if is_pinned:
            error_number = int(
                torch.cuda.cudart().cudaHostRegister(self.blocks.data_ptr(), num_bytes, 0)
            )
            if error_number:
                raise ConfigError(
                    f"{num_bytes / 2**30:.2f} GiB of host memory cannot be pinned (CUDA error "
                    f"{error_number}); lower kv_host_gb",
                    param="kv_host_gb",
                )
            self._registered = self.blocks.data_ptr()

    def close(self) -> None:
        """Nothing copies to or from it any more; the host may still read it."""
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._registered)
            self._registered = 0

    def __del__(self) -> None:
        # Memory that is given back while it is registered could never be registered again.
        with suppress(Exception):  # the driver may have gone before
            self.close()
