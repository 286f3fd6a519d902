"""A forward pass begins: which token each place holds, where its KV goes, its embedding.

T tokens this step, E hidden size, V vocabulary, W rows of the batch state, M block-table width,
S block_size
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pico_vllm.kernels.launch import (
    cdiv,
    launch_options,
    let_next_start,
    next_power_of_2,
    wait_for_inputs,
)


def embed_tokens_reference(
    token_ids_T: Tensor,
    token_rows_T: Tensor,
    positions_T: Tensor,
    last_tokens_W: Tensor,
    block_table_WM: Tensor,
    weight_VE: Tensor,
    slot_mapping_T: Tensor,
    block_size: int,
) -> Tensor:
    rows, positions = token_rows_T.long(), positions_T.long()
    ids = torch.where(token_ids_T < 0, last_tokens_W[rows], token_ids_T.long())
    blocks = block_table_WM[rows, positions.clamp(min=0) // block_size].long()
    slots = blocks * block_size + positions % block_size
    slot_mapping_T.copy_(slots.masked_fill(positions < 0, -1))
    return weight_VE[ids].masked_fill((positions < 0)[:, None], 0.0)


@triton.jit
def _embed_tokens_kernel(
    ids_ptr, rows_ptr, positions_ptr, last_tokens_ptr, table_ptr, weight_ptr, x_ptr, slots_ptr,
    table_stride, E: tl.constexpr, BLOCK_E: tl.constexpr, S: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    # In this order: the kernels behind this one start when those before it are over.
    wait_for_inputs(USE_PDL)
    let_next_start(USE_PDL)
    t = tl.program_id(0)
    position = tl.load(positions_ptr + t)
    row = tl.load(rows_ptr + t).to(tl.int64)
    token_id = tl.load(ids_ptr + t).to(tl.int64)
    if token_id < 0:
        token_id = tl.load(last_tokens_ptr + row).to(tl.int64)
    is_real = position >= 0
    block = tl.load(table_ptr + row * table_stride + tl.maximum(position, 0) // S)
    slot = block.to(tl.int64) * S + position % S
    tl.store(slots_ptr + t, tl.where(is_real, slot, -1))
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    end = tl.where(is_real, E, 0)
    x = tl.load(weight_ptr + token_id * E + e, mask=e < end, other=0.0)
    tl.store(x_ptr + t.to(tl.int64) * E + e, x, mask=e < E)


def embed_tokens(
    token_ids_T: Tensor,
    token_rows_T: Tensor,
    positions_T: Tensor,
    last_tokens_W: Tensor,
    block_table_WM: Tensor,
    weight_VE: Tensor,
    slot_mapping_T: Tensor,
    block_size: int,
) -> Tensor:
    """Embeddings of this step's tokens; ids that only the device knows come from the last step.

    Shapes:
        token_ids_T    int32; -1 stands for the row's last sampled token
        token_rows_T   int32, row of the batch state; padding has the row of null blocks
        positions_T    int32; -1 is padding: slot -1 and an embedding of zeros
        last_tokens_W  int64
        block_table    [W, M] int32
        weight_VE      contiguous
        slot_mapping_T int64, written: block * S + position % S
        returns        [T, E]

    Raises:
        ValueError: the weight is not contiguous.

    Not checked: ids and rows in range. Kernels behind this one start when the one before it is
    over. That is fetch_words, which never starts before earlier work is done: so a step's words,
    and everything that is there before a step, may be read by later kernels without waiting.
    """
    if not weight_VE.is_contiguous():
        raise ValueError(f"the embedding has strides {weight_VE.stride()}; it must be contiguous")
    num_tokens, hidden = token_ids_T.shape[0], weight_VE.shape[1]
    x_TE = torch.empty((num_tokens, hidden), dtype=weight_VE.dtype, device=weight_VE.device)
    block_e = min(2048, next_power_of_2(hidden))
    _embed_tokens_kernel[(num_tokens, cdiv(hidden, block_e))](
        token_ids_T, token_rows_T, positions_T, last_tokens_W, block_table_WM, weight_VE, x_TE,
        slot_mapping_T, block_table_WM.stride(0), E=hidden, BLOCK_E=block_e, S=block_size,
        **launch_options(weight_VE.device),
    )  # fmt: skip
    return x_TE
