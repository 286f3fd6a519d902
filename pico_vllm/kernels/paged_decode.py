"""Attention of one new token per request over its paged KV.

R requests, H query heads, G KV heads, D head dim, B blocks in pool, S block_size,
M block-table width, N tokens of a padded group of requests
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from pico_vllm.kernels.kv_rows import as_rows, row_ids

SPLIT_TOKENS = 600
"""A second call of attention costs as much as this many padded tokens: 60 us, 0.1 us a token."""
GROUP_TOKENS = 16384
"""Padded tokens of one group: bounds the gathered copy (12 MB at G=3, D=64 in bf16)."""


def paged_decode_reference(
    q_RHD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
) -> Tensor:
    num_heads, head_dim = q_RHD.shape[1:]
    num_kv_heads, block_size = k_BGSD.shape[1:3]
    out_RHD = torch.zeros_like(q_RHD)
    for r, seq_len in enumerate(seq_lens.tolist()):
        if seq_len == 0:
            continue
        blocks = block_table[r, : -(-seq_len // block_size)].long()
        k_GND, v_GND = (
            x[blocks].transpose(0, 1).reshape(num_kv_heads, -1, head_dim)[:, :seq_len].float()
            for x in (k_BGSD, v_BGSD)
        )
        q_GrD = q_RHD[r].view(num_kv_heads, -1, head_dim).float()
        weights = torch.softmax(q_GrD @ k_GND.transpose(1, 2) * scale, -1)
        out_RHD[r] = (weights @ v_GND).reshape(num_heads, head_dim).to(q_RHD.dtype)
    return out_RHD


@dataclass(slots=True)
class DecodeGroup:
    """Requests of similar length, attended in one call."""

    requests: Tensor | None
    """[r] int64, rows of q; None where the group is the whole batch in its order."""
    slots: Tensor
    """[r, N] int64; past a request's end its first slot again, which holds numbers of its own."""
    mask: Tensor | None
    """[r, 1, 1, N] bool, True at real tokens; None without padding."""
    rows: Tensor | None = None
    """[r * G * N] int64, see kv_rows; made at the first layer, which brings the strides."""


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Which KV a decode batch reads, the same in every layer."""

    num_requests: int
    groups: list[DecodeGroup] = field(default_factory=list)


def plan_decode(
    block_table: NDArray[np.int32], seq_lens: NDArray[np.int32], block_size: int
) -> DecodePlan:
    """Once per step on the host. block_table [R, M], seq_lens [R]."""
    num_requests = len(seq_lens)
    by_length = np.argsort(-seq_lens, kind="stable")
    by_length = by_length[: np.count_nonzero(seq_lens)]
    plan = DecodePlan(num_requests)
    while len(by_length):
        lengths = seq_lens[by_length].astype(np.int64)
        longest = int(lengths[0])
        # Cut where the padding of all that follow costs more than one more call.
        waste = (longest - lengths) * np.arange(len(lengths), 0, -1)
        size = int(np.argmax(waste > SPLIT_TOKENS)) or len(lengths)
        size = min(size, max(GROUP_TOKENS // longest, 1))
        members = np.sort(by_length[:size])
        plan.groups.append(
            _group(members, num_requests, block_table[members], seq_lens[members], block_size)
        )
        by_length = by_length[size:]
    return plan


def _group(
    members: NDArray[np.int64],
    num_requests: int,
    block_table: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
    block_size: int,
) -> DecodeGroup:
    longest = int(seq_lens.max())
    positions = np.arange(longest)
    is_real = positions < seq_lens[:, None]
    positions = np.where(is_real, positions, 0)
    blocks = np.take_along_axis(block_table, positions // block_size, axis=1).astype(np.int64)
    return DecodeGroup(
        requests=None if len(members) == num_requests else torch.from_numpy(members),
        slots=torch.from_numpy(blocks * block_size + positions % block_size),
        mask=None if is_real.all() else torch.from_numpy(is_real)[:, None, None],
    )


def paged_decode(
    q_RHD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, plan: DecodePlan, *, scale: float
) -> Tensor:
    """Attend one new token per request over its paged KV.

    Shapes:
        q_RHD          bf16, fp16 or fp32; strides free
        k/v_BGSD       one layer of the pool, dtype of q
        plan           plan_decode of the block table and lengths; lengths count the new token
        returns        [R, H, D], dtype of q; softmax and sums in fp32

    Raises:
        ValueError: H is not a multiple of G, or k_BGSD or v_BGSD is not a layer of a pool.

    Not checked: block ids in range. A row with seq_len 0 gives zeros; slots past a request's end
    are never read. Same answer as paged_decode_reference.
    """
    num_heads, num_kv_heads = q_RHD.shape[1], k_BGSD.shape[1]
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are not a multiple of {num_kv_heads} KV heads")
    k_rows, v_rows = as_rows(k_BGSD), as_rows(v_BGSD)
    out_RHD: Tensor | None = None
    for group in plan.groups:
        if group.rows is None:
            group.rows = row_ids(group.slots, k_BGSD).transpose(0, 1).flatten()
        if group.requests is None:
            return _attend(q_RHD, k_rows, v_rows, group, num_kv_heads, scale)
        if out_RHD is None:
            out_RHD = torch.zeros(q_RHD.shape, dtype=q_RHD.dtype)
        q_rHD = q_RHD.index_select(0, group.requests)
        attended_rHD = _attend(q_rHD, k_rows, v_rows, group, num_kv_heads, scale)
        out_RHD.index_copy_(0, group.requests, attended_rHD)
    return torch.zeros(q_RHD.shape, dtype=q_RHD.dtype) if out_RHD is None else out_RHD


def _attend(
    q_rHD: Tensor,
    k_rows: Tensor,
    v_rows: Tensor,
    group: DecodeGroup,
    num_kv_heads: int,
    scale: float,
) -> Tensor:
    """The query heads of one KV head are attention's rows: no KV head is copied for its group.

    Gathering first is not a detour: attention straight on the pool's blocks, one block a batch
    entry, took 112 us at 512 tokens, gathering (17 us) and attending (40 us) half of that.
    """
    assert group.rows is not None
    num_requests, num_tokens = group.slots.shape
    num_heads, head_dim = q_rHD.shape[1:]
    shape = (num_requests, num_kv_heads, num_tokens, head_dim)
    k_rGND = k_rows.index_select(0, group.rows).view(shape)
    v_rGND = v_rows.index_select(0, group.rows).view(shape)
    q_rGhD = q_rHD.reshape(num_requests, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out_rGhD = functional.scaled_dot_product_attention(
        q_rGhD, k_rGND, v_rGND, attn_mask=group.mask, scale=scale
    )
    return out_rGhD.reshape(num_requests, num_heads, head_dim)
