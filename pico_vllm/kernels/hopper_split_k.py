"""Products of some dozen to some hundred rows on Hopper, cut along K into parts that the kernel
behind adds up.

M rows of x, K input features, N weight rows, S splits of K

Outputs of a layer's smaller products are few tiles: cut along K they give more multiprocessors
work. The norm or the attention behind reads the sums anyway and adds up. A program asks the copy
engine (TMA) for its weights before it waits for the kernel before, and lets the kernel behind start
early, which cuBLAS does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pico_vllm.kernels.gluon import (
    DTYPES,
    bring,
    check_rows,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon_jit,
    has_hopper_gluon,
    mbarrier,
    send,
    sync_threads,
    tiles_of,
    wait_until_sent,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from pico_vllm.kernels.launch import NUM_MULTIPROCESSORS, cdiv, launch_options

BLOCK_K = 64
"""What the copy engine lays out without bank conflicts: 128 bytes."""
MAX_SHARED_BYTES = 227 * 1024
MAX_ROWS = 256
MAX_K = 2048
"""With longer rows programs read so much from L2 that cuBLAS wins, where neighbours share tiles: a
layer of Qwen2.5-1.5B with down, K = 8,960, cut by this kernel took 57.7 us at 128 rows, so 55.9."""
MAX_LONG_ROWS, LONG_SPLITS = 64, 8
"""Of longer rows. With down in as many parts such a layer takes 41.8 / 43.0 / 43.3 us at 32 / 48 /
64 rows, with cuBLAS 43.1 / 43.2 / 44.3."""


def hopper_split_k_reference(x_MK: Tensor, weight_NK: Tensor, num_splits: int) -> Tensor:
    """[S, M, N]"""
    rounds = -(-x_MK.shape[1] // BLOCK_K)
    size = -(-rounds // num_splits) * BLOCK_K
    parts = zip(x_MK.split(size, 1), weight_NK.split(size, 1), strict=True)
    return torch.stack([torch.nn.functional.linear(x, weight) for x, weight in parts])


@gluon_jit()
def _hopper_split_k_kernel(
    x_desc, weight_desc, out_desc,
    ALL_ROUNDS: gl.constexpr, SPLIT_ROUNDS: gl.constexpr, STAGES: gl.constexpr,
    USE_PDL: gl.constexpr,
):  # fmt: skip
    if USE_PDL:
        gdc_launch_dependents()
    dtype: gl.constexpr = x_desc.dtype
    BLOCK_M: gl.constexpr = x_desc.block_shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_shape[1]
    BLOCK_N: gl.constexpr = weight_desc.block_shape[0]
    NUM_BYTES: gl.constexpr = (BLOCK_M + BLOCK_N) * BLOCK_K * 2  # of a round
    REFILLS: gl.constexpr = SPLIT_ROUNDS > STAGES
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [BLOCK_M // 16, 1], [16, BLOCK_N, 16])

    x_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    w_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], weight_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    is_warm = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    mbarrier.init(is_warm, count=1)
    fence_async_shared()  # the copy engine counts on them
    sync_threads()

    n_start, m_start = gl.program_id(0) * BLOCK_N, gl.program_id(1) * BLOCK_M
    split = gl.program_id(2)
    k_start = split * (SPLIT_ROUNDS * BLOCK_K)
    num_rounds = SPLIT_ROUNDS
    if ALL_ROUNDS % SPLIT_ROUNDS:  # the last split takes fewer
        num_rounds = gl.minimum(SPLIT_ROUNDS, ALL_ROUNDS - split * SPLIT_ROUNDS)

    # Before waiting: what no kernel writes.
    for i in gl.static_range(STAGES):
        at, is_round = [n_start, k_start + i * BLOCK_K], i < num_rounds
        mbarrier.expect(full.index(i), NUM_BYTES, pred=is_round)
        bring(weight_desc, at, full.index(i), w_smem.index(i), pred=is_round)
    # Beyond x's end: zeros, and nothing is read, but x's descriptor is at hand after that.
    mbarrier.expect(is_warm, BLOCK_M * BLOCK_K * 2)
    bring(x_desc, [0, ALL_ROUNDS * BLOCK_K], is_warm, x_smem.index(0))
    mbarrier.wait(is_warm, 0)
    if USE_PDL:
        gdc_wait()
    for i in gl.static_range(STAGES):
        at = [m_start, k_start + i * BLOCK_K]
        bring(x_desc, at, full.index(i), x_smem.index(i), pred=i < num_rounds)

    acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout)
    if not REFILLS:  # then no product is waited for within the loop
        acc = warpgroup_mma_init(acc)
    for i in range(0, num_rounds):
        stage = i % STAGES
        mbarrier.wait(full.index(stage), i // STAGES & 1)
        weights = w_smem.index(stage).permute((1, 0))
        acc = warpgroup_mma(x_smem.index(stage), weights, acc, is_async=True)
        if REFILLS:
            # The round before is over in all warps, so its stage is filled again.
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            sync_threads()
            ahead = i - 1 + STAGES
            is_round = (i > 0) & (ahead < num_rounds)
            free = ahead % STAGES
            k = k_start + ahead * BLOCK_K
            mbarrier.expect(full.index(free), NUM_BYTES, pred=is_round)
            bring(weight_desc, [n_start, k], full.index(free), w_smem.index(free), pred=is_round)
            bring(x_desc, [m_start, k], full.index(free), x_smem.index(free), pred=is_round)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))

    sync_threads()  # all products are over: their memory takes the sums
    sums = x_smem.reinterpret(dtype, [1, BLOCK_M, BLOCK_N], out_desc.layout)
    sums.store(acc.to(dtype).reshape([1, BLOCK_M, BLOCK_N]))
    # The copy engine reads shared memory by another way than the store went.
    fence_async_shared()
    sync_threads()
    send(out_desc, [split, m_start, n_start], sums)
    wait_until_sent(0)


@dataclass(frozen=True, slots=True)
class SplitKConfig:
    block_m: int
    """Of a tile: 64 or 128, a warpgroup for each 64."""
    block_n: int
    num_splits: int


def split_k_config(M: int, N: int, K: int, max_splits: int) -> SplitKConfig:
    """At most one program a multiprocessor, and no split is empty."""
    block_n = 64 if M <= 64 and K <= MAX_K else 128
    num_tiles = cdiv(M, 64) * cdiv(N, block_n)
    num_rounds = cdiv(K, BLOCK_K)
    most = max(1, min(max_splits, NUM_MULTIPROCESSORS // num_tiles, num_rounds))
    return SplitKConfig(64, block_n, cdiv(num_rounds, cdiv(num_rounds, most)))


def is_faster(M: int, N: int, K: int) -> bool:
    """Than a product of cuBLAS, for what is added up behind it anyway: in LONG_SPLITS where K is
    more than MAX_K."""
    most_rows, num_splits = (MAX_ROWS, 2) if K <= MAX_K else (MAX_LONG_ROWS, LONG_SPLITS)
    return most_rows >= M and split_k_config(M, N, K, num_splits).num_splits == num_splits


def can_take(device: torch.device, dtype: torch.dtype, N: int, K: int) -> bool:
    """Whether hopper_split_k runs on this device and takes a weight [N, K]."""
    return has_hopper_gluon(device) and dtype in DTYPES and _fits(N, K)


def _fits(N: int, K: int) -> bool:
    # The copy engine counts in 16 bytes.
    return N > 0 and N % 8 == 0 and K > 0 and K % 8 == 0


def hopper_split_k(
    x_MK: Tensor,
    weight_NK: Tensor,
    *,
    max_splits: int = 2,
    config: SplitKConfig | None = None,
) -> Tensor:
    """x @ W.T as parts over stretches of K.

    Shapes:
        x_MK        bf16 or fp16; last dim contiguous, rows at multiples of 16 bytes
        weight_NK   dtype of x, likewise; N and K multiples of 8
        config      split_k_config's choice of at most max_splits where None
        returns     [S, M, N] in dtype of x: their sum is the product. Each is summed in fp32 and
                    rounded once

    Raises:
        ValueError: sizes, dtypes, strides or addresses the copy engine cannot take.

    Not checked: that the device is a Hopper with Gluon (can_take). NaN or Inf, which go through.
    Weights are read before the kernel before is over, so it must not have written them.
    Same parts as hopper_split_k_reference. The bits of a row depend on M, through the number of
    splits, but not on the other rows.
    """
    (M, K), N = x_MK.shape, weight_NK.shape[0]
    if x_MK.dtype not in DTYPES or not _fits(N, K) or M == 0:
        raise ValueError(
            f"x is {x_MK.dtype} {(M, K)}, the weight has {N} rows; bf16 or fp16, a row at least, "
            "and multiples of 8 features and of 8 weight rows are taken"
        )
    if weight_NK.shape != (N, K) or weight_NK.dtype != x_MK.dtype:
        raise ValueError(
            f"the weight is {tuple(weight_NK.shape)} {weight_NK.dtype}, not {(N, K)} {x_MK.dtype}"
        )
    check_rows(x=x_MK, the_weight=weight_NK)
    config = config or split_k_config(M, N, K, max_splits)
    all_rounds = cdiv(K, BLOCK_K)
    split_rounds = cdiv(all_rounds, config.num_splits)
    num_splits = cdiv(all_rounds, split_rounds)  # none is empty
    round_bytes = (config.block_m + config.block_n) * BLOCK_K * 2 + 8
    stages = min(split_rounds, (MAX_SHARED_BYTES - 256) // round_bytes)
    stages = max(stages, config.block_n // BLOCK_K)  # which the sums leave through
    out_SMN = torch.empty((num_splits, M, N), dtype=x_MK.dtype, device=x_MK.device)
    options: dict[str, Any] = launch_options(x_MK.device)
    grid = (cdiv(N, config.block_n), cdiv(M, config.block_m), num_splits)
    _hopper_split_k_kernel[grid](
        tiles_of(x_MK, [config.block_m, BLOCK_K]),
        tiles_of(weight_NK, [config.block_n, BLOCK_K]),
        tiles_of(out_SMN, [1, config.block_m, config.block_n]),
        ALL_ROUNDS=all_rounds, SPLIT_ROUNDS=split_rounds, STAGES=stages,
        num_warps=config.block_m // 16, **options,
    )  # fmt: skip
    return out_SMN
