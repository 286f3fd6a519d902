"""Attention of prompt chunks: new tokens over their request's cached context and themselves.

T tokens this step, H query heads, G KV heads, D head dim, B blocks in pool, S block_size,
R requests, M block-table width, Q new tokens of one request

The context is gathered out of the pool a tile at a time, never more than TILE_BYTES
(kernels/cpu/tiles.py). Every new token sees all of it, so no mask is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from pico_vllm.kernels.cpu.kv_rows import KVRows
from pico_vllm.kernels.cpu.tiles import attend_with_lse, merge


@dataclass(slots=True)
class ContextTile:
    blocks: NDArray[np.int64]
    num_tokens: int
    """The last block may hold more, which is not read."""
    rows: Tensor | None = None
    """[2 * G * len(blocks)] int64, of the block matrix, see KVRows."""


@dataclass(slots=True)
class PrefillPlan:
    """Whose new tokens a step attends, and over which context; the same in every layer."""

    query_lens: list[int]
    contexts: list[list[ContextTile]]
    """Of each request, in the order of its tokens."""
    kv_rows: KVRows | None = None
    """Of the pool that the tiles' rows were made for."""

    def bind(self, kv_rows: KVRows) -> KVRows:
        """Find the rows of this pool, once for all its layers."""
        self.kv_rows = kv_rows
        for tile in (tile for context in self.contexts for tile in context):
            tile.rows = kv_rows.to_device(kv_rows.of_blocks(tile.blocks).transpose(0, 2, 1))
        return kv_rows


def plan_prefill(
    block_table: NDArray[np.int32],
    query_lens: Sequence[int] | NDArray[np.int32],
    context_lens: Sequence[int] | NDArray[np.int32],
    block_size: int,
    *,
    tile_tokens: int,
) -> PrefillPlan:
    """Once per step on the host.

    block_table [R, M]; query_lens, context_lens: R each, tokens computed in this step and cached
    before it; tile_tokens: a multiple of block_size, see tiles.py.
    """
    contexts = []
    for blocks, context_len in zip(block_table, context_lens, strict=True):
        contexts.append(
            [
                ContextTile(
                    blocks[start // block_size : -(-end // block_size)].astype(np.int64),
                    end - start,
                )
                for start in range(0, int(context_len), tile_tokens)
                for end in (min(start + tile_tokens, int(context_len)),)
            ]
        )
    return PrefillPlan([int(query_len) for query_len in query_lens], contexts)


def paged_prefill(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    plan: PrefillPlan,
    *,
    scale: float,
) -> Tensor:
    """Attend each request's new tokens over its context in the pool and, causally, over themselves.

    Shapes:
        q_THD, k/v_TGD  this step's tokens, request after request; bf16, fp16 or fp32; strides free
        k/v_BGSD        one layer of the pool, same dtype; only the contexts' blocks are read
        plan            plan_prefill of the block table and lengths
        returns         [T, H, D], dtype of q; softmax and sums in fp32

    Raises:
        ValueError: H is not a multiple of G, or k_BGSD and v_BGSD are not a layer of a pool.

    Not checked: block ids in range; query_lens add up to T. What slots past a context hold does
    not count. Same answer as paged_prefill_reference.
    """
    num_heads, num_kv_heads = q_THD.shape[1], k_TGD.shape[1]
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are not a multiple of {num_kv_heads} KV heads")
    kv_rows = plan.kv_rows or plan.bind(KVRows.of(k_BGSD, v_BGSD))
    matrix = kv_rows.block_matrix(k_BGSD)
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    # [1, heads, T, D]
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_TGD, v_TGD))
    start = 0
    for query_len, context in zip(plan.query_lens, plan.contexts, strict=True):
        tokens = slice(start, start + query_len)
        new = (q[:, :, tokens], k[:, :, tokens], v[:, :, tokens])
        if context:
            out = _extend(*new, matrix, context, kv_rows, scale)
        else:
            out = functional.scaled_dot_product_attention(
                *new, is_causal=True, scale=scale, enable_gqa=True
            )
        out_THD[tokens] = out[0].transpose(0, 1)
        start += query_len
    return out_THD


def _extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    matrix: Tensor,
    context: list[ContextTile],
    kv_rows: KVRows,
    scale: float,
) -> Tensor:
    """[1, H, Q, D] in fp32: over the new tokens causally, then over all of each context tile."""
    new_out, lse = attend_with_lse(q, k, v, None, scale=scale, is_causal=True)
    out = new_out.float()
    for tile in context:
        tile_out, tile_lse = _attend_context(q, matrix, tile, kv_rows, scale)
        out, lse = merge(out, lse, tile_out, tile_lse)
    return out


def _attend_context(
    q: Tensor, matrix: Tensor, tile: ContextTile, kv_rows: KVRows, scale: float
) -> tuple[Tensor, Tensor]:
    """The tile's copy lives in here only: two never exist at a time."""
    gathered = matrix.index_select(0, tile.rows)
    kv = gathered.view(2, 1, kv_rows.num_heads, -1, q.shape[-1])[:, :, :, : tile.num_tokens]
    k_tile, v_tile = kv.unbind()
    return attend_with_lse(q, k_tile, v_tile, None, scale=scale)
