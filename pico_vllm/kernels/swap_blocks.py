"""Copy whole blocks between the KV pool of a device and one in pinned host memory, all layers and
heads of each at once.

C copies, B blocks in pool, G KV heads, L layers, S block_size, D head dim, N = G L 2 S D elements
of a block

One launch for all blocks of a direction. The kernel reads and writes host memory itself, over the
bus, as pinned memory has an address on the device; its few programs leave the multiprocessors to
the step beside which it runs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_N = 4096
"""Elements that a program has under way at once."""
NUM_PROGRAMS = 32
"""Of 8 KiB under way each in 16 bits: more than a bus of 64 GB/s has in the 2 us of a read."""


def swap_blocks_reference(source_BGLKSD: Tensor, target_BGLKSD: Tensor, copies_2C: Tensor) -> None:
    for source, target in zip(*copies_2C.tolist(), strict=True):
        target_BGLKSD[target] = source_BGLKSD[source].to(target_BGLKSD.device)


@triton.jit(do_not_specialize=["num_copies"])
def _swap_blocks_kernel(
    source_ptr, target_ptr, copies_ptr, num_copies, N, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pieces = tl.cdiv(N, BLOCK_N)
    for piece in range(tl.program_id(0), num_copies * pieces, tl.num_programs(0)):
        copy = piece // pieces
        source = tl.load(copies_ptr + copy).to(tl.int64)
        target = tl.load(copies_ptr + num_copies + copy).to(tl.int64)
        n = piece % pieces * BLOCK_N + tl.arange(0, BLOCK_N)
        values = tl.load(source_ptr + source * N + n, mask=n < N)
        tl.store(target_ptr + target * N + n, values, mask=n < N)


def swap_blocks(source_BGLKSD: Tensor, target_BGLKSD: Tensor, copies_2C: Tensor) -> None:
    """Copy blocks from one pool to the other: target[copies[1]] = source[copies[0]].

    Shapes:
        source_BGLKSD, target_BGLKSD  [B, G, L, 2, S, D], contiguous, alike but for B; on the
            device, or in pinned memory of the host
        copies_2C  [2, C] int32, contiguous, on the device: sources, then targets

    Raises:
        ValueError: another shape, dtype or layout.

    Not checked, as it would stall the stream: ids in range, and no target twice.
    Same bits as swap_blocks_reference.
    """
    for pool in (source_BGLKSD, target_BGLKSD):
        if pool.dim() != 6 or not pool.is_contiguous():
            raise ValueError(
                f"a pool is {list(pool.shape)} with strides {pool.stride()}; it must be "
                "[B, G, L, 2, S, D] and contiguous"
            )
    if source_BGLKSD.shape[1:] != target_BGLKSD.shape[1:] or (
        source_BGLKSD.dtype != target_BGLKSD.dtype
    ):
        raise ValueError(
            f"blocks are {list(source_BGLKSD.shape[1:])} {source_BGLKSD.dtype} and "
            f"{list(target_BGLKSD.shape[1:])} {target_BGLKSD.dtype}; they must be alike"
        )
    if copies_2C.dtype != torch.int32 or copies_2C.dim() != 2 or len(copies_2C) != 2:
        raise ValueError(
            f"copies are {list(copies_2C.shape)} {copies_2C.dtype}; they must be [2, C] torch.int32"
        )
    if not copies_2C.is_contiguous():
        raise ValueError(f"copies have strides {copies_2C.stride()}; they must be contiguous")
    num_copies, N = copies_2C.shape[1], source_BGLKSD.stride(0)
    if num_copies:
        _swap_blocks_kernel[(NUM_PROGRAMS,)](
            source_BGLKSD, target_BGLKSD, copies_2C, num_copies, N, BLOCK_N=BLOCK_N, num_warps=4
        )
