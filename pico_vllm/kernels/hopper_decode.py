"""Attention of one new token for many requests on Hopper, bound by reading their KV.

R requests, H query heads, G KV heads, N = H + 2 G heads of the fused projection, D head dim,
B blocks in pool, S block_size, W rows of the block table, M its width

A program is one warp and takes one (request, KV head, split). Keys and values of a block lie in one
piece, which one order to the copy engine (TMA) brings to a ring in shared memory: no addresses, no
registers, and KV of earlier steps is asked for before the wait for the kernel before. One warp has
nothing to reduce with others. Several programs share a multiprocessor.

The number of programs does not depend on the lengths, so that a CUDA graph can hold the launch:
programs whose split is empty leave at once. The program that finishes a (request, KV head) last
adds up its splits, in their order, behind what another kernel may have left of its first tokens
(shared_prefix.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pico_vllm.kernels.gluon import (
    DTYPES,
    TensorDescriptor,
    bring,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon_jit,
    has_hopper_gluon,
    mbarrier,
    mma_v2,
    sync_threads,
    tile_layout,
)
from pico_vllm.kernels.launch import NUM_MULTIPROCESSORS, cdiv, launch_options, next_power_of_2
from pico_vllm.kernels.paged_decode import (
    LOG2_E,
    MAX_PREFIX_SPLITS,
    MAX_SPLITS_IN_PLACE,
    PREFIX_STEP,
    AttendedPrefix,
    DecodeScratch,
    paged_decode_reference,
)

HEAD_DIMS = (64, 128)
BLOCK_SIZES = (16, 32, 64)
"""A product takes 16 tokens at least."""
MAX_GROUP = 16
"""Query heads of a KV head: rows of the tensor cores' instruction."""

MAX_STAGES = 3
"""Four at once and three give steps of the same length, but each number is one more kernel to
compile."""
MAX_SHARED_BYTES = 227 * 1024
"""Of a multiprocessor."""
LONG_PROGRAMS = 480
"""Where contexts are long; up to twice as many with splits, which are powers of two. us a layer on
an H200, of 12 query and 2 KV heads, with three programs a multiprocessor and with these: 140
requests of 1,000 tokens on average, in falling order, 47.1 and 36.5, 100 of 1,200 in any order 39.6
and 33.7, 60 of 1,300 25.6 and 21.1, 30 of 1,400 15.1 and 13.7."""

hopper_decode_reference = paged_decode_reference


@gluon_jit()
def _load_parts(x_ptr, part_stride, mask, NUM_PARTS: gl.constexpr):
    """All of them asked for before the first one is added up."""
    parts = ()
    for i in gl.static_range(NUM_PARTS):
        parts += (gl.load(x_ptr + i * part_stride, mask=mask, other=0.0),)
    return parts


@gluon_jit()
def _add_parts(parts, bias):
    total = parts[0].to(gl.float32) + bias
    for i in gl.static_range(1, len(parts)):
        total += parts[i].to(gl.float32)
    return total


@gluon_jit()
def _load_bias(bias_ptr, mask, HAS_BIAS: gl.constexpr):
    bias = 0.0
    if HAS_BIAS:
        bias = gl.load(bias_ptr, mask=mask, other=0.0).to(gl.float32)
    return bias


@gluon_jit()
def _rotated(low, high, norm_ptr, cos, sin, d, eps, HAS_NORM: gl.constexpr):
    """Both halves of rows, one a head, normalised if asked, then rotated."""
    dtype: gl.constexpr = norm_ptr.dtype.element_ty
    HALF: gl.constexpr = low.shape[1]
    if HAS_NORM:
        inverse = gl.rsqrt((gl.sum(low * low, 1) + gl.sum(high * high, 1)) / (2 * HALF) + eps)
        low_weight = gl.load(norm_ptr + d).to(gl.float32)
        high_weight = gl.load(norm_ptr + HALF + d).to(gl.float32)
        low = (low * inverse[:, None] * low_weight[None, :]).to(dtype).to(gl.float32)
        high = (high * inverse[:, None] * high_weight[None, :]).to(dtype).to(gl.float32)
    cos, sin = cos[None, :], sin[None, :]
    return (low * cos - high * sin).to(dtype), (high * cos + low * sin).to(dtype)


