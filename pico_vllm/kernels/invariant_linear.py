"""A product whose rows do not depend on each other, nor on how many there are.

M rows, N outputs, K inputs

Elsewhere a batch's size decides which kernel multiplies and how K is cut, and with it the last bits
of every row. Here one kernel sums K in one order, in instructions of one kind. Tiles are larger
where rows are many, which changes how often a weight is read, and no sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pico_vllm.kernels.launch import cdiv, launch_options, let_next_start, wait_for_inputs

FEW_ROWS = 64


def invariant_linear_reference(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    residual_MN: Tensor | None = None,
) -> Tensor:
    y_MN = x_MK.float() @ weight_NK.float().T
    for each in (bias_N, residual_MN):
        y_MN = y_MN if each is None else y_MN + each.float()
    return y_MN.to(x_MK.dtype)


@triton.jit
def _invariant_linear_kernel(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr,
    M, N, K, x_stride, residual_stride,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr, PRECISION: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(USE_PDL)
    num_tiles_m = tl.cdiv(M, BLOCK_M)
    pid = tl.program_id(0)
    m = (pid % num_tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (pid // num_tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m_mask, n_mask = m < M, n < N
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    weight_ptrs = weight_ptr + n.to(tl.int64)[None, :] * K + k[:, None]
    wait_for_inputs(USE_PDL)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        k_mask = start + k < K
        x = tl.load(x_ptrs + start, mask=m_mask[:, None] & k_mask[None, :], other=0.0)
        weight = tl.load(weight_ptrs + start, mask=k_mask[:, None] & n_mask[None, :], other=0.0)
        acc = tl.dot(x, weight, acc, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n_mask, other=0.0).to(tl.float32)[None, :]
    mask = m_mask[:, None] & n_mask[None, :]
    if HAS_RESIDUAL:
        residual_ptrs = residual_ptr + m.to(tl.int64)[:, None] * residual_stride + n[None, :]
        acc += tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


def invariant_linear(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    residual_MN: Tensor | None = None,
) -> Tensor:
    """x @ W.T, plus bias, plus residual.

    Shapes:
        x_MK         bf16, fp16 or fp32, inputs contiguous; any number of rows
        weight_NK    dtype of x, contiguous
        bias_N       dtype of x, contiguous
        residual_MN  dtype of x, outputs contiguous
        returns      [M, N], dtype of x; sums in fp32, rounded once

    Raises:
        ValueError: shapes, dtypes or strides that do not fit.

    Same answer as invariant_linear_reference. A row has the same bits in any x that holds it.
    Source: He et al. 2025, Defeating Nondeterminism in LLM Inference.
    """
    (M, K), N = x_MK.shape, weight_NK.shape[0]
    if weight_NK.shape != (N, K) or not weight_NK.is_contiguous() or x_MK.stride(1) != 1:
        raise ValueError(
            f"x is {list(x_MK.shape)} with strides {x_MK.stride()}, weight "
            f"{list(weight_NK.shape)} with {weight_NK.stride()}; inputs must be as many, contiguous"
        )
    for name, tensor, shape in (("bias", bias_N, (N,)), ("residual", residual_MN, (M, N))):
        if tensor is not None and (tensor.shape != shape or tensor.stride(-1) != 1):
            raise ValueError(
                f"{name} is {list(tensor.shape)} with strides {tensor.stride()}; "
                f"{list(shape)}, contiguous"
            )
    for tensor in (weight_NK, bias_N, residual_MN):
        if tensor is not None and tensor.dtype != x_MK.dtype:
            raise ValueError(f"x is {x_MK.dtype} and another operand {tensor.dtype}")
    out_MN = torch.empty((M, N), dtype=x_MK.dtype, device=x_MK.device)
    is_fp32 = x_MK.dtype == torch.float32
    if is_fp32 or M <= FEW_ROWS:
        block_m, block_n, block_k, num_warps, num_stages = 64, 32, 32 if is_fp32 else 128, 4, 4
        if is_fp32 and K % 16:
            num_stages = 1  # with more, Triton 3.6's code ends in a misaligned address there
    else:
        block_m, block_n, block_k, num_warps, num_stages = 128, 128, 64, 8, 4
    grid = (cdiv(M, block_m) * cdiv(N, block_n),)
    _invariant_linear_kernel[grid](
        x_MK, weight_NK, x_MK if bias_N is None else bias_N,
        x_MK if residual_MN is None else residual_MN, out_MN,
        M, N, K, x_MK.stride(0), 0 if residual_MN is None else residual_MN.stride(0),
        HAS_BIAS=bias_N is not None, HAS_RESIDUAL=residual_MN is not None,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, NUM_STAGES=num_stages,
        PRECISION="ieee" if is_fp32 else "tf32", num_warps=num_warps,
        **launch_options(x_MK.device),
    )  # fmt: skip
    return out_MN
