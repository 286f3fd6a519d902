"""Attention with the norm before it and the residual around it: fused QKV projection, optional
QK-norm, RoPE, whatever cache the step brings, O projection.

T tokens this step, H query heads, G KV heads, N = H + 2 G, D head dim, E hidden size
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from pico_vllm.layers.linear import Linear, Norm, Parts, Residual
from pico_vllm.layers.norm import RMSNorm
from pico_vllm.layers.rope import apply_rope


class KVStep(Protocol):
    """One step's view of a KV cache. It offers `attend`, or `rotate_and_attend` if `rotates`."""

    @property
    def rotates(self) -> bool:
        """Whether it applies QK-norm and RoPE itself, in one kernel with storing and attending."""
        ...

    def attend(self, layer: int, q_THD: Tensor, kv_TJD: Tensor) -> Tensor:
        """Store this step's keys and values of one layer, attend, return [T, H, D].

        J = 2 G: a token's keys, then its values, as they lie in the fused projection.
        """
        ...

    @property
    def adds_parts(self) -> bool:
        """Whether it takes a projection in more than one part, or without its bias."""
        ...

    def rotate_and_attend(
        self,
        layer: int,
        parts_SMN: Tensor,
        bias_N: Tensor | None,
        qk_norm: tuple[Tensor, Tensor, float] | None,
        *,
        only_last: bool,
    ) -> Tensor:
        """The same from the fused projection as it is: parts to be added up, and a bias. qk_norm:
        weights of q and k, and eps. only_last: attend with each request's last token alone,
        [R, H, D]."""
        ...


class Attention:
    def __init__(
        self,
        layer: int,
        *,
        norm: Norm,
        qkv: Linear,
        o: Linear,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> None:
        self.layer = layer
        self.norm = norm
        self.qkv = qkv
        self.o = o
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim

    def forward(
        self,
        residual: Residual,
        cos_sin: tuple[Tensor, Tensor] | None,
        kv: KVStep,
        wanted: Tensor | None = None,
        *,
        next_norm: Norm | None = None,
    ) -> Residual:
        """cos_sin: of the step's tokens; None where the cache rotates. wanted: the last token of
        each request, to go on with those alone; all tokens where it is None."""
        num_tokens = int(residual.x_TE.shape[0])
        H, G = self.num_heads, self.num_kv_heads
        if cos_sin is None:
            if kv.adds_parts:
                parts = self.qkv.normed_in_parts(self.norm, residual)
            else:
                parts = Parts(self.qkv.normed(self.norm, residual)[None])
            attended_THD = kv.rotate_and_attend(
                self.layer, parts.parts_SMN, parts.bias_N, self._qk_norm,
                only_last=wanted is not None,
            )  # fmt: skip
        else:
            qkv = self.qkv.normed(self.norm, residual).view(num_tokens, H + 2 * G, self.head_dim)
            qk = qkv[:, : H + G]
            normed = qk
            if self.q_norm is not None and self.k_norm is not None:
                normed = torch.cat((self.q_norm(qk[:, :H]), self.k_norm(qk[:, H:])), dim=1)
            # Queries and keys turn by the same angles: one call for both. Written back, the keys
            # lie beside the values, and a layer's KV is stored in one piece.
            qk.copy_(apply_rope(normed, *cos_sin))
            attended_THD = kv.attend(self.layer, qkv[:, :H], qkv[:, H:])
            if wanted is not None:
                attended_THD = attended_THD.index_select(0, wanted)
        if wanted is not None:
            residual = Residual(residual.x_TE.index_select(0, wanted))
        num_left = int(residual.x_TE.shape[0])
        attended_TE = attended_THD.reshape(num_left, H * self.head_dim)
        return self.o.added(attended_TE, residual, next_norm)

    @property
    def _qk_norm(self) -> tuple[Tensor, Tensor, float] | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return self.q_norm.weight_E, self.k_norm.weight_E, self.q_norm.eps
