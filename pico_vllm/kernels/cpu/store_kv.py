"""Write the keys and values of this step's tokens into the KV pool.

T tokens this step, G KV heads, J = 2 G, D head dim, B blocks in pool, S block_size
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pico_vllm.kernels.cpu.kv_rows import KVRows


@dataclass(slots=True)
class StorePlan:
    """Where a step's tokens go, the same in every layer."""

    slots: NDArray[np.int64]
    """[n], without padding."""
    tokens: Tensor | None
    """[n] int64, tokens to write; None where all are."""
    kv_rows: KVRows | None = None
    rows: Tensor | None = None
    """[n * J] int64, see KVRows."""

    def bind(self, kv_rows: KVRows) -> KVRows:
        """Find the rows of this pool, once for all its layers."""
        self.kv_rows = kv_rows
        rows_2nG = kv_rows.of_slots(self.slots)
        self.rows = kv_rows.to_device(rows_2nG.transpose(1, 0, 2))
        return kv_rows


def plan_store(slot_mapping: Tensor) -> StorePlan:
    """Once per step. slot_mapping [T] int64."""
    slots = slot_mapping.cpu().numpy()
    if slots.size and slots.min() >= 0:
        return StorePlan(slots, None)
    tokens = np.flatnonzero(slots >= 0)
    return StorePlan(slots[tokens], torch.from_numpy(tokens).to(slot_mapping.device))


def store_kv(kv_TJD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, slots: Tensor | StorePlan) -> None:
    """Write one layer's new keys and values to their slots.

    Shapes:
        kv_TJD         a token's G keys, then its G values; dtype of the pool; strides free
        k/v_BGSD       K and V of one layer of the pool, written in place
        slots          [T] int64, block_id * S + position % S, -1 is not written; or its plan_store

    Raises:
        ValueError: k_BGSD and v_BGSD are not laid out as a layer of a pool.

    Not checked: two tokens with one slot. Same result as store_kv_reference.
    """
    plan = slots if isinstance(slots, StorePlan) else plan_store(slots)
    kv_rows = plan.kv_rows or plan.bind(KVRows.of(k_BGSD, v_BGSD))
    assert plan.rows is not None
    new = kv_TJD if plan.tokens is None else kv_TJD[plan.tokens]
    store_rows(new, kv_rows.matrix(k_BGSD), plan.rows)


def store_rows(kv_TJD: Tensor, matrix: Tensor, rows: Tensor) -> None:
    """store_kv for a layer's KVRows.matrix and a plan's rows: tensors only, as a graph needs."""
    matrix.index_copy_(0, rows, kv_TJD.reshape(-1, int(kv_TJD.shape[2])))