@gluon_jit()
def _find_rows(
    table_ptr, block, end, first_row, block_rows, S: gl.constexpr, NUM_BLOCKS: gl.constexpr
):  # fmt: skip
    """Rows of the pool where these blocks begin. Those from `end` on lie outside, which the copy
    engine fills with zeros without reading."""
    rows = ()
    for i in gl.static_range(NUM_BLOCKS):
        is_there = block + i < end
        block_id = gl.load(table_ptr + block + i, mask=is_there, other=0)
        rows += (gl.where(is_there, first_row + block_id * block_rows, -2 * S),)
    return rows


@gluon_jit()
def _put_new_token(kv, new_smem, at, layout: gl.constexpr, S: gl.constexpr):
    """Into its block in shared memory, at slot `at`. Values of later slots become zeros: nobody may
    ever have written there, and a weight of 0 times no number is no number."""
    n = gl.arange(0, 16, gl.SliceLayout(1, layout))[:, None]
    k_new = new_smem.index(0).load(gl.SliceLayout(0, layout))[None, :]
    v_new = new_smem.index(1).load(gl.SliceLayout(0, layout))[None, :]
    for first in gl.static_range(0, S, 16):  # all at once take too many registers
        k, v = kv.slice(first, 16), kv.slice(S + first, 16)
        k.store(gl.where(first + n == at, k_new, k.load(layout)))
        values = gl.where(first + n == at, v_new, v.load(layout))
        v.store(gl.where(first + n > at, 0.0, values))


@gluon_jit()
def _add_splits(
    partial_ptr, stats_ptr, out_ptr, num_used, layout: gl.constexpr,
    GROUP: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, MAX_SPLITS: gl.constexpr,
    UNROLL: gl.constexpr,
):  # fmt: skip
    """Of one (request, KV head). Each thread keeps its own places: nothing is summed across threads
    but the statistics, and UNROLL splits are loaded before the first is needed."""
    stats_layout: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [1, 1], [1, 0])
    head = gl.arange(0, ROWS, gl.SliceLayout(1, stats_layout))[:, None]
    split = gl.arange(0, MAX_SPLITS, gl.SliceLayout(0, stats_layout))[None, :]
    is_used = (head < GROUP) & (split < num_used)
    stats = (split * GROUP + head) * 2
    highest = gl.load(stats_ptr + stats, mask=is_used, other=float("-inf"), cache_modifier=".cg")
    totals = gl.load(stats_ptr + stats + 1, mask=is_used, other=0.0, cache_modifier=".cg")
    top = gl.max(gl.where(head < GROUP, highest, 0.0), 1)
    total = gl.sum(totals * gl.exp2(highest - top[:, None]), 1)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    top = gl.convert_layout(top, rows)
    total = gl.convert_layout(total, rows)
    heads = gl.arange(0, ROWS, rows)
    d = gl.arange(0, D, gl.SliceLayout(0, layout))
    acc = gl.zeros([ROWS, D], gl.float32, layout)
    for first in range(0, num_used, UNROLL):
        for i in gl.static_range(UNROLL):
            at = (first + i) * GROUP + heads
            mask = heads < gl.where(first + i < num_used, GROUP, 0)
            high = gl.load(stats_ptr + at * 2, mask=mask, other=float("-inf"), cache_modifier=".cg")
            part = gl.load(
                partial_ptr + at[:, None] * D + d[None, :], mask=mask[:, None], other=0.0,
                cache_modifier=".cg",
            )  # fmt: skip
            acc += part * gl.exp2(high - top)[:, None]
    is_head = heads < GROUP
    out = acc / gl.where(is_head, total, 1.0)[:, None]
    out_at = heads[:, None] * D + d[None, :]
    gl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=is_head[:, None])


