"""Attention of prompt chunks: new tokens over their request's cached context and themselves.

T tokens this step, H query heads, G KV heads, D head dim, B blocks in pool, S block_size,
R requests, W rows of the block table, M its width; Q queries and N keys of one request

A program takes a tile: some tokens of one request, times the query heads that share a KV head, as
the rows of one matrix. It goes over the keys those tokens see, block_n at a time. The number of
programs depends on T and R alone, so that a CUDA graph can hold the launch.

Few tokens behind a long context are few tiles, each with many rounds to do one after the other.
There the keys are cut too: a program takes a (tile, KV head, split), and leaves its sums in a
scratch, which a second kernel adds up, token by token and head by head. Splits without a key leave
at once.

All keys lie in the pool. This step's lie in one piece besides, as the kernels before left them:
from there the card's copy engine (TMA) brings a round's keys without addresses of threads. 8,192
tokens of 12 heads of 128 take 416 to 435 us on an H200, from the pool 480 to 510. Rounds are the
same.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from pico_vllm.kernels.launch import (
    NUM_MULTIPROCESSORS,
    cdiv,
    launch_options,
    let_next_start,
    next_power_of_2,
    wait_for_inputs,
)
from pico_vllm.kernels.store_kv import check_pool

LOG2_E = 1.4426950408889634
MAX_HEAD_DIM = 256
MAX_SPLIT_TOKENS = 512
"""Of a launch whose keys are cut into splits. On an H200, as below, 256 tokens behind 2,083 /
8,192: not cut 53 / 181, in 4 splits 32 / 70."""
MAX_PROMPT_SPLITS = 32
MOST_SPLIT_PROGRAMS = 2 * NUM_MULTIPROCESSORS
"""That the tiles of tokens are cut into where they are fewer: all of them run at once. Requests
that decode have tiles beside these, mostly of few keys."""
MOST_ROWS_OF_SMALL_TILES = 128 * NUM_MULTIPROCESSORS
"""Tokens times query heads, from which on tiles are large."""
FEW_ROUNDS = 8
"""Keys of no more rounds are not cut. On an H200, us a layer of 12 query and 2 KV heads of 128, 48
tokens behind 144 / 512 / 2,083 / 8,192: not cut 6.9 / 13.2 / 49.8 / 179, in 16 splits 11.9 / 12.4 /
15.1 / 25.6."""
SPLIT_ROWS = 64
"""Most rows of a tile whose keys are cut."""
SPLIT_BLOCK_N = 64
"""Keys of a round of such a tile, in 16 bits."""


def paged_prefill_reference(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    block_table: Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    scale: float,
) -> Tensor:
    num_groups = q_THD.shape[1] // k_TGD.shape[1]
    block_size = k_BGSD.shape[2]
    out_THD = torch.zeros_like(q_THD)
    start = 0
    for blocks, query_len, context_len in zip(block_table, query_lens, context_lens, strict=True):
        tokens = slice(start, start + int(query_len))
        positions = torch.arange(int(context_len))
        at = (blocks[positions // block_size].long(), slice(None), positions % block_size)
        k_NHD, v_NHD = (
            torch.cat((pool[at], new[tokens])).float().repeat_interleave(num_groups, 1)
            for pool, new in ((k_BGSD, k_TGD), (v_BGSD, v_TGD))
        )
        scores_HQN = torch.einsum("qhd,nhd->hqn", q_THD[tokens].float(), k_NHD) * scale
        sees = torch.ones(scores_HQN.shape[1:], dtype=torch.bool).tril(int(context_len))
        weights_HQN = torch.softmax(scores_HQN.masked_fill(~sees, float("-inf")), -1)
        out_THD[tokens] = torch.einsum("hqn,nhd->qhd", weights_HQN, v_NHD).to(q_THD.dtype)
        start += int(query_len)
    return out_THD


def paged_prefill_pool_reference(
    q_THD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    block_table_WM: Tensor,
    rows_R: Tensor,
    query_start_loc: Tensor,
    seq_lens_R: Tensor,
    *,
    scale: float,
) -> Tensor:
    """The twin of the kernel below, for which this step's tokens lie in the pool too."""
    group = q_THD.shape[1] // k_BGSD.shape[1]
    block_size = k_BGSD.shape[2]
    starts = query_start_loc.tolist()
    out_THD = torch.zeros_like(q_THD)
    for r, (row, seq_len) in enumerate(zip(rows_R.tolist(), seq_lens_R.tolist(), strict=True)):
        tokens, query_len = slice(starts[r], starts[r + 1]), starts[r + 1] - starts[r]
        if seq_len == 0 or query_len == 0:
            continue
        positions_N = torch.arange(seq_len, device=q_THD.device)
        blocks_N = block_table_WM[row, positions_N // block_size].long()
        k_NHD, v_NHD = (
            pool[blocks_N, :, positions_N % block_size].float().repeat_interleave(group, 1)
            for pool in (k_BGSD, v_BGSD)
        )
        scores_HQN = torch.einsum("qhd,nhd->hqn", q_THD[tokens].float(), k_NHD) * scale
        sees_QN = positions_N <= positions_N[seq_len - query_len :, None]
        weights_HQN = torch.softmax(scores_HQN.masked_fill(~sees_QN, float("-inf")), -1)
        out_THD[tokens] = torch.einsum("hqn,nhd->qhd", weights_HQN, v_NHD).to(q_THD.dtype)
    return out_THD


@triton.jit
def attend_keys(
    acc, total, highest, q, positions, k_ptr, v_ptr, table_ptr, start, num_keys, scale_log2,
    stride_b, stride_s,
    D: tl.constexpr, D_PAD: tl.constexpr, S: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_EDGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys start to start + BLOCK_N of the pool. IS_EDGE: not all rows see all of them, or not all
    exist."""
    key = start + tl.arange(0, BLOCK_N)
    d = tl.arange(0, D_PAD)
    # None where there is nothing to mask: the loop over a long context then holds no predicates.
    if IS_EDGE:
        is_there = key < num_keys
        blocks = tl.load(table_ptr + key // S, mask=is_there, other=0)
        kv_mask = is_there[:, None] & (d < D)[None, :]
    else:
        blocks = tl.load(table_ptr + key // S)
        kv_mask = (d < D)[None, :] if D < D_PAD else None
    # K and V have the same strides, so they share the addresses.
    offsets = (blocks.to(tl.int64) * stride_b + key % S * stride_s)[:, None] + d[None, :]
    k = tl.load(k_ptr + offsets, mask=kv_mask, other=None if kv_mask is None else 0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if IS_EDGE:
        scores = tl.where(key[None, :] <= positions[:, None], scores, float("-inf"))
    weights, shrink, total, highest = _weigh(scores, total, highest, scale_log2)
    v = tl.load(v_ptr + offsets, mask=kv_mask, other=None if kv_mask is None else 0.0)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, total, highest


@triton.jit
def _attend_new_keys(
    acc, total, highest, q, k_new, v_new, token, column, scale_log2, PRECISION: tl.constexpr
):  # fmt: skip
    """A round of this step's keys, from `token` on, which all rows see."""
    k = k_new.load([token, column])
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    weights, shrink, total, highest = _weigh(scores, total, highest, scale_log2)
    v = v_new.load([token, column])
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, total, highest


@triton.jit
def _load_round(
    k_ptr, v_ptr, table_ptr, start, is_wanted, stride_b, stride_s,
    D: tl.constexpr, D_PAD: tl.constexpr, S: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A whole round of keys of the pool, and their values, to registers."""
    key = start + tl.arange(0, BLOCK_N)
    d = tl.arange(0, D_PAD)
    is_there = key < tl.where(is_wanted, start + BLOCK_N, 0)
    blocks = tl.load(table_ptr + key // S, mask=is_there, other=0)
    offsets = (blocks.to(tl.int64) * stride_b + key % S * stride_s)[:, None] + d[None, :]
    mask = is_there[:, None] & (d < D)[None, :]
    return tl.load(k_ptr + offsets, mask=mask, other=0.0), tl.load(v_ptr + offsets, mask, other=0.0)


@triton.jit
def _weigh(scores, total, highest, scale_log2):
    """The online softmax's step: weights of these scores, and what earlier sums shrink by."""
    new_highest = tl.maximum(highest, tl.max(scores, 1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - new_highest[:, None])
    shrink = tl.exp2(highest - new_highest)
    return weights, shrink, total * shrink + tl.sum(weights, 1), new_highest


@triton.jit
def _part_of_split(
    split, num_splits, num_unmasked, num_keys, BLOCK_N: tl.constexpr, FEW_ROUNDS: tl.constexpr
):  # fmt: skip
    """Where its keys begin, where those end that all rows see, and where all end; and how many
    splits have any.

    The last one has the rounds that need a mask, and as many of the others as make it as long as
    the rest; at least one, so that in its first round each row sees a key.
    """
    num_rounds = tl.cdiv(tl.maximum(num_keys, 0), BLOCK_N)
    num_splits = tl.where(num_rounds <= FEW_ROUNDS, 1, num_splits)
    rounds_each = tl.maximum(tl.cdiv(num_rounds, num_splits), 1)
    num_masked = num_rounds - num_unmasked // BLOCK_N
    rounds_before_last = num_unmasked // BLOCK_N - tl.maximum(rounds_each - num_masked, 1)
    rounds_before_last = tl.maximum(rounds_before_last, 0)
    num_used = tl.cdiv(rounds_before_last, rounds_each) + 1
    is_last = split == num_used - 1
    begin = tl.minimum(split * rounds_each, rounds_before_last) * BLOCK_N
    end = tl.minimum((split + 1) * rounds_each, rounds_before_last) * BLOCK_N
    return begin, tl.where(is_last, num_unmasked, end), tl.where(is_last, num_keys, end), num_used


# Specialised on no count: steps of all sizes share one compiled kernel, and one more where keys are
# cut.
@triton.jit(do_not_specialize=["num_tokens", "num_padded", "num_requests", "num_splits"])
def _paged_prefill_kernel(
    q_ptr, k_ptr, v_ptr, k_new, v_new,
    table_ptr, rows_ptr, query_start_loc_ptr, seq_lens_ptr, out_ptr,
    partial_ptr, stats_ptr, num_used_ptr,
    num_tokens, num_padded, num_requests, num_splits, scale_log2,
    stride_qt, stride_qh, stride_b, stride_g, stride_s, stride_w, stride_ot, stride_oh,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, S: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FEW_ROUNDS: tl.constexpr,
    HAS_NEW: tl.constexpr, READS_EARLY: tl.constexpr, HAS_SPLITS: tl.constexpr,
    PRECISION: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(USE_PDL)
    # Few tiles do not hide how long it takes to read starts, lengths and rows: that is over when
    # the kernel before ends.
    if not READS_EARLY:
        wait_for_inputs(USE_PDL)
    TILE_TOKENS: tl.constexpr = BLOCK_M // GROUP
    g = (tl.program_id(0) % NUM_KV_HEADS).to(tl.int64)
    tile = tl.program_id(0) // NUM_KV_HEADS

    # Request r has the tiles from query_start_loc[r] // TILE_TOKENS + r on, which leaves room for
    # one partly filled tile a request. The tokens after the last request, up to num_padded, are one
    # more, which sees nothing.
    r = 0
    last = num_requests
    while r < last:
        middle = (r + last + 1) // 2
        if tl.load(query_start_loc_ptr + middle) // TILE_TOKENS + middle <= tile:
            r = middle
        else:
            last = middle - 1
    is_request = r < num_requests
    query_start = tl.load(query_start_loc_ptr + r)
    query_end = tl.load(query_start_loc_ptr + r + 1, mask=is_request, other=num_padded)
    query_len = query_end - query_start
    # A prompt's last tile takes longest, so its first program gets it; and the oldest prompt, whose
    # context may be long where its chunk is short, comes first: no program is left to end alone.
    ahead, behind = tile - query_start // TILE_TOKENS - r, query_end // TILE_TOKENS + r - tile
    # Padding may lack a program at its end, not at its beginning.
    first = tl.where(is_request, behind, ahead) * TILE_TOKENS
    if first >= query_len:
        if READS_EARLY:
            # Waits too: whoever waits for this kernel waits for all before it.
            wait_for_inputs(USE_PDL)
        return
    seq_len = tl.load(seq_lens_ptr + r, mask=is_request, other=0)
    row = tl.load(rows_ptr + r, mask=is_request, other=0)
    num_tile_tokens = tl.minimum(TILE_TOKENS, query_len - first)
    first_position = seq_len - query_len + first
    num_keys = first_position + num_tile_tokens  # at most 0 where seq_len is 0
    num_unmasked = tl.maximum(first_position + 1, 0) // BLOCK_N * BLOCK_N
    table_ptr += row.to(tl.int64) * stride_w
    k_ptr += g * stride_g
    v_ptr += g * stride_g
    begin = 0
    if READS_EARLY:
        split = tl.program_id(1)
        begin, num_unmasked, num_keys, num_used = _part_of_split(
            split, num_splits, num_unmasked, num_keys, BLOCK_N, FEW_ROUNDS
        )
        # So is the first round, where earlier steps have stored all of it.
        known = tl.minimum(seq_len - query_len, num_unmasked)
        is_early = (begin + BLOCK_N <= known) & (split < num_used)
        early_k, early_v = _load_round(
            k_ptr, v_ptr, table_ptr, begin, is_early, stride_b, stride_s, D, D_PAD, S, BLOCK_N
        )
        wait_for_inputs(USE_PDL)
        if split >= num_used:
            return

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D_PAD)
    md_mask = (m < num_tile_tokens * GROUP)[:, None] & (d < D)[None, :]
    # 64 bits to the tile, 32 within: the rows' offsets stay in registers over the loops.
    first_token = (query_start + first).to(tl.int64)
    q_ptr += first_token * stride_qt + g * GROUP * stride_qh
    q_rows = m // GROUP * stride_qt + m % GROUP * stride_qh
    q = tl.load(q_ptr + q_rows[:, None] + d[None, :], mask=md_mask, other=0.0)

    positions = first_position + m // GROUP
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    if READS_EARLY:  # noqa: SIM102, decided when it is compiled
        if is_early:
            scores = tl.dot(q, tl.trans(early_k), input_precision=PRECISION)
            weights, shrink, total, highest = _weigh(scores, total, highest, scale_log2)
            weights = weights.to(early_v.dtype)
            acc = tl.dot(weights, early_v, acc * shrink[:, None], input_precision=PRECISION)
            begin += BLOCK_N
    num_from_pool = num_unmasked
    if HAS_NEW:
        context_len = tl.maximum(seq_len - query_len, 0)
        num_from_pool = tl.minimum(tl.cdiv(context_len, BLOCK_N) * BLOCK_N, num_unmasked)
    for start in tl.range(begin, num_from_pool, BLOCK_N):
        acc, total, highest = attend_keys(
            acc, total, highest, q, positions, k_ptr, v_ptr, table_ptr, start, num_keys, scale_log2,
            stride_b, stride_s, D, D_PAD, S, BLOCK_N, False, PRECISION,
        )  # fmt: skip
    if HAS_NEW:
        column = (g * D).to(tl.int32)
        for start in tl.range(num_from_pool, num_unmasked, BLOCK_N):
            acc, total, highest = _attend_new_keys(
                acc, total, highest, q, k_new, v_new, query_start + start - context_len, column,
                scale_log2, PRECISION,
            )  # fmt: skip
    # Mostly one or two rounds: too few for a pipeline.
    for start in tl.range(num_unmasked, num_keys, BLOCK_N, num_stages=1):
        acc, total, highest = attend_keys(
            acc, total, highest, q, positions, k_ptr, v_ptr, table_ptr, start, num_keys, scale_log2,
            stride_b, stride_s, D, D_PAD, S, BLOCK_N, True, PRECISION,
        )  # fmt: skip
    if HAS_SPLITS:
        tokens = first_token + m // GROUP
        if split == 0:
            tl.store(num_used_ptr + tokens, num_used, mask=m < num_tile_tokens * GROUP)
        if num_used > 1:
            heads = NUM_KV_HEADS * GROUP
            at = (split * num_tokens + tokens) * heads + g * GROUP + m % GROUP
            tl.store(stats_ptr + at * 2, highest, mask=m < num_tile_tokens * GROUP)
            tl.store(stats_ptr + at * 2 + 1, total, mask=m < num_tile_tokens * GROUP)
            tl.store(partial_ptr + at[:, None] * D + d[None, :], acc, mask=md_mask)
            return
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_ptr += first_token * stride_ot + g * GROUP * stride_oh
    out_rows = m // GROUP * stride_ot + m % GROUP * stride_oh
    tl.store(out_ptr + out_rows[:, None] + d[None, :], out.to(out_ptr.dtype.element_ty), md_mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _add_splits_kernel(
    partial_ptr, stats_ptr, num_used_ptr, out_ptr, num_tokens, stride_ot, stride_oh,
    D: tl.constexpr, D_PAD: tl.constexpr, MOST: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """One head of one token. In one warp a thread has all splits of what it adds up, where heads
    have 128 features: nothing is exchanged."""
    let_next_start(USE_PDL)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split, d = tl.arange(0, MOST), tl.arange(0, D_PAD)
    at = (split * num_tokens + token) * tl.num_programs(1) + head
    wait_for_inputs(USE_PDL)
    num_used = tl.load(num_used_ptr + token)
    if num_used == 1:
        return  # its program wrote the result
    is_used = split < num_used
    highest = tl.load(stats_ptr + at * 2, mask=is_used, other=float("-inf"))
    totals = tl.load(stats_ptr + at * 2 + 1, mask=is_used, other=0.0)
    parts = tl.load(
        partial_ptr + at[:, None] * D + d[None, :],
        mask=is_used[:, None] & (d < D)[None, :],
        other=0.0,
    )
    weights = tl.exp2(highest - tl.max(highest, 0))
    out = tl.sum(parts * weights[:, None], 0) / tl.sum(totals * weights, 0)
    out_ptrs = out_ptr + token * stride_ot + head * stride_oh + d
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=d < D)


@dataclass(frozen=True, slots=True)
class PrefillScratch:
    """Where splits leave their part until they are added up. One serves all layers of a step: a
    layer's attention is over before the next one's begins."""

    partials: Tensor
    """fp32, at least splits * T * H * D."""
    stats: Tensor
    """fp32, at least splits * T * H * 2: highest score and sum of weights."""
    num_used: Tensor
    """[>= T] int32: how many splits of a token's tile have keys."""

    @classmethod
    def allocate(cls, head_dim: int, device: torch.device) -> PrefillScratch:
        """Enough for any launch that for_few_tokens makes: 8.8 MB for a head dim of 128."""
        num_sums = MOST_SPLIT_PROGRAMS * SPLIT_ROWS
        return cls(
            torch.empty(num_sums * head_dim, dtype=torch.float32, device=device),
            torch.empty(num_sums * 2, dtype=torch.float32, device=device),
            torch.empty(MAX_SPLIT_TOKENS, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillConfig:
    """How the work is cut and compiled; sizes are powers of two."""

    block_m: int
    """Rows of a tile. As many whole tokens as fit, times H / G."""
    block_n: int
    """Keys of one round. Rounds count from position 0, whatever tile or chunk a token is in."""
    num_warps: int
    num_stages: int
    """2: keys and values come one round ahead; 3: and the block table two rounds ahead."""
    max_registers: int | None = None
    """Per thread. 128 lets two programs of 8 warps share a multiprocessor."""
    uses_new: bool = False
    """Take this step's keys and values from where they lie in one piece."""
    reads_early: bool = False
    """Read what earlier steps have left before the kernel before is over."""
    num_splits: int = 1
    """Of a tile's keys, at most MAX_PROMPT_SPLITS. The bits depend on it. Splits read early."""
    few_rounds: int = 0
    """Keys of no more rounds are not cut."""


def choose_config(
    num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype, *, has_new: bool = False
) -> PrefillConfig:
    """has_new: this step's keys and values can be had in one piece."""
    if dtype == torch.float32:
        # No tensor cores: operands lie in registers, which sets the size.
        block_n = 32 if head_dim <= 128 else 16
        return PrefillConfig(block_m=32, block_n=block_n, num_warps=8, num_stages=1)
    # Large tiles read the KV less often; small ones while there are not enough for all of some 132
    # multiprocessors.
    if num_tokens * num_heads < MOST_ROWS_OF_SMALL_TILES:
        num_warps = 4 if head_dim <= 128 else 8
        return PrefillConfig(
            block_m=SPLIT_ROWS, block_n=SPLIT_BLOCK_N, num_warps=num_warps, num_stages=2
        )
    if head_dim == 128 and has_new:
        # Two programs a multiprocessor, by their shared memory.
        return PrefillConfig(
            block_m=64, block_n=64, num_warps=4, num_stages=3, max_registers=168, uses_new=True
        )
    if 64 < head_dim <= 128:
        # Two programs a multiprocessor: one multiplies while the other takes exponentials. 509 us
        # for 8,192 tokens of 12 heads of 128 on an H200; alone with 128 keys a round 579 to 649.
        return PrefillConfig(block_m=128, block_n=64, num_warps=8, num_stages=3, max_registers=128)
    return PrefillConfig(block_m=128, block_n=64, num_warps=8, num_stages=2)


def for_few_tokens(
    config: PrefillConfig, num_tokens: int, num_heads: int, num_kv_heads: int, *, is_cut: bool
) -> PrefillConfig:
    """The config for tiles that leave most of the card idle: read early and, if is_cut, in splits.
    It depends on what a graph is made for alone.

    A step of 160 fresh tokens of Qwen2.5-1.5B takes 1.995 ms on an H200 with the kernel that adds
    splits up, where none has more than a few keys, and 1.883 without.
    """
    if num_tokens > MAX_SPLIT_TOKENS or config.block_m > SPLIT_ROWS or config.uses_new:
        return config
    config = replace(config, reads_early=True)
    if not is_cut:
        return config
    tile_tokens = config.block_m // (num_heads // num_kv_heads)
    num_tiles = cdiv(num_tokens, tile_tokens)
    num_splits = min(MAX_PROMPT_SPLITS, MOST_SPLIT_PROGRAMS // (num_tiles * num_kv_heads))
    if num_splits < 2:
        return config
    return replace(config, num_splits=num_splits, few_rounds=FEW_ROUNDS)


def are_cut(num_tokens: int, seq_lens: NDArray[np.int32]) -> bool:
    """Whether keys are to be cut in a launch of so many tokens: where none are, no second kernel is
    needed. seq_lens: [R], tokens of each request, counting the new ones."""
    if num_tokens > MAX_SPLIT_TOKENS:
        return False
    return bool(np.count_nonzero(seq_lens > FEW_ROUNDS * SPLIT_BLOCK_N))


@functools.cache
def has_copy_engine(device: torch.device) -> bool:
    """Whether multiprocessors have one (compute capability 9.0 and newer)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def check_head_dim(head_dim: int) -> None:
    if head_dim % 8 or not 0 < head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"head_dim {head_dim} is not supported: it must be a multiple of 8 up to {MAX_HEAD_DIM}"
        )


def paged_prefill(
    q_THD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    block_table_WM: Tensor,
    rows_R: Tensor,
    query_start_loc: Tensor,
    seq_lens_R: Tensor,
    *,
    scale: float,
    new_kv_TGD: tuple[Tensor, Tensor] | None = None,
    out: Tensor | None = None,
    has_padding: bool = True,
    reads_early: bool = False,
    scratch: PrefillScratch | None = None,
    config: PrefillConfig | None = None,
) -> Tensor:
    """Attend each request's new tokens over its paged KV, which holds theirs already. Causal.

    Shapes:
        q_THD            bf16, fp16 or fp32, last dim contiguous; other strides free
        k/v_BGSD         one layer of the pool, dtype of q
        block_table_WM   [W, M] int32, last dim contiguous; a request's entries past
                         ceil(seq_len / S) are never read
        rows_R           [R] int32, each request's row of the block table
        query_start_loc  [R + 1] int32; request r owns tokens query_start_loc[r] to [r + 1], the
                         last of its seq_len positions. What lies before the first request is left
                         alone, and so is what follows the last one if not has_padding; with
                         splits there must be neither
        new_kv_TGD       keys, rotated, and values of q's tokens, the same as in the pool: [T, G, D]
                         each, heads contiguous. Read where that is faster
        seq_lens_R       [R] int32, tokens, counting the new ones
        reads_early      whether query_start_loc, rows, seq_lens, the table and the KV of older
                         tokens lie complete before the kernel that was launched just before this
                         one: of few tokens they are then read without waiting (for_few_tokens)
        scratch          where it is given, with reads_early, few tiles are cut into splits
        returns          [T, H, D], dtype of q; softmax and sums in fp32. Written to `out` if given

    Raises:
        ValueError: a head dim, group or scale the kernel cannot take, or shapes, dtypes or strides
            that do not fit each other, the scratch included.

    Not checked, as it would stall the stream: block ids and rows in range, query_start_loc rising
    to at most T, query_len <= seq_len where seq_len > 0. A query_len of 0 is a padded request;
    padding tokens and those of a request with seq_len 0 give zeros.
    What reads_early says.
    Same answer as paged_prefill_pool_reference. With one config, a token's bits do not depend on
    what else is in the batch and, without splits, nor on how its prompt is cut into chunks.
    Source: Dao 2023, arXiv:2307.08691, over the blocks of Kwon et al. 2023, arXiv:2309.06180.
    """
    num_tokens, num_heads, head_dim = q_THD.shape
    num_kv_heads, block_size = k_BGSD.shape[1:3]
    num_requests = rows_R.shape[0]
    check_pool(k_BGSD, v_BGSD)
    check_head_dim(head_dim)
    if num_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are not a multiple of {num_kv_heads} KV heads")
    group = num_heads // num_kv_heads
    if config is None:
        has_new = new_kv_TGD is not None and has_copy_engine(q_THD.device)
        config = choose_config(num_tokens, num_heads, head_dim, q_THD.dtype, has_new=has_new)
        if reads_early and group <= config.block_m:
            is_cut = scratch is not None
            config = for_few_tokens(config, num_tokens, num_heads, num_kv_heads, is_cut=is_cut)
    if group > config.block_m:
        raise ValueError(f"{group} query heads a KV head exceed the tile's {config.block_m} rows")
    if k_BGSD.shape[3] != head_dim or k_BGSD.dtype != q_THD.dtype:
        raise ValueError(
            f"q has head_dim {head_dim} and {q_THD.dtype}, the pool {k_BGSD.shape[3]} and "
            f"{k_BGSD.dtype}"
        )
    if query_start_loc.shape[0] != num_requests + 1 or seq_lens_R.shape[0] != num_requests:
        raise ValueError(
            f"{num_requests} rows need as many seq_lens, not {seq_lens_R.shape[0]}, and one more "
            f"query_start_loc, not {query_start_loc.shape[0]}"
        )
    for name, ids in (
        ("block_table", block_table_WM), ("rows", rows_R),
        ("query_start_loc", query_start_loc), ("seq_lens", seq_lens_R),
    ):  # fmt: skip
        if ids.dtype != torch.int32 or ids.stride(-1) != 1:
            raise ValueError(f"{name} is {ids.dtype} with strides {ids.stride()}; int32, last 1")
    if scale <= 0:
        raise ValueError(f"scale {scale} must be above 0: scores are compared before it is applied")
    if out is None:
        out = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    elif out.shape != q_THD.shape or out.dtype != q_THD.dtype:
        raise ValueError(f"out is {list(out.shape)} {out.dtype}; {list(q_THD.shape)} {q_THD.dtype}")
    if q_THD.stride(2) != 1 or out.stride(2) != 1:
        raise ValueError(f"q {q_THD.stride()} and out {out.stride()} need a contiguous head dim")
    k_new: Tensor | TensorDescriptor = k_BGSD
    v_new: Tensor | TensorDescriptor = v_BGSD
    if config.uses_new:
        if new_kv_TGD is None:
            raise ValueError("the config wants this step's keys and values in one piece")
        k_new, v_new = (_rounds_of(x, q_THD, num_kv_heads, config.block_n) for x in new_kv_TGD)
    has_splits = config.num_splits > 1
    if has_splits and not has_padding:
        raise ValueError("splits are added up for all tokens: none may be another kernel's")
    sums: tuple[Tensor | None, ...] = (None, None, None)
    if has_splits:
        sums = _checked_scratch(scratch, q_THD, config)
    num_tiles = cdiv(num_tokens, config.block_m // group) + num_requests
    head_dim_pad = max(16, next_power_of_2(head_dim))
    options: dict[str, Any] = launch_options(q_THD.device)
    limit = {} if config.max_registers is None else {"maxnreg": config.max_registers}
    _paged_prefill_kernel[(num_tiles * num_kv_heads, config.num_splits)](
        q_THD, k_BGSD, v_BGSD, k_new, v_new,
        block_table_WM, rows_R, query_start_loc, seq_lens_R, out,
        *sums, num_tokens, num_tokens if has_padding else 0, num_requests, config.num_splits,
        scale * LOG2_E,
        *q_THD.stride()[:2], *k_BGSD.stride()[:3], block_table_WM.stride(0), *out.stride()[:2],
        NUM_KV_HEADS=num_kv_heads, GROUP=group,
        D=head_dim, D_PAD=head_dim_pad, S=block_size,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, FEW_ROUNDS=config.few_rounds,
        HAS_NEW=config.uses_new, READS_EARLY=config.reads_early, HAS_SPLITS=has_splits,
        PRECISION="ieee" if q_THD.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps, num_stages=config.num_stages, **options, **limit,
    )  # fmt: skip
    if has_splits:
        _add_splits_kernel[(num_tokens, num_heads)](
            *sums, out, num_tokens, *out.stride()[:2],
            D=head_dim, D_PAD=head_dim_pad, MOST=MAX_PROMPT_SPLITS,
            num_warps=1 if head_dim_pad <= 128 else 2, **options,
        )  # fmt: skip
    return out


def _checked_scratch(
    scratch: PrefillScratch | None, q_THD: Tensor, config: PrefillConfig
) -> tuple[Tensor, ...]:
    if config.num_splits > MAX_PROMPT_SPLITS or config.uses_new or not config.reads_early:
        raise ValueError(
            f"{config}: at most {MAX_PROMPT_SPLITS} splits, which read early, and of keys from the "
            "pool alone"
        )
    if scratch is None:
        raise ValueError(f"{config.num_splits} splits need a scratch")
    num_tokens, needed = q_THD.shape[0], config.num_splits * q_THD.numel()
    held = scratch.partials.numel(), scratch.stats.numel() // 2, scratch.num_used.numel()
    if held[0] < needed or held[1] < needed // q_THD.shape[2] or held[2] < num_tokens:
        raise ValueError(
            f"the scratch holds {held[0]} partial sums, {held[1]} of scores and {held[2]} tokens; "
            f"{config.num_splits} splits of {num_tokens} tokens need {needed}"
        )
    return scratch.partials, scratch.stats, scratch.num_used


def _rounds_of(x_TGD: Tensor, q_THD: Tensor, num_kv_heads: int, block_n: int) -> TensorDescriptor:
    """For the copy engine: a round is block_n tokens of one head."""
    (num_tokens, _, head_dim), dtype = q_THD.shape, q_THD.dtype
    if x_TGD.shape != (num_tokens, num_kv_heads, head_dim) or x_TGD.dtype != dtype:
        raise ValueError(
            f"new keys or values are {list(x_TGD.shape)} {x_TGD.dtype}, not "
            f"{[num_tokens, num_kv_heads, head_dim]} {dtype}"
        )
    if x_TGD.stride()[1:] != (head_dim, 1) or head_dim != next_power_of_2(head_dim):
        raise ValueError(
            f"new keys or values have strides {x_TGD.stride()}: heads must be contiguous, and the "
            f"head dim {head_dim} a power of two"
        )
    shape, strides = [num_tokens, num_kv_heads * head_dim], [x_TGD.stride(0), 1]
    return TensorDescriptor(x_TGD, shape, strides, [block_n, head_dim])
