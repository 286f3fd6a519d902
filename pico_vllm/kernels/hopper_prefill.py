"""Attention of fresh prompts on Hopper: nothing cached, so all keys lie in one piece.

T tokens this step, H query heads, G KV heads, D head dim, R requests

A program takes 64 tokens of one request and two query heads that share a KV head, 128 keys a round.
A warp brings queries, keys and values by the copy engine (TMA), rounds ahead as far as the rings in
shared memory go; two warpgroups take a head each. While a warpgroup takes one round's exponentials,
the values of the round before are multiplied. Triton does not let a kernel say so, so this one is
written in Gluon, where layouts, barriers and warps are ours to place: 8,192 tokens of 12 heads of
128 take 328 us on an H200, in paged_prefill 419.

The number of programs depends on T and R alone, so that a CUDA graph can hold the launch. It is
launched without programmatic dependent launch: what comes after it may still use that.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from pico_vllm.kernels.gluon import (
    DTYPES,
    TensorDescriptor,
    bring,
    fence_async_shared,
    gl,
    gluon_jit,
    has_hopper_gluon,
    mbarrier,
    tile_layout,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from pico_vllm.kernels.launch import cdiv
from pico_vllm.kernels.paged_prefill import LOG2_E, paged_prefill_pool_reference

TILE_TOKENS = 64
"""Rows of a warpgroup's products; what Hopper's instruction takes."""
BLOCK_N = 128
"""Keys of one round. Rounds count from a request's first token."""
NUM_STAGES = 2
"""Rounds of keys and of values in shared memory. A third gains nothing."""
HEADS_PER_PROGRAM = 2
"""Each takes four warps and what registers they can have: 232 a thread, the rest for the copies."""
HEAD_DIMS = (64, 128)
CONSUMER_REGISTERS = tl.constexpr(232)
PRODUCER_REGISTERS = tl.constexpr(40)

# ptxas takes the mask for a value known at run time only, so the barrier stays behind the
# exponentials. The pattern it compares with is a NaN that no sum has.
HOLD = tl.constexpr(
    "{.reg .pred q, r; .reg .b32 m; setp.ne.b32 q, $2, 0x7f812345; "
    "setp.ne.and.b32 r, $3, 0x7f812345, q; selp.b32 m, -1, 0, r; bar.warp.sync m; "
    "mov.b32 $0, $2; mov.b32 $1, $3;}"
)


def hopper_prefill_reference(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, query_start_loc: Tensor, *, scale: float
) -> Tensor:
    """Tokens as blocks of a pool, one token each."""
    tokens_T = torch.arange(len(q_THD), device=q_THD.device)
    return paged_prefill_pool_reference(
        q_THD, k_TGD[:, :, None], v_TGD[:, :, None],
        query_start_loc[:-1, None] + tokens_T, torch.arange(len(query_start_loc) - 1),
        query_start_loc, query_start_loc.diff(), scale=scale,
    )  # fmt: skip


@gluon_jit()
def _find_tile(query_start_loc_ptr, num_tokens, num_requests, TILE_TOKENS: gl.constexpr):
    """This program's tile: its request's first token and number of tokens (0 for padding), the
    first token of the tile counted from there, and how many exist.

    Request r has the tiles from query_start_loc[r] // TILE_TOKENS + r on, which leaves room for one
    partly filled tile a request. The tokens after the last request are one more, which sees
    nothing.
    """
    tile = gl.program_id(1)
    r = 0
    last = num_requests
    while r < last:
        middle = (r + last + 1) // 2
        if gl.load(query_start_loc_ptr + middle) // TILE_TOKENS + middle <= tile:
            r = middle
        else:
            last = middle - 1
    is_request = r < num_requests
    start = gl.load(query_start_loc_ptr + r)
    end = gl.load(query_start_loc_ptr + r + 1, mask=is_request, other=num_tokens)
    # A prompt's last tile takes longest, so its first program gets it. Padding may lack a program
    # at its end, not at its beginning.
    ahead, behind = tile - start // TILE_TOKENS - r, end // TILE_TOKENS + r - tile
    first = gl.where(is_request, behind, ahead) * TILE_TOKENS
    num_rows = gl.maximum(gl.minimum(end - start - first, TILE_TOKENS), 0)
    num_keys = gl.where(is_request, end - start, 0)
    return start, num_keys, first, num_rows


