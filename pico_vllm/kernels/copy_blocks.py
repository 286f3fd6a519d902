"""Copy whole blocks of the KV pool, all layers and heads of each at once.

C copies, B blocks in pool, G KV heads, L layers, S block_size, D head dim, N = G L 2 S D elements
of a block
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pico_vllm.kernels.launch import cdiv

BLOCK_N = 4096
"""Elements of a program: the blocks of small models still make many."""


def copy_blocks_reference(pool_BGLKSD: Tensor, copies_2C: Tensor) -> None:
    sources, targets = copies_2C.tolist()
    for source, target in zip(sources, targets, strict=True):
        pool_BGLKSD[target] = pool_BGLKSD[source]


# Launched without dependent launch: the kernel after it starts when all of it is written.
@triton.jit(do_not_specialize=["num_copies"])
def _copy_blocks_kernel(pool_ptr, copies_ptr, num_copies, N, BLOCK_N: tl.constexpr):
    copy = tl.program_id(0)
    source = tl.load(copies_ptr + copy).to(tl.int64)
    target = tl.load(copies_ptr + num_copies + copy).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    values = tl.load(pool_ptr + source * N + n, mask=n < N)
    tl.store(pool_ptr + target * N + n, values, mask=n < N)


def copy_blocks(pool_BGLKSD: Tensor, copies_2C: Tensor) -> None:
    """Copy blocks within a pool: pool[copies[1]] = pool[copies[0]].

    Shapes:
        pool_BGLKSD  [B, G, L, 2, S, D], contiguous
        copies_2C    [2, C] int32, contiguous, block ids: sources, then targets

    Raises:
        ValueError: another shape, dtype or layout.

    Not checked, as it would stall the stream: ids in range, no target twice, and no target that is
    a source of another copy.
    Same bits as copy_blocks_reference.
    """
    if pool_BGLKSD.dim() != 6 or not pool_BGLKSD.is_contiguous():
        raise ValueError(
            f"the pool is {list(pool_BGLKSD.shape)} with strides {pool_BGLKSD.stride()}; it must "
            "be [B, G, L, 2, S, D] and contiguous"
        )
    if copies_2C.dtype != torch.int32 or copies_2C.dim() != 2 or len(copies_2C) != 2:
        raise ValueError(
            f"copies are {list(copies_2C.shape)} {copies_2C.dtype}; they must be [2, C] torch.int32"
        )
    if not copies_2C.is_contiguous():
        raise ValueError(f"copies have strides {copies_2C.stride()}; they must be contiguous")
    num_copies, N = copies_2C.shape[1], pool_BGLKSD.stride(0)
    if num_copies:
        _copy_blocks_kernel[(num_copies, cdiv(N, BLOCK_N))](
            pool_BGLKSD, copies_2C, num_copies, N, BLOCK_N=BLOCK_N, num_warps=4
        )
