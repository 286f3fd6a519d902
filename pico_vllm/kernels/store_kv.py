"""Write the keys and values of this step's tokens into the KV pool.

T tokens this step, G KV heads, J = 2 G, D head dim, B blocks in pool, S block_size
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pico_vllm.kernels.launch import (
    launch_options,
    let_next_start,
    next_power_of_2,
    wait_for_inputs,
)


def store_kv_reference(
    kv_TJD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, slot_mapping: Tensor
) -> None:
    num_kv_heads, block_size = k_BGSD.shape[1:3]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            k_BGSD[slot // block_size, :, slot % block_size] = kv_TJD[token, :num_kv_heads]
            v_BGSD[slot // block_size, :, slot % block_size] = kv_TJD[token, num_kv_heads:]


@triton.jit
def _store_kv_kernel(
    kv_ptr, slot_mapping_ptr, k_ptr, v_ptr,
    stride_t, stride_j, stride_b, stride_g, stride_s,
    G: tl.constexpr, G_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, S: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(USE_PDL)
    token = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, G_PAD)[:, None]
    d = tl.arange(0, D_PAD)[None, :]
    mask = (g < G) & (d < D)
    wait_for_inputs(USE_PDL)
    slot = tl.load(slot_mapping_ptr + token)
    new = kv_ptr + token * stride_t + g * stride_j + d
    k = tl.load(new, mask=mask)
    v = tl.load(new + G * stride_j, mask=mask)
    home = slot // S * stride_b + slot % S * stride_s + g.to(tl.int64) * stride_g + d
    if slot >= 0:
        tl.store(k_ptr + home, k, mask=mask)
        tl.store(v_ptr + home, v, mask=mask)


def check_pool(k_BGSD: Tensor, v_BGSD: Tensor) -> None:
    """Kernels address K and V of a layer by one set of offsets."""
    if k_BGSD.shape != v_BGSD.shape or k_BGSD.dtype != v_BGSD.dtype:
        raise ValueError(
            f"k is {list(k_BGSD.shape)} {k_BGSD.dtype}, v {list(v_BGSD.shape)} {v_BGSD.dtype}; "
            "they must be alike"
        )
    if k_BGSD.stride() != v_BGSD.stride() or k_BGSD.stride(3) != 1:
        raise ValueError(
            f"k has strides {k_BGSD.stride()}, v {v_BGSD.stride()}; they must be equal, the last 1"
        )


def check_slots(slot_mapping_T: Tensor, num_tokens: int) -> None:
    if slot_mapping_T.dtype != torch.int64 or slot_mapping_T.shape != (num_tokens,):
        raise ValueError(
            f"slot_mapping is {list(slot_mapping_T.shape)} {slot_mapping_T.dtype}; "
            f"{num_tokens} tokens need [{num_tokens}] torch.int64"
        )


def store_kv(kv_TJD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, slot_mapping_T: Tensor) -> None:
    """Copy each token's keys and values to its slot.

    Shapes:
        kv_TJD          a token's G keys, then its G values; last dim contiguous, other strides free
        k/v_BGSD        one layer of the pool, dtype of kv
        slot_mapping_T  [T] int64, contiguous; -1 is not stored

    Raises:
        ValueError: shapes, dtypes or strides that do not fit each other.

    Not checked, as it would stall the stream: slots in range and, but for -1, different.
    Same bits as store_kv_reference.
    """
    num_tokens, num_rows, head_dim = kv_TJD.shape
    num_kv_heads, block_size = k_BGSD.shape[1:3]
    check_pool(k_BGSD, v_BGSD)
    check_slots(slot_mapping_T, num_tokens)
    if num_rows != 2 * num_kv_heads or head_dim != k_BGSD.shape[3] or kv_TJD.dtype != k_BGSD.dtype:
        raise ValueError(
            f"kv is {list(kv_TJD.shape)} {kv_TJD.dtype}; a pool of {num_kv_heads} heads of "
            f"{k_BGSD.shape[3]} {k_BGSD.dtype} needs twice as many rows of that"
        )
    if kv_TJD.stride(2) != 1 or not slot_mapping_T.is_contiguous():
        raise ValueError(
            f"kv {kv_TJD.stride()} and slot_mapping {slot_mapping_T.stride()} need last stride 1"
        )
    _store_kv_kernel[(num_tokens,)](
        kv_TJD, slot_mapping_T, k_BGSD, v_BGSD,
        *kv_TJD.stride()[:2], *k_BGSD.stride()[:3],
        G=num_kv_heads, G_PAD=next_power_of_2(num_kv_heads),
        D=head_dim, D_PAD=next_power_of_2(head_dim), S=block_size,
        num_warps=2 if num_kv_heads * head_dim <= 512 else 4, **launch_options(kv_TJD.device),
    )  # fmt: skip