@gluon_jit()
def _count_rounds(num_keys, first, num_rows, BLOCK_N: gl.constexpr):
    return gl.where((num_keys > 0) & (num_rows > 0), (first + num_rows + BLOCK_N - 1) // BLOCK_N, 0)


@gluon_jit()
def _produce(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, barriers,
    query_start_loc_ptr, num_tokens, num_requests, PAIRS_PER_KV_HEAD: gl.constexpr,
):  # fmt: skip
    """The warp that brings queries, and keys and values round by round where a stage is free."""
    q_full, k_full, k_empty, v_full, v_empty = barriers
    HEADS: gl.constexpr = q_smem.shape[0]
    TILE_TOKENS: gl.constexpr = q_smem.shape[1]
    NUM_STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    D: gl.constexpr = k_smem.shape[2]
    start, num_keys, first, num_rows = _find_tile(
        query_start_loc_ptr, num_tokens, num_requests, TILE_TOKENS
    )
    num_rounds = _count_rounds(num_keys, first, num_rows, BLOCK_N)
    if num_rounds > 0:
        mbarrier.expect(q_full, HEADS * TILE_TOKENS * D * 2)
        for i in gl.static_range(HEADS):
            head = gl.program_id(0) * HEADS + i
            bring(q_desc, [start + first, head * D], q_full, q_smem.index(i))
        column = gl.program_id(0) // PAIRS_PER_KV_HEAD * D
        for j in range(0, num_rounds):
            stage = j % NUM_STAGES
            # Of a stage that nobody has filled yet the turn before counts as over.
            turn_before = (j // NUM_STAGES & 1) ^ 1
            token = start + j * BLOCK_N
            mbarrier.wait(k_empty.index(stage), turn_before)
            mbarrier.expect(k_full.index(stage), BLOCK_N * D * 2)
            bring(k_desc, [token, column], k_full.index(stage), k_smem.index(stage))
            mbarrier.wait(v_empty.index(stage), turn_before)
            mbarrier.expect(v_full.index(stage), BLOCK_N * D * 2)
            bring(v_desc, [token, column], v_full.index(stage), v_smem.index(stage))


@gluon_jit()
def _weigh(scores, total, highest, scale_log2):
    """The online softmax's step: weights of these scores, and what earlier sums shrink by."""
    new_highest = gl.maximum(highest, gl.max(scores, 1) * scale_log2)
    weights = gl.exp2(scores * scale_log2 - new_highest[:, None])
    shrink = gl.exp2(highest - new_highest)
    return weights, shrink, total * shrink + gl.sum(weights, 1), new_highest


@gluon_jit()
def _hold(x):
    """A point that instructions for x come before and the next wait after: ptxas sees no tie
    between the wait for a product and the exponentials written before it, and moves the wait up."""
    return gl.inline_asm_elementwise(
        HOLD, "=f,=f,f,f", [x], dtype=gl.float32, is_pure=False, pack=2
    )


@gluon_jit()
def _next_round(
    acc, w, total, highest, q, k_smem, v_smem, barriers, j, nothing, keys, positions, scale_log2,
    o_layout: gl.constexpr, IS_LAST: gl.constexpr,
):  # fmt: skip
    """Round j's scores become weights while round j - 1's values are multiplied by theirs."""
    _q_full, k_full, k_empty, v_full, v_empty = barriers
    NUM_STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    stage = j % NUM_STAGES
    stage_before = (j - 1) % NUM_STAGES
    mbarrier.wait(k_full.index(stage), j // NUM_STAGES & 1)
    k = k_smem.index(stage).permute((1, 0))
    scores = warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(stage_before), (j - 1) // NUM_STAGES & 1)
    acc = warpgroup_mma(w, v_smem.index(stage_before), acc, is_async=True)
    scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    if IS_LAST:
        sees = (j * BLOCK_N + keys)[None, :] <= positions[:, None]
        scores = gl.where(sees, scores, float("-inf"))
    weights, shrink, total, highest = _weigh(scores, total, highest, scale_log2)
    total = _hold(total)
    acc, w = warpgroup_mma_wait(num_outstanding=0, deps=(acc, w))
    mbarrier.arrive(v_empty.index(stage_before), count=1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
    w = gl.convert_layout(weights.to(k_smem.dtype), gl.DotOperandLayout(0, o_layout, 2))
    return acc, w, total, highest


@gluon_jit()
def _zero_rows_from(v, num_left):
    """Rows of a round of values, in shared memory, that do not exist: other requests' or padding.

    Their weights are 0, but 0 times infinity is no number. Both warpgroups write the same bytes,
    and rows that exist get their own values back: that the other one may read or write meanwhile
    changes nothing.
    """
    BLOCK_N: gl.constexpr = v.shape[0]
    D: gl.constexpr = v.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    v.store(gl.where((n < num_left)[:, None], v.load(layout), 0.0))
    # Products read shared memory by another way than the store went.
    fence_async_shared()


@gluon_jit()
def _write(out, out_ptr, token, head, num_rows, stride_t, stride_h, layout: gl.constexpr):
    m = gl.arange(0, out.shape[0], gl.SliceLayout(1, layout))
    d = gl.arange(0, out.shape[1], gl.SliceLayout(0, layout))
    # 64 bits to the tile, 32 within.
    out_ptr += token.to(gl.int64) * stride_t + head * stride_h
    offsets = (m * stride_t)[:, None] + d[None, :]
    gl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=(m < num_rows)[:, None])


@gluon_jit()
def _consume(
    q_smem, k_smem, v_smem, barriers, out_ptr,
    query_start_loc_ptr, num_tokens, num_requests, scale_log2, stride_ot, stride_oh,
    INDEX: gl.constexpr,
):  # fmt: skip
    """A warpgroup, which takes one query head."""
    q_full, k_full, k_empty, v_full, _v_empty = barriers
    HEADS: gl.constexpr = q_smem.shape[0]
    TILE_TOKENS: gl.constexpr = q_smem.shape[1]
    NUM_STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    D: gl.constexpr = k_smem.shape[2]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    w_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    start, num_keys, first, num_rows = _find_tile(
        query_start_loc_ptr, num_tokens, num_requests, TILE_TOKENS
    )
    num_rounds = _count_rounds(num_keys, first, num_rows, BLOCK_N)
    head = gl.program_id(0) * HEADS + INDEX
    acc = gl.zeros([TILE_TOKENS, D], gl.float32, o_layout)
    if num_rounds > 0:
        # The first round: nothing else to multiply yet.
        q = q_smem.index(INDEX)
        nothing = gl.zeros([TILE_TOKENS, BLOCK_N], gl.float32, s_layout)
        mbarrier.wait(q_full, 0)
        mbarrier.wait(k_full.index(0), 0)
        k = k_smem.index(0).permute((1, 0))
        scores = warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
        mbarrier.arrive(k_empty.index(0), count=1)
        positions = first + gl.arange(0, TILE_TOKENS, s_rows)
        keys = gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
        if num_rounds == 1:
            scores = gl.where(keys[None, :] <= positions[:, None], scores, float("-inf"))
        highest = gl.full([TILE_TOKENS], float("-inf"), gl.float32, s_rows)
        total = gl.zeros([TILE_TOKENS], gl.float32, s_rows)
        weights, _shrink, total, highest = _weigh(scores, total, highest, scale_log2)
        w = gl.convert_layout(weights.to(k_smem.dtype), w_layout)
        # Rounds that all rows see.
        for j in range(1, num_rounds - 1):
            acc, w, total, highest = _next_round(
                acc, w, total, highest, q, k_smem, v_smem, barriers, j, nothing, keys, positions,
                scale_log2, o_layout, False,
            )  # fmt: skip
        # The last one, which rows see in part, unless it was the first.
        for j in range(gl.maximum(num_rounds - 1, 1), num_rounds):
            acc, w, total, highest = _next_round(
                acc, w, total, highest, q, k_smem, v_smem, barriers, j, nothing, keys, positions,
                scale_log2, o_layout, True,
            )  # fmt: skip
        # Its values.
        j = num_rounds - 1
        v = v_smem.index(j % NUM_STAGES)
        mbarrier.wait(v_full.index(j % NUM_STAGES), j // NUM_STAGES & 1)
        if num_rounds * BLOCK_N > num_keys:
            _zero_rows_from(v, num_keys - j * BLOCK_N)
        acc = warpgroup_mma(w, v, acc, is_async=True)
        acc, w = warpgroup_mma_wait(num_outstanding=0, deps=(acc, w))
        acc = acc * (1.0 / gl.convert_layout(total, o_rows))[:, None]
    if num_rows > 0:
        _write(acc, out_ptr, start + first, head, num_rows, stride_ot, stride_oh, o_layout)


# Specialised on neither count: steps of all sizes share one compiled kernel.
@gluon_jit(do_not_specialize=["num_tokens", "num_requests"])
def _hopper_prefill_kernel(
    q_desc, k_desc, v_desc, query_start_loc_ptr, out_ptr,
    num_tokens, num_requests, scale_log2, stride_ot, stride_oh,
    PAIRS_PER_KV_HEAD: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr,
    TILE_TOKENS: gl.constexpr, BLOCK_N: gl.constexpr, NUM_STAGES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = k_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [HEADS, TILE_TOKENS, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [NUM_STAGES, BLOCK_N, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [NUM_STAGES, BLOCK_N, D], v_desc.layout)
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], layout)
    k_full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], layout)
    k_empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], layout)
    v_full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], layout)
    v_empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], layout)
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(NUM_STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=HEADS)
        mbarrier.init(v_empty.index(i), count=HEADS)
    fence_async_shared()  # the copy engine counts on them
    barriers = (q_full, k_full, k_empty, v_full, v_empty)
    # The first partition has the four warps of the launch, the others those named here.
    gl.warp_specialize(
        [
            (_consume, (
                q_smem, k_smem, v_smem, barriers, out_ptr, query_start_loc_ptr, num_tokens,
                num_requests, scale_log2, stride_ot, stride_oh, 0,
            )),
            (_consume, (
                q_smem, k_smem, v_smem, barriers, out_ptr, query_start_loc_ptr, num_tokens,
                num_requests, scale_log2, stride_ot, stride_oh, 1,
            )),
            (_produce, (
                q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, barriers, query_start_loc_ptr,
                num_tokens, num_requests, PAIRS_PER_KV_HEAD,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def can_take(
    device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int
) -> bool:
    """Whether hopper_prefill runs on this device and takes these heads."""
    return (
        has_hopper_gluon(device)
        and dtype in DTYPES
        and head_dim in HEAD_DIMS
        and _has_pairs(num_heads, num_kv_heads)
    )


def _has_pairs(num_heads: int, num_kv_heads: int) -> bool:
    is_any = num_heads > 0 and num_kv_heads > 0
    return is_any and num_heads % (num_kv_heads * HEADS_PER_PROGRAM) == 0


def hopper_prefill(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    query_start_loc: Tensor,
    *,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """Attend each request's tokens over themselves. Causal. For requests without context.

    Shapes:
        q_THD            bf16 or fp16, D 64 or 128; tokens may lie apart, heads not
        k/v_TGD          [T, G, D], dtype of q, likewise; H / G even
        query_start_loc  [R + 1] int32; request r owns tokens query_start_loc[r] to [r + 1]. What
                         lies before the first request is left alone, what follows the last one is
                         padding
        returns          [T, H, D], dtype of q; softmax and sums in fp32. Written to `out` if given,
                         of which the last dim is contiguous

    Raises:
        ValueError: heads, head dim, dtype or scale the kernel cannot take, or shapes, dtypes or
            strides that do not fit each other.

    Not checked, as it would stall the stream: query_start_loc rising to at most T. Nor that the
    device is a Hopper with Gluon: can_take. A request without tokens is a padded one; padding
    tokens give zeros. What lies in keys and values of other requests or padding, NaN too, changes
    nothing.
    Same answer as hopper_prefill_reference. A token's bits depend on its request alone.
    Source: Shah et al. 2024, arXiv:2407.08608, without its turns between warpgroups.
    """
    num_tokens, num_heads, head_dim = q_THD.shape
    num_kv_heads = k_TGD.shape[1]
    if q_THD.dtype not in DTYPES or head_dim not in HEAD_DIMS:
        raise ValueError(
            f"q is {q_THD.dtype} with head_dim {head_dim}; bf16 or fp16 and {HEAD_DIMS} are taken"
        )
    if not _has_pairs(num_heads, num_kv_heads):
        raise ValueError(
            f"{num_heads} query heads are not an even multiple of {num_kv_heads} KV heads"
        )
    for name, x in (("k", k_TGD), ("v", v_TGD)):
        if x.shape != (num_tokens, num_kv_heads, head_dim) or x.dtype != q_THD.dtype:
            raise ValueError(
                f"{name} is {list(x.shape)} {x.dtype}, not "
                f"{[num_tokens, num_kv_heads, head_dim]} {q_THD.dtype}"
            )
    if (
        query_start_loc.dim() != 1 or len(query_start_loc) < 1
        or query_start_loc.dtype != torch.int32 or query_start_loc.stride(0) != 1
    ):  # fmt: skip
        raise ValueError(
            f"query_start_loc is {list(query_start_loc.shape)} {query_start_loc.dtype} with "
            f"strides {query_start_loc.stride()}; [R + 1] int32, contiguous"
        )
    if scale <= 0:
        raise ValueError(f"scale {scale} must be above 0: scores are compared before it is applied")
    if out is None:
        out = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    elif out.shape != q_THD.shape or out.dtype != q_THD.dtype or out.stride(2) != 1:
        raise ValueError(
            f"out is {list(out.shape)} {out.dtype} with strides {out.stride()}; "
            f"{list(q_THD.shape)} {q_THD.dtype} with the last one 1"
        )
    if num_tokens == 0:
        return out
    q_desc = _tiles_of("q", q_THD, TILE_TOKENS)
    k_desc, v_desc = _tiles_of("k", k_TGD, BLOCK_N), _tiles_of("v", v_TGD, BLOCK_N)
    num_requests = len(query_start_loc) - 1
    num_tiles = cdiv(num_tokens, TILE_TOKENS) + num_requests
    num_pairs = num_heads // HEADS_PER_PROGRAM
    _hopper_prefill_kernel[(num_pairs, num_tiles)](
        q_desc, k_desc, v_desc, query_start_loc, out,
        num_tokens, num_requests, scale * LOG2_E, *out.stride()[:2],
        PAIRS_PER_KV_HEAD=num_pairs // num_kv_heads, HEADS=HEADS_PER_PROGRAM, D=head_dim,
        TILE_TOKENS=TILE_TOKENS, BLOCK_N=BLOCK_N, NUM_STAGES=NUM_STAGES, num_warps=4,
    )  # fmt: skip
    return out


def _tiles_of(name: str, x_THD: Tensor, num_rows: int) -> TensorDescriptor:
    """For the copy engine: a tile is num_rows tokens of one head."""
    num_tokens, num_heads, head_dim = x_THD.shape
    stride, *strides = x_THD.stride()
    # It counts in 16 bytes.
    if strides != [head_dim, 1] or stride % 8 or x_THD.data_ptr() % 16:
        raise ValueError(
            f"{name} has strides {x_THD.stride()} from address {x_THD.data_ptr()}: heads must be "
            "contiguous, tokens and the first element at multiples of 16 bytes"
        )
    tile = [num_rows, head_dim]
    shape = [num_tokens, num_heads * head_dim]
    return TensorDescriptor(x_THD, shape, [stride, 1], tile, tile_layout(*tile))