# Specialised on no count: steps of all sizes share one compiled kernel.
@gluon_jit(do_not_specialize=["num_splits", "num_prefix_splits", "min_rounds"])
def _hopper_decode_kernel(
    kv_desc, qkv_ptr, k_ptr, v_ptr, table_ptr, rows_ptr, seq_lens_ptr, prefix_lens_ptr, out_ptr,
    partial_ptr, stats_ptr, counter_ptr,
    cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, bias_ptr,
    scale_log2, eps, num_splits, num_prefix_splits, min_rounds,
    part_stride, block_stride, head_stride, table_stride,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, S: gl.constexpr,
    NUM_BLOCKS: gl.constexpr, NUM_STAGES: gl.constexpr, MAX_SPLITS: gl.constexpr,
    NUM_PARTS: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_NORM: gl.constexpr, HAS_PREFIX: gl.constexpr, PREFIX_STEP: gl.constexpr,
    USE_PDL: gl.constexpr,
):  # fmt: skip
    if USE_PDL:
        gdc_launch_dependents()
    dtype: gl.constexpr = kv_desc.dtype
    ROWS: gl.constexpr = 8 if GROUP <= 8 else 16
    ROUND_BYTES: gl.constexpr = NUM_BLOCKS * 2 * S * D * 2
    NUM_TILES: gl.constexpr = NUM_BLOCKS * S // 16  # of a product's 16 tokens
    # Of rows of heads and of tokens; a row's places are contiguous in a thread.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [1, 1], [1, 0])
    HALF: gl.constexpr = D // 2
    half_layout: gl.constexpr = gl.BlockedLayout([1, 8], [512 // D, D // 16], [1, 1], [1, 0])
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    b_layout: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    mma_rows: gl.constexpr = gl.SliceLayout(1, mma)

    num_pairs = gl.num_programs(0) // num_splits
    pid = gl.program_id(0)
    pair, split = pid % num_pairs, pid // num_pairs
    r, g = pair // NUM_KV_HEADS, pair % NUM_KV_HEADS
    # Lengths, tables and the KV of earlier steps lie complete before the step's first kernel.
    seq_len = gl.load(seq_lens_ptr + r)
    row = gl.load(rows_ptr + r)
    num_blocks = (seq_len + S - 1) // S
    own_block = 0
    num_parts = 0
    if HAS_PREFIX:
        # As prefix_split_tokens cuts it.
        prefix_len = gl.load(prefix_lens_ptr + r)
        own_block = prefix_len // S
        num_steps = (prefix_len + PREFIX_STEP - 1) // PREFIX_STEP
        steps_a_part = gl.maximum((num_steps + num_prefix_splits - 1) // num_prefix_splits, 1)
        num_parts = (num_steps + steps_a_part - 1) // steps_a_part
    all_rounds = (num_blocks - own_block + NUM_BLOCKS - 1) // NUM_BLOCKS
    rounds_a_split = gl.maximum((all_rounds + num_splits - 1) // num_splits, min_rounds)
    num_used = gl.maximum((all_rounds + rounds_a_split - 1) // rounds_a_split, 1)
    if split >= num_used:
        # Waits too: whoever waits for this kernel waits for all before it.
        if USE_PDL:
            gdc_wait()
        return
    first_block = own_block + split * rounds_a_split * NUM_BLOCKS
    num_rounds = gl.minimum(all_rounds - split * rounds_a_split, rounds_a_split)
    has_new = split == num_used - 1

    ring = gl.allocate_shared_memory(dtype, [NUM_STAGES * NUM_BLOCKS, 2 * S, D], kv_desc.layout)
    q_smem = gl.allocate_shared_memory(dtype, [16, D], kv_desc.layout)
    new_smem = gl.allocate_shared_memory(dtype, [2, D], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()  # the copy engine counts on them
    sync_threads()

    # Before waiting: what no kernel of this step writes, but for the new token's slot.
    table_ptr += row.to(gl.int64) * table_stride
    block_rows = block_stride // D
    first_row = g * (head_stride // D)
    rows = _find_rows(
        table_ptr, first_block, num_blocks, first_row, block_rows, S, NUM_STAGES * NUM_BLOCKS
    )
    for j in gl.static_range(NUM_STAGES):
        mbarrier.expect(full.index(j), ROUND_BYTES, pred=j < num_rounds)
        for i in gl.static_range(j * NUM_BLOCKS, (j + 1) * NUM_BLOCKS):
            bring(kv_desc, [rows[i], 0], full.index(j), ring.index(i), pred=j < num_rounds)
    rows = _find_rows(
        table_ptr, first_block + NUM_STAGES * NUM_BLOCKS, num_blocks, first_row, block_rows, S,
        NUM_BLOCKS,
    )  # fmt: skip
    d = gl.arange(0, D, gl.SliceLayout(0, layout))
    h = gl.arange(0, HALF, gl.SliceLayout(0, half_layout))
    position = gl.maximum(seq_len - 1, 0)
    cos = gl.load(cos_ptr + position.to(gl.int64) * D + h)
    sin = gl.load(sin_ptr + position.to(gl.int64) * D + HALF + h)
    stores = has_new & (seq_len > 0)
    new_block = gl.load(table_ptr + position // S, mask=stores, other=0).to(gl.int64)
    heads = gl.arange(0, ROWS, gl.SliceLayout(1, half_layout))
    is_head = (heads < GROUP)[:, None]
    q_at = (g * GROUP + heads)[:, None] * D + h[None, :]
    one = gl.arange(0, 1, gl.SliceLayout(1, half_layout))[:, None]
    k_at = (NUM_KV_HEADS * GROUP + g + one) * D + h[None, :]
    is_one = one < 1
    v_at = (NUM_KV_HEADS * (GROUP + 1) + g) * D + d
    is_place = d < D
    q_low_bias = _load_bias(bias_ptr + q_at, is_head, HAS_BIAS)
    q_high_bias = _load_bias(bias_ptr + HALF + q_at, is_head, HAS_BIAS)
    k_low_bias = _load_bias(bias_ptr + k_at, is_one, HAS_BIAS)
    k_high_bias = _load_bias(bias_ptr + HALF + k_at, is_one, HAS_BIAS)
    v_bias = _load_bias(bias_ptr + v_at, is_place, HAS_BIAS)
    if USE_PDL:
        gdc_wait()

    qkv_ptr += r.to(gl.int64) * ((GROUP + 2) * NUM_KV_HEADS * D)
    q_low = _load_parts(qkv_ptr + q_at, part_stride, is_head, NUM_PARTS)
    q_high = _load_parts(qkv_ptr + HALF + q_at, part_stride, is_head, NUM_PARTS)
    k_low = _load_parts(qkv_ptr + k_at, part_stride, is_one, NUM_PARTS)
    k_high = _load_parts(qkv_ptr + HALF + k_at, part_stride, is_one, NUM_PARTS)
    v_new = _load_parts(qkv_ptr + v_at, part_stride, is_place, NUM_PARTS)
    q_low, q_high = _rotated(
        _add_parts(q_low, q_low_bias), _add_parts(q_high, q_high_bias), q_norm_ptr, cos, sin, h,
        eps, HAS_NORM,
    )  # fmt: skip
    k_low, k_high = _rotated(
        _add_parts(k_low, k_low_bias), _add_parts(k_high, k_high_bias), k_norm_ptr, cos, sin, h,
        eps, HAS_NORM,
    )  # fmt: skip
    k_low = gl.max(k_low, 0).to(dtype)  # its one row
    k_high = gl.max(k_high, 0).to(dtype)
    v_new = _add_parts(v_new, v_bias).to(dtype)
    new_at = new_block * block_stride + g.to(gl.int64) * head_stride + position % S * D
    gl.store(k_ptr + new_at + h, k_low, mask=stores)
    gl.store(k_ptr + new_at + HALF + h, k_high, mask=stores)
    gl.store(v_ptr + new_at + d, v_new, mask=stores)
    new_smem.index(0).slice(0, HALF).store(k_low)
    new_smem.index(0).slice(HALF, HALF).store(k_high)
    new_smem.index(1).store(v_new)
    q = gl.join(q_low, q_high).permute((0, 2, 1)).reshape([ROWS, D])
    q_smem.slice(0, ROWS).store(q)
    if ROWS == 8:
        # Rows of no head: whatever was there would do, but products of zeros take less power.
        q_smem.slice(8, 8).store(gl.zeros([8, D], dtype, layout))
    sync_threads()
    q = q_smem.load(a_layout)

    n = gl.arange(0, 16, gl.SliceLayout(0, mma))
    nothing = gl.zeros([16, 16], gl.float32, mma)
    # Beside it scores of no head have no weight: again for power.
    is_head_row = gl.arange(0, 16, mma_rows) < GROUP
    highest = gl.where(is_head_row, float("-inf"), 1e30)
    total = gl.zeros([16], gl.float32, mma_rows)
    acc = gl.zeros([16, D], gl.float32, mma)
    for j in range(0, num_rounds):
        stage = j % NUM_STAGES
        block = first_block + j * NUM_BLOCKS
        mbarrier.wait(full.index(stage), j // NUM_STAGES & 1)
        if has_new & (j == num_rounds - 1):
            last = position // S
            kv = ring.index(stage * NUM_BLOCKS + last - block)
            _put_new_token(kv, new_smem, position % S, layout, S)
            sync_threads()
        scores = ()
        for i in gl.static_range(NUM_TILES):
            kv = ring.index(stage * NUM_BLOCKS + i * 16 // S)
            k = kv.slice(i * 16 % S, 16).permute((1, 0)).load(b_layout)
            s = mma_v2(q, k, nothing)
            s = gl.where((block * S + i * 16 + n < seq_len)[None, :], s, float("-inf"))
            scores += (s,)
        top = scores[0]
        for i in gl.static_range(1, NUM_TILES):
            top = gl.maximum(top, scores[i])
        new_highest = gl.maximum(highest, gl.max(top, 1) * scale_log2)
        shrink = gl.exp2(highest - new_highest)
        highest = new_highest
        acc *= shrink[:, None]
        all_weights = nothing
        for i in gl.static_range(NUM_TILES):
            weights = gl.exp2(scores[i] * scale_log2 - highest[:, None])
            all_weights = all_weights + weights
            kv = ring.index(stage * NUM_BLOCKS + i * 16 // S)
            v = kv.slice(S + i * 16 % S, 16).load(b_layout)
            acc = mma_v2(gl.convert_layout(weights.to(dtype), a_layout), v, acc)
        total = total * shrink + gl.sum(all_weights, 1)
        ahead = j + NUM_STAGES
        is_round = ahead < num_rounds
        mbarrier.expect(full.index(stage), ROUND_BYTES, pred=is_round)
        for i in gl.static_range(NUM_BLOCKS):
            to = ring.index(stage * NUM_BLOCKS + i)
            bring(kv_desc, [rows[i], 0], full.index(stage), to, pred=is_round)
        rows = _find_rows(
            table_ptr, block + (NUM_STAGES + 1) * NUM_BLOCKS, num_blocks, first_row, block_rows, S,
            NUM_BLOCKS,
        )  # fmt: skip

    m = gl.arange(0, 16, mma_rows)
    columns = gl.arange(0, D, gl.SliceLayout(0, mma))
    at = m[:, None] * D + columns[None, :]
    is_row = m < GROUP
    out_ptr += pair * (GROUP * D)
    if num_used + num_parts > 1:
        all_splits = num_splits
        if HAS_PREFIX:
            all_splits += num_prefix_splits
        stats_ptr += pair * all_splits * (GROUP * 2)
        partial_ptr += pair.to(gl.int64) * all_splits * (GROUP * D)
        mine = (num_parts + split) * GROUP
        gl.store(stats_ptr + (mine + m) * 2, highest, mask=is_row)
        gl.store(stats_ptr + (mine + m) * 2 + 1, total, mask=is_row)
        gl.store(partial_ptr + mine * D + at, acc, mask=is_row[:, None])
        sync_threads()  # all threads have stored before one of them says so
        num_done = gl.atomic_add(counter_ptr + pair, 1, sem="acq_rel")
        sync_threads()
        if num_done == num_used - 1:
            gl.store(counter_ptr + pair, 0)
            _add_splits(
                partial_ptr, stats_ptr, out_ptr, num_used + num_parts, layout, GROUP, ROWS, D,
                MAX_SPLITS, 4 if ROWS == 8 else 1,
            )  # fmt: skip
    else:
        out = acc / gl.where(seq_len > 0, total, 1.0)[:, None]
        gl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=is_row[:, None])


@dataclass(frozen=True, slots=True)
class HopperDecodeConfig:
    """How the work is cut. The bits depend on the blocks of a round and where splits begin."""

    num_splits: int
    """At most MAX_SPLITS_IN_PLACE."""
    num_blocks: int
    """Of a round: one step of the softmax."""
    num_stages: int
    """Rounds in shared memory."""
    min_rounds: int
    """Of a split, where there are as many. Short contexts are not cut."""


def decode_config(
    num_requests: int, num_kv_heads: int, block_size: int, head_dim: int, *, is_long: bool = False
) -> HopperDecodeConfig:
    """The fastest on an H200 behind a product, by and large: 32 tokens a round, splits for three
    programs a multiprocessor, and as many rounds in shared memory as these programs leave room for,
    up to MAX_STAGES. Where contexts are long (paged_decode.are_long), splits for LONG_PROGRAMS."""
    num_blocks = max(1, 32 // block_size)
    if is_long:
        wanted = cdiv(LONG_PROGRAMS, num_requests * num_kv_heads)
        splits = min(MAX_SPLITS_IN_PLACE, next_power_of_2(wanted))
        return HopperDecodeConfig(splits, num_blocks, MAX_STAGES, min_rounds=4)
    wanted = 3 * NUM_MULTIPROCESSORS // (num_requests * num_kv_heads)
    splits = max(1, min(MAX_SPLITS_IN_PLACE, 1 << (wanted.bit_length() - 1) if wanted else 1))
    programs = -(-num_requests * num_kv_heads * splits // NUM_MULTIPROCESSORS)
    round_bytes = num_blocks * 2 * block_size * head_dim * 2
    stages = (MAX_SHARED_BYTES // programs - 6144) // round_bytes
    return HopperDecodeConfig(splits, num_blocks, max(2, min(stages, MAX_STAGES)), min_rounds=4)


def is_faster(num_requests: int, num_kv_heads: int, *, is_long: bool) -> bool:
    """Than paged_decode. Behind a product of cuBLAS on an H200 256 contexts of 256 / 622 tokens on
    average took 23.4 / 50.7 us a layer, so 21.5 / 46.2; 146 of 1,087 59.6, 43.5; 32 of 600 12.8,
    10.4; 16 of 8,192 42.0, 38.5. From 25 requests on products may let it start early
    (hopper_split_k): a step of Qwen2.5-1.5B at 32 / 64 requests 1.60 / 1.66 ms, so 1.48 / 1.51."""
    num_pairs = num_requests * num_kv_heads
    return num_pairs >= (32 if is_long else 256) or num_requests > 24


def can_take(
    device: torch.device,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
) -> bool:
    """Whether hopper_rope_decode runs on this device and takes such a pool."""
    return (
        has_hopper_gluon(device)
        and dtype in DTYPES
        and head_dim in HEAD_DIMS
        and block_size in BLOCK_SIZES
        and _has_groups(num_heads, num_kv_heads)
    )


def _has_groups(num_heads: int, num_kv_heads: int) -> bool:
    is_even = num_heads > 0 and num_kv_heads > 0 and num_heads % num_kv_heads == 0
    return is_even and num_heads // num_kv_heads <= MAX_GROUP


def hopper_rope_decode(
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
    bias_N: Tensor | None = None,
    is_long: bool = False,
    config: HopperDecodeConfig | None = None,
    prefix: AttendedPrefix | None = None,
) -> Tensor:
    """RoPE (after QK-norm where weights are given), store of the new KV and attention over all.

    Shapes:
        qkv_RND          bf16 or fp16, contiguous: a token's H queries, G keys, G values; D 64 or
                         128, H / G at most MAX_GROUP. Or [S, R, N, D], S parts to be added up
        cos/sin_PD       fp32 tables by position, both halves alike but for a minus sign in sin's
                         first, which is not read
        k/v_BGSD         K and V of one layer of the pool, dtype of qkv; S in BLOCK_SIZES. Of one
                         block and KV head V lies right behind K. Written at position seq_len - 1
                         of each request
        block_table_WM   int32; entries past ceil(seq_len / S) are never read
        rows_R           int32, the row of the table that belongs to each request
        seq_lens_R       int32, tokens, counting the token being decoded
        bias_N           N D numbers to be added to the projection, in dtype of qkv
        is_long          whether contexts are long (paged_decode.are_long); right for any lengths
        config           decode_config's choice where None; its splits must fit the scratch
        prefix           what shared_prefix.attend_prefix left for a config of as many splits
        returns          [R, H, D], dtype of qkv; softmax and sums in fp32

    Raises:
        ValueError: heads, head dim, block size, dtype or scale the kernel cannot take, or shapes,
            strides, addresses or a scratch that do not fit.

    Not checked, as it would stall the stream: block ids in range. Nor that the device is a Hopper
    with Gluon: can_take. Lengths, table and the KV of earlier tokens are read before the kernel
    before is over, so it must not have written them. A row with seq_len 0 stores nothing and gives
    zeros. What lies in slots that no token has, NaN too, changes nothing.
    Same answer as rope_store_kv and hopper_decode_reference. The bits of a request depend on R
    and is_long, through the number of splits, but not on what else is in the batch.
    Source: Kwon et al. 2023, arXiv:2309.06180, section 4.1; online softmax, arXiv:1805.02867;
    splits, Dao et al. 2023, Flash-Decoding.
    """
    num_parts = qkv_RND.shape[0] if qkv_RND.dim() == 4 else 1
    num_requests, num_all, head_dim = qkv_RND.shape[-3:]
    num_kv_heads, block_size = k_BGSD.shape[1:3]
    num_heads = num_all - 2 * num_kv_heads
    if qkv_RND.dtype not in DTYPES or head_dim not in HEAD_DIMS or block_size not in BLOCK_SIZES:
        raise ValueError(
            f"qkv is {qkv_RND.dtype} with head_dim {head_dim}, blocks have {block_size} slots; "
            f"bf16 or fp16, {HEAD_DIMS} and {BLOCK_SIZES} are taken"
        )
    if not _has_groups(num_heads, num_kv_heads):
        raise ValueError(
            f"{num_heads} query heads are not 1 to {MAX_GROUP} for each of {num_kv_heads} KV heads"
        )
    if not qkv_RND.is_contiguous():
        raise ValueError(f"qkv has strides {qkv_RND.stride()}; it must be contiguous")
    check_bias(bias_N, qkv_RND)
    if scale <= 0:
        raise ValueError(f"scale {scale} must be above 0: scores are compared before it is applied")
    config = config or decode_config(
        num_requests, num_kv_heads, block_size, head_dim, is_long=is_long
    )
    if config.num_splits > MAX_SPLITS_IN_PLACE:
        raise ValueError(f"{config.num_splits} splits are more than {MAX_SPLITS_IN_PLACE}")
    prefix_splits = 0 if prefix is None else prefix.num_splits
    needed = num_requests * (config.num_splits + prefix_splits) * num_heads * head_dim
    if scratch.partials.numel() < needed or scratch.counters.numel() < num_requests * num_kv_heads:
        raise ValueError(
            f"the scratch holds {scratch.partials.numel()} partial sums; {num_requests} requests "
            f"need {needed}"
        )
    kv_desc = _blocks_of(k_BGSD, v_BGSD, qkv_RND.dtype, head_dim)
    out_RHD = torch.empty(
        (num_requests, num_heads, head_dim), dtype=qkv_RND.dtype, device=qkv_RND.device
    )
    options: dict[str, Any] = launch_options(qkv_RND.device)
    _hopper_decode_kernel[(num_requests * num_kv_heads * config.num_splits,)](
        kv_desc, qkv_RND, k_BGSD, v_BGSD, block_table_WM, rows_R, seq_lens_R,
        seq_lens_R if prefix is None else prefix.lens_R, out_RHD,
        scratch.partials, scratch.stats, scratch.counters,
        cos_PD, sin_PD, qkv_RND if q_norm_D is None else q_norm_D,
        qkv_RND if k_norm_D is None else k_norm_D, qkv_RND if bias_N is None else bias_N,
        scale * LOG2_E, eps, config.num_splits, prefix_splits, config.min_rounds,
        num_requests * num_all * head_dim,
        k_BGSD.stride(0), k_BGSD.stride(1), block_table_WM.stride(0),
        NUM_KV_HEADS=num_kv_heads, GROUP=num_heads // num_kv_heads, D=head_dim, S=block_size,
        NUM_BLOCKS=config.num_blocks, NUM_STAGES=config.num_stages,
        MAX_SPLITS=MAX_SPLITS_IN_PLACE + (prefix is not None) * MAX_PREFIX_SPLITS,
        NUM_PARTS=num_parts, HAS_BIAS=bias_N is not None,
        HAS_NORM=q_norm_D is not None, HAS_PREFIX=prefix is not None, PREFIX_STEP=PREFIX_STEP,
        num_warps=1, **options,
    )  # fmt: skip
    return out_RHD


def check_bias(bias_N: Tensor | None, qkv_RND: Tensor) -> None:
    """Raises ValueError where it is none of this projection."""
    shape = (qkv_RND.shape[-2] * qkv_RND.shape[-1],)
    if bias_N is not None and (
        bias_N.shape != shape or bias_N.dtype != qkv_RND.dtype or bias_N.stride(0) != 1
    ):
        raise ValueError(
            f"bias is {tuple(bias_N.shape)} {bias_N.dtype} with strides {bias_N.stride()}; it must "
            f"be {shape} {qkv_RND.dtype}, contiguous"
        )


def _blocks_of(
    k_BGSD: Tensor, v_BGSD: Tensor, dtype: torch.dtype, head_dim: int
) -> TensorDescriptor:
    """For the copy engine: the pool from this layer on as rows of D, K and V of a block one tile of
    2 S rows."""
    num_blocks, num_kv_heads, block_size, d = k_BGSD.shape
    block_stride, head_stride = k_BGSD.stride()[:2]
    if k_BGSD.dtype != dtype or v_BGSD.dtype != dtype or d != head_dim:
        raise ValueError(
            f"k is {k_BGSD.dtype} and v {v_BGSD.dtype} with head_dim {d}, qkv {dtype} with "
            f"{head_dim}"
        )
    if (
        k_BGSD.shape != v_BGSD.shape
        or k_BGSD.stride() != v_BGSD.stride()
        or k_BGSD.stride()[2:] != (d, 1)
        or block_stride % d
        or head_stride % d
        or v_BGSD.data_ptr() - k_BGSD.data_ptr() != block_size * d * k_BGSD.element_size()
        or k_BGSD.data_ptr() % 16
    ):
        raise ValueError(
            f"k {k_BGSD.stride()} from address {k_BGSD.data_ptr()} and v {v_BGSD.stride()} from "
            f"{v_BGSD.data_ptr()}: of a block and KV head V must lie right behind K, in rows"
        )
    num_elements = (num_blocks - 1) * block_stride + (num_kv_heads - 1) * head_stride
    num_rows = num_elements // d + 2 * block_size
    if num_rows >= 2**31:
        raise ValueError(f"the pool has {num_rows} rows; the copy engine counts to 2^31")
    tile = [2 * block_size, d]
    return TensorDescriptor(k_BGSD, [num_rows, d], [d, 1], tile, tile_layout(*tile))
