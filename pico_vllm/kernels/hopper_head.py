"""Head and choice of the likeliest token in one kernel on Hopper, where some dozen to some hundred
requests decode greedily.

R requests, E hidden size, V rows of the head

The logits never come to memory. A program takes tiles of all requests by 192 tokens, one after the
other, and the copy engine (TMA) brings x and weights as far ahead as the ring in shared memory
goes, across tiles. x is the left operand: most logits of a request are in one thread, which
compares them by itself. Tiles of 192 are two operands, since tensors have sizes that are powers of
two: 151,936 tokens are then six tiles for each of 132 multiprocessors.

A logit, rounded to the dtype of x as others round it, and its place in the tile are packed into 32
bits, larger for a higher logit and, among equal ones, for a lower id.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from pico_vllm.kernels.gluon import (
    DTYPES,
    bring,
    check_rows,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon_jit,
    has_hopper_gluon,
    mbarrier,
    sync_threads,
    tiles_of,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from pico_vllm.kernels.head_sample import (
    BAD_LOGITS,
    HeadScratch,
    check_requests,
)
from pico_vllm.kernels.launch import NUM_MULTIPROCESSORS, cdiv, launch_options

TILE_REQUESTS = (64, 128, 256)
MAX_REQUESTS = TILE_REQUESTS[-1]
MIN_REQUESTS = 5
"""Alone, with the norm before it, it is as fast as head_sample, of Qwen2.5-1.5B on an H200 at
8 / 16 / 24 requests 118 / 118 / 123 us and 119 / 115 / 112, of Qwen3-0.6B 83 / 81 / 88 and
78 / 77 / 75. In a step, where that one has a second kernel at its end, of 8 requests 1.148 ms and
1.163, of 4 1.256 and 1.242."""
MOST_BOUND_BY_READING = 128
MIN_BUSY = 0.9
"""Share of multiprocessors with a tile, over all turns, where more requests bind by products."""
MAIN_TOKENS, REST_TOKENS = 128, 64
TILE_TOKENS = MAIN_TOKENS + REST_TOKENS
BLOCK_K = 64
"""Of E, what the copy engine lays out without bank conflicts: 128 bytes."""
MAX_SHARED_BYTES = 227 * 1024
OTHER_BYTES = 2048
"""For barriers, and for a number of each request on its way between threads."""

# Two numbers at a time.
ORDERED = """{{
    .reg .b32 both, signs;
    cvt.rn.{}.f32 both, $3, $2;
    shr.u32 signs, both, 15;
    and.b32 signs, signs, 0x00010001;
    mul.lo.u32 signs, signs, 0x7FFF;
    xor.b32 both, both, signs;
    shl.b32 $0, both, 16;
    and.b32 $1, both, 0xFFFF0000;
}}"""
ORDERED_BF16 = tl.constexpr(ORDERED.format("bf16x2"))
ORDERED_FP16 = tl.constexpr(ORDERED.format("f16x2"))
_LOWEST = tl.constexpr(-(2**63))
_BAD = tl.constexpr(2**63 - 1)
_ID_BITS = tl.constexpr(2**32 - 1)


@gluon_jit()
def _bring_weights(main_desc, rest_desc, memory, stage, token, k, is_round):
    _x_smem, main_smem, rest_smem, full = memory
    bring(main_desc, [token, k], full.index(stage), main_smem.index(stage), pred=is_round)
    rest_at = token + main_desc.block_shape[0]
    bring(rest_desc, [rest_at, k], full.index(stage), rest_smem.index(stage), pred=is_round)


@gluon_jit()
def _ordered(x, dtype: gl.constexpr):
    """Rounded to the dtype: its 16 bits in the upper half of an integer, in the order of the
    numbers, zeros in the lower half. What is no number comes last; -0 comes before 0."""
    code: gl.constexpr = ORDERED_FP16 if dtype == gl.float16 else ORDERED_BF16
    return gl.inline_asm_elementwise(code, "=r,=r,r,r", [x], dtype=gl.int32, is_pure=True, pack=2)


@gluon_jit()
def _best_of(sums, place, num_tokens, layout: gl.constexpr, dtype: gl.constexpr):
    """Of the logits of each request from a place in the tile on, where the tile's first num_tokens
    are those of tokens and the others 0: the best, with how many tokens the tile has from its place
    on. -inf comes last of all, behind inf and what is no number: it lies below the lowest integer,
    and so above the highest."""
    INFINITY: gl.constexpr = 0x7C00 if dtype == gl.float16 else 0x7F80
    places = place + gl.arange(0, sums.shape[1], gl.SliceLayout(0, layout))
    around = (INFINITY - 0x8000) * 65536 + num_tokens - places
    around = gl.where(places < num_tokens, around, -0x80000000)  # with 0, lower than any token
    return gl.max(_ordered(sums, dtype) + around.to(gl.int32)[None, :], 1)


@gluon_jit(do_not_specialize=["num_requests", "vocab_size", "num_tiles"])
def _hopper_head_kernel(
    x_desc, main_desc, rest_desc, rows_ptr, last_tokens_ptr, key_ptr, counter_ptr, out_ptr,
    num_requests, vocab_size, num_tiles,
    ROUNDS: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    if USE_PDL:
        gdc_launch_dependents()
    dtype: gl.constexpr = x_desc.dtype
    REQUESTS: gl.constexpr = x_desc.block_shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_shape[1]
    MAIN: gl.constexpr = main_desc.block_shape[0]
    REST: gl.constexpr = rest_desc.block_shape[0]
    TILE: gl.constexpr = MAIN + REST
    NUM_BYTES: gl.constexpr = (REQUESTS + TILE) * BLOCK_K * 2  # of a round
    INFINITY: gl.constexpr = 0x7C00 if dtype == gl.float16 else 0x7F80
    main_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, MAIN, 16])
    rest_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, REST, 16])
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])

    x_smem = gl.allocate_shared_memory(dtype, [STAGES, REQUESTS, BLOCK_K], x_desc.layout)
    main_smem = gl.allocate_shared_memory(dtype, [STAGES, MAIN, BLOCK_K], main_desc.layout)
    rest_smem = gl.allocate_shared_memory(dtype, [STAGES, REST, BLOCK_K], rest_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    is_warm = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    mbarrier.init(is_warm, count=1)
    fence_async_shared()  # the copy engine counts on them
    sync_threads()
    memory = (x_smem, main_smem, rest_smem, full)
    first_tile, num_programs = gl.program_id(0), gl.num_programs(0)
    num_turns = (num_tiles - first_tile + num_programs - 1) // num_programs * ROUNDS

    # Before waiting: what no kernel writes.
    for s in gl.static_range(STAGES):
        at = (first_tile + s // ROUNDS * num_programs) * TILE
        mbarrier.expect(full.index(s), NUM_BYTES, pred=s < num_turns)
        _bring_weights(
            main_desc, rest_desc, memory, s, at, s % ROUNDS * BLOCK_K, s < num_turns
        )  # fmt: skip
    # Beyond x's end: zeros, and nothing is read, but x's descriptor is at hand after that.
    mbarrier.expect(is_warm, REQUESTS * BLOCK_K * 2)
    bring(x_desc, [0, ROUNDS * BLOCK_K], is_warm, x_smem.index(0))
    mbarrier.wait(is_warm, 0)
    if USE_PDL:
        gdc_wait()
    for s in gl.static_range(STAGES):
        x_at = [0, s % ROUNDS * BLOCK_K]
        bring(x_desc, x_at, full.index(s), x_smem.index(s), pred=s < num_turns)

    best = gl.full([REQUESTS], -65536, gl.int32, layout)
    best_id = gl.zeros([REQUESTS], gl.int32, layout)
    turn = 0
    for tile in range(first_tile, num_tiles, num_programs):
        main = gl.zeros([REQUESTS, MAIN], gl.float32, main_layout)
        rest = gl.zeros([REQUESTS, REST], gl.float32, rest_layout)
        for _ in range(0, ROUNDS):
            stage = turn % STAGES
            mbarrier.wait(full.index(stage), turn // STAGES & 1)
            x = x_smem.index(stage)
            rest_columns = rest_smem.index(stage).permute((1, 0))
            rest = warpgroup_mma(x, rest_columns, rest, is_async=True)
            main_columns = main_smem.index(stage).permute((1, 0))
            main = warpgroup_mma(x, main_columns, main, is_async=True)
            # The round before is over in all warps, so its stage is filled again.
            main, rest = warpgroup_mma_wait(num_outstanding=2, deps=(main, rest))
            sync_threads()
            ahead = turn - 1 + STAGES
            is_round = (turn > 0) & (ahead < num_turns)
            free = ahead % STAGES
            token = (first_tile + ahead // ROUNDS * num_programs) * TILE
            k = ahead % ROUNDS * BLOCK_K
            mbarrier.expect(full.index(free), NUM_BYTES, pred=is_round)
            _bring_weights(main_desc, rest_desc, memory, free, token, k, is_round)
            bring(x_desc, [0, k], full.index(free), x_smem.index(free), pred=is_round)
            turn += 1
        main, rest = warpgroup_mma_wait(num_outstanding=0, deps=(main, rest))
        first_id = tile * TILE
        num_tokens = gl.minimum(vocab_size - first_id, TILE)
        main_best = _best_of(main, 0, num_tokens, main_layout, dtype)
        rest_best = _best_of(rest, MAIN, num_tokens, rest_layout, dtype)
        tile_best = gl.maximum(
            gl.convert_layout(main_best, layout), gl.convert_layout(rest_best, layout)
        )
        score = tile_best >> 16
        is_better = score > best
        best = gl.where(is_better, score, best)
        best_id = gl.where(is_better, first_id + num_tokens - (tile_best & 0xFFFF), best_id)

    is_bad = best >= 2 * INFINITY - 0x8000
    key = best.to(gl.int64) * 4294967296 + (_ID_BITS - best_id.to(gl.int64))
    key = gl.where(is_bad, _BAD, key)
    r = gl.arange(0, REQUESTS, layout)
    is_request = r < num_requests
    gl.atomic_max(key_ptr + r, key, mask=is_request, sem="relaxed")
    sync_threads()  # all threads have compared before one of them says so
    num_done = gl.atomic_add(counter_ptr, 1, sem="acq_rel")
    sync_threads()
    if num_done == num_programs - 1:
        key = gl.load(key_ptr + r, mask=is_request, other=0, cache_modifier=".cg")
        row = gl.load(rows_ptr + r, mask=is_request, other=0)
        is_bad = key == _BAD
        token_id = _ID_BITS - (key & _ID_BITS)
        gl.store(key_ptr + r, gl.full([REQUESTS], _LOWEST, gl.int64, layout), mask=is_request)
        gl.store(out_ptr + r, gl.where(is_bad, BAD_LOGITS, token_id), mask=is_request)
        gl.store(last_tokens_ptr + row, gl.where(is_bad, 0, token_id), mask=is_request)
        gl.store(counter_ptr, 0)


def can_take(device: torch.device, dtype: torch.dtype, E: int) -> bool:
    """Whether hopper_head runs on this device and takes a head of such rows."""
    return has_hopper_gluon(device) and dtype in DTYPES and _fits(E)


def _fits(E: int) -> bool:
    return E > 0 and E % 8 == 0  # the copy engine counts in 16 bytes


def is_faster(R: int, vocab_size: int) -> bool:
    """Than a product and a choice from its logits. On an H200, of 151,936 tokens with rows of
    1,536, at 32 / 64 / 128 / 256 requests 110 / 108 / 114 / 172 us, as two kernels 128 / 136 / 148
    / 202. Of 128,256 with rows of 4,096, tiles for 5.1 turns, 420 us at 256 requests beside 401."""
    if not MIN_REQUESTS <= R <= MAX_REQUESTS:
        return False
    num_tiles = cdiv(vocab_size, TILE_TOKENS)
    num_turns = cdiv(num_tiles, NUM_MULTIPROCESSORS)
    is_even = num_tiles >= MIN_BUSY * num_turns * NUM_MULTIPROCESSORS
    return R <= MOST_BOUND_BY_READING or is_even


def num_warps(requests: int) -> int:
    """Of a tile of so many requests. With 16, sums of 256 leave a thread too few registers."""
    return min(requests // 16, 8)


def num_stages(requests: int) -> int:
    return (MAX_SHARED_BYTES - OTHER_BYTES) // ((requests + TILE_TOKENS) * BLOCK_K * 2)


def hopper_head(
    x_RE: Tensor,
    head_VE: Tensor,
    *,
    vocab_size: int,
    rows_R: Tensor,
    last_tokens_W: Tensor,
    scratch: HeadScratch,
    out_R: Tensor,
) -> None:
    """Choose the likeliest next token of each request from its normalised hidden state.

    Shapes:
        x_RE             bf16 or fp16, R from 1 to MAX_REQUESTS; last dim contiguous, rows at
                         multiples of 16 bytes
        head_VE          in dtype of x, likewise; E a multiple of 8
        vocab_size       ids from here on are no tokens
        rows_R           int32, the row of the batch state that belongs to each request
        last_tokens_W    int64, set to the chosen id, or 0 for none, at each request's row
        out_R            int64, set to the chosen ids, or -2 where a token's logit is NaN or Inf

    Raises:
        ValueError: R outside 1..MAX_REQUESTS, or shapes, dtypes, strides or addresses that do not
            fit.

    Logits are summed in fp32 and rounded to the dtype of x, as others see them; the lowest id wins
    among equals. Not checked: that the device is a Hopper with Gluon (can_take); rows in range,
    and no row twice. The head is read before the kernel before is over, so it must not have written
    it. Same ids as head_sample_reference of greedy requests, but where the best logit is 0 and -0,
    to which only numbers too small for the dtype are rounded: 0 wins then. A request's id does not
    depend on the batch.
    """
    (R, E), V = x_RE.shape, head_VE.shape[0]
    if x_RE.dtype not in DTYPES or not _fits(E) or not 1 <= R <= MAX_REQUESTS:
        raise ValueError(
            f"x is {x_RE.dtype} {(R, E)}; bf16 or fp16, 1 to {MAX_REQUESTS} requests and multiples "
            "of 8 features are taken"
        )
    if head_VE.shape != (V, E) or head_VE.dtype != x_RE.dtype:
        raise ValueError(
            f"the head is {tuple(head_VE.shape)} {head_VE.dtype}, not {(V, E)} {x_RE.dtype}"
        )
    check_rows(x=x_RE, the_head=head_VE)
    check_requests(R, V, vocab_size, {"rows": rows_R, "out": out_R})
    options: dict[str, Any] = launch_options(x_RE.device)
    requests = next(size for size in TILE_REQUESTS if size >= R)
    num_tiles = cdiv(vocab_size, TILE_TOKENS)
    warps = num_warps(requests)
    _hopper_head_kernel[(min(num_tiles, NUM_MULTIPROCESSORS),)](
        tiles_of(x_RE, [requests, BLOCK_K]),
        tiles_of(head_VE[:vocab_size], [MAIN_TOKENS, BLOCK_K]),
        tiles_of(head_VE[:vocab_size], [REST_TOKENS, BLOCK_K]),
        rows_R, last_tokens_W, scratch.keys, scratch.counters, out_R,
        R, vocab_size, num_tiles,
        ROUNDS=cdiv(E, BLOCK_K), STAGES=num_stages(requests), WARPS=warps, num_warps=warps,
        **options,
    )  # fmt: skip
