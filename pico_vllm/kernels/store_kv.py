"""Write the keys and values of this step's tokens into the KV pool.

T tokens this step, G KV heads, J = 2 G, D head dim, B blocks in pool, S block_size
"""

from __future__ import annotations

from torch import Tensor


def store_kv_reference(
    kv_TJD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, slot_mapping: Tensor
) -> None:
    num_kv_heads, block_size = k_BGSD.shape[1:3]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            k_BGSD[slot // block_size, :, slot % block_size] = kv_TJD[token, :num_kv_heads]
            v_BGSD[slot // block_size, :, slot % block_size] = kv_TJD[token, num_kv_heads:]
