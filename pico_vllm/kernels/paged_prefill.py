"""Attention of prompt chunks: new tokens over their request's cached context and themselves.

T tokens this step, H query heads, G KV heads, D head dim, B blocks in pool, S block_size,
R requests, M block-table width
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def paged_prefill_reference(
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
    num_groups = q_THD.shape[1] // k_TGD.shape[1]
    block_size = k_BGSD.shape[2]
    out_THD = torch.zeros_like(q_THD)
    start = 0
    for blocks, query_len, context_len in zip(block_table, query_lens, context_lens, strict=True):
        tokens = slice(start, start + int(query_len))
        positions = torch.arange(int(context_len))
        at = (blocks[positions // block_size].long(), slice(None), positions % block_size)
        k_NHD, v_NHD = (
            torch.cat((pool[at], new[tokens])).float().repeat_interleave(num_groups, 1)
            for pool, new in ((k_BGSD, k_TGD), (v_BGSD, v_TGD))
        )
        scores_HQN = torch.einsum("qhd,nhd->hqn", q_THD[tokens].float(), k_NHD) * scale
        sees = torch.ones(scores_HQN.shape[1:], dtype=torch.bool).tril(int(context_len))
        weights_HQN = torch.softmax(scores_HQN.masked_fill(~sees, float("-inf")), -1)
        out_THD[tokens] = torch.einsum("hqn,nhd->qhd", weights_HQN, v_NHD).to(q_THD.dtype)
        start += int(query_len)
    return out_THD
