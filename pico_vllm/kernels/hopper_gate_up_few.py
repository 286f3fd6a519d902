"""Gate and up of an MLP with its SiLU on Hopper, for some dozen to some hundred rows: one tile a
multiprocessor, and nearly all of them busy.

T tokens this step, E hidden size, F MLP size; the weight's rows are F of gate, then F of up

    out = silu(x @ gate.T) * (x @ up.T)

Tiles whose sizes are powers of two, or three times that, leave a third of the multiprocessors
without work, or give some of them two. So a tile's weights are two operands, and the few rows of
the second one make up the size that gives each multiprocessor one tile. x is the left operand,
since Hopper's instruction takes 64 rows of that one and any multiple of 8 of the other.

Gate and up come interleaved by 8 rows, which are 8 outputs: so both sums of an output are in one
thread.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import triton.language as tl
from torch import Tensor

from pico_vllm.kernels.gluon import (
    TensorDescriptor,
    bring,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon_jit,
    mbarrier,
    send,
    sync_threads,
    tiles_of,
    wait_until_sent,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from pico_vllm.kernels.launch import NUM_MULTIPROCESSORS, cdiv, launch_options

MAX_TOKENS = 256
TILE_TOKENS, MAIN_ROWS, REST_ROWS = (64, 128), (128, 256), (0, 16)
"""Tokens of a tile, and weight rows of its two operands."""
MIN_BUSY = 1 / 3
"""Share of multiprocessors that must have a tile. On an H200 the MLP of Qwen3-0.6B and the norm
behind it take 12.8 / 14.1 / 16.9 us at 64 / 128 / 256 rows, in 48 / 96 / 96 tiles, with cuBLAS and
a kernel for SiLU 14.3 / 14.6 / 17.2."""
MOST_BEYOND_A_TILE = 40
"""Tokens of a second tile with which the largest ones take longer than cuBLAS and a kernel for
SiLU. Steps of Qwen2.5-1.5B with 136 / 160 / 176 requests on an H200: 1.996 / 1.980 / 1.982 ms, with
cuBLAS 1.842 / 1.929 / 1.979."""
BLOCK_K = 64
"""Of E, what the copy engine lays out without bank conflicts: 128 bytes."""
HALF = 8
"""Rows of gate, then of up: where the instruction's sums come to lie in one thread."""
MAX_SHARED_BYTES = 227 * 1024
OTHER_BYTES = 4096
"""For barriers, and for the second operand's results on their way."""

# Triton's own guard against denormal numbers, which next to 1 are none.
EXP2 = tl.constexpr("ex2.approx.ftz.f32 $0, $1;")
RECIPROCAL = tl.constexpr("rcp.approx.ftz.f32 $0, $1;")


@gluon_jit()
def silu_mul(gate, up):
    power = gl.inline_asm_elementwise(
        EXP2, "=f,f", [gate * -1.4426950408889634], dtype=gl.float32, is_pure=True, pack=1
    )
    sigmoid = gl.inline_asm_elementwise(
        RECIPROCAL, "=f,f", [1.0 + power], dtype=gl.float32, is_pure=True, pack=1
    )
    return gate * sigmoid * up


@gluon_jit()
def _bring_weights(main_desc, rest_desc, memory, stage, main_at, rest_at, k, is_round):
    _x_smem, main_smem, rest_smem, full = memory
    bring(main_desc, [main_at, 0, 0, k], full.index(stage), main_smem.index(stage), pred=is_round)
    if rest_desc is not None:
        bring(
            rest_desc, [rest_at, 0, 0, k], full.index(stage), rest_smem.index(stage), pred=is_round
        )  # fmt: skip


@gluon_jit()
def _as_columns(weights, dtype: gl.constexpr):
    """A tile of weights as the right operand."""
    ROWS: gl.constexpr = weights.shape[0] * 16
    BLOCK_K: gl.constexpr = weights.shape[3]
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    return weights.reinterpret(dtype, [ROWS, BLOCK_K], layout).permute((1, 0))


@gluon_jit()
def _silu_mul(sums):
    """Of sums whose columns are 8 of gate, 8 of up and so on."""
    TOKENS: gl.constexpr = sums.shape[0]
    EIGHTS: gl.constexpr = sums.shape[1] // 16
    gate, up = gl.split(sums.reshape([TOKENS, EIGHTS, 2, 8]).permute((0, 1, 3, 2)))
    return silu_mul(gate, up).reshape([TOKENS, EIGHTS * 8])


