"""PagedKV: the KV pool of one rank, and attention over it.

    B blocks in pool, G KV heads, L layers, S block_size, D head dim, H query heads, T tokens this
    step

The pool is one tensor kv_pool[B, G, L, 2, S, D]: a block is one contiguous piece, and so is any
range of its heads. Block 0 is the null block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from pico_vllm.config.model import ModelConfig
from pico_vllm.forward_batch import ForwardBatch
from pico_vllm.kernels.cpu.kv_rows import KVRows
from pico_vllm.kernels.cpu.paged_decode import (
    DecodePlan,
    DecodeTiles,
    attend_tiles,
    paged_decode,
    plan_decode,
)
from pico_vllm.kernels.cpu.paged_prefill import PrefillPlan, paged_prefill, plan_prefill
from pico_vllm.kernels.cpu.store_kv import StorePlan, plan_store, store_kv, store_rows
from pico_vllm.kernels.cpu.tiles import tile_tokens
from pico_vllm.step import BlockCopies, BlockCopy


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
        host_pool: Tensor | None = None,
    ) -> None:
        """host_pool: as the device pool, without a null block, for what lies below it."""
        self.block_size = block_size
        self.device_pool = allocate_pool(
            num_device_blocks + 1, block_size, model, dtype=dtype, device=device
        )
        if host_pool is None:
            host_pool = allocate_pool(0, block_size, model, dtype=dtype, device=torch.device("cpu"))
        self.host_pool = host_pool
        self._scale = model.head_dim**-0.5
        self._tile_tokens = tile_tokens(
            model.num_kv_heads, model.head_dim, dtype.itemsize, block_size
        )
        # Views of each layer, made once: slicing the pool takes 10 us.
        pool = self.device_pool
        self._layers = [
            (pool[:, :, layer, 0], pool[:, :, layer, 1]) for layer in range(pool.shape[2])
        ]
        self._kv_rows = KVRows.of(*self._layers[0])
        self._matrices = [self._kv_rows.matrix(k_BGSD) for k_BGSD, _ in self._layers]

    def for_step(self, batch: ForwardBatch) -> DecodeStep | PagedStep:
        """What a step attends over: tensors only where all of it decodes in one group."""
        n = batch.num_decodes
        store = plan_store(batch.slot_mapping)
        store.bind(self._kv_rows)
        block_table = batch.block_table.cpu().numpy()
        decode = plan_decode(
            block_table[:n],
            batch.seq_lens[:n].cpu().numpy(),
            self.block_size,
            tile_tokens=self._tile_tokens,
        )
        tiles = decode.bind(self._kv_rows, self.device_pool.dtype)
        if n == batch.num_tokens and decode.is_one_group and store.tokens is None:
            assert store.rows is not None
            return DecodeStep(
                matrices=self._matrices, new_rows=store.rows, tiles=tiles, scale=self._scale
            )
        prefill = plan_prefill(
            block_table[n:],
            batch.query_lens[n:],
            batch.context_lens[n:],
            self.block_size,
            tile_tokens=self._tile_tokens,
        )
        prefill.bind(self._kv_rows)
        return PagedStep(self._layers, n, store, decode, prefill, self._scale)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Within the device pool."""
        ids = [copy.source for copy in copies], [copy.target for copy in copies]
        _copy_blocks(self.device_pool, self.device_pool, BlockCopies(*ids))

    def copy_out(self, copies: BlockCopies) -> None:
        """Device to host."""
        _copy_blocks(self.device_pool, self.host_pool, copies)

    def copy_in(self, copies: BlockCopies) -> None:
        """Host to device."""
        _copy_blocks(self.host_pool, self.device_pool, copies)


def _copy_blocks(source: Tensor, target: Tensor, copies: BlockCopies) -> None:
    source_ids = torch.tensor(copies.sources, dtype=torch.int64, device=source.device)
    target_ids = torch.tensor(copies.targets, dtype=torch.int64, device=target.device)
    target[target_ids] = source[source_ids].to(target.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStep:
    """A step in which every request decodes. What does not depend on the layer is computed once."""

    rotates: ClassVar[bool] = False
    matrices: list[Tensor]
    """Of each layer, see KVRows."""
    new_rows: Tensor
    """[R * 2 G] int64, where the new token's KV goes."""
    tiles: DecodeTiles
    scale: float

    def attend(self, layer: int, q_THD: Tensor, kv_TJD: Tensor) -> Tensor:
        matrix = self.matrices[layer]
        store_rows(kv_TJD, matrix, self.new_rows)
        return attend_tiles(q_THD, matrix, self.tiles, scale=self.scale)


class PagedStep:
    """Any step: decode rows first, then prompt chunks."""

    rotates = False

    def __init__(
        self,
        layers: list[tuple[Tensor, Tensor]],
        num_decodes: int,
        store: StorePlan,
        decode: DecodePlan,
        prefill: PrefillPlan,
        scale: float,
    ) -> None:
        self._layers = layers
        self._num_decodes = num_decodes
        self._store = store
        self._decode = decode
        self._prefill = prefill
        self._scale = scale

    def attend(self, layer: int, q_THD: Tensor, kv_TJD: Tensor) -> Tensor:
        """Write this step's KV of one layer, then attend over it and over what was cached.

        Returns [T, H, D].
        """
        k_BGSD, v_BGSD = self._layers[layer]
        store_kv(kv_TJD, k_BGSD, v_BGSD, self._store)
        k_TGD, v_TGD = kv_TJD.chunk(2, dim=1)
        n, scale = self._num_decodes, self._scale
        parts = []
        if n > 0:
            parts.append(paged_decode(q_THD[:n], k_BGSD, v_BGSD, self._decode, scale=scale))
        if n < len(q_THD):
            new = (q_THD[n:], k_TGD[n:], v_TGD[n:])
            parts.append(paged_prefill(*new, k_BGSD, v_BGSD, self._prefill, scale=scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
