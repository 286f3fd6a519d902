"""Linear layers of 5 to 16 rows on Hopper, bound by reading the weights, with what stands around
them fused.

M rows of x, K input features, N weight rows, F outputs: N, or N / 2 where gate and up are fused

A program takes 64 outputs and a part of K. It asks the copy engine (TMA) for weights until its ring
in shared memory is full before it waits for the kernel before, then for x, and while it multiplies
for what comes next. Two programs fit a multiprocessor: those of one kernel fetch weights where
those of the kernel before still multiply. So all products of a layer may start early, which those
of small_linear lose by. Triton's own pipeline asks for weights late and does not let copies cross
the wait, hence Gluon. On an H200 a layer of Qwen2.5-1.5B, attention included, takes 36.2 us at
8 rows (41.4 with small_linear's products) and 38.2 at 16 (42.4); at 2 rows neither gains, at 32
this one loses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pico_vllm.kernels.gluon import (
    DTYPES,
    TensorDescriptor,
    bring,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon_jit,
    has_hopper_gluon,
    mbarrier,
    sync_threads,
    tiles_of,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from pico_vllm.kernels.launch import NUM_MULTIPROCESSORS, cdiv, launch_options
from pico_vllm.kernels.small_linear import LinearScratch, checked_out, small_linear_reference

hopper_linear_reference = small_linear_reference

MIN_ROWS, MAX_ROWS = 3, 16
MAX_K = 16384
"""The norm's weights of a program's part lie in shared memory whole."""
BLOCK_N = 64
"""Weight rows of a product, what Hopper's instruction takes; rows of x are its columns."""
MAX_SHARED_BYTES = 115712
"""Of a program, for two a multiprocessor: 228 KiB, of which each takes 1 KiB more than it asks."""


@gluon_jit()
def _add_splits(partial_ptr, at, NUM_SPLITS: gl.constexpr, SIZE: gl.constexpr):
    total = gl.load(partial_ptr + at, cache_modifier=".cg")
    for i in gl.static_range(1, NUM_SPLITS):
        total += gl.load(partial_ptr + i * SIZE + at, cache_modifier=".cg")
    return total


