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

from pico_vllm.kernels.cpu.kv_rows import KVRows

SPLIT_TOKENS = 600
"""Most padding of a group: 0.1 us a token, and a call more costs 60 us."""
GROUP_TOKENS = 16384
"""Padded tokens of one group: bounds the gathered copy (12 MB at G=3, D=64 in bf16)."""


@dataclass(slots=True)
class DecodeGroup:
    """Requests of similar length, attended in one call."""

    requests: Tensor | None
    """[r] int64, rows of q; None where the group is the whole batch in its order."""
    slots: NDArray[np.int64]
    """[r, N]; past a request's end its first slot again, which holds numbers of its own."""
    is_real: NDArray[np.bool_] | None
    """[r, N]; None without padding."""
    rows: Tensor | None = None
    """[2 * r * G * N] int64, see KVRows."""
    mask: Tensor | None = None
    """[r * G, 1, 1, N] in q's dtype, added to the scores."""


@dataclass(slots=True)
class DecodePlan:
    """Which KV a decode batch reads, the same in every layer."""

    num_requests: int
    groups: list[DecodeGroup] = field(default_factory=list)
    kv_rows: KVRows | None = None
    """Of the pool that the groups' rows and masks were made for."""

    def bind(self, kv_rows: KVRows, dtype: torch.dtype) -> KVRows:
        """Find the rows of this pool and make masks of its dtype, once for all its layers."""
        self.kv_rows = kv_rows
        for group in self.groups:
            rows_2rNG = kv_rows.of_slots(group.slots)
            group.rows = kv_rows.to_device(rows_2rNG.transpose(0, 1, 3, 2))
            if group.is_real is not None:
                hides = np.where(group.is_real, np.float32(0), np.float32(-np.inf))
                hides = hides.repeat(kv_rows.num_heads, axis=0)[:, None, None]
                group.mask = torch.from_numpy(hides).to(kv_rows.device, dtype)
        return kv_rows


def plan_decode(
    block_table: NDArray[np.int32], seq_lens: NDArray[np.int32], block_size: int
) -> DecodePlan:
    """Once per step on the host. block_table [R, M], seq_lens [R]."""
    num_requests = len(seq_lens)
    plan = DecodePlan(num_requests)
    if num_requests and _is_one_group(seq_lens):
        plan.groups.append(_group(None, block_table, seq_lens, block_size))
        return plan
    by_length = np.argsort(-seq_lens, kind="stable")
    by_length = by_length[: np.count_nonzero(seq_lens)]
    while len(by_length):
        lengths = seq_lens[by_length].astype(np.int64)
        longest = int(lengths[0])
        padding = np.cumsum(longest - lengths)
        size = int(np.searchsorted(padding, SPLIT_TOKENS, side="right"))
        size = min(size, max(GROUP_TOKENS // longest, 1))
        members = np.sort(by_length[:size])
        plan.groups.append(_group(members, block_table[members], seq_lens[members], block_size))
        by_length = by_length[size:]
    return plan


def _is_one_group(seq_lens: NDArray[np.int32]) -> bool:
    padded_tokens = len(seq_lens) * int(seq_lens.max())
    padding = padded_tokens - int(seq_lens.sum())
    is_small = padded_tokens <= GROUP_TOKENS or len(seq_lens) == 1
    return is_small and padding <= SPLIT_TOKENS and int(seq_lens.min()) > 0


def _group(
    members: NDArray[np.int64] | None,
    block_table: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
    block_size: int,
) -> DecodeGroup:
    """Table and lengths are those of the members; None stands for the whole batch."""
    longest = int(seq_lens.max())
    first_slots = block_table[:, : -(-longest // block_size)].astype(np.int64) * block_size
    slots = (first_slots[:, :, None] + np.arange(block_size)).reshape(len(seq_lens), -1)[
        :, :longest
    ]
    is_real = None
    if int(seq_lens.min()) < longest:
        is_real = np.arange(longest) < seq_lens[:, None]
        slots = np.where(is_real, slots, slots[:, :1])
    requests = None if members is None else torch.from_numpy(members)
    return DecodeGroup(requests=requests, slots=slots, is_real=is_real)


def paged_decode(
    q_RHD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, plan: DecodePlan, *, scale: float
) -> Tensor:
    """Attend one new token per request over its paged KV.

    Shapes:
        q_RHD          bf16, fp16 or fp32; strides free
        k/v_BGSD       K and V of one layer of the pool, dtype of q
        plan           plan_decode of the block table and lengths; lengths count the new token
        returns        [R, H, D], dtype of q; softmax and sums in fp32

    Raises:
        ValueError: H is not a multiple of G, or k_BGSD and v_BGSD are not a layer of a pool.

    Not checked: block ids in range. A row with seq_len 0 gives zeros; slots past a request's end
    are never read. Same answer as paged_decode_reference.
    """
    kv_rows = plan.kv_rows or plan.bind(KVRows.of(k_BGSD, v_BGSD), k_BGSD.dtype)
    if q_RHD.shape[1] % kv_rows.num_heads:
        raise ValueError(
            f"{q_RHD.shape[1]} query heads are not a multiple of {kv_rows.num_heads} KV heads"
        )
    matrix = kv_rows.matrix(k_BGSD)
    if len(plan.groups) == 1 and plan.groups[0].requests is None:
        group = plan.groups[0]
        return attend_rows(q_RHD, matrix, group.rows, group.mask, kv_rows.num_heads, scale=scale)
    out_RHD = torch.zeros(q_RHD.shape, dtype=q_RHD.dtype, device=q_RHD.device)
    for group in plan.groups:
        requests = group.requests.to(q_RHD.device)
        q_rHD = q_RHD.index_select(0, requests)
        attended_rHD = attend_rows(
            q_rHD, matrix, group.rows, group.mask, kv_rows.num_heads, scale=scale
        )
        out_RHD.index_copy_(0, requests, attended_rHD)
    return out_RHD


def attend_rows(
    q_rHD: Tensor,
    matrix: Tensor,
    rows: Tensor,
    mask: Tensor | None,
    num_kv_heads: int,
    *,
    scale: float,
) -> Tensor:
    """One attention for r * G (request, KV head) pairs; their query heads are attention's queries.

    matrix, rows and mask are a layer's KVRows.matrix and a DecodeGroup's rows and mask: tensors
    only, so that a graph can be made of it.

    Gathering first is not a detour: attention straight on the pool's blocks, one block a batch
    entry, took 112 us at 512 tokens, gathering (17 us) and attending (40 us) half of that.
    """
    # int: in a graph these are constants, not operations of every layer.
    num_requests, num_heads, head_dim = (int(size) for size in q_rHD.shape)
    num_pairs = num_requests * num_kv_heads
    kv = matrix.index_select(0, rows).view(2, num_pairs, 1, -1, head_dim)
    k_P1ND, v_P1ND = kv.unbind()
    q_P1hD = q_rHD.reshape(num_pairs, 1, num_heads // num_kv_heads, head_dim)
    out_P1hD = functional.scaled_dot_product_attention(
        q_P1hD, k_P1ND, v_P1ND, attn_mask=mask, scale=scale
    )
    return out_P1hD.view(num_requests, num_heads, head_dim)