@gluon_jit(do_not_specialize=["T", "F"])
def _hopper_gate_up_few_kernel(
    x_desc, main_desc, rest_desc, out_desc, out_ptr, out_stride, T, F,
    ROUNDS: gl.constexpr, STAGES: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    if USE_PDL:
        gdc_launch_dependents()
    dtype: gl.constexpr = x_desc.dtype
    TOKENS: gl.constexpr = x_desc.block_shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_shape[1]
    MAIN_EIGHTS: gl.constexpr = main_desc.block_shape[0]
    REST_EIGHTS: gl.constexpr = 0 if rest_desc is None else rest_desc.block_shape[0]
    TILE_EIGHTS: gl.constexpr = MAIN_EIGHTS + REST_EIGHTS
    NUM_BYTES: gl.constexpr = (TOKENS + 16 * TILE_EIGHTS) * BLOCK_K * 2  # of a round
    EARLY: gl.constexpr = ROUNDS if ROUNDS < STAGES else STAGES
    WARPS: gl.constexpr = TOKENS // 16
    main_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [WARPS, 1], [16, 16 * MAIN_EIGHTS, 16]
    )
    rest_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [WARPS, 1], [16, 16 * REST_EIGHTS, 16]
    )

    x_smem = gl.allocate_shared_memory(dtype, [STAGES, TOKENS, BLOCK_K], x_desc.layout)
    main_smem = gl.allocate_shared_memory(
        dtype, [STAGES, MAIN_EIGHTS, 2, 8, BLOCK_K], main_desc.layout
    )
    rest_smem = main_smem
    if rest_desc is not None:
        rest_smem = gl.allocate_shared_memory(
            dtype, [STAGES, REST_EIGHTS, 2, 8, BLOCK_K], rest_desc.layout
        )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    is_warm = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    mbarrier.init(is_warm, count=1)
    fence_async_shared()  # the copy engine counts on them
    sync_threads()
    memory = (x_smem, main_smem, rest_smem, full)
    # Programs that start side by side share weights, which are more than tokens.
    main_at = gl.program_id(1) * TILE_EIGHTS
    rest_at = main_at + MAIN_EIGHTS
    token = gl.program_id(0) * TOKENS

    # Before waiting: what no kernel writes.
    for i in gl.static_range(EARLY):
        mbarrier.expect(full.index(i), NUM_BYTES)
        _bring_weights(main_desc, rest_desc, memory, i, main_at, rest_at, i * BLOCK_K, True)
    # Beyond x's end: zeros, and nothing is read, but x's descriptor is at hand after that.
    mbarrier.expect(is_warm, TOKENS * BLOCK_K * 2)
    bring(x_desc, [0, ROUNDS * BLOCK_K], is_warm, x_smem.index(0))
    mbarrier.wait(is_warm, 0)
    if USE_PDL:
        gdc_wait()
    for i in gl.static_range(EARLY):
        bring(x_desc, [token, i * BLOCK_K], full.index(i), x_smem.index(i))

    main = gl.zeros([TOKENS, 16 * MAIN_EIGHTS], gl.float32, main_layout)
    if rest_desc is not None:
        rest = gl.zeros([TOKENS, 16 * REST_EIGHTS], gl.float32, rest_layout)
    for i in range(0, ROUNDS):
        stage = i % STAGES
        mbarrier.wait(full.index(stage), i // STAGES & 1)
        x = x_smem.index(stage)
        # The round before is over in all warps, so its stage is filled again.
        if rest_desc is None:
            main = warpgroup_mma(x, _as_columns(main_smem.index(stage), dtype), main, is_async=True)
            main = warpgroup_mma_wait(num_outstanding=1, deps=(main,))
        else:
            rest = warpgroup_mma(x, _as_columns(rest_smem.index(stage), dtype), rest, is_async=True)
            main = warpgroup_mma(x, _as_columns(main_smem.index(stage), dtype), main, is_async=True)
            main, rest = warpgroup_mma_wait(num_outstanding=2, deps=(main, rest))
        sync_threads()
        ahead = i - 1 + STAGES
        is_round = (i > 0) & (ahead < ROUNDS)
        free = ahead % STAGES
        k = ahead * BLOCK_K
        mbarrier.expect(full.index(free), NUM_BYTES, pred=is_round)
        _bring_weights(main_desc, rest_desc, memory, free, main_at, rest_at, k, is_round)
        bring(x_desc, [token, k], full.index(free), x_smem.index(free), pred=is_round)

    if rest_desc is None:
        main = warpgroup_mma_wait(num_outstanding=0, deps=(main,))
    else:
        main, rest = warpgroup_mma_wait(num_outstanding=0, deps=(main, rest))
        results = _silu_mul(rest).to(dtype)
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [WARPS, 1], [1, 0])
        results = gl.convert_layout(results, layout)
        t = token + gl.arange(0, TOKENS, gl.SliceLayout(1, layout))[:, None]
        f = rest_at * 8 + gl.arange(0, 8 * REST_EIGHTS, gl.SliceLayout(0, layout))[None, :]
        gl.store(out_ptr + t.to(gl.int64) * out_stride + f, results, mask=(t < T) & (f < F))
    sync_threads()  # all products are over: their memory takes the results
    results = x_smem.reinterpret(dtype, [TOKENS, 8 * MAIN_EIGHTS], out_desc.layout)
    results.store(_silu_mul(main).to(dtype))
    # The copy engine reads shared memory by another way than the store went.
    fence_async_shared()
    sync_threads()
    send(out_desc, [token, main_at * 8], results)
    wait_until_sent(0)


