"""PagedKV: the KV pool of one rank, and attention over it.

    B blocks in pool, G KV heads, L layers, S block_size, D head dim, H query heads, T tokens this
    step

The pool is one tensor kv_pool[B, G, L, 2, S, D]: a block is one contiguous piece, and so is any
range of its heads. Block 0 is the null block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pico_vllm.cache.block_manager import BlockCopy
from pico_vllm.config.model import ModelConfig
from pico_vllm.forward_batch import ForwardBatch
from pico_vllm.kernels.paged_decode import DecodePlan, paged_decode, plan_decode
from pico_vllm.kernels.paged_prefill import paged_prefill
from pico_vllm.kernels.store_kv import plan_store, store_kv


def allocate_pool(
    num_blocks: int,
    block_size: int,
    model: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Zeros of [num_blocks, G, L, 2, S, D]. Attention multiplies whole blocks, so unused slots must
    hold numbers."""
    shape = (num_blocks, model.num_kv_heads, model.num_layers, 2, block_size, model.head_dim)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # NumPy asks the system for zeroed pages, which take no memory before they are written;
    # torch.zeros writes them all.
    num_bytes = max(1, math.prod(shape)) * dtype.itemsize
    pool = torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype)
    return pool[: math.prod(shape)].view(shape)


class PagedKV:
    def __init__(
        self,
        model: ModelConfig,
        *,
        num_device_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_host_blocks: int = 0,
    ) -> None:
        self.block_size = block_size
        self.device_pool = allocate_pool(
            num_device_blocks + 1, block_size, model, dtype=dtype, device=device
        )
        self.host_pool = allocate_pool(
            num_host_blocks, block_size, model, dtype=dtype, device=torch.device("cpu")
        )
        self._scale = model.head_dim**-0.5

    def for_step(self, batch: ForwardBatch) -> PagedStep:
        return PagedStep(self.device_pool, batch, self.block_size, self._scale)

    def copy_out(self, copies: Sequence[BlockCopy]) -> None:
        """Device to host."""
        _copy_blocks(self.device_pool, self.host_pool, copies)

    def copy_in(self, copies: Sequence[BlockCopy]) -> None:
        """Host to device."""
        _copy_blocks(self.host_pool, self.device_pool, copies)


def _copy_blocks(source: Tensor, target: Tensor, copies: Sequence[BlockCopy]) -> None:
    source_ids = torch.tensor(
        [copy.source for copy in copies], dtype=torch.int64, device=source.device
    )
    target_ids = torch.tensor(
        [copy.target for copy in copies], dtype=torch.int64, device=target.device
    )
    target[target_ids] = source[source_ids].to(target.device)


class PagedStep:
    """The pool as one step sees it: what does not depend on the layer is computed once."""

    def __init__(self, pool: Tensor, batch: ForwardBatch, block_size: int, scale: float) -> None:
        self._pool = pool
        self._batch = batch
        self._scale = scale
        self._num_decodes = batch.num_decodes
        self._store_plan = plan_store(batch.slot_mapping)
        self._decode_plan: DecodePlan | None = None
        if self._num_decodes:
            n = self._num_decodes
            self._decode_plan = plan_decode(
                batch.block_table[:n].numpy(), batch.seq_lens[:n].numpy(), block_size
            )

    def attend(self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        """Write this step's KV of one layer, then attend over it and over what was cached. Returns
        [T, H, D]."""
        batch = self._batch
        k_BGSD, v_BGSD = self._pool[:, :, layer, 0], self._pool[:, :, layer, 1]
        store_kv(k_TGD, v_TGD, k_BGSD, v_BGSD, self._store_plan)
        n = self._num_decodes
        if n == batch.num_tokens:
            return paged_decode(q_THD, k_BGSD, v_BGSD, self._decode_plan, scale=self._scale)
        extended = paged_prefill(
            q_THD[n:],
            k_TGD[n:],
            v_TGD[n:],
            k_BGSD,
            v_BGSD,
            batch.block_table[n:],
            batch.query_lens[n:],
            batch.context_lens[n:],
            scale=self._scale,
        )
        if n == 0:
            return extended
        decoded = paged_decode(q_THD[:n], k_BGSD, v_BGSD, self._decode_plan, scale=self._scale)
        return torch.cat((decoded, extended))
