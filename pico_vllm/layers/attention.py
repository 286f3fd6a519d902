"""Attention: fused QKV projection, optional QK-norm, RoPE, then whatever cache the step brings,
then the O projection.

T tokens this step, H query heads, G KV heads, D head dim, E hidden size
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from pico_vllm.layers.linear import Linear
from pico_vllm.layers.norm import RMSNorm
from pico_vllm.layers.rope import apply_rope


class KVStep(Protocol):
    """One step's view of a KV cache."""

    def attend(self, layer: int, q_THD: Tensor, kv_TJD: Tensor) -> Tensor:
        """Store this step's keys and values of one layer, attend, return [T, H, D].

        J = 2 G: a token's keys, then its values, as they lie in the fused projection.
        """
        ...


class Attention:
    def __init__(
        self,
        layer: int,
        *,
        qkv: Linear,
        o: Linear,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> None:
        self.layer = layer
        self.qkv = qkv
        self.o = o
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim

    def forward(self, x_TE: Tensor, cos_sin: tuple[Tensor, Tensor], kv: KVStep) -> Tensor:
        num_tokens = int(x_TE.shape[0])
        H, G = self.num_heads, self.num_kv_heads
        qkv = self.qkv(x_TE).view(num_tokens, H + 2 * G, self.head_dim)
        qk = qkv[:, : H + G]
        normed = qk
        if self.q_norm is not None and self.k_norm is not None:
            normed = torch.cat((self.q_norm(qk[:, :H]), self.k_norm(qk[:, H:])), dim=1)
        # Queries and keys turn by the same angles: one call for both. Written back, the keys lie
        # beside the values, and a layer's KV is stored in one piece.
        qk.copy_(apply_rope(normed, *cos_sin))
        attended_THD = kv.attend(self.layer, qkv[:, :H], qkv[:, H:])
        return self.o(attended_THD.reshape(num_tokens, H * self.head_dim))
