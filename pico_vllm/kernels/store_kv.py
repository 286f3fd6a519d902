"""Write the keys and values of this step's tokens into the KV pool.

T tokens this step, G KV heads, D head dim, B blocks in pool, S block_size
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pico_vllm.kernels.kv_rows import KVRows


def store_kv_reference(
    k_TGD: Tensor, v_TGD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, slot_mapping: Tensor
) -> None:
    block_size = k_BGSD.shape[2]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            k_BGSD[slot // block_size, :, slot % block_size] = k_TGD[token]
            v_BGSD[slot // block_size, :, slot % block_size] = v_TGD[token]


@dataclass(slots=True)
class StorePlan:
    """Where a step's tokens go, the same in every layer."""

    slots: NDArray[np.int64]
    """[n], without padding."""
    tokens: Tensor | None
    """[n] int64, tokens to write; None where all are."""
    kv_rows: KVRows | None = None
    k_rows: Tensor | None = None
    v_rows: Tensor | None = None
    """[n * G] int64."""

    def bind(self, kv_rows: KVRows) -> KVRows:
        """Find the rows of this pool, once for all its layers."""
        self.kv_rows = kv_rows
        k_rows, v_rows = kv_rows.of_slots(self.slots)
        self.k_rows, self.v_rows = (
            torch.from_numpy(k_rows.ravel()),
            torch.from_numpy(v_rows.ravel()),
        )
        return kv_rows


def plan_store(slot_mapping: Tensor) -> StorePlan:
    """Once per step. slot_mapping [T] int64 on the CPU."""
    slots = slot_mapping.numpy()
    if slots.size and slots.min() >= 0:
        return StorePlan(slots, None)
    tokens = np.flatnonzero(slots >= 0)
    return StorePlan(slots[tokens], torch.from_numpy(tokens))


def store_kv(
    k_TGD: Tensor, v_TGD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, slots: Tensor | StorePlan
) -> None:
    """Write one layer's new keys and values to their slots.

    Shapes:
        k/v_TGD        dtype of the pool; strides free
        k/v_BGSD       K and V of one layer of the pool, written in place
        slots          [T] int64, block_id * S + position % S, -1 is not written; or its plan_store

    Raises:
        ValueError: k_BGSD and v_BGSD are not laid out as a layer of a pool.

    Not checked: two tokens with one slot. Same result as store_kv_reference.
    """
    plan = slots if isinstance(slots, StorePlan) else plan_store(slots)
    kv_rows = plan.kv_rows or plan.bind(KVRows.of(k_BGSD, v_BGSD))
    if plan.tokens is not None:
        k_TGD, v_TGD = k_TGD[plan.tokens], v_TGD[plan.tokens]
    assert plan.k_rows is not None and plan.v_rows is not None
    store_rows(k_TGD, v_TGD, kv_rows.matrix(k_BGSD), plan.k_rows, plan.v_rows)


def store_rows(
    k_TGD: Tensor, v_TGD: Tensor, matrix: Tensor, k_rows: Tensor, v_rows: Tensor
) -> None:
    """store_kv for a layer's KVRows.matrix and a plan's rows: tensors only, as a graph needs."""
    head_dim = k_TGD.shape[2]
    matrix.index_copy_(0, k_rows, k_TGD.reshape(-1, head_dim))
    matrix.index_copy_(0, v_rows, v_TGD.reshape(-1, head_dim))
