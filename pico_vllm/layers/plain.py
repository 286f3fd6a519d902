"""PlainLayers: makes layers that run PyTorch's own operations. A device's own makers derive from
it."""

from __future__ import annotations

import torch
from torch import Tensor

from pico_vllm.layers.embedding import Embedding
from pico_vllm.layers.linear import DenseWeight, Int8Weight, Linear, Weight


class PlainLayers:
    def linear(self, weight: Weight, bias_N: Tensor | None) -> Linear:
        return Linear(weight, bias_N)

    def embedding(self, weight: DenseWeight | Int8Weight, dtype: torch.dtype) -> Embedding:
        """dtype: of what it gives."""
        return Embedding(weight, dtype)