@dataclass(frozen=True, slots=True)
class FewConfig:
    """A tile."""

    tokens: int
    """A warpgroup for each 64."""
    main_rows: int
    rest_rows: int

    @property
    def outputs(self) -> int:
        return (self.main_rows + self.rest_rows) // 2

    @property
    def num_rows(self) -> int:
        """Of x and weights, that are fetched for it."""
        return self.tokens + self.main_rows + self.rest_rows

    def num_tiles(self, T: int, F: int) -> int:
        return cdiv(T, self.tokens) * cdiv(F, self.outputs)


CONFIGS = sorted(
    (FewConfig(*sizes) for sizes in itertools.product(TILE_TOKENS, MAIN_ROWS, REST_ROWS)),
    key=lambda config: config.num_rows,
)


def few_config(T: int, F: int) -> FewConfig | None:
    """The tile for which the least is fetched and of which no multiprocessor has two. None where
    there is none, where most multiprocessors would have no tile, or where much of the largest ones
    would be empty."""
    if T > MAX_TOKENS:
        return None
    fitting = (config for config in CONFIGS if config.num_tiles(T, F) <= NUM_MULTIPROCESSORS)
    config = next(fitting, None)
    if config is None or config.num_tiles(T, F) < MIN_BUSY * NUM_MULTIPROCESSORS:
        return None
    is_largest = config.tokens == max(TILE_TOKENS) and config.main_rows == max(MAIN_ROWS)
    if is_largest and 0 < T - config.tokens <= MOST_BEYOND_A_TILE:
        return None
    return config


def few_gate_up(x_TE: Tensor, weight_NE: Tensor, out_TF: Tensor, config: FewConfig) -> None:
    """As hopper_gate_up says, which has checked the arguments, for any T."""
    (T, E), F = x_TE.shape, out_TF.shape[1]
    rounds = cdiv(E, BLOCK_K)
    stages = min((MAX_SHARED_BYTES - OTHER_BYTES) // (config.num_rows * BLOCK_K * 2), rounds)
    stages = max(stages, config.main_rows // 2 // BLOCK_K)  # which results leave through
    options: dict[str, Any] = launch_options(x_TE.device)
    grid = (cdiv(T, config.tokens), cdiv(F, config.outputs))
    _hopper_gate_up_few_kernel[grid](
        tiles_of(x_TE, [config.tokens, BLOCK_K]),
        halves_of(weight_NE, config.main_rows),
        halves_of(weight_NE, config.rest_rows) if config.rest_rows else None,
        tiles_of(out_TF, [config.tokens, config.main_rows // 2]),
        out_TF, out_TF.stride(0), T, F,
        ROUNDS=rounds, STAGES=stages, num_warps=config.tokens // 16, **options,
    )  # fmt: skip


def halves_of(weight_NE: Tensor, tile_rows: int) -> TensorDescriptor:
    """A tile is 8 rows of gate, the same 8 of up, the next 8 of gate."""
    N, E = weight_NE.shape
    shape, strides = [N // 2 // HALF, 2, HALF, E], [HALF * E, N // 2 * E, E, 1]
    return tiles_of(
        weight_NE.as_strided(shape, strides), [tile_rows // 2 // HALF, 2, HALF, BLOCK_K]
    )
