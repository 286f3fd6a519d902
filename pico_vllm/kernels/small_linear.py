"""Linear layers of a few rows, bound by reading the weights, with what stands around them fused.

M rows of x, K input features, N weight rows, F outputs: N, or N / 2 where gate and up are fused

One or a few rows multiply and add in fp32 registers (GEMV); up to MAX_ROWS rows use tl.dot on a
tile of weight rows and all rows of x. RMSNorm costs no kernel: x is multiplied by the norm's weight
on the way in, the squares are added up beside the products, and the sums are scaled at the end.
Weights do not depend on the kernel before, so their first tiles are fetched before waiting for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from pico_vllm.kernels.launch import (
    NUM_MULTIPROCESSORS,
    launch_options,
    let_next_start,
    next_power_of_2,
    wait_for_inputs,
)
from pico_vllm.kernels.rms_norm import rms_norm

MAX_ROWS = 64


def small_linear_reference(
    x_MK: Tensor,
    weight_NK: Tensor,
    *,
    bias_N: Tensor | None = None,
    norm_K: Tensor | None = None,
    eps: float = 0.0,
    residual_MN: Tensor | None = None,
    has_silu_mul: bool = False,
) -> Tensor:
    """One operation after another in the dtype of the inputs."""
    if norm_K is not None:
        x_MK = functional.rms_norm(x_MK, x_MK.shape[1:], norm_K, eps)
    out = functional.linear(x_MK, weight_NK, bias_N)
    if has_silu_mul:
        gate, up = out.chunk(2, dim=1)
        out = functional.silu(gate) * up
    return out if residual_MN is None else out + residual_MN


@triton.jit
def _load(pointers, mask, IS_MASKED: tl.constexpr, POLICY: tl.constexpr):
    if IS_MASKED:
        values = tl.load(pointers, mask=mask, other=0.0, eviction_policy=POLICY)
    else:
        values = tl.load(pointers, eviction_policy=POLICY)
    return values


@triton.jit
def _weight_rows(pid, NUM_OUT: tl.constexpr, BLOCK_N: tl.constexpr, HAS_SILU: tl.constexpr):
    """The weight rows of a tile, and which exist. Gate and up of one output lie side by side."""
    j = tl.arange(0, BLOCK_N)
    if HAS_SILU:
        n = pid * (BLOCK_N // 2) + j // 2
        rows = n + (j % 2) * NUM_OUT
    else:
        n = pid * BLOCK_N + j
        rows = n
    return rows, n < NUM_OUT


@triton.jit(do_not_specialize=["M"])
def _gemv_kernel(
    x_ptr, weight_ptr, norm_ptr, bias_ptr, residual_ptr, out_ptr,
    eps, M,
    NUM_OUT: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_EARLY: tl.constexpr, GROUP: tl.constexpr,
    NUM_THREADS: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_SILU: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(USE_PDL)
    pid = tl.program_id(0)
    rows, is_row = _weight_rows(pid, NUM_OUT, BLOCK_N, HAS_SILU)
    if HAS_SILU:
        n = pid * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    else:
        n = rows
    k = tl.arange(0, BLOCK_K)[None, None, :]
    m = tl.arange(0, ROWS)
    is_m = (m < M)[:, None, None]
    in_row = is_row[None, :, None]
    HAS_ROW_MASK: tl.constexpr = (NUM_OUT * (1 + HAS_SILU)) % BLOCK_N != 0
    weight_ptrs = weight_ptr + rows.to(tl.int64)[None, :, None] * K + k

    # Before waiting: what no kernel writes.
    early = ()
    for i in tl.static_range(NUM_EARLY):
        at = i * BLOCK_K
        w_mask = in_row & (at + k < K)
        is_masked = HAS_ROW_MASK or at + BLOCK_K > K
        early += (_load(weight_ptrs + at, w_mask, is_masked, "evict_first"),)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + rows, mask=is_row, other=0.0).to(tl.float32)
    wait_for_inputs(USE_PDL)

    out_at = m[:, None] * NUM_OUT + n[None, :]
    is_there = (m < M)[:, None] & (n < NUM_OUT)[None, :]
    if HAS_RESIDUAL:  # here, for its way to overlap x's
        residual = tl.load(residual_ptr + out_at, mask=is_there, other=0.0).to(tl.float32)
    ITEM: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth // 8
    if BLOCK_K * ITEM <= 512 and NUM_THREADS > 32:
        # A warp takes whole rows: with x in the same form no values cross warps.
        x_k = tl.broadcast_to(k, (1, BLOCK_N, BLOCK_K))
    else:
        x_k = k
    x_row = m[:, None, None] * K
    acc = tl.zeros((ROWS, BLOCK_N, BLOCK_K), tl.float32)
    if HAS_NORM:
        squares = tl.zeros((ROWS, x_k.shape[1], BLOCK_K), tl.float32)
    for i in tl.static_range(NUM_EARLY):
        x_at = i * BLOCK_K + x_k
        is_ragged = (i + 1) * BLOCK_K > K
        x = _load(x_ptr + x_row + x_at, is_m & (x_at < K), is_ragged or ROWS > 1, "")
        x = x.to(tl.float32)
        if HAS_NORM:
            squares += x * x
            x *= _load(norm_ptr + x_at, x_at < K, is_ragged, "").to(tl.float32)
        acc += early[i].to(tl.float32) * x
    IS_RAGGED: tl.constexpr = (K - NUM_EARLY * BLOCK_K) % (GROUP * BLOCK_K) != 0
    for k0 in tl.range(NUM_EARLY * BLOCK_K, K, GROUP * BLOCK_K):
        group = ()
        for i in tl.static_range(GROUP):
            at = k0 + i * BLOCK_K
            w_mask = in_row & (at + k < K)
            group += (_load(weight_ptrs + at, w_mask, IS_RAGGED or HAS_ROW_MASK, "evict_first"),)
        for i in tl.static_range(GROUP):
            x_at = k0 + i * BLOCK_K + x_k
            x = _load(x_ptr + x_row + x_at, is_m & (x_at < K), IS_RAGGED or ROWS > 1, "")
            x = x.to(tl.float32)
            if HAS_NORM:
                squares += x * x
                x *= _load(norm_ptr + x_at, x_at < K, IS_RAGGED, "").to(tl.float32)
            acc += group[i].to(tl.float32) * x

    y = tl.sum(acc, axis=2)
    if HAS_NORM:
        y *= tl.rsqrt(tl.sum(squares, axis=2) / K + eps)
    if HAS_BIAS:
        y += bias[None, :]
    if HAS_SILU:
        gate, up = tl.split(tl.reshape(y, (ROWS, BLOCK_N // 2, 2)))
        y = gate / (1.0 + tl.exp(-gate)) * up
    if HAS_RESIDUAL:
        y += residual
    tl.store(out_ptr + out_at, y.to(out_ptr.dtype.element_ty), mask=is_there)


@triton.jit
def dot_rows(
    first_w, x_ptr, weight_ptr, norm_ptr, rows, is_row, M, k_start, k_end,
    K: tl.constexpr, SPAN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr, IS_MASKED: tl.constexpr, HAS_NORM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Weight rows times all rows of x over SPAN input features from k_start, of which those from
    k_end on do not count: the sums [BLOCK_N, BLOCK_M], and x's squares summed [BLOCK_M].

    With NUM_STAGES 1 the next weights are on their way in registers, first_w being the first; else
    in shared memory.
    """
    k = k_start + tl.arange(0, BLOCK_K)
    m = tl.arange(0, BLOCK_M)
    is_m = (m < M)[:, None]
    in_row = is_row[:, None]
    weight_ptrs = weight_ptr + rows.to(tl.int64)[:, None] * K + k[None, :]
    x_ptrs = x_ptr + m[:, None] * K + k[None, :]
    dtype = x_ptr.dtype.element_ty
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    squares = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    if NUM_STAGES == 1:
        w = first_w
    for k0 in tl.range(0, SPAN, BLOCK_K, num_stages=NUM_STAGES):
        if NUM_STAGES == 1:
            ahead = k0 + BLOCK_K
            next_mask = in_row & (ahead + k < k_end)[None, :]
            next_w = tl.load(
                weight_ptrs + ahead, mask=next_mask, other=0.0, eviction_policy="evict_first"
            )
        else:
            w_mask = in_row & (k0 + k < k_end)[None, :]
            w = _load(weight_ptrs + k0, w_mask, IS_MASKED, "evict_first")
        x = tl.load(x_ptrs + k0, mask=is_m & (k0 + k < k_end)[None, :], other=0.0)
        if HAS_NORM:
            norm = _load(norm_ptr + k0 + k, k0 + k < k_end, IS_MASKED, "").to(tl.float32)
            if dtype == tl.float16:
                norm *= 0.0625  # x times the norm's weight may exceed fp16 before it is scaled
            x_fp32 = x.to(tl.float32)
            squares += x_fp32 * x_fp32
            x = (x_fp32 * norm[None, :]).to(dtype)
        acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
        if NUM_STAGES == 1:
            w = next_w
    return acc, tl.sum(squares, axis=1)


