"""HostPool: the memory of the host tier, host_pool[B, G, L, 2, S, D] as in cache/kv_pool.py but for
the null block.

For a GPU it is pinned: registered with the driver in one piece, as PyTorch's allocator of pinned
memory would round it up to a power of two.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pico_vllm.cache.kv_pool import allocate_pool
from pico_vllm.config.model import ModelConfig
from pico_vllm.errors import ConfigError

_CPU = torch.device("cpu")


class HostPool:
    """Owner of the memory, which is unpinned when nothing refers to this any more."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        model: ModelConfig,
        *,
        dtype: torch.dtype,
        is_pinned: bool,
    ) -> None:
        """Raises ConfigError where the system does not let so much memory be pinned."""
        self._registered = 0
        self.blocks: Tensor = allocate_pool(num_blocks, block_size, model, dtype=dtype, device=_CPU)
        self.bytes: NDArray[np.uint8] = self.blocks.view(num_blocks, -1).view(torch.uint8).numpy()
        """[B, bytes of a block], of the same memory."""
        if is_pinned:
            error = int(
                torch.cuda.cudart().cudaHostRegister(self.blocks.data_ptr(), self.bytes.nbytes, 0)
            )
            if error:
                raise ConfigError(
                    f"{self.bytes.nbytes / 2**30:.2f} GiB of host memory cannot be pinned (CUDA "
                    f"error {error}); lower kv_host_gb",
                    param="kv_host_gb",
                )
            self._registered = self.blocks.data_ptr()

    def close(self) -> None:
        """Nothing copies to or from it any more."""
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._registered)
            self._registered = 0

    def __del__(self) -> None:
        if getattr(self, "_registered", 0):
            self.close()
