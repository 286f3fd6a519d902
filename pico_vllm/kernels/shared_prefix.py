"""Attention of one new token per request where many requests begin with the same cached tokens.

R requests, H query heads, G KV heads, N = H + 2 G heads of the fused projection, D head dim,
B blocks in pool, S block_size, W rows of the block table, M its width

By the kernels of decode attention each request brings those tokens' keys and values to a
multiprocessor of its own, and be it from L2. Here the queries of many requests are the rows of one
matrix, which tensor cores multiply with each key once a tile of rows. A program takes a (tile of
requests times the query heads that share a KV head, split of the prefix), and leaves its sums in
the scratch, unnormalised, where the kernel that attends the rest of each request finds them as
splits that come before its own.

The number of programs depends on R alone, so that a CUDA graph can hold the launch: those whose
split is empty, or whose requests share nothing, leave at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pico_vllm.kernels import hopper_decode, paged_decode
from pico_vllm.kernels.launch import (
    NUM_MULTIPROCESSORS,
    cdiv,
    launch_options,
    let_next_start,
    next_power_of_2,
    wait_for_inputs,
)
from pico_vllm.kernels.paged_decode import (
    LOG2_E,
    MAX_PREFIX_SPLITS,
    MAX_SPLITS_IN_PLACE,
    PREFIX_STEP,
    AttendedPrefix,
    DecodeScratch,
    prefix_split_tokens,
    rotate,
)
from pico_vllm.kernels.paged_prefill import attend_keys

MIN_SHARING = 4
"""Requests: for fewer, rows of a tile are mostly empty."""
MIN_SAVED_BYTES = 180 << 20
MIN_SAVED_BYTES_EACH = 768 << 10
"""Keys and values of a layer that need not be read again, in all and for each request, from which
on a second kernel pays: its sums have to be added up, and what many read comes from L2. us a layer
on an H200, projection included, 12 query and 2 KV heads of 128, 600 own tokens on average, the
usual kernel and this: 64 requests behind 2,048 / 8,192 tokens 28.9, 36.5 / 70.8, 46.5; 128 behind
1,024 / 2,048 39.4, 47.3 / 51.8, 50.0; 192 behind 1,024 67.1, 57.1; 256 behind 512 / 1,024 62.3,
65.4 / 74.9, 68.1. 16 query and 8 KV heads, 200 own: 64 behind 512 / 1,024 37.3, 35.9 / 48.1,
39.8."""


def shared_prefix_reference(
    q_RHD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    prefix_lens: Tensor,
    *,
    scale: float,
) -> Tensor:
    """The prefix of all that share one at once, then each request's rest, merged by their
    log-sum-exp."""
    num_requests, num_heads, head_dim = q_RHD.shape
    num_kv_heads, block_size = k_BGSD.shape[1:3]

    def attend(requests: list[int], start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Over positions start to stop of the first one's blocks; with log-sum-exp, [R, H]."""
        at = torch.arange(start, stop)
        blocks = block_table[requests[0], at // block_size].long()
        k_GND, v_GND = (
            x[blocks, :, at % block_size].transpose(0, 1).float() for x in (k_BGSD, v_BGSD)
        )
        q_GrD = q_RHD[requests].view(len(requests), num_kv_heads, -1, head_dim).transpose(0, 1)
        scores = q_GrD.reshape(num_kv_heads, -1, head_dim).float() @ k_GND.transpose(1, 2) * scale
        out = torch.softmax(scores, -1) @ v_GND
        shape = (num_kv_heads, len(requests), -1)
        return (
            out.view(*shape, head_dim).transpose(0, 1).reshape(-1, num_heads, head_dim),
            scores.logsumexp(-1).view(shape).transpose(0, 1).reshape(-1, num_heads),
        )

    out_RHD = torch.zeros((num_requests, num_heads, head_dim))
    lse_RH = torch.full((num_requests, num_heads), float("-inf"))
    sharing = prefix_lens.nonzero()[:, 0].tolist()
    if sharing:
        out_RHD[sharing], lse_RH[sharing] = attend(sharing, 0, int(prefix_lens.max()))
    for r, (prefix_len, seq_len) in enumerate(
        zip(prefix_lens.tolist(), seq_lens.tolist(), strict=True)
    ):
        if seq_len == 0:
            continue
        out_HD, lse_H = (x[0] for x in attend([r], prefix_len, seq_len))
        part_H = torch.sigmoid(lse_RH[r] - lse_H)[:, None]
        out_RHD[r] = out_RHD[r] * part_H + out_HD * (1 - part_H)
    return out_RHD.to(q_RHD.dtype)


@triton.jit
def _sum_of_parts(
    x_ptrs, bias_ptrs, mask, part_stride, NUM_PARTS: tl.constexpr, HAS_BIAS: tl.constexpr
):  # fmt: skip
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    for i in tl.static_range(1, NUM_PARTS):
        x += tl.load(x_ptrs + i * part_stride, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_ptrs, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit(do_not_specialize=["num_requests", "num_splits", "num_own_splits"])
def _shared_prefix_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, rows_ptr, seq_lens_ptr, prefix_lens_ptr,
    partial_ptr, stats_ptr, cos_ptr, sin_ptr, q_norm_ptr, bias_ptr,
    scale_log2, eps,
    part_stride, q_stride, block_stride, head_stride, table_stride,
    num_requests, num_splits, num_own_splits,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr,
    NUM_PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr,
    PRECISION: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(USE_PDL)
    TILE_REQUESTS: tl.constexpr = BLOCK_M // GROUP
    split = tl.program_id(0) % num_splits
    g = tl.program_id(0) // num_splits % NUM_KV_HEADS
    first = tl.program_id(0) // num_splits // NUM_KV_HEADS * TILE_REQUESTS

    m, d = tl.arange(0, BLOCK_M), tl.arange(0, D_PAD)
    r = first + m // GROUP
    is_there = (m < TILE_REQUESTS * GROUP) & (r < num_requests)
    # Lengths, tables and the KV of earlier steps lie complete before the step's first kernel.
    prefix_lens = tl.load(prefix_lens_ptr + r, mask=is_there, other=0)
    shares = prefix_lens > 0
    prefix_len = tl.max(prefix_lens, 0)
    split_len = prefix_split_tokens(prefix_len, num_splits, STEP)
    start = split * split_len
    end = tl.minimum(start + split_len, prefix_len)
    if start >= end:
        # Waits too: whoever waits for this kernel waits for all before it.
        wait_for_inputs(USE_PDL)
        return

    row = tl.load(rows_ptr + tl.min(tl.where(shares, r, num_requests), 0))
    positions = tl.load(seq_lens_ptr + r, mask=shares, other=1) - 1
    md_mask = shares[:, None]
    if D != D_PAD:
        md_mask = md_mask & (d < D)[None, :]
    angles = positions[:, None] * D + d[None, :]
    cos = tl.load(cos_ptr + angles, mask=md_mask, other=0.0)
    sin = tl.load(sin_ptr + angles, mask=md_mask, other=0.0)
    wait_for_inputs(USE_PDL)
    other = (d + D // 2) % D
    head = ((g * GROUP + m % GROUP) * D)[:, None]
    q_rows = q_ptr + (r * q_stride)[:, None] + head
    x = _sum_of_parts(
        q_rows + d[None, :], bias_ptr + head + d[None, :], md_mask, part_stride, NUM_PARTS, HAS_BIAS
    )
    y = _sum_of_parts(
        q_rows + other[None, :], bias_ptr + head + other[None, :], md_mask, part_stride, NUM_PARTS,
        HAS_BIAS,
    )  # fmt: skip
    q = rotate(x, y, q_norm_ptr, cos, sin, d, eps, D, HAS_NORM)
    q = q.to(q_ptr.dtype.element_ty)

    table_ptr += row.to(tl.int64) * table_stride
    k_ptr += g.to(tl.int64) * head_stride
    v_ptr += g.to(tl.int64) * head_stride
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    last = tl.full([BLOCK_M], 0, tl.int32) + end - 1
    whole_end = start + (end - start) // BLOCK_N * BLOCK_N
    for at in tl.range(start, whole_end, BLOCK_N):
        acc, total, highest = attend_keys(
            acc, total, highest, q, last, k_ptr, v_ptr, table_ptr, at, end, scale_log2,
            block_stride, D, D, D_PAD, S, BLOCK_N, False, PRECISION,
        )  # fmt: skip
    if whole_end < end:
        acc, total, highest = attend_keys(
            acc, total, highest, q, last, k_ptr, v_ptr, table_ptr, whole_end, end, scale_log2,
            block_stride, D, D, D_PAD, S, BLOCK_N, True, PRECISION,
        )  # fmt: skip

    all_splits = num_splits + num_own_splits
    at = ((r.to(tl.int64) * NUM_KV_HEADS + g) * all_splits + split) * GROUP + m % GROUP
    tl.store(stats_ptr + at * 2, highest, mask=shares)
    tl.store(stats_ptr + at * 2 + 1, total, mask=shares)
    tl.store(partial_ptr + at[:, None] * D + d[None, :], acc, mask=md_mask)


@dataclass(frozen=True, slots=True)
class PrefixConfig:
    """How the work is cut and compiled; sizes are powers of two, the splits' number too."""

    block_m: int
    """Rows of a tile: as many whole requests as fit, times H / G."""
    block_n: int
    """Keys of one round; PREFIX_STEP is a multiple."""
    num_splits: int
    """At most MAX_PREFIX_SPLITS."""
    num_warps: int
    num_stages: int
    max_registers: int | None = None


def prefix_config(
    num_requests: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> PrefixConfig:
    group = num_heads // num_kv_heads
    least = next_power_of_2(group)
    if dtype == torch.float32:
        # No tensor cores: operands lie in registers, which sets the size.
        block_m, block_n, num_warps, num_stages = 32, 32 if head_dim <= 128 else 16, 8, 1
    else:
        # On an H200 256 requests behind 1,024 tokens took 34 us a layer so, with 128 rows and twice
        # the warps 37 to 45.
        block_m, block_n, num_warps, num_stages = 64, 64, 4 if head_dim <= 128 else 8, 2
    block_m = max(block_m, least)
    num_tiles = cdiv(num_requests, block_m // group)
    wanted = 2 * NUM_MULTIPROCESSORS // (num_tiles * num_kv_heads)
    splits = min(MAX_PREFIX_SPLITS, 1 << (wanted.bit_length() - 1)) if wanted else 1
    return PrefixConfig(block_m, block_n, splits, num_warps, num_stages)


def is_faster(num_sharing: int, num_tokens: int, token_bytes: int) -> bool:
    """Whether so many requests are to attend so many tokens that they share by a kernel of its own.
    token_bytes: of a token's keys and values of one layer."""
    saved = (num_sharing - 1) * num_tokens * token_bytes
    return num_sharing >= MIN_SHARING and saved >= max(
        MIN_SAVED_BYTES, num_sharing * MIN_SAVED_BYTES_EACH
    )


def attend_prefix(
    qkv_RND: Tensor,
    cos_PD: Tensor,
    sin_PD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    block_table_WM: Tensor,
    rows_R: Tensor,
    seq_lens_R: Tensor,
    prefix_lens_R: Tensor,
    *,
    scale: float,
    scratch: DecodeScratch,
    num_own_splits: int,
    q_norm_D: Tensor | None = None,
    eps: float = 0.0,
    bias_N: Tensor | None = None,
    config: PrefixConfig | None = None,
) -> AttendedPrefix:
    """RoPE of the queries (after QK-norm where a weight is given) and attention over a prefix that
    requests share, to be gone on with by rope_paged_decode or hopper_rope_decode.

    Shapes:
        qkv_RND, bias_N, tables, pool, rows and lengths   as hopper_rope_decode, head dims and
                         dtypes as rope_paged_decode; nothing of it is written
        prefix_lens_R    int32; the same number of tokens for all that share the prefix, 0 for the
                         others. Whole blocks, the same ones in their rows of the block table, and
                         less than seq_len
        num_own_splits   of the kernel that goes on
        config           prefix_config's choice where None
        returns          where the sums lie in the scratch

    Raises:
        ValueError: heads, strides, dtypes or a scale that the kernel cannot take, or a scratch that
            is too small.

    Not checked, as it would stall the stream: that the requests share those blocks.
    Source: Juravsky et al. 2024, Hydragen, arXiv:2402.05099; Ye et al. 2024, Cascade Inference.
    """
    is_in_parts = qkv_RND.dim() == 4
    num_requests, num_all, head_dim = qkv_RND.shape[-3:]
    num_kv_heads, block_size = k_BGSD.shape[1:3]
    num_heads = num_all - 2 * num_kv_heads
    paged_decode.check(qkv_RND[0] if is_in_parts else qkv_RND, num_heads, k_BGSD, v_BGSD)
    hopper_decode.check_bias(bias_N, qkv_RND)
    if not qkv_RND.is_contiguous():
        raise ValueError(f"qkv has strides {qkv_RND.stride()}; it must be contiguous")
    if head_dim % 2:
        raise ValueError(f"head_dim {head_dim} is odd: it has no halves to rotate")
    if scale <= 0:
        raise ValueError(f"scale {scale} must be above 0: scores are compared before it is applied")
    config = config or prefix_config(num_requests, num_heads, num_kv_heads, head_dim, qkv_RND.dtype)
    group = num_heads // num_kv_heads
    if config.num_splits > MAX_PREFIX_SPLITS or config.block_m < group:
        raise ValueError(
            f"{config}: at most {MAX_PREFIX_SPLITS} splits are added up, and a tile takes a "
            f"request's {group} heads"
        )
    needed = num_requests * (config.num_splits + num_own_splits) * num_heads * head_dim
    if scratch.partials.numel() < needed:
        raise ValueError(
            f"the scratch holds {scratch.partials.numel()} partial sums; {num_requests} requests "
            f"need {needed}"
        )
    options: dict[str, Any] = launch_options(qkv_RND.device)
    if config.max_registers is not None:
        options["maxnreg"] = config.max_registers
    num_tiles = cdiv(num_requests, config.block_m // group)
    _shared_prefix_kernel[(num_tiles * num_kv_heads * config.num_splits,)](
        qkv_RND, k_BGSD, v_BGSD, block_table_WM, rows_R, seq_lens_R, prefix_lens_R,
        scratch.partials, scratch.stats, cos_PD, sin_PD,
        qkv_RND if q_norm_D is None else q_norm_D, qkv_RND if bias_N is None else bias_N,
        scale * LOG2_E, eps,
        num_requests * num_all * head_dim, num_all * head_dim,
        k_BGSD.stride(0), k_BGSD.stride(1), block_table_WM.stride(0),
        num_requests, config.num_splits, num_own_splits,
        NUM_KV_HEADS=num_kv_heads, GROUP=group, D=head_dim,
        D_PAD=max(16, next_power_of_2(head_dim)), S=block_size,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, STEP=PREFIX_STEP,
        NUM_PARTS=len(qkv_RND) if is_in_parts else 1, HAS_BIAS=bias_N is not None,
        HAS_NORM=q_norm_D is not None,
        PRECISION="ieee" if qkv_RND.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps, num_stages=config.num_stages, **options,
    )  # fmt: skip
    return AttendedPrefix(prefix_lens_R, config.num_splits)


def shared_prefix_decode(
    qkv_RND: Tensor,
    cos_PD: Tensor,
    sin_PD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    block_table_WM: Tensor,
    rows_R: Tensor,
    seq_lens_R: Tensor,
    prefix_lens_R: Tensor,
    *,
    scale: float,
    scratch: DecodeScratch,
    q_norm_D: Tensor | None = None,
    k_norm_D: Tensor | None = None,
    eps: float = 0.0,
    bias_N: Tensor | None = None,
    is_long: bool = False,
    on_hopper: bool = False,
    config: PrefixConfig | None = None,
) -> Tensor:
    """rope_paged_decode in two kernels, one for what requests share and one for the rest.

    Shapes:
        prefix_lens_R   as attend_prefix
        is_long         whether the rests are long (paged_decode.are_long)
        on_hopper       go on with hopper_rope_decode, which takes qkv in parts, and a bias
        the rest        as rope_paged_decode

    Same answer as rope_store_kv and shared_prefix_reference. The bits of a request depend on R,
    is_long and prefix_lens.
    """
    num_requests, _, head_dim = qkv_RND.shape[-3:]
    num_kv_heads, block_size = k_BGSD.shape[1:3]
    inputs = (
        qkv_RND, cos_PD, sin_PD, k_BGSD, v_BGSD, block_table_WM, rows_R, seq_lens_R,
    )  # fmt: skip
    common = {"scale": scale, "scratch": scratch, "q_norm_D": q_norm_D, "eps": eps}
    if on_hopper:
        hopper = hopper_decode.decode_config(
            num_requests, num_kv_heads, block_size, head_dim, is_long=is_long
        )
        common["bias_N"] = bias_N
        prefix = attend_prefix(
            *inputs, prefix_lens_R, num_own_splits=hopper.num_splits, config=config, **common
        )
        return hopper_decode.hopper_rope_decode(
            *inputs, k_norm_D=k_norm_D, config=hopper, prefix=prefix, **common
        )
    if qkv_RND.dim() != 3 or bias_N is not None:
        raise ValueError("parts of qkv, or a bias, are added up on_hopper alone")
    row_bytes = next_power_of_2(head_dim) * qkv_RND.dtype.itemsize
    own = paged_decode.decode_config(num_requests, num_kv_heads, row_bytes, is_long=is_long)
    # Behind a prefix splits are added up in place.
    own = replace(own, num_splits=min(own.num_splits, MAX_SPLITS_IN_PLACE))
    prefix = attend_prefix(
        *inputs, prefix_lens_R, num_own_splits=own.num_splits, config=config, **common
    )
    return paged_decode.rope_paged_decode(
        *inputs, k_norm_D=k_norm_D, config=own, prefix=prefix, **common
    )
