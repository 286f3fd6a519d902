"""TritonKV: the KV pool on a device whose kernels find blocks themselves.

    B blocks in pool, G KV heads, L layers, S block_size, D head dim, N heads of the QKV projection

Same pool as PagedKV, kv_pool[B, G, L, 2, S, D]. Unused slots need hold no numbers: no kernel looks
at them.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from pico_vllm.config.model import ModelConfig
from pico_vllm.forward_batch import ForwardBatch
from pico_vllm.kernels import hopper_decode, shared_prefix
from pico_vllm.kernels.copy_blocks import copy_blocks
from pico_vllm.kernels.hopper_prefill import can_take, hopper_prefill
from pico_vllm.kernels.paged_decode import DecodeScratch, paged_decode, rope_paged_decode
from pico_vllm.kernels.paged_prefill import (
    PrefillConfig,
    PrefillScratch,
    choose_config,
    paged_prefill,
)
from pico_vllm.kernels.rope_store_kv import rope_store_kv


class TritonKV:
    """Owner of the pool. Rotates queries and keys itself, in the kernels that store and attend."""

    def __init__(
        self,
        model: ModelConfig,
        *,
        num_device_blocks: int,
        block_size: int,
        max_num_seqs: int,
        cos_PD: Tensor,
        sin_PD: Tensor,
        dtype: torch.dtype,
        device: torch.device,
        is_batch_invariant: bool = False,
    ) -> None:
        """is_batch_invariant: attend all tokens by one kernel, cut in one way."""
        shape = (num_device_blocks + 1, model.num_kv_heads, model.num_layers, 2)
        self.device_pool = torch.empty(
            (*shape, block_size, model.head_dim), dtype=dtype, device=device
        )
        self.cos_sin = (cos_PD, sin_PD)
        self.scale = model.head_dim**-0.5
        self.takes_fresh = not is_batch_invariant and can_take(
            device, dtype, model.num_heads, model.num_kv_heads, model.head_dim
        )
        self.takes_many = hopper_decode.can_take(
            device, dtype, model.num_heads, model.num_kv_heads, model.head_dim, block_size
        )
        self.can_share = not is_batch_invariant
        """Whether steps in which all decode may say who shares a prefix."""
        self._token_bytes = 2 * model.num_kv_heads * model.head_dim * dtype.itemsize  # of a layer
        self.prefill_config: PrefillConfig | None = None
        self.prefill_scratch: PrefillScratch | None = None
        if is_batch_invariant:
            self.prefill_config = choose_config(1, model.num_heads, model.head_dim, dtype)
            self.decode_starts = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        else:
            self.prefill_scratch = PrefillScratch.allocate(model.head_dim, device)
        self.scratch = DecodeScratch.allocate(
            max_num_seqs, model.num_heads, model.num_kv_heads, model.head_dim, device
        )
        pool = self.device_pool
        self.layers = [
            (pool[:, :, layer, 0], pool[:, :, layer, 1]) for layer in range(model.num_layers)
        ]

    def for_step(self, batch: ForwardBatch) -> TritonStep:
        return TritonStep(self, batch)

    def shares(self, num_requests: int, num_tokens: int) -> bool:
        """Whether it pays that so many requests attend so many tokens together."""
        return shared_prefix.is_faster(num_requests, num_tokens, self._token_bytes)

    def copy_blocks(self, copies_2C: Tensor) -> None:
        """Sources and targets, int32 on the device."""
        copy_blocks(self.device_pool, copies_2C)


class TritonStep:
    rotates: ClassVar[bool] = True

    def __init__(self, kv: TritonKV, batch: ForwardBatch) -> None:
        assert batch.feed is not None, "the batch was not made for the device"
        self._kv = kv
        self._batch = batch
        self._table_rows = batch.feed.table_rows
        self._is_long = batch.feed.is_long
        self._prefix_lens = batch.feed.prefix_lens

    @property
    def adds_parts(self) -> bool:
        if self._kv.prefill_config is not None:  # batch-invariant: one kernel attends all
            return False
        return not self._is_decode or self._is_on_hopper()

    @property
    def _is_decode(self) -> bool:
        return self._batch.num_decodes == self._batch.num_tokens

    def rotate_and_attend(
        self,
        layer: int,
        parts_SMN: Tensor,
        bias_N: Tensor | None,
        qk_norm: tuple[Tensor, Tensor, float] | None,
        *,
        only_last: bool,
    ) -> Tensor:
        """Write this step's KV of one layer, then attend over it and over what was cached."""
        num_parts, num_tokens, _ = parts_SMN.shape
        qkv = parts_SMN.view(num_parts, num_tokens, -1, self._kv.device_pool.shape[-1])
        if num_parts == 1 and bias_N is None:
            qkv = qkv[0]
        if self._is_decode and self._kv.prefill_config is None:
            return self._decode(layer, qkv, qk_norm, bias_N)
        rotated = self._rotate_and_store(layer, qkv, qk_norm, bias_N)
        if self._kv.prefill_config is not None:
            attended_THD = self._attend_alike(layer, *rotated)
            if not only_last:
                return attended_THD
            assert self._batch.feed is not None
            return attended_THD.index_select(0, self._batch.feed.sample_at)
        if only_last:
            return self._attend_last(layer, rotated[0])
        return self._attend(layer, *rotated)

    def _decode(
        self,
        layer: int,
        qkv: Tensor,
        qk_norm: tuple[Tensor, Tensor, float] | None,
        bias_N: Tensor | None,
    ) -> Tensor:
        """One token of each request, and nothing else."""
        kv, batch = self._kv, self._batch
        q_norm, k_norm, eps = qk_norm or (None, None, 0.0)
        arguments = (
            qkv, *kv.cos_sin, *kv.layers[layer],
            batch.block_table, self._table_rows, batch.seq_lens,
        )  # fmt: skip
        options = {
            "scale": kv.scale, "scratch": kv.scratch, "is_long": self._is_long,
            "q_norm_D": q_norm, "k_norm_D": k_norm, "eps": eps,
        }  # fmt: skip
        on_hopper = self._is_on_hopper()
        if self._prefix_lens is not None:
            return shared_prefix.shared_prefix_decode(
                *arguments, self._prefix_lens, **options, on_hopper=on_hopper, bias_N=bias_N
            )
        if on_hopper:
            return hopper_decode.hopper_rope_decode(*arguments, **options, bias_N=bias_N)
        return rope_paged_decode(*arguments, **options)

    def _is_on_hopper(self) -> bool:
        num_kv_heads = self._kv.device_pool.shape[1]
        return self._kv.takes_many and hopper_decode.is_faster(
            self._batch.num_tokens, num_kv_heads, is_long=self._is_long
        )

    def _attend(self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        """Each kind of request by its own kernel, over what all of them have stored."""
        kv, batch = self._kv, self._batch
        feed = batch.feed
        assert feed is not None
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        if feed.decode_lens is not None:
            # Those that decode have a token each, and are the first. What this leaves in the
            # places of others, they write to after it.
            n = min(len(feed.decode_lens), len(q_THD))
            paged_decode(
                q_THD[:n], *kv.layers[layer], batch.block_table, self._table_rows[:n],
                feed.decode_lens[:n], scale=kv.scale, scratch=kv.scratch, out=out_THD[:n],
            )  # fmt: skip
        of_all = *kv.layers[layer], batch.block_table, self._table_rows
        options: dict[str, Any] = {
            "scale": kv.scale, "new_kv_TGD": (k_TGD, v_TGD), "out": out_THD,
            # Attention of requests that decode comes between, beside others.
            "reads_early": feed.decode_lens is None,
            "scratch": kv.prefill_scratch if self._is_long else None,
        }  # fmt: skip
        if feed.older_starts is not None:
            has_padding = feed.fresh_starts is None
            paged_prefill(
                q_THD, *of_all, feed.older_starts, batch.seq_lens, has_padding=has_padding,
                **options,
            )  # fmt: skip
        if feed.fresh_starts is not None and kv.takes_fresh:
            hopper_prefill(q_THD, k_TGD, v_TGD, feed.fresh_starts, scale=kv.scale, out=out_THD)
        elif feed.fresh_starts is not None:
            paged_prefill(q_THD, *of_all, feed.fresh_starts, batch.seq_lens, **options)
        return out_THD

    def _attend_alike(self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        """All requests by one kernel, cut in one way."""
        kv, batch = self._kv, self._batch
        # Of those that decode nobody staged where they begin: each has one token.
        starts = batch.query_start_loc
        if self._is_decode:
            starts = kv.decode_starts[: len(starts)]
        return paged_prefill(
            q_THD, *kv.layers[layer], batch.block_table, self._table_rows, starts, batch.seq_lens,
            scale=kv.scale, new_kv_TGD=(k_TGD, v_TGD), config=kv.prefill_config,
        )  # fmt: skip

    def _attend_last(self, layer: int, q_THD: Tensor) -> Tensor:
        """All tokens have left their KV, the last one of each request attends: that is
        decoding."""
        kv, batch = self._kv, self._batch
        assert batch.feed is not None
        return paged_decode(
            q_THD.index_select(0, batch.feed.sample_at), *kv.layers[layer],
            batch.block_table, self._table_rows, batch.seq_lens,
            scale=kv.scale, scratch=kv.scratch,
        )  # fmt: skip

    def _rotate_and_store(
        self,
        layer: int,
        qkv: Tensor,
        qk_norm: tuple[Tensor, Tensor, float] | None,
        bias_N: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries, rotated keys and values of all tokens, whose KV goes to the pool."""
        kv, batch = self._kv, self._batch
        q_norm, k_norm, eps = qk_norm or (None, None, 0.0)
        rotated_TND = rope_store_kv(
            qkv, *kv.cos_sin, batch.positions, batch.slot_mapping, *kv.layers[layer],
            bias_N=bias_N, q_norm=q_norm, k_norm=k_norm, eps=eps,
        )  # fmt: skip
        G = kv.device_pool.shape[1]
        in_parts = qkv.dim() == 4
        v_TGD = (rotated_TND if in_parts else qkv)[:, -G:]
        q_rot_THD, k_rot_TGD = rotated_TND[:, : qkv.shape[-2] - G].tensor_split([-G], 1)
        return q_rot_THD, k_rot_TGD, v_TGD
