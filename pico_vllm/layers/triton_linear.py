"""What the GPU runs in the place of plain linear layers and embeddings.

Up to 64 rows a product is bound by reading its weights: one kernel with its norm, bias, activation
and residual. Above that cuBLAS, with kernels around it. On a Hopper 3 to 16 rows have a kernel
whose programs all start early (hopper_linear); from 25 to 256, smaller products, and up to 64 down
too, leave their sums to what comes behind (hopper_split_k); and gate and up are one kernel with
SiLU where that is faster (hopper_gate_up). Of small_linear's, from two rows on, only the first
product of a layer starts early, and attention: with all of them a step of 8 requests of
Qwen2.5-1.5B took 1.41 ms on an H200, so 1.29, with none 1.35.

With `batch_invariant` one kernel multiplies any number of rows (InvariantLinear).

    M rows, T tokens this step, E hidden size, W rows of the batch state
"""

from __future__ import annotations

from enum import Enum, auto

import torch
from torch import Tensor
from torch.nn import functional

from pico_vllm.forward_batch import ForwardBatch
from pico_vllm.kernels import hopper_gate_up, hopper_linear, hopper_split_k
from pico_vllm.kernels.embed_tokens import embed_tokens
from pico_vllm.kernels.invariant_linear import invariant_linear
from pico_vllm.kernels.launch import NUM_MULTIPROCESSORS
from pico_vllm.kernels.rms_norm import add_rms_norm, rms_norm
from pico_vllm.kernels.silu_mul import silu_mul
from pico_vllm.kernels.small_linear import LinearScratch, beats_cublas, small_linear
from pico_vllm.layers.embedding import Embedding
from pico_vllm.layers.linear import DenseWeight, Int8Weight, Linear, Parts, Residual, Weight
from pico_vllm.layers.norm import RMSNorm
from pico_vllm.layers.plain import PlainLayers

MAX_SMALL_ROWS = 24
"""Of small_linear where there is hopper_split_k. On an H200 a step of Qwen2.5-1.5B at 32 / 48 / 64
requests takes 1.48 / 1.44 / 1.51 ms, with small_linear up to 64 rows 1.53 (of another run) /
1.68 / 1.76."""
MAX_PARTS_OF_O = 3
"""By hopper_split_k, where the norm adds up."""
MAX_ROWS_IN_PARTS = 256
MAX_PARTS = 4
"""With five a step of 256 requests of Qwen2.5-1.5B took 2.317 and 2.322 ms, so 2.310 and 2.309; one
of 128 as long."""
MIN_PART = 512
"""Of K. Measured on an H200: a layer of Qwen2.5-1.5B without attention 49.8 to 47.7 us at 128 rows,
60.2 to 55.8 at 256."""


class Way(Enum):
    """Of multiplying so many rows by a weight."""

    SMALL = auto()
    """One kernel with what surrounds it."""
    SPLIT = auto()
    """Parts of K by hopper_split_k, where the kernel behind adds up; else cuBLAS."""
    CUT = auto()
    """Parts of K by cuBLAS, where the kernel behind adds up."""
    WHOLE = auto()
    """cuBLAS."""


