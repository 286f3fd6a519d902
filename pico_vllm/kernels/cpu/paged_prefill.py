"""Attention of prompt chunks: new tokens over their request's cached context and themselves.

T tokens this step, H query heads, G KV heads, D head dim, B blocks in pool, S block_size,
R requests, M block-table width, C context tokens of one request, Q its new tokens
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pico_vllm.kernels.cpu.kv_rows import KVRows


def paged_prefill(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    block_table: Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    scale: float,
) -> Tensor:
    """Attend each request's new tokens over its context in the pool and, causally, over themselves.

    Shapes:
        q_THD, k/v_TGD  this step's tokens, request after request; bf16, fp16 or fp32; strides free
        k/v_BGSD        one layer of the pool, same dtype; only the slots of the contexts are read
        block_table     [R, M] int32
        query_lens      R host ints, tokens; their sum is T
        context_lens    R host ints, tokens cached before this step
        returns         [T, H, D], dtype of q; softmax and sums in fp32

    Raises:
        ValueError: H is not a multiple of G, or k_BGSD and v_BGSD are not a layer of a pool.

    Not checked: block ids in range. Same answer as paged_prefill_reference.
    """
    num_heads, num_kv_heads = q_THD.shape[1], k_TGD.shape[1]
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are not a multiple of {num_kv_heads} KV heads")
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    q_HTD, k_GTD, v_GTD = (x.transpose(0, 1) for x in (q_THD, k_TGD, v_TGD))
    start = 0
    for request, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        end = start + int(query_len)
        new_HQD, k_GQD, v_GQD = q_HTD[:, start:end], k_GTD[:, start:end], v_GTD[:, start:end]
        if context_len == 0:
            out_HQD = functional.scaled_dot_product_attention(
                new_HQD[None],
                k_GQD[None],
                v_GQD[None],
                is_causal=True,
                scale=scale,
                enable_gqa=True,
            )[0]
        else:
            context = _context(k_BGSD, v_BGSD, block_table[request], int(context_len))
            out_HQD = _extend(new_HQD, k_GQD, v_GQD, *context, scale)
        out_THD[start:end] = out_HQD.transpose(0, 1)
        start = end
    return out_THD


def _context(
    k_BGSD: Tensor, v_BGSD: Tensor, blocks: Tensor, context_len: int
) -> tuple[Tensor, Tensor]:
    """k and v [G, C, D] of the cached tokens."""
    kv_rows = KVRows.of(k_BGSD, v_BGSD)
    positions = np.arange(context_len)
    slots = (
        blocks.cpu().numpy()[positions // kv_rows.block_size].astype(np.int64) * kv_rows.block_size
    )
    rows_2CG = kv_rows.of_slots(slots + positions % kv_rows.block_size)
    rows = kv_rows.to_device(rows_2CG.transpose(0, 2, 1))
    kv_2GCD = kv_rows.matrix(k_BGSD).index_select(0, rows)
    k_GCD, v_GCD = kv_2GCD.view(2, kv_rows.num_heads, context_len, -1)
    return k_GCD, v_GCD


def _extend(
    q_HQD: Tensor, k_GQD: Tensor, v_GQD: Tensor, k_GCD: Tensor, v_GCD: Tensor, scale: float
) -> Tensor:
    """New tokens over context and themselves: one mask, True where a query sees a token."""
    query_len, context_len = q_HQD.shape[1], k_GCD.shape[1]
    shape = (query_len, context_len + query_len)
    sees = torch.ones(shape, dtype=torch.bool, device=q_HQD.device).tril(context_len)
    k_GND, v_GND = torch.cat((k_GCD, k_GQD), 1), torch.cat((v_GCD, v_GQD), 1)
    return functional.scaled_dot_product_attention(
        q_HQD[None], k_GND[None], v_GND[None], attn_mask=sees, scale=scale, enable_gqa=True
    )[0]
