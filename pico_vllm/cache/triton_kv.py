"""TritonKV: the KV pool on a device whose kernels find blocks themselves.

    B blocks in pool, G KV heads, L layers, S block_size, D head dim, N heads of the QKV projection

Same pool as PagedKV, kv_pool[B, G, L, 2, S, D]. Unused slots need hold no numbers: no kernel looks
at them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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
        self._cuts: dict[int, _Cut] = {}

    @property
    def adds_parts(self) -> bool:
        if self._kv.prefill_config is not None:  # batch-invariant: one kernel attends all
            return False
        num_decodes, num_tokens = self._batch.num_decodes, self._batch.num_tokens
        if num_decodes == num_tokens:
            return self._is_on_hopper(num_tokens)
        return num_decodes == 0

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
        n = self._batch.num_decodes
        if self._kv.prefill_config is not None:
            attended_THD = self._extend(layer, qkv, qk_norm, 0)
            if not only_last:
                return attended_THD
            assert self._batch.feed is not None
            return attended_THD.index_select(0, self._batch.feed.sample_at)
        if n == num_tokens:
            return self._decode(layer, qkv, qk_norm, n, bias_N=bias_N)
        if only_last:
            return self._extend_last(layer, qkv, qk_norm, bias_N)
        if n == 0:
            return self._extend(layer, qkv, qk_norm, 0, bias_N)
        # Never in parts. Both write into one tensor: nothing is copied afterwards.
        num_kv_heads = self._kv.device_pool.shape[1]
        out_THD = torch.empty_like(
            qkv[:, 2 * num_kv_heads :], memory_format=torch.contiguous_format
        )
        self._decode(layer, qkv[:n], qk_norm, n, out=out_THD[:n])
        self._extend(layer, qkv[n:], qk_norm, n, out=out_THD[n:])
        return out_THD

    def _decode(
        self,
        layer: int,
        qkv: Tensor,
        qk_norm: tuple[Tensor, Tensor, float] | None,
        n: int,
        *,
        bias_N: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The first n requests, one token each."""
        kv, cut = self._kv, self._cut_at(n)
        q_norm, k_norm, eps = qk_norm or (None, None, 0.0)
        arguments = (
            qkv, *kv.cos_sin, *kv.layers[layer],
            self._batch.block_table, cut.decoding_rows, cut.decoding_lens,
        )  # fmt: skip
        options = {
            "scale": kv.scale, "scratch": kv.scratch,
            "q_norm_D": q_norm, "k_norm_D": k_norm, "eps": eps,
        }  # fmt: skip
        on_hopper = self._is_on_hopper(n)
        if self._prefix_lens is not None:
            assert out is None, "of a step in which all decode"
            return shared_prefix.shared_prefix_decode(
                *arguments, self._prefix_lens[:n], **options,
                is_long=self._is_long, on_hopper=on_hopper, bias_N=bias_N,
            )  # fmt: skip
        if on_hopper:
            return hopper_decode.hopper_rope_decode(
                *arguments, **options, bias_N=bias_N, is_long=self._is_long, out=out
            )
        return rope_paged_decode(*arguments, **options, is_long=self._is_long, out=out)

    def _is_on_hopper(self, num_requests: int) -> bool:
        num_kv_heads = self._kv.device_pool.shape[1]
        return self._kv.takes_many and hopper_decode.is_faster(
            num_requests, num_kv_heads, is_long=self._is_long
        )

    def _extend(
        self,
        layer: int,
        qkv: Tensor,
        qk_norm: tuple[Tensor, Tensor, float] | None,
        n: int,
        bias_N: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The requests after the first n, whose tokens these are. Those at the end that have no
        context may have a kernel of their own."""
        kv, cut = self._kv, self._cut_at(n)
        rotated = self._rotate_and_store(layer, qkv, qk_norm, bias_N, cut.positions, cut.slots)
        if out is None:
            out = torch.empty_like(rotated[0], memory_format=torch.contiguous_format)
        num_older = cut.num_older_tokens
        if cut.older_starts is not None:
            q_rot_THD, *new_kv_TGD = (x[:num_older] for x in rotated)
            paged_prefill(
                q_rot_THD, *kv.layers[layer], self._batch.block_table, cut.older_rows,
                cut.older_starts, cut.older_lens,
                scale=kv.scale, new_kv_TGD=tuple(new_kv_TGD), out=out[:num_older],
                # What _starts computes behind decoding requests may not be there early enough.
                scratch=kv.prefill_scratch if n == 0 else None,
                config=kv.prefill_config,
            )  # fmt: skip
        if cut.fresh_starts is not None:
            fresh = (x[num_older:] for x in rotated) if num_older else rotated
            out_fresh = out[num_older:] if num_older else out
            hopper_prefill(*fresh, cut.fresh_starts, scale=kv.scale, out=out_fresh)
        return out

    def _extend_last(
        self,
        layer: int,
        qkv: Tensor,
        qk_norm: tuple[Tensor, Tensor, float] | None,
        bias_N: Tensor | None = None,
    ) -> Tensor:
        """All tokens leave their KV, the last one of each request attends: that is decoding."""
        kv, batch = self._kv, self._batch
        assert batch.feed is not None
        q_rot_THD, _, _ = self._rotate_and_store(
            layer, qkv, qk_norm, bias_N, batch.positions, batch.slot_mapping
        )
        return paged_decode(
            q_rot_THD.index_select(0, batch.feed.sample_at), *kv.layers[layer],
            batch.block_table, self._table_rows, batch.seq_lens,
            scale=kv.scale, scratch=kv.scratch, is_long=True,
        )  # fmt: skip

    def _rotate_and_store(
        self,
        layer: int,
        qkv: Tensor,
        qk_norm: tuple[Tensor, Tensor, float] | None,
        bias_N: Tensor | None,
        positions_T: Tensor,
        slots_T: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries, rotated keys and values of these tokens, whose KV goes to the pool."""
        kv = self._kv
        q_norm, k_norm, eps = qk_norm or (None, None, 0.0)
        rotated_TND = rope_store_kv(
            qkv, *kv.cos_sin, positions_T, slots_T, *kv.layers[layer],
            bias_N=bias_N, q_norm=q_norm, k_norm=k_norm, eps=eps,
        )  # fmt: skip
        G = kv.device_pool.shape[1]
        in_parts = qkv.dim() == 4
        v_TGD = (rotated_TND if in_parts else qkv)[:, -G:]
        q_rot_THD, k_rot_TGD = rotated_TND[:, : qkv.shape[-2] - G].tensor_split([-G], 1)
        return q_rot_THD, k_rot_TGD, v_TGD

    def _cut_at(self, n: int) -> _Cut:
        """The step's tensors behind its first n requests, made once for all layers."""
        if n in self._cuts:
            return self._cuts[n]
        kv, batch = self._kv, self._batch
        assert batch.feed is not None
        num_requests = batch.seq_lens.shape[0]
        fresh, fresh_token = batch.feed.fresh_request, batch.feed.fresh_token
        if not kv.takes_fresh:
            fresh, fresh_token = num_requests, batch.num_tokens
        num_older = max(fresh_token - n, 0)
        has_fresh = fresh_token < batch.num_tokens
        cut = self._cuts[n] = _Cut(
            decoding_rows=self._table_rows[:n],
            decoding_lens=batch.seq_lens[:n],
            positions=batch.positions[n:],
            slots=batch.slot_mapping[n:],
            num_older_tokens=num_older,
            older_rows=self._table_rows[n:fresh],
            older_lens=batch.seq_lens[n:fresh],
            older_starts=self._starts(n, fresh, n) if num_older else None,
            fresh_starts=self._starts(fresh, num_requests, fresh_token) if has_fresh else None,
        )
        return cut

    def _starts(self, first: int, last: int, token: int) -> Tensor:
        """query_start_loc of the requests from first to before last, counted from a token."""
        if self._batch.num_decodes == self._batch.num_tokens:
            # Nobody staged them: each request has one token.
            return self._kv.decode_starts[: last + 1]
        if token == 0:
            return self._batch.query_start_loc[: last + 1]
        return self._batch.query_start_loc[first : last + 1] - token


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """Of decoding requests, of those with a context and of fresh ones, what the kernels take."""

    decoding_rows: Tensor
    decoding_lens: Tensor
    positions: Tensor
    """Of the tokens behind the first n requests; so are slots."""
    slots: Tensor
    num_older_tokens: int
    older_rows: Tensor
    older_lens: Tensor
    older_starts: Tensor | None
    """query_start_loc, counted from their first token; None where there are none."""
    fresh_starts: Tensor | None
    """Likewise."""
