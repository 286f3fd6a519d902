"""Attention of one new token per request over its paged KV.

R requests, H query heads, G KV heads, N = H + 2 G heads of the fused projection, D head dim,
B blocks in pool, S block_size, W rows of the block table, M its width

A program takes one (request, KV head, split): all query heads that share the KV head use the same
loads, and long contexts are cut into splits. The number of programs does not depend on the lengths,
so that a CUDA graph can hold the launch: programs whose split is empty leave at once. The program
that finishes a (request, KV head) last adds up its splits, in their order; where there may be more
than MAX_SPLITS_IN_PLACE, for few requests with long contexts, a second kernel does, head by head.

Another kernel (shared_prefix.py) may have attended the first tokens of some requests already. What
it left in the scratch counts as splits that come before their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from pico_vllm.kernels.launch import (
    NUM_MULTIPROCESSORS,
    cdiv,
    launch_options,
    let_next_start,
    next_power_of_2,
    wait_for_inputs,
)

LOG2_E = 1.4426950408889634
MAX_SPLITS_IN_PLACE = 16
"""More than this and one program adding them up takes longer than a second kernel."""
MAX_SPLITS = 128
MAX_PREFIX_SPLITS = 16
PREFIX_STEP = 64
"""Tokens. Splits of a shared prefix begin at multiples of it."""
MAX_PREFIX_ROWS = 64
"""Query rows of a tile of a shared prefix's kernel; one request's, where it has more."""
MOST_PROGRAMS = 6 * NUM_MULTIPROCESSORS
"""That one (request, KV head) after the other is cut into, where there are not as many pairs."""
MOST_WITH_SPLITS = 8 * NUM_MULTIPROCESSORS
"""Programs of any kernel that uses DecodeScratch, where it cuts pairs."""
COMBINE_D = 32
"""Of a head, what one program of the second kernel adds up."""
LONG_CONTEXT = 2048
"""Tokens from which on more splits pay for one request."""
MANY_REQUESTS = 32
LONG_ON_AVERAGE = 400
"""From so many requests on, of so many tokens on average, more splits pay for all."""


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


@triton.jit
def rotate(x, y, norm_ptr, cos, sin, d, eps, D: tl.constexpr, HAS_NORM: tl.constexpr):
    """Rows, one a head, normalised if asked, then rotated. y: the same, its halves swapped."""
    if HAS_NORM:
        dtype = norm_ptr.dtype.element_ty
        inverse = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        d_mask = d < D
        other = (d + D // 2) % D
        weight = tl.load(norm_ptr + d, mask=d_mask, other=0.0).to(tl.float32)[None, :]
        other_weight = tl.load(norm_ptr + other, mask=d_mask, other=0.0).to(tl.float32)[None, :]
        x = (x * inverse * weight).to(dtype).to(tl.float32)
        y = (y * inverse * other_weight).to(dtype).to(tl.float32)
    return x * cos + y * sin


@triton.jit
def rotated(x_ptr, norm_ptr, cos, sin, d, dot_mask, eps, D: tl.constexpr, HAS_NORM: tl.constexpr):
    """Rows at x_ptr (one a head, broadcast over d), normalised if asked, then rotated; fp32."""
    other = (d + D // 2) % D
    x = tl.load(x_ptr + d[None, :], mask=dot_mask, other=0.0).to(tl.float32)
    y = tl.load(x_ptr + other[None, :], mask=dot_mask, other=0.0).to(tl.float32)
    return rotate(x, y, norm_ptr, cos, sin, d, eps, D, HAS_NORM)


@triton.jit
def prefix_split_tokens(prefix_len, num_splits, STEP: tl.constexpr):
    """Of each split of a shared prefix but the last, which may be shorter; all are in use then."""
    return tl.maximum(tl.cdiv(tl.cdiv(prefix_len, STEP), num_splits), 1) * STEP


@triton.jit
def _kv_tile(
    k_ptr, v_ptr, table_ptr, at, end, block_stride, d,
    D: tl.constexpr, D_PAD: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Keys and values at positions `at` below `end`, [BLOCK_N, D_PAD] each, zeros past it."""
    is_there = at < end
    blocks = tl.load(table_ptr + at // S, mask=is_there, other=0).to(tl.int64)
    offsets = (blocks * block_stride + (at % S) * D)[:, None] + d[None, :]
    mask = is_there[:, None]
    if D != D_PAD:
        mask = mask & (d < D)[None, :]
    k = tl.load(k_ptr + offsets, mask=mask, other=0.0)
    v = tl.load(v_ptr + offsets, mask=mask, other=0.0)
    return k, v


@triton.jit(do_not_specialize=["num_splits", "num_prefix_splits"])
def _paged_decode_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, rows_ptr, seq_lens_ptr, prefix_lens_ptr, out_ptr,
    partial_ptr, stats_ptr, counter_ptr,
    cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr,
    scale_log2, eps,
    q_stride, block_stride, head_stride, table_stride, num_splits, num_prefix_splits,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    GROUP_POW2: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, S: tl.constexpr,
    BLOCK_N: tl.constexpr, UNROLL: tl.constexpr,
    IS_IN_PLACE: tl.constexpr, MOST_IN_PLACE: tl.constexpr, NUM_STAGES: tl.constexpr,
    IS_FUSED: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_PREFIX: tl.constexpr, PREFIX_STEP: tl.constexpr, PRECISION: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(USE_PDL)
    pid = tl.program_id(0)
    pair, split = pid // num_splits, pid % num_splits
    r, g = pair // NUM_KV_HEADS, pair % NUM_KV_HEADS
    # Lengths, tables and the KV of earlier steps lie complete before the step's first kernel.
    seq_len = tl.load(seq_lens_ptr + r)
    row = tl.load(rows_ptr + r)
    table_ptr += row.to(tl.int64) * table_stride
    num_cached = seq_len - IS_FUSED  # the fused kernel brings the last token itself
    prefix_len = 0
    num_parts = 0
    if HAS_PREFIX:
        prefix_len = tl.load(prefix_lens_ptr + r)
        part_len = prefix_split_tokens(prefix_len, num_prefix_splits, PREFIX_STEP)
        num_parts = tl.cdiv(prefix_len, part_len)
    num_tiles = tl.cdiv(num_cached - prefix_len, BLOCK_N)
    tiles_per_split = tl.maximum(tl.cdiv(num_tiles, num_splits), 1)
    start = prefix_len + split * tiles_per_split * BLOCK_N
    end = tl.minimum(start + tiles_per_split * BLOCK_N, num_cached)
    num_used = tl.maximum(tl.cdiv(num_tiles, tiles_per_split), 1)
    if split >= num_used:
        # Waits too: whoever waits for this kernel waits for all before it.
        wait_for_inputs(USE_PDL)
        return

    d, n = tl.arange(0, D_PAD), tl.arange(0, BLOCK_N)
    d_mask = d < D
    heads = tl.arange(0, GROUP_PAD)
    head_mask = heads < GROUP
    hd_mask = head_mask[:, None] & d_mask[None, :]
    k_ptr += g.to(tl.int64) * head_stride
    v_ptr += g.to(tl.int64) * head_stride
    if not IS_FUSED:
        # The kernel just before may have stored what is attended here.
        wait_for_inputs(USE_PDL)
    if NUM_STAGES == 1:
        k, v = _kv_tile(k_ptr, v_ptr, table_ptr, start + n, end, block_stride, d, D, D_PAD, S)
    out_ptrs = out_ptr + ((r * NUM_KV_HEADS + g) * GROUP + heads[:, None]) * D + d[None, :]
    if IS_FUSED:
        position = tl.maximum(seq_len - 1, 0).to(tl.int64)
        cos = tl.load(cos_ptr + position * D + d, mask=d_mask, other=0.0)
        sin = tl.load(sin_ptr + position * D + d, mask=d_mask, other=0.0)
        new_block = tl.load(table_ptr + position // S).to(tl.int64)
    wait_for_inputs(USE_PDL)
    if seq_len == 0:
        tl.store(out_ptrs, tl.zeros((GROUP_PAD, D_PAD), out_ptr.dtype.element_ty), mask=hd_mask)
        return

    dtype = q_ptr.dtype.element_ty
    q_row_ptr = q_ptr + r.to(tl.int64) * q_stride
    q_ptrs = q_row_ptr + (g * GROUP + heads)[:, None] * D
    highest = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    acc = tl.zeros((GROUP_PAD, D_PAD), tl.float32)
    if IS_FUSED:
        q_rot = rotated(
            q_ptrs, q_norm_ptr, cos[None, :], sin[None, :], d, hd_mask, eps, D, HAS_NORM
        ).to(dtype)
        if split == 0:
            # The new token: its KV goes to the pool, and into the sums from here.
            one = tl.arange(0, 1)[:, None]
            k_row = q_row_ptr + (NUM_KV_HEADS * GROUP + g + one) * D
            k_new = rotated(
                k_row, k_norm_ptr, cos[None, :], sin[None, :], d, d_mask[None, :], eps, D, HAS_NORM
            ).to(dtype)
            v_row = k_row + NUM_KV_HEADS * D
            v_new = tl.load(v_row + d[None, :], mask=d_mask[None, :], other=0.0)
            new = new_block * block_stride + (position % S) * D + d[None, :]
            tl.store(k_ptr + new, k_new, mask=d_mask[None, :])
            tl.store(v_ptr + new, v_new, mask=d_mask[None, :])
            products = q_rot.to(tl.float32) * k_new.to(tl.float32)
            highest = tl.sum(products, axis=1) * scale_log2
            total += 1.0
            acc += v_new.to(tl.float32)
    else:
        q_rot = tl.load(q_ptrs + d[None, :], mask=hd_mask, other=0.0)

    for at in tl.range(start, end, BLOCK_N, num_stages=NUM_STAGES):
        if NUM_STAGES == 1:
            # Registers hold the tile in use and the next one, under way.
            next_k, next_v = _kv_tile(
                k_ptr, v_ptr, table_ptr, at + BLOCK_N + n, end, block_stride, d, D, D_PAD, S
            )
        else:
            k, v = _kv_tile(k_ptr, v_ptr, table_ptr, at + n, end, block_stride, d, D, D_PAD, S)
        scores = tl.dot(q_rot, tl.trans(k), input_precision=PRECISION) * scale_log2
        scores = tl.where((at + n < end)[None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        highest = new_highest
        if NUM_STAGES == 1:
            k, v = next_k, next_v

    if (num_used + num_parts > 1) | (not IS_IN_PLACE):
        all_splits = num_splits
        if HAS_PREFIX:
            all_splits += num_prefix_splits
        stats_ptr += pair * all_splits * GROUP * 2
        partial_ptr += pair.to(tl.int64) * all_splits * GROUP * D
        mine = (num_parts + split) * GROUP
        tl.store(stats_ptr + (mine + heads) * 2, highest, mask=head_mask)
        tl.store(stats_ptr + (mine + heads) * 2 + 1, total, mask=head_mask)
        partials = partial_ptr + (mine + heads[:, None]) * D + d[None, :]
        tl.store(partials, acc, mask=hd_mask)
        if not IS_IN_PLACE:
            return
        tl.debug_barrier()  # all threads have stored before one of them says so
        num_done = tl.atomic_add(counter_ptr + pair, 1, sem="acq_rel")
        if num_done < num_used - 1:
            return
        tl.debug_barrier()
        tl.store(counter_ptr + pair, 0)
        _add_splits(
            partial_ptr, stats_ptr, out_ptr + pair * GROUP * D, num_used + num_parts,
            GROUP, GROUP_POW2, D, D_PAD, MOST_IN_PLACE, UNROLL,
        )  # fmt: skip
    else:
        tl.store(out_ptrs, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=hd_mask)


@triton.jit
def _add_splits(
    partial_ptr, stats_ptr, out_ptr, num_used,
    GROUP: tl.constexpr, GROUP_POW2: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    MOST_IN_PLACE: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Of one (request, KV head). Each thread keeps its own places: nothing is summed across
    threads but the statistics, and UNROLL splits are loaded before the first is needed."""
    d, heads, splits = tl.arange(0, D_PAD), tl.arange(0, GROUP_POW2), tl.arange(0, MOST_IN_PLACE)
    head_mask = heads < GROUP
    hd_mask = head_mask[:, None] & (d < D)[None, :]
    stats = stats_ptr + (splits[None, :] * GROUP + heads[:, None]) * 2
    is_used = head_mask[:, None] & (splits < num_used)[None, :]
    highest = tl.load(stats, mask=is_used, other=float("-inf"), cache_modifier=".cg")
    totals = tl.load(stats + 1, mask=is_used, other=0.0, cache_modifier=".cg")
    top = tl.where(head_mask, tl.max(highest, axis=1), 0.0)
    total = tl.sum(totals * tl.exp2(highest - top[:, None]), axis=1)
    acc = tl.zeros((GROUP_POW2, D_PAD), tl.float32)
    for first in tl.range(0, num_used, UNROLL, num_stages=1):
        for i in tl.static_range(UNROLL):
            at = (first + i) * GROUP + heads
            mask = heads < tl.where(first + i < num_used, GROUP, 0)
            weight = tl.exp2(
                tl.load(stats_ptr + at * 2, mask=mask, other=float("-inf"), cache_modifier=".cg")
                - top
            )
            part = tl.load(
                partial_ptr + at[:, None] * D + d[None, :],
                mask=mask[:, None] & (d < D)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            acc += part * weight[:, None]
    out = acc / tl.where(head_mask, total, 1.0)[:, None]
    tl.store(
        out_ptr + heads[:, None] * D + d[None, :], out.to(out_ptr.dtype.element_ty), mask=hd_mask
    )


@triton.jit(do_not_specialize=["num_splits"])
def _combine_kernel(
    partial_ptr, stats_ptr, seq_lens_ptr, out_ptr, num_splits,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, MOST: tl.constexpr, IS_FUSED: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_D places of one head of one request: all its splits at once."""
    let_next_start(USE_PDL)
    pair, head = tl.program_id(0), tl.program_id(1)
    seq_len = tl.load(seq_lens_ptr + pair // NUM_KV_HEADS)
    num_tiles = tl.cdiv(seq_len - IS_FUSED, BLOCK_N)
    tiles_per_split = tl.maximum(tl.cdiv(num_tiles, num_splits), 1)
    num_used = tl.maximum(tl.cdiv(num_tiles, tiles_per_split), 1)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    split = tl.arange(0, MOST)
    is_used = split < num_used
    at = (pair.to(tl.int64) * num_splits + split) * GROUP + head
    wait_for_inputs(USE_PDL)
    if seq_len == 0:
        return
    highest = tl.load(stats_ptr + at * 2, mask=is_used, other=float("-inf"))
    totals = tl.load(stats_ptr + at * 2 + 1, mask=is_used, other=0.0)
    part = tl.load(
        partial_ptr + at[:, None] * D + d[None, :],
        mask=is_used[:, None] & (d < D)[None, :],
        other=0.0,
    )
    weight = tl.exp2(highest - tl.max(highest, axis=0))
    acc = tl.sum(part * weight[:, None], axis=0) / tl.sum(totals * weight, axis=0)
    out_ptrs = out_ptr + (pair.to(tl.int64) * GROUP + head) * D + d
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=d < D)


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """Where splits leave their part until they are added up. One serves all layers of a step: a
    layer's attention is over before the next one's begins."""

    partials: Tensor
    """fp32, at least R * G * splits * (H / G) * D."""
    stats: Tensor
    """fp32, at least R * G * splits * (H / G) * 2: highest score and sum of weights."""
    counters: Tensor
    """[>= R * G] int32, zeros between launches."""

    @classmethod
    def allocate(
        cls,
        max_requests: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
    ) -> DecodeScratch:
        # Pairs of a request and a KV head, times splits.
        most = max(max_requests * num_kv_heads, MOST_WITH_SPLITS)
        group = num_heads // num_kv_heads
        num_sums = most * group
        # Of a shared prefix: one split, or more while there are few tiles.
        of_tiles = 2 * NUM_MULTIPROCESSORS * max(MAX_PREFIX_ROWS, next_power_of_2(group))
        of_requests = max_requests * num_heads
        num_sums += max(of_requests, min(of_requests * MAX_PREFIX_SPLITS, of_tiles))
        return cls(
            torch.empty(num_sums * head_dim, dtype=torch.float32, device=device),
            torch.empty(num_sums * 2, dtype=torch.float32, device=device),
            torch.zeros(max_requests * num_kv_heads, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True)
class AttendedPrefix:
    """Tokens whose part of the sums lies in the scratch already."""

    lens_R: Tensor
    """int32, how many of each request's first tokens; whole blocks, and not the new token."""
    num_splits: int
    """Room for each request, at most MAX_PREFIX_SPLITS; prefix_split_tokens says what is in use."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How the work is cut. The bits depend on the tile and the number of splits."""

    block_n: int
    """Positions of a tile."""
    num_splits: int
    num_warps: int
    num_stages: int = 1
    """1: the next tile is under way to registers; more: to shared memory, which takes longer for
    one program and leaves room for five on a multiprocessor."""
    max_registers: int | None = None


def decode_config(
    num_requests: int, num_kv_heads: int, row_bytes: int, *, is_long: bool
) -> DecodeConfig:
    """The fastest on an H200 for so many requests; row_bytes: of one head's key.

    Eight warps end one tile sooner (4.4 us, four 5.8, at one request), four get more of many tiles
    done (16 x 8K: 39 us, eight 45). Where programs are many, what counts is how many of them a
    multiprocessor holds: 256 contexts of 622 tokens take 47 us so, 94 with eight warps each.
    """
    block_n = 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16
    splits = num_splits(num_requests, num_kv_heads, is_long=is_long)
    if _are_many(num_requests * num_kv_heads, is_long=is_long):
        return DecodeConfig(block_n, splits, num_warps=4, num_stages=3)
    if is_long:
        return DecodeConfig(block_n, splits, num_warps=4)
    # Two on a multiprocessor: 128 contexts of 190 tokens 18.6 to 11.6 us.
    return DecodeConfig(
        block_n, splits, num_warps=8, max_registers=128 if row_bytes <= 256 else None
    )


def are_long(context_lens: NDArray[np.int32]) -> bool:
    """Whether contexts of decoding requests are to be cut into more splits. context_lens: [R],
    tokens before this step."""
    if np.count_nonzero(context_lens >= LONG_CONTEXT):
        return True
    num_requests = len(context_lens)
    return num_requests >= MANY_REQUESTS and context_lens.sum() >= LONG_ON_AVERAGE * num_requests


def can_be_long(num_requests: int, max_context: int) -> bool:
    """Whether are_long may hold for so many requests of at most max_context tokens."""
    return max_context >= (LONG_ON_AVERAGE if num_requests >= MANY_REQUESTS else LONG_CONTEXT)


def num_splits(num_requests: int, num_kv_heads: int, *, is_long: bool) -> int:
    """Enough programs for two on each of some 132 multiprocessors, six of the small ones where
    contexts are long (are_long)."""
    num_pairs = num_requests * num_kv_heads
    are_small = is_long and _are_many(num_pairs, is_long=True)
    wanted = (MOST_PROGRAMS if are_small else 2 * NUM_MULTIPROCESSORS) // num_pairs
    most = MAX_SPLITS if is_long else MAX_SPLITS_IN_PLACE
    return max(1, min(most, 1 << (wanted.bit_length() - 1) if wanted else 1))


def _are_many(num_pairs: int, *, is_long: bool) -> bool:
    """Whether small programs pay, for so many pairs of a request and a KV head."""
    return num_pairs >= (64 if is_long else 265)


def paged_decode(
    q_RHD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    block_table_WM: Tensor,
    rows_R: Tensor,
    seq_lens_R: Tensor,
    *,
    scale: float,
    scratch: DecodeScratch,
    is_long: bool = True,
    config: DecodeConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend one new token per request over its paged KV, which is stored already.

    Shapes:
        q_RHD          bf16, fp16 or fp32, heads contiguous
        k/v_BGSD       K and V of one layer of the pool, dtype of q
        block_table    [W, M] int32; entries past ceil(seq_len / S) are never read
        rows_R         int32, the row of the table that belongs to each request
        seq_lens_R     int32, tokens, counting the token being decoded
        is_long        whether to cut few requests into more splits; right for any lengths
        config         decode_config's choice where None; its splits must fit the scratch
        returns        [R, H, D], dtype of q; softmax and sums in fp32. Written to `out` if given,
                       contiguous

    Raises:
        ValueError: H is not a multiple of G, or dtypes, strides, the scratch or `out` do not fit.

    Not checked, as it would stall the stream: block ids in range. A row with seq_len 0 gives zeros.
    Same answer as paged_decode_reference. The bits of a request depend on R and
    is_long, through the number of splits, but not on what else is in the batch.
    Source: Kwon et al. 2023, arXiv:2309.06180, section 4.1; online softmax, arXiv:1805.02867;
    splits, Dao et al. 2023, Flash-Decoding.
    """
    num_heads, head_dim = q_RHD.shape[1:]
    if q_RHD.stride(1) != head_dim or q_RHD.stride(2) != 1:
        raise ValueError(f"q has strides {q_RHD.stride()}; its heads must be contiguous")
    return _launch(
        q_RHD,
        num_heads,
        k_BGSD,
        v_BGSD,
        block_table_WM,
        rows_R,
        seq_lens_R,
        scale,
        scratch,
        config or _config_of(q_RHD, k_BGSD, is_long=is_long),
        out=out,
    )


def rope_paged_decode(
    qkv_RND: Tensor,
    cos_PD: Tensor,
    sin_PD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    block_table_WM: Tensor,
    rows_R: Tensor,
    seq_lens_R: Tensor,
    *,
    scale: float,
    scratch: DecodeScratch,
    q_norm_D: Tensor | None = None,
    k_norm_D: Tensor | None = None,
    eps: float = 0.0,
    is_long: bool = True,
    config: DecodeConfig | None = None,
    prefix: AttendedPrefix | None = None,
) -> Tensor:
    """RoPE (after QK-norm where weights are given), store of the new KV and paged_decode in one.

    Shapes:
        qkv_RND        the fused projection, contiguous: a token's H queries, G keys, G values
        cos/sin_PD     fp32 tables by position; sin with the minus sign in its first half
        prefix         what shared_prefix.attend_prefix left for a config of as many splits, at most
                       MAX_SPLITS_IN_PLACE
        the rest       as paged_decode; the pool is written at position seq_len - 1 of each request

    Raises:
        ValueError: as paged_decode.

    Same answer as rope_store_kv and paged_decode, but for the new token's score, which is summed in
    another order. A row with seq_len 0 stores nothing and gives zeros.
    """
    num_all, head_dim = qkv_RND.shape[1:]
    num_heads = num_all - 2 * k_BGSD.shape[1]
    if not qkv_RND.is_contiguous():
        raise ValueError(f"qkv has strides {qkv_RND.stride()}; it must be contiguous")
    if head_dim % 2:
        raise ValueError(f"head_dim {head_dim} is odd: it has no halves to rotate")
    rope = (cos_PD, sin_PD, q_norm_D, k_norm_D, eps)
    return _launch(
        qkv_RND,
        num_heads,
        k_BGSD,
        v_BGSD,
        block_table_WM,
        rows_R,
        seq_lens_R,
        scale,
        scratch,
        config or _config_of(qkv_RND, k_BGSD, is_long=is_long),
        rope,
        prefix,
    )


def _config_of(q: Tensor, k_BGSD: Tensor, *, is_long: bool) -> DecodeConfig:
    row_bytes = next_power_of_2(q.shape[2]) * q.dtype.itemsize
    return decode_config(q.shape[0], k_BGSD.shape[1], row_bytes, is_long=is_long)


def _launch(
    q: Tensor,
    num_heads: int,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    block_table_WM: Tensor,
    rows_R: Tensor,
    seq_lens_R: Tensor,
    scale: float,
    scratch: DecodeScratch,
    config: DecodeConfig,
    rope: tuple[Tensor, Tensor, Tensor | None, Tensor | None, float] | None = None,
    prefix: AttendedPrefix | None = None,
    out: Tensor | None = None,
) -> Tensor:
    num_requests, head_dim = q.shape[0], q.shape[2]
    num_kv_heads, block_size = k_BGSD.shape[1:3]
    check(q, num_heads, k_BGSD, v_BGSD)
    splits = config.num_splits
    is_in_place = splits <= MAX_SPLITS_IN_PLACE
    if prefix is not None and not is_in_place:
        raise ValueError(f"{splits} splits behind a prefix are more than {MAX_SPLITS_IN_PLACE}")
    prefix_splits = 0 if prefix is None else prefix.num_splits
    needed = num_requests * (splits + prefix_splits) * num_heads * head_dim
    if scratch.partials.numel() < needed or scratch.counters.numel() < num_requests * num_kv_heads:
        raise ValueError(
            f"the scratch holds {scratch.partials.numel()} partial sums; {num_requests} requests "
            f"need {needed}"
        )
    shape = (num_requests, num_heads, head_dim)
    if out is None:
        out = torch.empty(shape, dtype=q.dtype, device=q.device)
    elif out.shape != shape or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(
            f"out is {tuple(out.shape)} {out.dtype} with strides {out.stride()}; it must be "
            f"{shape} {q.dtype}, contiguous"
        )
    cos, sin, q_norm, k_norm, eps = rope or (q, q, None, None, 0.0)
    options: dict[str, Any] = launch_options(q.device)
    group = num_heads // num_kv_heads
    head_dim_pad = next_power_of_2(head_dim)
    heads = {"NUM_KV_HEADS": num_kv_heads, "GROUP": group, "D": head_dim}
    cut = {"BLOCK_N": config.block_n, "IS_FUSED": rope is not None}
    limit = {} if config.max_registers is None else {"maxnreg": config.max_registers}
    _paged_decode_kernel[(num_requests * num_kv_heads * splits,)](
        q, k_BGSD, v_BGSD, block_table_WM, rows_R, seq_lens_R,
        seq_lens_R if prefix is None else prefix.lens_R, out,
        scratch.partials, scratch.stats, scratch.counters,
        cos, sin, q if q_norm is None else q_norm, q if k_norm is None else k_norm,
        scale * LOG2_E, eps,
        q.stride(0), k_BGSD.stride(0), k_BGSD.stride(1), block_table_WM.stride(0),
        # Numbers, not part of the code: batches of many sizes share a kernel.
        splits, prefix_splits,
        D_PAD=head_dim_pad, GROUP_PAD=max(16, next_power_of_2(group)),
        GROUP_POW2=next_power_of_2(group), S=block_size,
        IS_IN_PLACE=is_in_place, UNROLL=8,
        MOST_IN_PLACE=MAX_SPLITS_IN_PLACE + (prefix is not None) * MAX_PREFIX_SPLITS,
        NUM_STAGES=config.num_stages,
        HAS_NORM=q_norm is not None, HAS_PREFIX=prefix is not None, PREFIX_STEP=PREFIX_STEP,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps, **heads, **cut, **options, **limit,
    )  # fmt: skip
    if not is_in_place:
        _combine_kernel[(num_requests * num_kv_heads, group, cdiv(head_dim, COMBINE_D))](
            scratch.partials, scratch.stats, seq_lens_R, out, splits,
            MOST=MAX_SPLITS, BLOCK_D=COMBINE_D, **heads, **cut, num_warps=4, **options,
        )  # fmt: skip
    return out


def check(q: Tensor, num_heads: int, k_BGSD: Tensor, v_BGSD: Tensor) -> None:
    num_kv_heads, _, head_dim = k_BGSD.shape[1:]
    if num_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are not a multiple of {num_kv_heads} KV heads")
    if not q.dtype == k_BGSD.dtype == v_BGSD.dtype:
        raise ValueError(f"dtypes differ: q {q.dtype}, k {k_BGSD.dtype}, v {v_BGSD.dtype}")
    if k_BGSD.stride() != v_BGSD.stride() or k_BGSD.stride()[2:] != (head_dim, 1):
        raise ValueError(
            f"k {k_BGSD.stride()} and v {v_BGSD.stride()} need equal strides, and slots and head "
            "dim contiguous"
        )
