"""Attention over a long context by tiles: how much is gathered at once, and how the parts merge.

G KV heads, D head dim, S block_size, Q queries of a request, H query heads
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


def tile_tokens(num_kv_heads: int, head_dim: int, itemsize: int, block_size: int) -> int:
    """How many tokens TILE_BYTES holds, in whole blocks."""
    block_bytes = 2 * num_kv_heads * head_dim * itemsize * block_size
    return block_size * max(1, TILE_BYTES // block_bytes)


def attend_with_lse(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float, is_causal: bool = False
) -> tuple[Tensor, Tensor]:
    """[batch, heads, queries, D] and, in fp32, the natural logarithm of each softmax's denominator
    [batch, heads, queries]. The heads of k and v may divide those of q."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    return out, lse


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of tokens from attention over each; out in fp32."""
    # exp(more_lse) / (exp(lse) + exp(more_lse)) without an overflow.
    share = torch.sigmoid(more_lse - lse)[..., None]
    return torch.lerp(out, more.float(), share), torch.logaddexp(lse, more_lse)
