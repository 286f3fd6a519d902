"""Gate and up of an MLP with its SiLU on Hopper, for prompts; for fewer rows hopper_gate_up_few.

T tokens this step, E hidden size, F MLP size; the weight's rows are F of gate, then F of up

    out = silu(x @ gate.T) * (x @ up.T)

A program takes tiles of 256 tokens and of 32 outputs a warpgroup, of which it has two or three. The
copy engine (TMA) brings x and weights as far ahead as the ring in shared memory goes, across tiles,
and weights before the kernel before is over. Weights are the left operand, since Hopper's
instruction takes 64 rows of that one and up to 256 of the other: more products a byte of shared
memory than the other way around. x is shared by as many weights as registers have sums for.

Gate and up come interleaved by 8 rows, which are 8 outputs: so both sums of an output are in one
thread. Its results go out through the stage of the ring whose turn it is.
"""

from __future__ import annotations

from typing import Any

import torch
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
    send,
    sync_threads,
    tiles_of,
    wait_until_sent,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from pico_vllm.kernels.hopper_gate_up_few import (
    BLOCK_K,
    HALF,
    MAX_SHARED_BYTES,
    few_config,
    few_gate_up,
    halves_of,
    silu_mul,
)
from pico_vllm.kernels.launch import NUM_MULTIPROCESSORS, cdiv, launch_options

TOKENS = 256
"""Of a tile."""
MIN_MANY = 1024
"""With fewer tokens, down to those of hopper_gate_up_few, cuBLAS and a kernel for SiLU are as fast.
On an H200, a layer's norm and MLP: Qwen2.5-1.5B 512 rows 84 us (80), 1,024 133 (151), 8,192 1,023
(1,155); Llama-3.1-8B 1,024 535 to 551 (552), 8,192 4.26 ms (4.56)."""
GROUP_ROWS = 64
"""Weight rows of a warpgroup, half of them gate."""
TILES_ABREAST = 8
"""Tiles of tokens between which programs share weights; a few MB of x."""


def hopper_gate_up_reference(x_TE: Tensor, weight_NE: Tensor) -> Tensor:
    gate_TF, up_TF = torch.nn.functional.linear(x_TE, weight_NE).chunk(2, dim=1)
    return torch.nn.functional.silu(gate_TF) * up_TF


@gluon_jit()
def _find_tile(tile, num_token_tiles, num_output_tiles, TILES_ABREAST: gl.constexpr):
    """Of tokens and of outputs. Neighbours share x of a few tiles of tokens and weights of a few
    tiles of outputs: what programs read at a time stays in L2."""
    tiles_of_all_outputs = TILES_ABREAST * num_output_tiles
    first = tile // tiles_of_all_outputs * TILES_ABREAST
    num_abreast = gl.minimum(num_token_tiles - first, TILES_ABREAST)
    at = tile % tiles_of_all_outputs
    return first + at % num_abreast, at // num_abreast


@gluon_jit()
def _bring_weights(weight_desc, weight_smem, full, stage, output_tile, k, is_round):
    STAGES: gl.constexpr = full.shape[0]
    GROUPS: gl.constexpr = weight_smem.shape[0] // STAGES
    EIGHTS: gl.constexpr = weight_smem.shape[1]
    for i in gl.static_range(GROUPS):
        bring(
            weight_desc, [(output_tile * GROUPS + i) * EIGHTS, 0, 0, k], full.index(stage),
            weight_smem.index(stage * GROUPS + i), pred=is_round,
        )  # fmt: skip