@triton.jit
def rms_scale(square, eps, K: tl.constexpr, dtype: tl.constexpr):
    """What dot_rows' sums are multiplied by to have been RMS-normalised."""
    scale = tl.rsqrt(square / K + eps)
    if dtype == tl.float16:
        scale *= 16.0
    return scale


@triton.jit(do_not_specialize=["M"])
def _skinny_kernel(
    x_ptr, weight_ptr, norm_ptr, bias_ptr, residual_ptr, out_ptr,
    partial_ptr, counter_ptr, eps, M,
    NUM_OUT: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_SPLITS: tl.constexpr, NUM_STAGES: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_SILU: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, PRECISION: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(USE_PDL)
    pid, split = tl.program_id(0), tl.program_id(1)
    rows, is_row = _weight_rows(pid, NUM_OUT, BLOCK_N, HAS_SILU)
    # A split takes whole tiles; the last one may take fewer.
    SPLIT_K: tl.constexpr = (K + NUM_SPLITS * BLOCK_K - 1) // (NUM_SPLITS * BLOCK_K) * BLOCK_K
    IS_MASKED: tl.constexpr = (SPLIT_K * NUM_SPLITS != K) or (
        (NUM_OUT * (1 + HAS_SILU)) % BLOCK_N != 0
    )
    k_start = split * SPLIT_K
    k_end = tl.minimum(k_start + SPLIT_K, K)
    first_w = 0
    if NUM_STAGES == 1:
        k = k_start + tl.arange(0, BLOCK_K)
        weight_ptrs = weight_ptr + rows.to(tl.int64)[:, None] * K + k[None, :]
        w_mask = is_row[:, None] & (k < k_end)[None, :]
        first_w = _load(weight_ptrs, w_mask, IS_MASKED, "evict_first")
    wait_for_inputs(USE_PDL)

    acc, square = dot_rows(
        first_w, x_ptr, weight_ptr, norm_ptr, rows, is_row, M, k_start, k_end,
        K, SPLIT_K, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES, IS_MASKED, HAS_NORM, PRECISION,
    )  # fmt: skip
    m = tl.arange(0, BLOCK_M)
    if NUM_SPLITS > 1:
        j = tl.arange(0, BLOCK_N)
        TILE: tl.constexpr = (BLOCK_N + 1) * BLOCK_M  # the sums, and a row of squares
        partial_ptr += pid * NUM_SPLITS * TILE
        acc_ptrs = partial_ptr + j[:, None] * BLOCK_M + m[None, :]
        square_ptrs = partial_ptr + BLOCK_N * BLOCK_M + m
        tl.store(acc_ptrs + split * TILE, acc)
        if HAS_NORM:
            tl.store(square_ptrs + split * TILE, square)
        tl.debug_barrier()  # all threads have stored before one of them says so
        num_done = tl.atomic_add(counter_ptr + pid, 1, sem="acq_rel")
        if num_done < NUM_SPLITS - 1:
            return
        tl.debug_barrier()
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        square = tl.zeros((BLOCK_M,), tl.float32)
        for i in tl.static_range(NUM_SPLITS):
            acc += tl.load(acc_ptrs + i * TILE, cache_modifier=".cg")
            if HAS_NORM:
                square += tl.load(square_ptrs + i * TILE, cache_modifier=".cg")
        tl.store(counter_ptr + pid, 0)

    if HAS_NORM:
        acc *= rms_scale(square, eps, K, x_ptr.dtype.element_ty)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
    if HAS_SILU:
        pairs = tl.permute(tl.reshape(acc, (BLOCK_N // 2, 2, BLOCK_M)), (0, 2, 1))
        gate, up = tl.split(pairs)
        y = gate / (1.0 + tl.exp(-gate)) * up
        n = pid * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    else:
        y = acc
        n = rows
    at = n[:, None] + m[None, :] * NUM_OUT
    is_there = (n < NUM_OUT)[:, None] & (m < M)[None, :]
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + at, mask=is_there, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=is_there)


@dataclass(frozen=True, slots=True)
class LinearScratch:
    """Where splits of K leave their sums until they are added up. One serves all layers of a step:
    a kernel is over before the next one writes here."""

    partials: Tensor
    """[MAX_PARTIALS] fp32."""
    counters: Tensor
    """[MAX_SPLIT_TILES] int32, zeros between launches."""

    MAX_PARTIALS = NUM_MULTIPROCESSORS * 65 * 64
    MAX_SPLIT_TILES = NUM_MULTIPROCESSORS

    @classmethod
    def allocate(cls, device: torch.device) -> LinearScratch:
        return cls(
            torch.empty(cls.MAX_PARTIALS, dtype=torch.float32, device=device),
            torch.zeros(cls.MAX_SPLIT_TILES, dtype=torch.int32, device=device),
        )


def is_gemv(M: int, N: int, K: int) -> bool:
    """Whether few enough rows, of few enough features, for multiplying and adding in registers."""
    if K > 2048:
        return M == 1 and N < 65536
    return M == 1 or (M == 2 and N < 65536) or (M <= 4 and N < 8192)


def keeps_norm(M: int, N: int, K: int) -> bool:
    """Whether the tl.dot kernel normalises x itself. Its squares take registers, and its way
    through registers the pipeline through shared memory: from some size on a kernel before it is
    cheaper."""
    if N < 8192:
        return K <= 2048
    most = 32 if K <= 2048 and N < 65536 else 16
    return most >= M


def gemv_options(
    N: int, K: int, itemsize: int, has_norm: bool, has_silu_mul: bool
) -> dict[str, int]:
    """Tile and warps of the GEMV. A warp reads 512 bytes of a row at once."""
    width = 512 // itemsize
    if 8 * width < K:
        tile = {"BLOCK_N": 2 if has_silu_mul or N > 4096 else 1, "BLOCK_K": 8 * width}
        return {**tile, "NUM_EARLY": min(3, -(-K // (8 * width))), "GROUP": 2, "num_warps": 8}
    block_n, num_warps = 2, 1
    if N >= 65536:
        block_n, num_warps = 8, 4
    elif not has_norm:  # with it, what crosses the two warps would be two sums
        width, num_warps = 2 * width, 2
    tile = {"BLOCK_N": block_n, "BLOCK_K": width, "NUM_EARLY": -(-K // width), "GROUP": 1}
    return {**tile, "num_warps": num_warps}


def skinny_options(M: int, N: int, K: int, itemsize: int, has_norm: bool) -> dict[str, int]:
    """Tile, splits, stages and warps of the tl.dot kernel.

    Weights of few rows are cut along K into at most one program a multiprocessor, with large tiles.
    """
    block_n, num_splits = 64, 1
    if N < 8192:
        num_splits = max(1, min(K // 512, NUM_MULTIPROCESSORS // -(-N // block_n)))
    if has_norm:
        block_k, num_stages, num_warps = (256, 1, 8) if N < 8192 else (128, 1, 4)
    elif N >= 8192:
        block_k, num_stages, num_warps = 64, 4, 4
    else:
        block_k, num_stages, num_warps = (128, 4, 4) if K <= 2048 else (256, 3, 4)
    block_k = max(16, min(block_k * 2 // itemsize, next_power_of_2(K)))
    return {
        "BLOCK_M": max(16, next_power_of_2(M)), "BLOCK_N": block_n, "BLOCK_K": block_k,
        "NUM_SPLITS": num_splits, "NUM_STAGES": num_stages, "num_warps": num_warps,
    }  # fmt: skip


def beats_cublas(M: int, N: int, K: int) -> bool:
    """Whether small_linear is faster than a plain product and the kernels around it, for M rows and
    a weight [N, K]. Measured on an H200 for Qwen2.5-1.5B, Qwen3-0.6B and Llama-3.1-8B, of which the
    fused projection (6144, 4096) is where it is not from two rows on."""
    return M <= MAX_ROWS and (M == 1 or K <= 2048 or not 4096 < N < 8192)


def small_linear(
    x_MK: Tensor,
    weight_NK: Tensor,
    *,
    bias_N: Tensor | None = None,
    norm_K: Tensor | None = None,
    eps: float = 0.0,
    residual_MN: Tensor | None = None,
    has_silu_mul: bool = False,
    scratch: LinearScratch | None = None,
    starts_early: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """A linear layer of a few rows, with RMSNorm before it and SiLU-and-multiply, residual after.

    y = (rms_norm(x) * norm) @ W.T + bias; y = silu(first half of y) * second half; y += residual

    Shapes:
        x_MK         bf16, fp16 or fp32, contiguous; M from 1 to MAX_ROWS
        weight_NK    dtype of x, contiguous; with has_silu_mul F = N / 2 gate rows, then F up rows
        bias_N       dtype of x like norm_K and residual_MN, which is [M, F] with has_silu_mul
        scratch      needed where M > 1 and K is long enough to be split
        starts_early whether the tl.dot kernel may start before the kernel before is over. Its
                     programs are few and large: where the one before has few too, they would gather
                     on the multiprocessors that it leaves free, and those of the next after them
        out          written instead of a new tensor. It may be residual_MN itself (each
                     program reads the residual where it writes), but not overlap x
        returns      [M, N], or [M, F], in dtype of x; sums and norm in fp32, no TF32 for fp32

    Raises:
        ValueError: M outside 1..MAX_ROWS, shapes, dtypes or strides that do not fit, or no scratch.

    Not checked: NaN or Inf, which go through. Same answer as small_linear_reference, rounded once
    instead of after every operation. The bits depend on M, but not on the other rows.
    Source: split sums in the order of the splits, as Stream-K's fixup, arXiv:2301.03598.
    """
    M, (N, K) = x_MK.shape[0], weight_NK.shape
    if not 1 <= M <= MAX_ROWS:
        raise ValueError(f"{M} rows; this kernel takes 1 to {MAX_ROWS}")
    out = checked_out(x_MK, weight_NK, bias_N, norm_K, residual_MN, has_silu_mul, out)
    num_out = out.shape[1]
    uses_gemv = is_gemv(M, N, K)
    if norm_K is not None and not uses_gemv and not keeps_norm(M, N, K):
        x_MK, norm_K = rms_norm(x_MK, norm_K, eps), None
    options: dict[str, Any] = launch_options(x_MK.device)
    flags = {
        "HAS_NORM": norm_K is not None,
        "HAS_SILU": has_silu_mul,
        "HAS_BIAS": bias_N is not None,
        "HAS_RESIDUAL": residual_MN is not None,
    }
    inputs = (
        x_MK,
        weight_NK,
        x_MK if norm_K is None else norm_K,
        x_MK if bias_N is None else bias_N,
        x_MK if residual_MN is None else residual_MN,
        out,
    )
    if uses_gemv:
        tile = gemv_options(N, K, x_MK.element_size(), norm_K is not None, has_silu_mul)
        num_tiles = -(-N // tile["BLOCK_N"])
        _gemv_kernel[(num_tiles,)](
            *inputs, eps, M, NUM_OUT=num_out, K=K, ROWS=next_power_of_2(M),
            NUM_THREADS=32 * tile["num_warps"], **tile, **flags, **options,
        )  # fmt: skip
        return out
    if not starts_early:
        options = {"USE_PDL": False}
    tile = skinny_options(M, N, K, x_MK.element_size(), norm_K is not None)
    if tile["NUM_SPLITS"] > 1 and scratch is None:
        raise ValueError(f"{M} rows of {K} features are split: that needs a scratch")
    shared = (out, out) if scratch is None else (scratch.partials, scratch.counters)
    _skinny_kernel[(-(-N // tile["BLOCK_N"]), tile["NUM_SPLITS"])](
        *inputs, *shared, eps, M, NUM_OUT=num_out, K=K,
        PRECISION="ieee" if x_MK.dtype == torch.float32 else "tf32", **tile, **flags, **options,
    )  # fmt: skip
    return out


def checked_out(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    norm_K: Tensor | None,
    residual_MN: Tensor | None,
    has_silu_mul: bool,
    out: Tensor | None,
) -> Tensor:
    """`out` or a new tensor. ValueError if shapes, dtypes or strides do not fit."""
    M, (N, K) = x_MK.shape[0], weight_NK.shape
    num_out = N // 2 if has_silu_mul else N
    if has_silu_mul and N % 2:
        raise ValueError(f"{N} weight rows are not a gate and an up of the same size")
    for name, tensor, shape in (
        ("x", x_MK, (M, K)),
        ("weight", weight_NK, (N, K)),
        ("bias", bias_N, (N,)),
        ("norm", norm_K, (K,)),
        ("residual", residual_MN, (M, num_out)),
    ):
        if tensor is None:
            continue
        if tensor.shape != shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)}, not {shape}")
        if tensor.dtype != x_MK.dtype:
            raise ValueError(f"dtypes differ: x {x_MK.dtype}, {name} {tensor.dtype}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}; it must be contiguous")
    if out is None:
        return torch.empty((M, num_out), dtype=x_MK.dtype, device=x_MK.device)
    if out.shape != (M, num_out) or out.dtype != x_MK.dtype or not out.is_contiguous():
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}, not {x_MK.dtype} {(M, num_out)}")
    return out