@gluon_jit(do_not_specialize=["M"])
def _hopper_linear_kernel(
    weight_desc, x_desc, norm_ptr, bias_ptr, residual_ptr, out_ptr,
    partial_ptr, counter_ptr, eps, M,
    NUM_OUT: gl.constexpr, K: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    NUM_SPLITS: gl.constexpr, NUM_STAGES: gl.constexpr,
    HAS_NORM: gl.constexpr, HAS_SILU: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    if USE_PDL:
        gdc_launch_dependents()
    dtype: gl.constexpr = weight_desc.dtype
    ALL_ROUNDS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    MAX_ROUNDS: gl.constexpr = (ALL_ROUNDS + NUM_SPLITS - 1) // NUM_SPLITS
    REFILLS: gl.constexpr = MAX_ROUNDS > NUM_STAGES
    NUM_BYTES: gl.constexpr = ((1 + HAS_SILU) * BLOCK_N + ROWS) * BLOCK_K * 2  # of a round
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    x_layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // BLOCK_K, BLOCK_K // 8], [4, 1], [1, 0]
    )

    w_smem = gl.allocate_shared_memory(dtype, [NUM_STAGES, BLOCK_N, BLOCK_K], weight_desc.layout)
    if HAS_SILU:
        up_smem = gl.allocate_shared_memory(
            dtype, [NUM_STAGES, BLOCK_N, BLOCK_K], weight_desc.layout
        )
    x_smem = gl.allocate_shared_memory(dtype, [NUM_STAGES, ROWS, BLOCK_K], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    is_warm = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(i), count=1)
    mbarrier.init(is_warm, count=1)
    fence_async_shared()  # the copy engine counts on them
    sync_threads()

    pid, split = gl.program_id(0), gl.program_id(1)
    n_start = pid * BLOCK_N
    up_start = NUM_OUT + n_start
    k_start = split * (MAX_ROUNDS * BLOCK_K)
    num_rounds = MAX_ROUNDS
    if MAX_ROUNDS * NUM_SPLITS != ALL_ROUNDS:  # the last split takes fewer
        num_rounds = gl.minimum(MAX_ROUNDS, ALL_ROUNDS - split * MAX_ROUNDS)

    # Before waiting: what no kernel writes.
    for i in gl.static_range(NUM_STAGES):
        k, is_round = k_start + i * BLOCK_K, i < num_rounds
        mbarrier.expect(full.index(i), NUM_BYTES, pred=is_round)
        bring(weight_desc, [n_start, k], full.index(i), w_smem.index(i), pred=is_round)
        if HAS_SILU:
            bring(weight_desc, [up_start, k], full.index(i), up_smem.index(i), pred=is_round)
    # Beyond x's end: zeros, and nothing is read, but x's descriptor is at hand after that.
    mbarrier.expect(is_warm, ROWS * BLOCK_K * 2)
    bring(x_desc, [0, ALL_ROUNDS * BLOCK_K], is_warm, x_smem.index(0))
    if HAS_NORM:
        norm_smem = gl.allocate_shared_memory(
            dtype, [MAX_ROUNDS, BLOCK_K], gl.SwizzledSharedLayout(1, 1, 1, [0])
        )
        norm_k = k_start + gl.arange(0, BLOCK_K, gl.BlockedLayout([1], [32], [4], [0]))
        for first in gl.static_range(0, MAX_ROUNDS, 32):  # as many on their way at once
            norms = ()
            for i in gl.static_range(32):
                if first + i < MAX_ROUNDS:
                    k = (first + i) * BLOCK_K + norm_k
                    norms += (gl.load(norm_ptr + k, mask=k < K, other=0.0),)
            for i in gl.static_range(32):
                if first + i < MAX_ROUNDS:
                    norm_smem.index(first + i).store(norms[i])
    mbarrier.wait(is_warm, 0)
    if USE_PDL:
        gdc_wait()

    for i in gl.static_range(NUM_STAGES):
        k, is_round = k_start + i * BLOCK_K, i < num_rounds
        bring(x_desc, [0, k], full.index(i), x_smem.index(i), pred=is_round)
    acc = gl.zeros([BLOCK_N, ROWS], gl.float32, layout)
    up = acc
    if not REFILLS:  # then no product is waited for within the loop
        acc = warpgroup_mma_init(acc)
        if HAS_SILU:
            up = warpgroup_mma_init(up)
    if HAS_NORM:
        squares = gl.zeros([ROWS, BLOCK_K], gl.float32, x_layout)
    for i in range(0, num_rounds):
        stage = i % NUM_STAGES
        mbarrier.wait(full.index(stage), i // NUM_STAGES & 1)
        x_i = x_smem.index(stage)
        if HAS_NORM:
            x = x_i.load(x_layout).to(gl.float32)
            norm = norm_smem.index(i).load(gl.SliceLayout(0, x_layout)).to(gl.float32)
            if dtype == gl.float16:
                norm *= 0.0625  # x times the norm's weight may exceed fp16 before it is scaled
            squares += x * x
            x_i.store((x * norm[None, :]).to(dtype))
            fence_async_shared()  # products read shared memory by another way than the store went
            sync_threads()
        acc = warpgroup_mma(w_smem.index(stage), x_i.permute((1, 0)), acc, is_async=True)
        if HAS_SILU:
            up = warpgroup_mma(up_smem.index(stage), x_i.permute((1, 0)), up, is_async=True)
        if REFILLS:
            # The round before is over in all warps, so its stage is filled again.
            if HAS_SILU:
                acc, up = warpgroup_mma_wait(num_outstanding=2, deps=(acc, up))
            else:
                acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            sync_threads()
            ahead = i - 1 + NUM_STAGES
            is_round = (i > 0) & (ahead < num_rounds)
            free = ahead % NUM_STAGES
            k = k_start + ahead * BLOCK_K
            mbarrier.expect(full.index(free), NUM_BYTES, pred=is_round)
            bring(weight_desc, [n_start, k], full.index(free), w_smem.index(free), pred=is_round)
            if HAS_SILU:
                bring(
                    weight_desc, [up_start, k], full.index(free), up_smem.index(free),
                    pred=is_round,
                )  # fmt: skip
            bring(x_desc, [0, k], full.index(free), x_smem.index(free), pred=is_round)

    n = n_start + gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    m = gl.arange(0, ROWS, gl.SliceLayout(0, layout))
    at = n[:, None] + m[None, :] * NUM_OUT
    is_there = (n < NUM_OUT)[:, None] & (m < M)[None, :]
    if HAS_RESIDUAL:  # here, for its way to overlap the last products
        residual = gl.load(residual_ptr + at, mask=is_there, other=0.0)
    if HAS_SILU:
        acc, up = warpgroup_mma_wait(num_outstanding=0, deps=(acc, up))
    else:
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    if HAS_NORM:
        square = gl.convert_layout(gl.sum(squares, 1), gl.SliceLayout(0, layout))

    is_last = True
    if NUM_SPLITS > 1:
        TILE: gl.constexpr = BLOCK_N * ROWS
        SIZE: gl.constexpr = (1 + HAS_SILU) * TILE + ROWS  # the sums, and a row of squares
        partial_ptr += pid * (NUM_SPLITS * SIZE)
        mine_ptr = partial_ptr + split * SIZE
        j = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))[:, None] * ROWS + m[None, :]
        gl.store(mine_ptr + j, acc)
        if HAS_SILU:
            gl.store(mine_ptr + TILE + j, up)
        if HAS_NORM:
            gl.store(mine_ptr + (1 + HAS_SILU) * TILE + m, square)
        sync_threads()  # all threads have stored before one of them says so
        is_last = gl.atomic_add(counter_ptr + pid, 1, sem="acq_rel") == NUM_SPLITS - 1
        sync_threads()
    if is_last:
        if NUM_SPLITS > 1:
            acc = _add_splits(partial_ptr, j, NUM_SPLITS, SIZE)
            if HAS_SILU:
                up = _add_splits(partial_ptr + TILE, j, NUM_SPLITS, SIZE)
            if HAS_NORM:
                square = _add_splits(partial_ptr + (1 + HAS_SILU) * TILE, m, NUM_SPLITS, SIZE)
            gl.store(counter_ptr + pid, 0)
        if HAS_NORM:
            scale = gl.rsqrt(square / K + eps)
            if dtype == gl.float16:
                scale *= 16.0
            acc *= scale[None, :]
            if HAS_SILU:
                up *= scale[None, :]
        if HAS_BIAS:
            bias = gl.load(bias_ptr + n, mask=n < NUM_OUT, other=0.0)
            acc += bias.to(gl.float32)[:, None]
            if HAS_SILU:
                up_bias = gl.load(bias_ptr + NUM_OUT + n, mask=n < NUM_OUT, other=0.0)
                up += up_bias.to(gl.float32)[:, None]
        y = acc
        if HAS_SILU:
            y = acc / (1.0 + gl.exp(-acc)) * up
        if HAS_RESIDUAL:
            y += residual.to(gl.float32)
        gl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=is_there)