class TritonLinear(Linear):
    """y = x @ W.T + bias with what surrounds it. `added` may write to its residual."""

    weight: DenseWeight

    def __init__(self, weight: DenseWeight, bias_N: Tensor | None, scratch: LinearScratch) -> None:
        super().__init__(weight, bias_N)
        self._scratch = scratch

    def __call__(self, x_MK: Tensor) -> Tensor:
        if self._way(x_MK) is Way.SMALL:
            return self._small(x_MK)
        return functional.linear(x_MK, self.weight.weight_NK, self.bias_N)

    def normed(self, norm: RMSNorm, residual: Residual) -> Tensor:
        if self._way(residual.x_TE) is Way.SMALL:
            return self._small(residual.x_TE, norm_K=norm.weight_E, eps=norm.eps)
        return self(normed_rows(norm, residual))

    def normed_in_parts(self, norm: RMSNorm, residual: Residual) -> Parts:
        is_long = self.weight.shape[1] > hopper_split_k.MAX_K  # as no qkv that was measured
        if is_long or self._way(residual.x_TE) is not Way.SPLIT:
            return Parts(self.normed(norm, residual)[None])
        parts_SMN = hopper_split_k.hopper_split_k(
            normed_rows(norm, residual), self.weight.weight_NK,
            max_splits=_most_parts_to_attend(len(residual.x_TE)),
        )  # fmt: skip
        return Parts(parts_SMN, self.bias_N)

    def normed_silu_mul(self, norm: RMSNorm, residual: Residual) -> Tensor:
        x_MK, (N, K) = residual.x_TE, self.weight.shape
        M = len(x_MK)
        on_hopper = (
            M > MAX_SMALL_ROWS
            and self.bias_N is None
            and hopper_gate_up.can_take(x_MK.device, x_MK.dtype, N // 2, K)
            and hopper_gate_up.is_faster(M, N // 2)
        )
        if on_hopper:
            return hopper_gate_up.hopper_gate_up(normed_rows(norm, residual), self.weight.weight_NK)
        if self._way(x_MK) is Way.SMALL:
            return self._small(
                x_MK, norm_K=norm.weight_E, eps=norm.eps, has_silu_mul=True, starts_early=False
            )
        return silu_mul(self(normed_rows(norm, residual)))

    def added(self, x_MK: Tensor, residual: Residual, next_norm: RMSNorm | None = None) -> Residual:
        residual_MN, weight_NK, way = residual.x_TE, self.weight.weight_NK, self._way(x_MK)
        if way is Way.SMALL:
            return Residual(self._small(x_MK, residual_MN=residual_MN, starts_early=False))
        if self.bias_N is not None:
            return Residual(residual_MN.add_(self(x_MK)))
        if next_norm is None or way is Way.WHOLE:
            # In place: out of place cuBLAS would first copy the residual.
            return Residual(residual_MN.addmm_(x_MK, weight_NK.T))
        if way is Way.SPLIT:
            is_long = weight_NK.shape[1] > hopper_split_k.MAX_K
            most = hopper_split_k.LONG_SPLITS if is_long else MAX_PARTS_OF_O
            parts_SMN = hopper_split_k.hopper_split_k(x_MK, weight_NK, max_splits=most)
        else:
            num_parts = _num_parts(len(x_MK), *self.weight.shape)
            parts_SMN = _product_in_parts(x_MK, weight_NK, num_parts)
        return Residual(*add_rms_norm(parts_SMN, residual_MN, next_norm.weight_E, next_norm.eps))

    def _way(self, x_MK: Tensor) -> Way:
        M, (N, K) = len(x_MK), self.weight.shape
        if M > MAX_ROWS_IN_PARTS:  # told at once, as steps of so many wait for their launches
            return Way.WHOLE
        on_hopper = hopper_split_k.can_take(x_MK.device, x_MK.dtype, N, K)
        is_split = on_hopper and hopper_split_k.is_faster(M, N, K)
        is_cut = _num_parts(M, N, K) > 1
        if M > MAX_SMALL_ROWS and on_hopper:
            is_narrow = N <= hopper_split_k.MAX_K  # as down is, of models that were measured
            is_small = not is_split and not (is_narrow and is_cut) and beats_cublas(M, N, K)
        else:
            is_small = beats_cublas(M, N, K)
        if is_small:
            return Way.SMALL
        return Way.SPLIT if is_split else Way.CUT if is_cut else Way.WHOLE

    def _small(
        self,
        x_MK: Tensor,
        *,
        has_silu_mul: bool = False,
        starts_early: bool = True,
        **around: object,
    ) -> Tensor:
        """Of which small_linear takes starts_early."""
        weight_NK = self.weight.weight_NK
        around |= {"has_silu_mul": has_silu_mul, "bias_N": self.bias_N, "scratch": self._scratch}
        shape = (len(x_MK), *weight_NK.shape)
        if hopper_linear.can_take(x_MK.device, x_MK.dtype, *shape, has_silu_mul):
            return hopper_linear.hopper_linear(x_MK, weight_NK, **around)
        return small_linear(x_MK, weight_NK, starts_early=starts_early, **around)


def normed_rows(norm: RMSNorm, residual: Residual) -> Tensor:
    if residual.normed_TE is not None:
        return residual.normed_TE
    return rms_norm(residual.x_TE, norm.weight_E, norm.eps)


class InvariantLinear(Linear):
    """The same bits for a row whatever else is in the batch: each step of it is a kernel that
    treats all rows alike."""

    weight: DenseWeight

    def __call__(self, x_MK: Tensor) -> Tensor:
        return invariant_linear(x_MK, self.weight.weight_NK, self.bias_N)

    def normed(self, norm: RMSNorm, residual: Residual) -> Tensor:
        return self(rms_norm(residual.x_TE, norm.weight_E, norm.eps))

    def normed_silu_mul(self, norm: RMSNorm, residual: Residual) -> Tensor:
        return silu_mul(self.normed(norm, residual))

    def added(self, x_MK: Tensor, residual: Residual, next_norm: RMSNorm | None = None) -> Residual:
        return Residual(invariant_linear(x_MK, self.weight.weight_NK, self.bias_N, residual.x_TE))


def _most_parts_to_attend(M: int) -> int:
    """Parts of qkv that attention adds up. A layer of Qwen2.5-1.5B at 32 / 48 / 64 / 96 / 128 rows
    with two parts 43.1 / 43.2 / 44.3 / 51.3 / 54.3 us on an H200, with three 42.3 / 43.1 / 44.4 /
    50.9 / 54.3, with four 43.0 / 43.4 / 44.8 / 50.5 / 53.1."""
    return 3 if M <= 64 else 4


def _num_parts(M: int, N: int, K: int) -> int:
    """Into how many parts of K a product is cut whose sums the next kernel adds up anyway.

    cuBLAS leaves most of the card idle where outputs are few, or cuts K itself and adds up in one
    more kernel.
    """
    if M > MAX_ROWS_IN_PARTS:
        return 1
    num_tiles = -(-M // 128) * -(-N // 128)
    most = min(MAX_PARTS, NUM_MULTIPROCESSORS // num_tiles)
    fitting = (n for n in range(most, 1, -1) if K % (64 * n) == 0)
    return next((n for n in fitting if K // n >= MIN_PART), 1)


def _product_in_parts(x_MK: Tensor, weight_NK: Tensor, num_parts: int) -> Tensor:
    """[num_parts, M, N], to be added up; each part is rounded to the dtype, as a whole product is
    before it is added to the residual."""
    x_SMK = x_MK.view(len(x_MK), num_parts, -1).transpose(0, 1)
    weight_SKN = weight_NK.view(len(weight_NK), num_parts, -1).permute(1, 2, 0)
    return torch.bmm(x_SMK, weight_SKN)


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

    def __init__(self, device: torch.device, *, is_batch_invariant: bool = False) -> None:
        self._scratch = LinearScratch.allocate(device)
        self._is_batch_invariant = is_batch_invariant

    def linear(self, weight: Weight, bias_N: Tensor | None) -> Linear:
        if not isinstance(weight, DenseWeight):
            return super().linear(weight, bias_N)
        if self._is_batch_invariant:
            return InvariantLinear(weight, bias_N)
        return TritonLinear(weight, bias_N, self._scratch)