@gluon_jit()
def _fill(
    x_desc, weight_desc, memory, counts, turn, tile, i, token_tile, output_tile,
    ROUNDS: gl.constexpr, TILES_ABREAST: gl.constexpr,
):  # fmt: skip
    """Ask for what comes at this turn of the ring, whose stage is free: round i of the tile, or,
    after its last round, nothing, for its results to go out. Returns what the next turn is for."""
    x_smem, weight_smem, full, _empty = memory
    num_token_tiles, num_output_tiles, num_programs = counts
    STAGES: gl.constexpr = x_smem.shape[0]
    TOKENS: gl.constexpr = x_smem.shape[1]
    BLOCK_K: gl.constexpr = x_smem.shape[2]
    NUM_BYTES: gl.constexpr = (TOKENS + 64 * (weight_smem.shape[0] // STAGES)) * BLOCK_K * 2
    stage = turn % STAGES
    is_tile = tile < num_token_tiles * num_output_tiles
    is_round = is_tile & (i < ROUNDS)
    k = i * BLOCK_K
    mbarrier.expect(full.index(stage), NUM_BYTES, pred=is_round)
    at = [token_tile * TOKENS, k]
    bring(x_desc, at, full.index(stage), x_smem.index(stage), pred=is_round)
    _bring_weights(weight_desc, weight_smem, full, stage, output_tile, k, is_round)
    mbarrier.arrive(full.index(stage), count=1, pred=is_tile & (i == ROUNDS))
    i += 1
    if i > ROUNDS:
        i = 0
        tile += num_programs
        token_tile, output_tile = _find_tile(tile, num_token_tiles, num_output_tiles, TILES_ABREAST)
    return tile, i, token_tile, output_tile


@gluon_jit()
def _halves(x):
    """The first and the second half of the columns."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    return gl.split(x.reshape([ROWS, 2, COLUMNS // 2]).permute((0, 2, 1)))


@gluon_jit()
def _silu_mul(sums):
    """Of sums whose rows are 8 of gate, 8 of up and so on."""
    EIGHTS: gl.constexpr = sums.shape[0] // 16
    TOKENS: gl.constexpr = sums.shape[1]
    gate, up = gl.split(sums.reshape([EIGHTS, 2, 8, TOKENS]).permute((0, 2, 3, 1)))
    return silu_mul(gate, up).reshape([EIGHTS * 8, TOKENS])


@gluon_jit()
def _send(out_desc, memory, sums, token, output):
    """Results of a warpgroup, through shared memory: token by token there, unlike in registers."""
    memory.permute((1, 0)).store(_silu_mul(sums).to(out_desc.dtype))
    # The copy engine reads shared memory by another way than the store went.
    fence_async_shared()
    sync_threads()
    send(out_desc, [token, output], memory)


@gluon_jit()
def _work(
    x_desc, weight_desc, out_desc, memory, is_warm, counts,
    ROUNDS: gl.constexpr, TILES_ABREAST: gl.constexpr, USE_PDL: gl.constexpr, INDEX: gl.constexpr,
):  # fmt: skip
    """A warpgroup. The first one fills the ring too."""
    x_smem, weight_smem, full, empty = memory
    num_token_tiles, num_output_tiles, num_programs = counts
    STAGES: gl.constexpr = x_smem.shape[0]
    GROUPS: gl.constexpr = weight_smem.shape[0] // STAGES
    TOKENS: gl.constexpr = x_smem.shape[1]
    BLOCK_K: gl.constexpr = x_smem.shape[2]
    SENT_TOKENS: gl.constexpr = out_desc.block_shape[0]
    OUTPUTS: gl.constexpr = out_desc.block_shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    rows_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    first_tile = gl.program_id(0)
    if INDEX == 0:
        EARLY: gl.constexpr = ROUNDS if ROUNDS < STAGES else STAGES
        NUM_BYTES: gl.constexpr = (TOKENS + 64 * GROUPS) * BLOCK_K * 2
        fill_tile = first_tile
        fill_token_tile, fill_output_tile = _find_tile(
            first_tile, num_token_tiles, num_output_tiles, TILES_ABREAST
        )
        # Before waiting: what no kernel writes.
        for s in gl.static_range(EARLY):
            mbarrier.expect(full.index(s), NUM_BYTES)
            _bring_weights(
                weight_desc, weight_smem, full, s, fill_output_tile, s * BLOCK_K, True
            )  # fmt: skip
        # Beyond x's end: zeros, and nothing is read, but x's descriptor is at hand after that.
        mbarrier.expect(is_warm, TOKENS * BLOCK_K * 2)
        bring(x_desc, [0, ROUNDS * BLOCK_K], is_warm, x_smem.index(0))
        mbarrier.wait(is_warm, 0)
        if USE_PDL:
            gdc_wait()
        for s in gl.static_range(EARLY):
            at = [fill_token_tile * TOKENS, s * BLOCK_K]
            bring(x_desc, at, full.index(s), x_smem.index(s))
        fill_round = 0 + EARLY
        for s in gl.static_range(EARLY, STAGES):
            fill_tile, fill_round, fill_token_tile, fill_output_tile = _fill(
                x_desc, weight_desc, memory, counts, s, fill_tile, fill_round, fill_token_tile,
                fill_output_tile, ROUNDS, TILES_ABREAST,
            )  # fmt: skip
    sums = gl.zeros([64, TOKENS], gl.float32, layout)
    turn = 0
    for tile in range(first_tile, num_token_tiles * num_output_tiles, num_programs):
        for i in range(0, ROUNDS):
            stage = turn % STAGES
            mbarrier.wait(full.index(stage), turn // STAGES & 1)
            weights = weight_smem.index(stage * GROUPS + INDEX)
            sums = warpgroup_mma(
                weights.reinterpret(x_smem.dtype, [64, BLOCK_K], rows_layout),
                x_smem.index(stage).permute((1, 0)), sums, use_acc=i > 0, is_async=True,
            )  # fmt: skip
            # The round before is over.
            sums = warpgroup_mma_wait(num_outstanding=1, deps=(sums,))
            mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1, pred=i > 0)
            if INDEX == 0:  # noqa: SIM102, decided when it is compiled
                if turn > 0:
                    mbarrier.wait(empty.index((turn - 1) % STAGES), (turn - 1) // STAGES & 1)
                    fill_tile, fill_round, fill_token_tile, fill_output_tile = _fill(
                        x_desc, weight_desc, memory, counts, turn - 1 + STAGES, fill_tile,
                        fill_round, fill_token_tile, fill_output_tile, ROUNDS, TILES_ABREAST,
                    )  # fmt: skip
            turn += 1
        sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
        mbarrier.arrive(empty.index((turn - 1) % STAGES), count=1)
        if INDEX == 0:
            mbarrier.wait(empty.index((turn - 1) % STAGES), (turn - 1) // STAGES & 1)
            fill_tile, fill_round, fill_token_tile, fill_output_tile = _fill(
                x_desc, weight_desc, memory, counts, turn - 1 + STAGES, fill_tile, fill_round,
                fill_token_tile, fill_output_tile, ROUNDS, TILES_ABREAST,
            )  # fmt: skip

        token_tile, output_tile = _find_tile(tile, num_token_tiles, num_output_tiles, TILES_ABREAST)
        token = token_tile * TOKENS
        output = (output_tile * GROUPS + INDEX) * OUTPUTS
        stage = turn % STAGES
        mbarrier.wait(full.index(stage), turn // STAGES & 1)
        if USE_PDL:
            gdc_wait()
        # Each half takes as much as a warpgroup's weights of a stage, and a fourth of its x.
        mine = weight_smem.index(stage * GROUPS + INDEX).reinterpret(
            x_smem.dtype, [SENT_TOKENS, OUTPUTS], out_desc.layout
        )
        others = x_smem.index(stage).reinterpret(
            x_smem.dtype, [4, SENT_TOKENS, OUTPUTS], out_desc.layout
        )
        low, high = _halves(sums)
        _send(out_desc, mine, low, token, output)
        _send(out_desc, others.index(INDEX), high, token + SENT_TOKENS, output)
        wait_until_sent(0)
        mbarrier.arrive(empty.index(stage), count=1)
        turn += 1


@gluon_jit(do_not_specialize=["num_token_tiles", "num_output_tiles", "num_programs"])
def _hopper_gate_up_kernel(
    x_desc, weight_desc, out_desc, num_token_tiles, num_output_tiles, num_programs,
    ROUNDS: gl.constexpr, TOKENS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
    TILES_ABREAST: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    if USE_PDL:
        gdc_launch_dependents()
    BLOCK_K: gl.constexpr = x_desc.block_shape[1]
    EIGHTS: gl.constexpr = weight_desc.block_shape[0]
    dtype: gl.constexpr = x_desc.dtype
    x_smem = gl.allocate_shared_memory(dtype, [STAGES, TOKENS, BLOCK_K], x_desc.layout)
    weight_smem = gl.allocate_shared_memory(
        dtype, [STAGES * GROUPS, EIGHTS, 2, 8, BLOCK_K], weight_desc.layout
    )
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    is_warm = gl.allocate_shared_memory(gl.int64, [1], layout)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    mbarrier.init(is_warm, count=1)
    fence_async_shared()  # the copy engine counts on them
    memory = (x_smem, weight_smem, full, empty)
    counts = (num_token_tiles, num_output_tiles, num_programs)
    # The first partition has the four warps of the launch, the others those named here. With a warp
    # for the copies there would be 16 (they count by fours), for which ptxas gives 128 registers a
    # thread: too few for the sums of 256 tokens, and Triton's requests for more do not change that.
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_work, (
                    x_desc, weight_desc, out_desc, memory, is_warm, counts, ROUNDS, TILES_ABREAST,
                    USE_PDL, 0,
                )),
                (_work, (
                    x_desc, weight_desc, out_desc, memory, is_warm, counts, ROUNDS, TILES_ABREAST,
                    USE_PDL, 1,
                )),
            ],
            [4],
            [240],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_work, (
                    x_desc, weight_desc, out_desc, memory, is_warm, counts, ROUNDS, TILES_ABREAST,
                    USE_PDL, 0,
                )),
                (_work, (
                    x_desc, weight_desc, out_desc, memory, is_warm, counts, ROUNDS, TILES_ABREAST,
                    USE_PDL, 1,
                )),
                (_work, (
                    x_desc, weight_desc, out_desc, memory, is_warm, counts, ROUNDS, TILES_ABREAST,
                    USE_PDL, 2,
                )),
            ],
            [4, 4],
            [168, 168],
        )  # fmt: skip


def can_take(device: torch.device, dtype: torch.dtype, F: int, E: int) -> bool:
    """Whether hopper_gate_up runs on this device and takes a weight [2 F, E]."""
    return has_hopper_gluon(device) and dtype in DTYPES and _fits(F, E)


def _fits(F: int, E: int) -> bool:
    # The copy engine counts in 16 bytes, and outputs are interleaved by 8.
    return F > 0 and F % HALF == 0 and E > 0 and E % 8 == 0


def is_faster(T: int, F: int) -> bool:
    """Than cuBLAS and a kernel for SiLU behind it."""
    return T >= MIN_MANY or few_config(T, F) is not None


def tile_options(T: int, F: int) -> dict[str, int]:
    """Warpgroups and stages: as many as keep multiprocessors busy for the shortest time."""

    def cost(groups: int) -> int:
        num_tiles = cdiv(T, TOKENS) * cdiv(F, groups * GROUP_ROWS // 2)
        return cdiv(num_tiles, NUM_MULTIPROCESSORS) * groups

    groups = min((3, 2), key=cost)
    stage_bytes = (TOKENS + groups * GROUP_ROWS) * BLOCK_K * 2 + 16
    return {"GROUPS": groups, "STAGES": (MAX_SHARED_BYTES - 256) // stage_bytes}


def hopper_gate_up(x_TE: Tensor, weight_NE: Tensor, *, out: Tensor | None = None) -> Tensor:
    """silu of x times the first half of the weight's rows, times x times the second half.

    Shapes:
        x_TE       bf16 or fp16; last dim contiguous, rows at multiples of 16 bytes
        weight_NE  [2 F, E] in dtype of x, contiguous; F and E multiples of 8
        returns    [T, F] in dtype of x; sums and SiLU in fp32, rounded once. Written to `out` if
                   given, whose rows may lie apart as x's

    Raises:
        ValueError: sizes, dtypes, strides or addresses the copy engine cannot take.

    Not checked: that the device is a Hopper with Gluon (can_take). NaN or Inf, which go through.
    Weights are read before the kernel before is over, so it must not have written them. An `out`
    that overlaps x.
    Same answer as hopper_gate_up_reference. The bits of a row depend on neither T nor other rows.
    """
    (T, E), N = x_TE.shape, weight_NE.shape[0]
    F = N // 2
    if x_TE.dtype not in DTYPES or N % 2 or not _fits(F, E):
        raise ValueError(
            f"x is {x_TE.dtype} {(T, E)}, the weight has {N} rows; bf16 or fp16, and multiples of "
            "8 features and of 16 weight rows are taken"
        )
    if weight_NE.shape != (N, E) or weight_NE.dtype != x_TE.dtype or not weight_NE.is_contiguous():
        raise ValueError(
            f"the weight is {tuple(weight_NE.shape)} {weight_NE.dtype} with strides "
            f"{weight_NE.stride()}; contiguous {(N, E)} {x_TE.dtype}"
        )
    if out is None:
        out = torch.empty((T, F), dtype=x_TE.dtype, device=x_TE.device)
    elif out.shape != (T, F) or out.dtype != x_TE.dtype:
        raise ValueError(f"out is {tuple(out.shape)} {out.dtype}, not {(T, F)} {x_TE.dtype}")
    check_rows(x=x_TE, the_weight=weight_NE, out=out)
    if T == 0:
        return out
    config = few_config(T, F)
    if config is not None:
        few_gate_up(x_TE, weight_NE, out, config)
        return out
    options: dict[str, Any] = launch_options(x_TE.device)
    tile = tile_options(T, F)
    num_token_tiles = cdiv(T, TOKENS)
    num_output_tiles = cdiv(F, tile["GROUPS"] * GROUP_ROWS // 2)
    num_programs = min(num_token_tiles * num_output_tiles, NUM_MULTIPROCESSORS)
    _hopper_gate_up_kernel[(num_programs,)](
        tiles_of(x_TE, [TOKENS, BLOCK_K]),
        halves_of(weight_NE, GROUP_ROWS),
        tiles_of(out, [TOKENS // 2, GROUP_ROWS // 2]),
        num_token_tiles, num_output_tiles, num_programs,
        ROUNDS=cdiv(E, BLOCK_K), TOKENS=TOKENS, TILES_ABREAST=TILES_ABREAST, num_warps=4,
        **tile, **options,
    )  # fmt: skip
    return out