def can_take(
    device: torch.device, dtype: torch.dtype, M: int, N: int, K: int, has_silu_mul: bool
) -> bool:
    """Whether hopper_linear runs on this device and takes M rows and a weight [N, K]."""
    return has_hopper_gluon(device) and dtype in DTYPES and _fits(M, N, K, has_silu_mul)


def _fits(M: int, N: int, K: int, has_silu_mul: bool) -> bool:
    # The copy engine counts in 16 bytes.
    has_room = 0 < K <= MAX_K and K % 8 == 0
    return MIN_ROWS <= M <= MAX_ROWS and has_room and not (has_silu_mul and N % 2)


def tile_options(M: int, N: int, K: int, has_norm: bool, has_silu_mul: bool) -> dict[str, int]:
    """Tile, splits and stages.

    K is cut into at most one program a multiprocessor, but not into parts of less than four rounds
    with a norm, whose way through registers each round pays for, and of six without. Of
    Qwen2.5-1.5B: qkv 3 parts (2 or 4 cost 0.4 us a layer more), o 2 (3: up to 0.8 more), down 5.
    """
    rows = 8 if M <= 8 else 16
    num_tiles = cdiv(N // 2 if has_silu_mul else N, BLOCK_N)

    def fitted(block_k: int) -> dict[str, int]:
        all_rounds = cdiv(K, block_k)
        least_k = 512 if has_norm else 768
        num_splits = max(1, min(cdiv(K, least_k), NUM_MULTIPROCESSORS // num_tiles))
        num_rounds = cdiv(all_rounds, num_splits)
        round_bytes = ((1 + has_silu_mul) * BLOCK_N + rows) * block_k * 2 + 8
        norm_bytes = num_rounds * block_k * 2 if has_norm else 0
        most_stages = (MAX_SHARED_BYTES - 256 - norm_bytes) // round_bytes
        return {
            "ROWS": rows, "BLOCK_N": BLOCK_N, "BLOCK_K": block_k,
            "NUM_SPLITS": cdiv(all_rounds, num_rounds),  # none is empty
            "NUM_STAGES": min(most_stages, num_rounds),
        }  # fmt: skip

    options = fitted(128)
    # A stage is filled again one round late: of two, only one would be on its way.
    return options if options["NUM_STAGES"] >= min(3, cdiv(K, 128)) else fitted(64)


def hopper_linear(
    x_MK: Tensor,
    weight_NK: Tensor,
    *,
    bias_N: Tensor | None = None,
    norm_K: Tensor | None = None,
    eps: float = 0.0,
    residual_MN: Tensor | None = None,
    has_silu_mul: bool = False,
    scratch: LinearScratch | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """A linear layer of a few rows, with RMSNorm before it and SiLU-and-multiply, residual after.

    y = (rms_norm(x) * norm) @ W.T + bias; y = silu(first half of y) * second half; y += residual

    Shapes:
        x_MK         bf16 or fp16, contiguous; M from MIN_ROWS to MAX_ROWS, K a multiple of 8 up to
                     MAX_K
        weight_NK    dtype of x, contiguous; with has_silu_mul F = N / 2 gate rows, then F up rows
        bias_N       dtype of x like norm_K and residual_MN, which is [M, F] with has_silu_mul
        scratch      needed where K is long enough to be split
        out          written instead of a new tensor. It may be residual_MN itself (each
                     program reads the residual where it writes), but not overlap x
        returns      [M, N], or [M, F], in dtype of x; sums and norm in fp32

    Raises:
        ValueError: M or K outside what is taken, shapes, dtypes, strides or addresses that do not
            fit, or no scratch.

    Not checked: that the device is a Hopper with Gluon (can_take). NaN or Inf, which go through.
    Weights and norm are read before the kernel before is over, so it must not have written them.
    Same answer as small_linear_reference, rounded once instead of after every operation. The bits
    depend on M, but not on the other rows.
    """
    M, (N, K) = x_MK.shape[0], weight_NK.shape
    if x_MK.dtype not in DTYPES or not _fits(M, N, K, has_silu_mul):
        raise ValueError(
            f"x is {x_MK.dtype} {tuple(x_MK.shape)}, weight {(N, K)}; bf16 or fp16, {MIN_ROWS} to "
            f"{MAX_ROWS} rows and a multiple of 8 up to {MAX_K} features are taken, with SiLU an "
            "even number of weight rows"
        )
    out = checked_out(x_MK, weight_NK, bias_N, norm_K, residual_MN, has_silu_mul, out)
    tile = tile_options(M, N, K, norm_K is not None, has_silu_mul)
    if tile["NUM_SPLITS"] > 1 and scratch is None:
        raise ValueError(f"{K} features of {N} weight rows are split: that needs a scratch")
    shared = (out, out) if scratch is None else (scratch.partials, scratch.counters)
    options: dict[str, Any] = launch_options(x_MK.device)
    _hopper_linear_kernel[(cdiv(out.shape[1], BLOCK_N), tile["NUM_SPLITS"])](
        _tiles_of("weight", weight_NK, BLOCK_N, tile["BLOCK_K"]),
        _tiles_of("x", x_MK, tile["ROWS"], tile["BLOCK_K"]),
        x_MK if norm_K is None else norm_K,
        x_MK if bias_N is None else bias_N,
        x_MK if residual_MN is None else residual_MN,
        out, *shared, eps, M,
        NUM_OUT=out.shape[1], K=K, **tile,
        HAS_NORM=norm_K is not None, HAS_SILU=has_silu_mul, HAS_BIAS=bias_N is not None,
        HAS_RESIDUAL=residual_MN is not None, num_warps=4, **options,
    )  # fmt: skip
    return out


def _tiles_of(name: str, matrix: Tensor, num_rows: int, num_columns: int) -> TensorDescriptor:
    if matrix.data_ptr() % 16:
        raise ValueError(f"{name} begins at address {matrix.data_ptr()}, no multiple of 16")
    return tiles_of(matrix, [num_rows, num_columns])
