"""One layer of the KV pool as a plain matrix of rows: one row per (block, KV head, K or V, slot).

    B blocks in pool, G KV heads, L layers, S block_size, D head dim

The pool is [B, G, L, 2, S, D], so a layer has holes between its heads. Counted from the layer's
first element every D elements are a row, holes included, and the same row numbers serve all layers.
On the CPU index_select and index_copy_ on this matrix run at memory speed, for blocks in any order
and to the exact token, with one call for K and V: a step computes its row numbers once.

S rows are also one row of a matrix with whole blocks, [rows / S, S * D], which index_select reads a
quarter faster.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVRows:
    """How (block, head, K or V, slot) become rows; the same for all layers of a pool."""

    shape: tuple[int, int]
    """Rows from a layer's first element to its last, and D."""
    block_size: int
    num_heads: int
    block_stride: int
    head_stride: int
    v_offset: int
    """Rows from an element of K to the same of V."""
    device: torch.device

    @classmethod
    def of(cls, k_BGSD: Tensor, v_BGSD: Tensor) -> KVRows:
        num_blocks, num_heads, block_size, head_dim = k_BGSD.shape
        block_stride, head_stride, slot_stride, element_stride = k_BGSD.stride()
        v_offset = v_BGSD.storage_offset() - k_BGSD.storage_offset()
        is_layer_of_pool = (
            v_BGSD.shape == k_BGSD.shape
            and v_BGSD.stride() == k_BGSD.stride()
            and v_BGSD.untyped_storage().data_ptr() == k_BGSD.untyped_storage().data_ptr()
            and v_offset >= 0
            and (slot_stride, element_stride) == (head_dim, 1)
            and not any(x % (block_size * head_dim) for x in (block_stride, head_stride, v_offset))
        )
        if not is_layer_of_pool:
            raise ValueError(
                f"k {tuple(k_BGSD.shape)} {k_BGSD.stride()} and v {tuple(v_BGSD.shape)} "
                f"{v_BGSD.stride()} are not K and V of one layer of a pool [B, G, L, 2, S, D]"
            )
        last = (num_blocks - 1) * block_stride + (num_heads - 1) * head_stride + v_offset
        return cls(
            shape=(last // head_dim + block_size, head_dim),
            block_size=block_size,
            num_heads=num_heads,
            block_stride=block_stride // head_dim,
            head_stride=head_stride // head_dim,
            v_offset=v_offset // head_dim,
            device=k_BGSD.device,
        )

    def matrix(self, k_BGSD: Tensor) -> Tensor:
        """[rows, D] view of the layer."""
        return k_BGSD.as_strided(self.shape, (self.shape[1], 1))

    def block_matrix(self, k_BGSD: Tensor) -> Tensor:
        """[rows / S, S * D] view of the layer."""
        return whole_blocks(self.matrix(k_BGSD), self.block_size)

    def to_device(self, rows: NDArray[np.int64]) -> Tensor:
        """Row numbers in the given order as one flat tensor."""
        return torch.from_numpy(rows.ravel()).to(self.device)

    def of_slots(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """[2, *slots.shape, G]: K's rows, then V's, of slots block_id * S + offset.

        In NumPy: a step's row numbers take 15 us, as torch operations 100.
        """
        rows = slots // self.block_size * self.block_stride + slots % self.block_size
        return self._of_heads(rows)

    def of_blocks(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """[2, *blocks.shape, G]: rows of the block matrix, K's, then V's."""
        return self._of_heads(blocks * self.block_stride) // self.block_size

    def _of_heads(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        heads = np.arange(self.num_heads) * self.head_stride
        offsets = np.stack((heads, heads + self.v_offset))
        return rows[..., None] + offsets.reshape(2, *[1] * rows.ndim, self.num_heads)


def whole_blocks(matrix: Tensor, block_size: int) -> Tensor:
    """[rows / S, S * D] of KVRows.matrix."""
    return matrix.view(-1, block_size * int(matrix.shape[1]))
