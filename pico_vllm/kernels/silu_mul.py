"""The gate of an MLP: silu(gate) * up.

T tokens this step, F MLP size; gate and up lie side by side, 2 F wide

    silu(x) = x / (1 + exp(-x))
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pico_vllm.kernels.launch import cdiv, launch_options, let_next_start, wait_for_inputs


def silu_mul_reference(gate_up_T2F: Tensor) -> Tensor:
    gate_TF, up_TF = gate_up_T2F.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate_TF) * up_TF).to(gate_up_T2F.dtype)


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr, out_ptr, stride_t, stride_ot,
    F: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(USE_PDL)
    token = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate_ptrs = gate_up_ptr + token * stride_t + f
    wait_for_inputs(USE_PDL)
    gate = tl.load(gate_ptrs, mask=f < F, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + F, mask=f < F, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + token * stride_ot + f, out.to(out_ptr.dtype.element_ty), mask=f < F)


def silu_mul(gate_up_T2F: Tensor, out: Tensor | None = None) -> Tensor:
    """silu of the first half times the second.

    Shapes:
        gate_up_T2F  bf16, fp16 or fp32 [T, 2 F]; last dim contiguous, rows anywhere
        returns      [T, F] in the same dtype; fp32 inside, rounded once. Written to `out` if given,
                     whose rows may lie anywhere too

    Raises:
        ValueError: an odd width, or an `out` that does not fit.

    Same answer as silu_mul_reference. Source: Shazeer 2020, arXiv:2002.05202.
    """
    num_tokens, width = gate_up_T2F.shape
    if width % 2 or gate_up_T2F.stride(1) != 1:
        raise ValueError(
            f"gate_up is {width} wide with strides {gate_up_T2F.stride()}; even, last stride 1"
        )
    shape = (num_tokens, width // 2)
    if out is None:
        out = torch.empty(shape, dtype=gate_up_T2F.dtype, device=gate_up_T2F.device)
    elif out.shape != shape or out.dtype != gate_up_T2F.dtype or out.stride(1) != 1:
        raise ValueError(
            f"out is {list(out.shape)} {out.dtype} with strides {out.stride()}; "
            f"{list(shape)} {gate_up_T2F.dtype} with last stride 1"
        )
    block = 1024  # of 2-byte elements, 16 bytes a thread
    _silu_mul_kernel[(num_tokens, cdiv(shape[1], block))](
        gate_up_T2F, out, gate_up_T2F.stride(0), out.stride(0),
        F=shape[1], BLOCK=block, num_warps=4, **launch_options(gate_up_T2F.device),
    )  # fmt: skip
    return out
