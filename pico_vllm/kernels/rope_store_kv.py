"""Rotate this step's queries and keys, normalised first if asked, and store keys and values.

T tokens this step, H query heads, G KV heads, N = H + 2 G heads of the fused projection,
D head dim, P positions of the tables, B blocks in pool, S block_size, Z parts of the projection

A program takes some heads of one token: queries go to the output; keys go there and to the pool,
and their values to the pool with them. A projection that comes in parts is added up on the way, and
then the values go to the output too.
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
from pico_vllm.kernels.store_kv import check_pool, check_slots, store_kv_reference

MAX_TILE_HEADS = 16
"""Of one program: of 16 heads of 128 elements, each of 128 threads has 16 bytes of either half."""


def rope_store_kv_reference(
    qkv: Tensor,
    cos_PD: Tensor,
    sin_PD: Tensor,
    positions_T: Tensor,
    slot_mapping_T: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    *,
    bias_N: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    num_kv_heads, head_dim = k_BGSD.shape[1], k_BGSD.shape[3]
    dtype, in_parts = k_BGSD.dtype, qkv.dim() == 4
    if in_parts:
        qkv = qkv.float().sum(0)
        if bias_N is not None:
            qkv += bias_N.float().view(qkv.shape[1:])
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), 1)
    cos_T1D, sin_T1D = (table[positions_T.long()].unsqueeze(1) for table in (cos_PD, sin_PD))
    rotated = []
    for x, weight in ((q, q_norm), (k, k_norm)):
        if weight is not None:
            variance = x.float().square().mean(-1, keepdim=True)
            x = (x.float() * torch.rsqrt(variance + eps) * weight.float()).to(dtype)
        wide = x.float()
        rotated.append((wide * cos_T1D + wide.roll(head_dim // 2, -1) * sin_T1D).to(dtype))
    v = v.to(dtype)
    store_kv_reference(torch.cat((rotated[1], v), 1), k_BGSD, v_BGSD, slot_mapping_T)
    return torch.cat((*rotated, v) if in_parts else rotated, 1)


@triton.jit
def _load_bias(bias_ptrs, mask, HAS_BIAS: tl.constexpr):
    bias = 0.0
    if HAS_BIAS:
        bias = tl.load(bias_ptrs, mask=mask, other=0.0).to(tl.float32)
    return bias


@triton.jit
def _load_sum(x_ptrs, stride_z, bias, mask, NUM_PARTS: tl.constexpr, HAS_BIAS: tl.constexpr):
    total = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    for i in tl.static_range(1, NUM_PARTS):
        total += tl.load(x_ptrs + i * stride_z, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total += bias
    return total


@triton.jit
def _rope_store_kv_kernel(
    qkv_ptr, cos_ptr, sin_ptr, positions_ptr, slot_mapping_ptr, k_ptr, v_ptr, out_ptr,
    bias_ptr, q_norm_ptr, k_norm_ptr, eps,
    stride_z, stride_t, stride_n, stride_p, stride_b, stride_g, stride_s,
    NUM_PARTS: tl.constexpr, IN_PARTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, S: tl.constexpr,
    TILE_HEADS: tl.constexpr, HALF_PAD: tl.constexpr, HAS_NORM: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(USE_PDL)
    HALF: tl.constexpr = D // 2
    NUM_QUERY_TILES: tl.constexpr = (H + TILE_HEADS - 1) // TILE_HEADS
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    is_query = tile < NUM_QUERY_TILES
    # Heads of one kind, counted from its first; a head's halves are d and d + D / 2.
    head = (tile if is_query else tile - NUM_QUERY_TILES) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    d = tl.arange(0, HALF_PAD)
    mask = (head < (H if is_query else G))[:, None] & (d < HALF)[None, :]
    if HAS_NORM:
        norm_ptr = q_norm_ptr if is_query else k_norm_ptr
        low_weight = tl.load(norm_ptr + d, mask=d < HALF, other=0.0).to(tl.float32)
        high_weight = tl.load(norm_ptr + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)
    first = 0 if is_query else H  # of the projection's heads
    bias_ptrs = bias_ptr + (first + head[:, None]) * D + d[None, :]
    low_bias = _load_bias(bias_ptrs, mask, HAS_BIAS)
    high_bias = _load_bias(bias_ptrs + HALF, mask, HAS_BIAS)
    wait_for_inputs(USE_PDL)
    # Padding has position -1: it must not read before the tables.
    position = tl.maximum(tl.load(positions_ptr + token), 0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    x_ptrs = qkv_ptr + token * stride_t + (first + head[:, None]) * stride_n + d[None, :]
    low = _load_sum(x_ptrs, stride_z, low_bias, mask, NUM_PARTS, HAS_BIAS)
    high = _load_sum(x_ptrs + HALF, stride_z, high_bias, mask, NUM_PARTS, HAS_BIAS)
    # The other halves of the tables repeat these, the sine's with a minus.
    cos = tl.load(cos_ptr + position * stride_p + d, mask=d < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + position * stride_p + HALF + d, mask=d < HALF, other=0.0)[None, :]
    dtype = out_ptr.dtype.element_ty
    if HAS_NORM:
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        inverse = tl.rsqrt(squares / D + eps)[:, None]
        low = (low * inverse * low_weight[None, :]).to(dtype).to(tl.float32)
        high = (high * inverse * high_weight[None, :]).to(dtype).to(tl.float32)
    low_rot = (low * cos - high * sin).to(dtype)
    high_rot = (high * cos + low * sin).to(dtype)
    OUT_HEADS: tl.constexpr = H + 2 * G if IN_PARTS else H + G
    out_ptrs = out_ptr + (token * OUT_HEADS + first + head[:, None]) * D + d[None, :]
    tl.store(out_ptrs, low_rot, mask=mask)
    tl.store(out_ptrs + HALF, high_rot, mask=mask)
    if not is_query and (IN_PARTS or slot >= 0):
        v_bias_ptrs = bias_ptrs + G * D
        v_low_bias = _load_bias(v_bias_ptrs, mask, HAS_BIAS)
        v_high_bias = _load_bias(v_bias_ptrs + HALF, mask, HAS_BIAS)
        v_ptrs = x_ptrs + G * stride_n
        v_low = _load_sum(v_ptrs, stride_z, v_low_bias, mask, NUM_PARTS, HAS_BIAS).to(dtype)
        v_high = _load_sum(v_ptrs + HALF, stride_z, v_high_bias, mask, NUM_PARTS, HAS_BIAS)
        v_high = v_high.to(dtype)
        if IN_PARTS:
            tl.store(out_ptrs + G * D, v_low, mask=mask)
            tl.store(out_ptrs + G * D + HALF, v_high, mask=mask)
        if slot >= 0:
            home = slot // S * stride_b + slot % S * stride_s
            homes = home + head[:, None].to(tl.int64) * stride_g + d[None, :]
            tl.store(k_ptr + homes, low_rot, mask=mask)
            tl.store(k_ptr + homes + HALF, high_rot, mask=mask)
            tl.store(v_ptr + homes, v_low, mask=mask)
            tl.store(v_ptr + homes + HALF, v_high, mask=mask)


def rope_store_kv(
    qkv: Tensor,
    cos_PD: Tensor,
    sin_PD: Tensor,
    positions_T: Tensor,
    slot_mapping_T: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    *,
    bias_N: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """RMSNorm of each head where weights are given, RoPE, and the store of keys and values.

    Shapes:
        qkv             [T, N, D] bf16, fp16 or fp32: a token's H queries, G keys, G values; last
                        dim contiguous, other strides free. Or [Z, T, N, D]: parts, to be added up
        bias_N          [N * D], to be added to parts; contiguous, dtype of qkv
        cos/sin_PD      fp32 tables by position, rows alike; of cos the first half of a row is read,
                        of sin, which holds -sin and sin, the second
        positions_T     [T] int32 or int64
        slot_mapping_T  [T] int64; keys and values of -1 are not stored
        k/v_BGSD        one layer of the pool, dtype of qkv
        q/k_norm        [D] each, or neither
        returns         rotated queries, then rotated keys [T, H + G, D], contiguous; where qkv
                        comes in parts then the values, [T, N, D]. Written to `out` if given

    Raises:
        ValueError: an odd head dim, or shapes, dtypes or strides that do not fit each other.

    Not checked, as it would stall the stream: positions below P, slots in range and different.
    fp32 inside; normalised values are rounded to the dtype before they are rotated, as a model that
    applies one after the other does. Same answer as rope_store_kv_reference.
    Source: Su et al. 2021, arXiv:2104.09864, halves as in GPT-NeoX.
    """
    in_parts = qkv.dim() == 4
    num_tokens, num_all, head_dim = qkv.shape[-3:]
    num_kv_heads, block_size = k_BGSD.shape[1:3]
    num_heads = num_all - 2 * num_kv_heads
    check_pool(k_BGSD, v_BGSD)
    check_slots(slot_mapping_T, num_tokens)
    if head_dim % 2:
        raise ValueError(f"head_dim {head_dim} is odd: it has no halves to rotate")
    if num_heads < 1 or head_dim != k_BGSD.shape[3] or qkv.dtype != k_BGSD.dtype:
        raise ValueError(
            f"qkv is {list(qkv.shape)} {qkv.dtype}; a pool of {num_kv_heads} heads of "
            f"{k_BGSD.shape[3]} {k_BGSD.dtype} needs more than twice as many rows of that"
        )
    if positions_T.shape != (num_tokens,) or qkv.stride(-1) != 1:
        raise ValueError(
            f"positions are {list(positions_T.shape)} for {num_tokens} tokens, qkv has strides "
            f"{qkv.stride()}; one position a token and last stride 1"
        )
    for table in (cos_PD, sin_PD):
        if table.shape[1] != head_dim or table.dtype != torch.float32:
            raise ValueError(f"a table is {list(table.shape)} {table.dtype}; [P, {head_dim}] fp32")
    if cos_PD.stride() != sin_PD.stride() or cos_PD.stride(1) != 1:
        raise ValueError(f"cos {cos_PD.stride()} and sin {sin_PD.stride()} need equal strides")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm are given together or not at all")
    for norm in (q_norm, k_norm):
        if norm is not None and (norm.shape != (head_dim,) or norm.stride(0) != 1):
            raise ValueError(f"a norm's weights are {list(norm.shape)}; [{head_dim}], contiguous")
    if bias_N is not None and not (
        in_parts and bias_N.shape == (num_all * head_dim,) and bias_N.is_contiguous()
    ):
        raise ValueError(
            f"a bias of {list(bias_N.shape)}: {num_all * head_dim} contiguous places, and only for "
            "a projection in parts"
        )
    shape = (num_tokens, num_all if in_parts else num_heads + num_kv_heads, head_dim)
    if out is None:
        out = torch.empty(shape, dtype=qkv.dtype, device=qkv.device)
    elif out.shape != shape or not out.is_contiguous():
        raise ValueError(
            f"out is {list(out.shape)} with strides {out.stride()}; {list(shape)}, contiguous"
        )
    tile_heads = min(MAX_TILE_HEADS, next_power_of_2(max(num_heads, num_kv_heads)))
    half_pad = next_power_of_2(head_dim // 2)
    num_tiles = cdiv(num_heads, tile_heads) + cdiv(num_kv_heads, tile_heads)
    _rope_store_kv_kernel[(num_tokens, num_tiles)](
        qkv, cos_PD, sin_PD, positions_T, slot_mapping_T, k_BGSD, v_BGSD, out,
        *(qkv if each is None else each for each in (bias_N, q_norm, k_norm)), eps,
        qkv.stride(0) if in_parts else 0, *qkv.stride()[-3:-1],
        cos_PD.stride(0), *k_BGSD.stride()[:3],
        NUM_PARTS=len(qkv) if in_parts else 1, IN_PARTS=in_parts, HAS_BIAS=bias_N is not None,
        H=num_heads, G=num_kv_heads, D=head_dim, S=block_size,
        TILE_HEADS=tile_heads, HALF_PAD=half_pad, HAS_NORM=q_norm is not None,
        num_warps=max(1, min(4, tile_heads * half_pad // 256)), **launch_options(qkv.device),
    )  # fmt: skip
    return out
