"""One layer of the KV pool as a plain matrix of rows, one row per (block, KV head, slot).

    B blocks in pool, G KV heads, S block_size, D head dim

The pool is [B, G, L, 2, S, D], so the layer's k_BGSD has holes between heads. Counted from its
first element every D elements are a row, holes included; the same row numbers serve v_BGSD and all
layers. On the CPU index_select and index_copy_ on this matrix run at memory speed, for blocks in any
order and to the exact token.
"""

from __future__ import annotations

import torch
from torch import Tensor


def as_rows(x_BGSD: Tensor) -> Tensor:
    """[rows, D] view of the memory from the first element of x_BGSD to its last."""
    num_blocks, num_heads, block_size, head_dim = x_BGSD.shape
    block_rows, head_rows = _row_strides(x_BGSD)
    num_rows = (num_blocks - 1) * block_rows + (num_heads - 1) * head_rows + block_size
    return x_BGSD.as_strided((num_rows, head_dim), (head_dim, 1))


def row_ids(slots: Tensor, x_BGSD: Tensor) -> Tensor:
    """Rows of these slots (block_id * S + offset) for each head: [G, *slots.shape] int64."""
    num_heads, block_size = x_BGSD.shape[1:3]
    block_rows, head_rows = _row_strides(x_BGSD)
    rows = slots // block_size * block_rows + slots % block_size
    heads = torch.arange(num_heads).view(-1, *[1] * slots.dim())
    return rows + heads * head_rows


def _row_strides(x_BGSD: Tensor) -> tuple[int, int]:
    """Rows from one block to the next, and from one head to the next."""
    head_dim = x_BGSD.shape[3]
    block_stride, head_stride, slot_stride, element_stride = x_BGSD.stride()
    is_rows = (slot_stride, element_stride) == (head_dim, 1)
    if not is_rows or block_stride % head_dim or head_stride % head_dim:
        raise ValueError(f"not a layer of a KV pool: {tuple(x_BGSD.shape)}, {x_BGSD.stride()}")
    return block_stride // head_dim, head_stride // head_dim
