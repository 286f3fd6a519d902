"""What kernels in Gluon share: its names, where this Triton has them.

Gluon is a lower language inside Triton: layouts, barriers and copies are the kernel's own to place.
Modules of such kernels import without it too, and their can_take then says no.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        mma_v2,
        tma,
        warpgroup_mma,
        warpgroup_mma_init,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    HAS_GLUON = True
    gluon_jit: Callable[..., Any] = gluon.jit
    # Triton 3.9 renamed them.
    bring = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
    send = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
    wait_until_sent = tma.store_wait
    sync_threads = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
    _memory = gl.shared_memory_descriptor
    if not hasattr(_memory, "reinterpret"):  # of Triton 3.6, where its name is private
        _memory.reinterpret = _memory._reinterpret
except ImportError:
    HAS_GLUON = False
    TensorDescriptor = Any
    gl = mbarrier = mma_v2 = fence_async_shared = bring = send = None
    wait_until_sent = sync_threads = None
    warpgroup_mma = warpgroup_mma_init = warpgroup_mma_wait = None
    gdc_launch_dependents = gdc_wait = None

    def gluon_jit(**options: Any) -> Any:
        return lambda function: function


DTYPES = (torch.bfloat16, torch.float16)


@functools.cache
def has_hopper_gluon(device: torch.device) -> bool:
    """Whether kernels in Gluon for Hopper run there."""
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return HAS_GLUON and is_hopper


@functools.cache
def tile_layout(*tile: int) -> Any:
    """In shared memory, as the copy engine leaves 16-bit numbers. To look for it takes longer than
    the rest of a descriptor."""
    return gl.NVMMASharedLayout.get_default_for(list(tile), gl.bfloat16)  # of fp16 the same


def tiles_of(tensor: torch.Tensor, tile: list[int]) -> TensorDescriptor:
    """For the copy engine, of 16-bit numbers; zeros past the tensor's end."""
    shape, strides = list(tensor.shape), list(tensor.stride())
    return TensorDescriptor(tensor, shape, strides, tile, tile_layout(*tile))


def check_rows(**tensors: torch.Tensor) -> None:
    """Raises ValueError where the copy engine cannot take a matrix. In its name an underscore
    stands for a space."""
    for name, tensor in tensors.items():
        if tensor.stride(1) != 1 or tensor.stride(0) % 8 or tensor.data_ptr() % 16:
            raise ValueError(
                f"{name.replace('_', ' ')} has strides {tensor.stride()} from address "
                f"{tensor.data_ptr()}: rows must be contiguous and begin at multiples of 16 bytes"
            )


__all__ = [
    "DTYPES", "HAS_GLUON", "TensorDescriptor", "bring", "check_rows", "fence_async_shared",
    "gdc_launch_dependents", "gdc_wait", "gl", "gluon_jit", "has_hopper_gluon", "mbarrier",
    "mma_v2", "sync_threads", "tile_layout", "tiles_of", "warpgroup_mma", "warpgroup_mma_init",
    "warpgroup_mma_wait",
]  # fmt: skip
