"""A pool whose unused slots are NaN, filled with known keys and values, for the kernels' tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

NUM_LAYERS, LAYER = 3, 1


@dataclass
class PagedCase:
    """Requests with their KV both in a pool's blocks and as dense tensors [tokens, G, D]."""

    k_BGSD: Tensor
    v_BGSD: Tensor
    block_table: np.ndarray
    seq_lens: np.ndarray
    keys: list[Tensor]
    values: list[Tensor]


def empty_layer(
    num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """K and V of the middle layer of a pool that holds NaN everywhere."""
    pool = torch.full(
        (num_blocks, num_kv_heads, NUM_LAYERS, 2, block_size, head_dim), float("nan"), dtype=dtype
    )
    return pool[:, :, LAYER, 0], pool[:, :, LAYER, 1]


def paged_case(
    seq_lens: list[int],
    *,
    num_kv_heads: int = 3,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    num_shared: int = 0,
    is_shuffled: bool = True,
    seed: int = 0,
) -> PagedCase:
    """The first `num_shared` blocks belong to all requests. Table entries past a request's end name
    a block that does not exist."""
    generator = torch.Generator().manual_seed(seed)
    num_own = [-(-seq_len // block_size) for seq_len in seq_lens]
    num_blocks = 1 + num_shared + sum(num_own)
    ids = np.arange(1, num_blocks, dtype=np.int32)
    if is_shuffled:
        np.random.default_rng(seed).shuffle(ids)
    k_BGSD, v_BGSD = empty_layer(num_blocks, num_kv_heads, block_size, head_dim, dtype)
    shape = (num_shared * block_size, num_kv_heads, head_dim)
    shared = [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]
    shared_ids, own_ids = ids[:num_shared], ids[num_shared:]
    table = np.full((len(seq_lens), num_shared + max([*num_own, 1])), 2**31 - 1, np.int32)
    case = PagedCase(k_BGSD, v_BGSD, table, np.array(seq_lens, np.int32), [], [])
    for request, (seq_len, own) in enumerate(zip(seq_lens, num_own, strict=True)):
        blocks, own_ids = np.concatenate((shared_ids, own_ids[:own])), own_ids[own:]
        is_present = seq_len > 0
        table[request, : len(blocks)] = blocks
        for pool, dense, common in (
            (k_BGSD, case.keys, shared[0]),
            (v_BGSD, case.values, shared[1]),
        ):
            new = torch.randn((seq_len, *shape[1:]), generator=generator).to(dtype)
            tokens = torch.cat((common, new)) if is_present else new
            positions = np.arange(len(tokens))
            at = torch.from_numpy(blocks[positions // block_size]).long()
            pool[at, :, positions % block_size] = tokens
            dense.append(tokens)
        if is_present:
            case.seq_lens[request] += num_shared * block_size
    return case


def dense_attention(q_QHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, scale: float) -> Tensor:
    """fp64 attention of the last Q of N tokens, causal, written without any of our code."""
    num_queries, num_heads, _ = q_QHD.shape
    num_tokens, num_kv_heads, _ = k_NGD.shape
    out = torch.zeros(q_QHD.shape, dtype=torch.float64)
    for query in range(num_queries):
        sees = num_tokens - num_queries + query + 1
        for head in range(num_heads):
            kv_head = head * num_kv_heads // num_heads
            k, v = k_NGD[:sees, kv_head].double(), v_NGD[:sees, kv_head].double()
            out[query, head] = torch.softmax(k @ q_QHD[query, head].double() * scale, 0) @ v
    return out


TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Absolute, for values of about 1: twice what scaled_dot_product_attention of that dtype misses."""
