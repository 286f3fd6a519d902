"""A kernel that does nothing but read: how fast memory can be at best."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCKS = ((4096, 4), (8192, 4), (8192, 8), (16384, 8))
"""Elements and warps of a program that are tried: 8 to 16 wide loads a thread, all before the first
is needed."""


def read_sums_reference(data: Tensor, block: int) -> Tensor:
    return data.view(-1, block).sum(1, dtype=torch.int32)


@triton.jit
def _read_kernel(data_ptr, sums_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    values = tl.load(data_ptr + pid.to(tl.int64) * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums_ptr + pid, tl.sum(values))


def read_sums(data: Tensor, sums: Tensor, block: int, num_warps: int) -> None:
    """sums[i] = sum of data[i * block : (i + 1) * block]; all int32 and contiguous. The sum only
    keeps the compiler from leaving the reads out.

    Raises:
        ValueError: data is not as many blocks as there are sums.
    """
    if data.dtype != torch.int32 or sums.dtype != torch.int32 or data.numel() != len(sums) * block:
        raise ValueError(
            f"data is {data.numel()} {data.dtype}, sums {len(sums)} {sums.dtype}; int32, {block} "
            "elements a sum"
        )
    _read_kernel[(len(sums),)](data, sums, BLOCK=block, num_warps=num_warps)
