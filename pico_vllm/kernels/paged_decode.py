"""Attention of one new token per request over its paged KV.

R requests, H query heads, G KV heads, D head dim, B blocks in pool, S block_size,
M block-table width
"""

from __future__ import annotations

import torch
from torch import Tensor


def paged_decode_reference(
    q_RHD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
) -> Tensor:
    num_heads, head_dim = q_RHD.shape[1:]
    num_kv_heads, block_size = k_BGSD.shape[1:3]
    out_RHD = torch.zeros_like(q_RHD)
    for r, seq_len in enumerate(seq_lens.tolist()):
        if seq_len == 0:
            continue
        blocks = block_table[r, : -(-seq_len // block_size)].long()
        k_GND, v_GND = (
            x[blocks].transpose(0, 1).reshape(num_kv_heads, -1, head_dim)[:, :seq_len].float()
            for x in (k_BGSD, v_BGSD)
        )
        q_GrD = q_RHD[r].view(num_kv_heads, -1, head_dim).float()
        weights = torch.softmax(q_GrD @ k_GND.transpose(1, 2) * scale, -1)
        out_RHD[r] = (weights @ v_GND).reshape(num_heads, head_dim).to(q_RHD.dtype)
    return out_RHD
