"""Attention over a long context by tiles: how much is gathered at once, and how the parts merge.

G KV heads, D head dim, S block_size, H query heads, h = H / G; Q queries, N tokens of a request
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE_BYTES = 6 << 20
"""Most KV that is copied out of the pool at a time: 8,192 tokens at G=3, D=64 in bf16. A single
block may be larger."""
PIECES_PER_TILE = 4
"""A request longer than half a tile is cut into pieces of at most a fourth of one: attention shares
out (piece, KV head) pairs, and three pairs keep two threads busy for three fourths of the time."""
QUERIES_AT_ONCE = 1024
"""Of attend_by_products, whose scores exist in memory."""


def tile_tokens(num_kv_heads: int, head_dim: int, itemsize: int, block_size: int) -> int:
    """How many tokens TILE_BYTES holds, in whole blocks."""
    block_bytes = 2 * num_kv_heads * head_dim * itemsize * block_size
    return block_size * max(1, TILE_BYTES // block_bytes)


def attend_with_lse(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float, is_causal: bool = False
) -> tuple[Tensor, Tensor]:
    """[batch, H, Q, D] and, in fp32, the natural logarithm of each softmax's denominator
    [batch, H, Q]. The heads of k and v may divide those of q; a mask is [batch, 1, 1, N]."""
    if q.device.type != "cpu":
        return attend_by_products(q, k, v, mask, scale=scale, is_causal=is_causal)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    return out, lse


def attend_by_products(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float, is_causal: bool = False
) -> tuple[Tensor, Tensor]:
    """attend_with_lse on any device: torch has no attention that gives both results on all."""
    q_bGhQD = q.float().unflatten(1, (k.shape[1], -1))
    k_bGND, v_bGND = k.float(), v.float()
    at_N = torch.arange(k.shape[2], device=q.device)
    outs, lses = [], []
    for first in range(0, q.shape[2], QUERIES_AT_ONCE):
        part = q_bGhQD[..., first : first + QUERIES_AT_ONCE, :]
        scores_bGhQN = torch.einsum("bghqd,bgnd->bghqn", part, k_bGND) * scale
        if mask is not None:
            scores_bGhQN += mask.unsqueeze(1)
        if is_causal:
            at_Q = torch.arange(first, first + part.shape[3], device=q.device)
            scores_bGhQN.masked_fill_(at_N > at_Q[:, None], float("-inf"))
        lses.append(scores_bGhQN.logsumexp(-1))
        weights_bGhQN = scores_bGhQN.sub_(lses[-1][..., None]).exp_()
        outs.append(torch.einsum("bghqn,bgnd->bghqd", weights_bGhQN, v_bGND))
    return torch.cat(outs, 3).flatten(1, 2).to(q.dtype), torch.cat(lses, 3).flatten(1, 2)


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of tokens from attention over each; out in fp32."""
    # exp(more_lse) / (exp(lse) + exp(more_lse)) without an overflow.
    share = torch.sigmoid(more_lse - lse)[..., None]
    return torch.lerp(out, more.float(), share), torch.logaddexp(lse, more_lse)
