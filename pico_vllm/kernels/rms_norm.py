"""RMSNorm over the last dimension, alone or after adding to the residual stream.

T tokens this step, N heads of a token, E hidden size or head dim

    y = x / sqrt(mean(x^2) + eps) * weight
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pico_vllm.kernels.launch import (
    cdiv,
    launch_options,
    let_next_start,
    next_power_of_2,
    wait_for_inputs,
)

MAX_SIZE = 32768
"""A program holds whole rows in registers."""
TILE_ELEMENTS = 1024
"""Short rows, such as heads, share a program up to this many elements."""


def rms_norm_reference(x: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * inverse * weight_E.float()).to(x.dtype)


def add_rms_norm_reference(
    x: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    parts_STE = x.reshape(-1, *residual_TE.shape)
    sum_TE = (residual_TE.float() + parts_STE.float().sum(0)).to(residual_TE.dtype)
    return sum_TE, rms_norm_reference(sum_TE, weight_E, eps)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, sum_ptr, out_ptr, num_rows, eps,
    stride_xs, stride_xt, stride_xn, stride_residual, stride_ot, stride_on,
    NUM_PARTS: tl.constexpr, N: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr,
    TILE_ROWS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(USE_PDL)
    row = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
    e = tl.arange(0, E_PAD)[None, :]
    mask = (row < num_rows) & (e < E)
    weight = tl.load(weight_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    wait_for_inputs(USE_PDL)
    x_ptrs = x_ptr + row // N * stride_xt + row % N * stride_xn + e
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * stride_residual + e, mask=mask, other=0.0)
        total = residual.to(tl.float32)
        for part in tl.static_range(NUM_PARTS):
            total += tl.load(x_ptrs + part * stride_xs, mask=mask, other=0.0).to(tl.float32)
        x = total.to(out_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * E + e, x, mask=mask)
    else:
        x = tl.load(x_ptrs, mask=mask, other=0.0)
    # The norm sees the sum as it is stored, rounded.
    wide = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 1) / E + eps)[:, None]
    out_ptrs = out_ptr + row // N * stride_ot + row % N * stride_on + e
    tl.store(out_ptrs, (wide * inverse * weight).to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight_E: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """Normalise each row.

    Shapes:
        x         bf16, fp16 or fp32 [T, E], or [T, N, E] for heads; last dim contiguous, other
                  strides free
        weight_E  any of those dtypes, contiguous
        returns   shape and dtype of x; summed in fp32, rounded once. Written to `out` if given,
                  whose strides are as free as those of x

    Raises:
        ValueError: E above 32768, or shapes, dtypes or strides that do not fit each other.

    Same answer as rms_norm_reference. Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    _check(x, weight_E)
    if x.dim() not in (2, 3):
        raise ValueError(f"x has {x.dim()} dimensions; 2, or 3 for heads")
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    elif out.shape != x.shape or out.dtype != x.dtype or out.stride(-1) != 1:
        raise ValueError(
            f"out is {list(out.shape)} {out.dtype} with strides {out.stride()}; "
            f"{list(x.shape)} {x.dtype} with last stride 1"
        )
    _launch(x, None, weight_E, None, out, eps)
    return out


def add_rms_norm(
    x: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add and normalise the sum: (x + residual, rms_norm of it), both contiguous.

    Shapes, dtypes and errors as rms_norm; residual_TE as x [T, E], or x [S, T, E] of S parts that
    are all added, in their order. The sum is made in fp32 and rounded once; the norm is that of the
    rounded sum, so that it equals rms_norm of what is returned. Same answer as
    add_rms_norm_reference.
    """
    _check(x, weight_E)
    if x.dim() not in (2, 3) or x.shape[-2:] != residual_TE.shape or residual_TE.dtype != x.dtype:
        raise ValueError(
            f"x is {list(x.shape)} {x.dtype}, residual {list(residual_TE.shape)} "
            f"{residual_TE.dtype}; they must be alike, [T, E], but for x's parts [S, T, E]"
        )
    if residual_TE.stride(1) != 1:
        raise ValueError(f"residual has strides {residual_TE.stride()}; the last must be 1")
    sum_TE, normed_TE = (
        torch.empty(residual_TE.shape, dtype=x.dtype, device=x.device) for _ in range(2)
    )
    _launch(x, residual_TE, weight_E, sum_TE, normed_TE, eps)
    return sum_TE, normed_TE


def _check(x: Tensor, weight_E: Tensor) -> None:
    size = x.shape[-1]
    if size > MAX_SIZE:
        raise ValueError(f"rows of {size} elements are longer than {MAX_SIZE}")
    if weight_E.shape != (size,) or weight_E.stride(0) != 1 or x.stride(-1) != 1:
        raise ValueError(
            f"x has rows of {size} and strides {x.stride()}, weight {list(weight_E.shape)} and "
            f"{weight_E.stride()}; as many weights, last strides 1"
        )


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight_E: Tensor,
    sum_TE: Tensor | None,
    out: Tensor,
    eps: float,
) -> None:
    size = x.shape[-1]
    is_in_parts = residual is not None and x.dim() == 3
    num_parts = x.shape[0] if is_in_parts else 1
    num_heads = x.shape[1] if x.dim() == 3 and not is_in_parts else 1
    num_rows = out.shape[0] * num_heads
    padded_size = next_power_of_2(size)
    tile_rows = max(1, TILE_ELEMENTS // padded_size)
    _rms_norm_kernel[(cdiv(num_rows, tile_rows),)](
        x, x if residual is None else residual, weight_E, x if sum_TE is None else sum_TE, out,
        num_rows, eps,
        x.stride(0) if is_in_parts else 0, x.stride(-2 if is_in_parts else 0), x.stride(-2),
        0 if residual is None else residual.stride(0), out.stride(0), out.stride(-2),
        NUM_PARTS=num_parts, N=num_heads, E=size, E_PAD=padded_size, TILE_ROWS=tile_rows,
        HAS_RESIDUAL=residual is not None,
        # 16 bytes a thread of 2-byte elements.
        num_warps=max(4, min(16, padded_size // 256)), **launch_options(x.device),
    )  # fmt: skip
