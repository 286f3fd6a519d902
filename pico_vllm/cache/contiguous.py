"""The first two rungs of the ladder: no cache, and one contiguous cache a request. Small, slow,
easy to read.

Paged attention must give the same tokens as these.

    H query heads, G KV heads, D head dim, L layers, T tokens this step; Q and K tokens of one
    request
"""

from __future__ import annotations

import torch
from torch import Tensor

from pico_vllm.config.model import ModelConfig
from pico_vllm.forward_batch import ForwardBatch


def causal_attention(q_QHD: Tensor, k_KGD: Tensor, v_KGD: Tensor, *, scale: float) -> Tensor:
    """Attention of the last Q of K tokens over those at or before each. Scores and sums in fp32."""
    num_queries, num_heads, _ = q_QHD.shape
    num_keys, num_kv_heads, _ = k_KGD.shape
    heads_per_kv = num_heads // num_kv_heads
    k_KHD = k_KGD.float().repeat_interleave(heads_per_kv, dim=1)
    v_KHD = v_KGD.float().repeat_interleave(heads_per_kv, dim=1)
    scores_HQK = torch.einsum("qhd,khd->hqk", q_QHD.float(), k_KHD) * scale
    query_at = torch.arange(num_keys - num_queries, num_keys, device=q_QHD.device)
    is_ahead = torch.arange(num_keys, device=q_QHD.device)[None, :] > query_at[:, None]
    weights_HQK = scores_HQK.masked_fill(is_ahead, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights_HQK, v_KHD).to(q_QHD.dtype)


class NoKV:
    """Keeps nothing: every step computes whole sequences."""

    def __init__(self, model: ModelConfig) -> None:
        self._scale = model.head_dim**-0.5

    def for_step(self, batch: ForwardBatch) -> NoKVStep:
        return NoKVStep(batch, self._scale)


class NoKVStep:
    rotates = False

    def __init__(self, batch: ForwardBatch, scale: float) -> None:
        self._lengths = batch.query_lens.tolist()
        self._scale = scale

    def attend(self, layer: int, q_THD: Tensor, kv_TJD: Tensor) -> Tensor:
        k_TGD, v_TGD = kv_TJD.chunk(2, dim=1)
        requests = zip(*(x.split(self._lengths) for x in (q_THD, k_TGD, v_TGD)), strict=True)
        return torch.cat([causal_attention(q, k, v, scale=self._scale) for q, k, v in requests])


class ContiguousKV:
    """kv[rows, L, 2, max_len, G, D]: each running request has one row as long as the window."""

    def __init__(
        self,
        model: ModelConfig,
        *,
        max_num_seqs: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (
            max_num_seqs,
            model.num_layers,
            2,
            max_model_len,
            model.num_kv_heads,
            model.head_dim,
        )
        self._kv = torch.empty(shape, dtype=dtype, device=device)
        self._scale = model.head_dim**-0.5

    def for_step(self, batch: ForwardBatch) -> ContiguousStep:
        return ContiguousStep(self._kv, batch, self._scale)


class ContiguousStep:
    rotates = False

    def __init__(self, kv: Tensor, batch: ForwardBatch, scale: float) -> None:
        self._kv = kv
        self._rows = list(
            zip(
                batch.rows.tolist(),
                batch.context_lens.tolist(),
                batch.query_lens.tolist(),
                strict=True,
            )
        )
        self._scale = scale

    def attend(self, layer: int, q_THD: Tensor, kv_TJD: Tensor) -> Tensor:
        k_TGD, v_TGD = kv_TJD.chunk(2, dim=1)
        outputs = []
        start = 0
        for row, context_len, query_len in self._rows:
            tokens = slice(start, start + query_len)
            start += query_len
            seq_len = context_len + query_len
            keys, values = self._kv[row, layer]
            keys[context_len:seq_len] = k_TGD[tokens]
            values[context_len:seq_len] = v_TGD[tokens]
            outputs.append(
                causal_attention(q_THD[tokens], keys[:seq_len], values[:seq_len], scale=self._scale)
            )
        return torch.cat(outputs)
