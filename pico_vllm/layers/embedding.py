"""Token embedding: rows of a weight that the output head may share."""

from __future__ import annotations

import torch
from torch import Tensor

from pico_vllm.forward_batch import ForwardBatch
from pico_vllm.layers.linear import DenseWeight, Int8Weight


class Embedding:
    """[V, E] table; `weight` may be the same object as the head's."""

    def __init__(self, weight: DenseWeight | Int8Weight, dtype: torch.dtype) -> None:
        self.weight = weight
        self.dtype = dtype

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        return self.weight.rows(token_ids_T).to(self.dtype)

    def forward(self, batch: ForwardBatch) -> Tensor:
        return self(batch.token_ids)
