"""What the GPU runs in the place of plain linear layers and embeddings.

Up to MAX_ROWS rows a product is bound by reading its weights: one kernel with its norm, bias,
activation and residual. Above that cuBLAS, with kernels around it. Of two rows and more, only the
first product of a layer and attention start early: with all of them a step of 8 requests of
Qwen2.5-1.5B takes 1.41 ms on an H200, so 1.29, with none 1.35.

    M rows, T tokens this step, E hidden size, W rows of the batch state
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pico_vllm.forward_batch import ForwardBatch
from pico_vllm.kernels.embed_tokens import embed_tokens
from pico_vllm.kernels.rms_norm import rms_norm
from pico_vllm.kernels.silu_mul import silu_mul
from pico_vllm.kernels.small_linear import LinearScratch, beats_cublas, small_linear
from pico_vllm.layers.embedding import Embedding
from pico_vllm.layers.linear import DenseWeight, Int8Weight, Linear, Weight
from pico_vllm.layers.norm import RMSNorm
from pico_vllm.layers.plain import PlainLayers


class TritonLinear(Linear):
    """y = x @ W.T + bias with what surrounds it. `added` may write to its residual."""

    weight: DenseWeight

    def __init__(self, weight: DenseWeight, bias_N: Tensor | None, scratch: LinearScratch) -> None:
        super().__init__(weight, bias_N)
        self._scratch = scratch

    def __call__(self, x_MK: Tensor) -> Tensor:
        if self._is_small(x_MK):
            return self._small(x_MK)
        return functional.linear(x_MK, self.weight.weight_NK, self.bias_N)

    def normed(self, norm: RMSNorm, x_MK: Tensor) -> Tensor:
        if self._is_small(x_MK):
            return self._small(x_MK, norm_K=norm.weight_E, eps=norm.eps)
        return self(rms_norm(x_MK, norm.weight_E, norm.eps))

    def normed_silu_mul(self, norm: RMSNorm, x_MK: Tensor) -> Tensor:
        if self._is_small(x_MK):
            return self._small(
                x_MK, norm_K=norm.weight_E, eps=norm.eps, has_silu_mul=True, starts_early=False
            )
        return silu_mul(self.normed(norm, x_MK))

    def added(self, x_MK: Tensor, residual_MN: Tensor) -> Tensor:
        if self._is_small(x_MK):
            return self._small(x_MK, residual_MN=residual_MN, starts_early=False)
        if self.bias_N is not None:
            return residual_MN.add_(self(x_MK))
        # In place: out of place cuBLAS would first copy the residual.
        return residual_MN.addmm_(x_MK, self.weight.weight_NK.T)

    def _is_small(self, x_MK: Tensor) -> bool:
        return beats_cublas(x_MK.shape[0], *self.weight.shape)

    def _small(self, x_MK: Tensor, **around: object) -> Tensor:
        return small_linear(
            x_MK,
            self.weight.weight_NK,
            bias_N=self.bias_N,
            scratch=self._scratch,
            **around,
        )


class TritonEmbedding(Embedding):
    weight: DenseWeight

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Also fills the batch's slot mapping."""
        feed = batch.feed
        assert feed is not None, "the batch was not made for the device"
        return embed_tokens(
            batch.token_ids,
            feed.token_rows,
            batch.positions,
            feed.last_tokens,
            batch.block_table,
            self.weight.weight_NK,
            batch.slot_mapping,
            feed.block_size,
        ).to(self.dtype)


class FedLayers(PlainLayers):
    """Plain but for the embedding, which finds the ids and slots that a device's batch lacks."""

    def embedding(self, weight: DenseWeight | Int8Weight, dtype: torch.dtype) -> TritonEmbedding:
        assert isinstance(weight, DenseWeight), type(weight)
        return TritonEmbedding(weight, dtype)


class TritonLayers(FedLayers):
    """Makes the layers of one device, which share their scratch."""

    def __init__(self, device: torch.device) -> None:
        self._scratch = LinearScratch.allocate(device)

    def linear(self, weight: Weight, bias_N: Tensor | None) -> Linear:
        if not isinstance(weight, DenseWeight):
            return super().linear(weight, bias_N)
        return TritonLinear(weight, bias_N, self._scratch)
