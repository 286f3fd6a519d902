"""The head and the choice of the next token in one kernel, so that logits never exist in memory.

R requests, E hidden size, V rows of the head, W rows of the batch state

A program multiplies some rows of the head with the final norm of all requests' x and keeps the best
id of each request. Score and id are packed into one int64, larger for a higher score and, among
equal scores, for a lower id, so that the best of all programs is an atomic maximum, in any order.
The program that is done last writes the ids.

A request with a temperature of 1e-5 or more takes the maximum of logits / temperature plus Gumbel
noise, which is a sample of the softmax. Noise is Philox4x32-10 of the request's seed and place:
key = seed, counter = (id // 4, position, sample index, 0), word id % 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pico_vllm.kernels.launch import launch_options, let_next_start, wait_for_inputs
from pico_vllm.kernels.small_linear import MAX_ROWS, dot_rows, rms_scale

GREEDY_BELOW = tl.constexpr(1e-5)
BAD_LOGITS = tl.constexpr(-2)
"""Instead of an id, where a logit is NaN or infinite."""
_LOWEST = tl.constexpr(-(2**63))
_BAD = tl.constexpr(2**63 - 1)
_ID_BITS = tl.constexpr(2**32 - 1)


def head_sample_reference(
    logits_RV: Tensor, noise_RV: Tensor, temperatures_R: Tensor, *, vocab_size: int
) -> Tensor:
    """[R] ids from logits in any dtype and noise that the caller has drawn."""
    logits_RV, noise_RV = logits_RV[:, :vocab_size].float(), noise_RV[:, :vocab_size]
    is_greedy = (temperatures_R < GREEDY_BELOW.value)[:, None]
    scores_RV = logits_RV / temperatures_R[:, None].where(~is_greedy, 1.0)
    scores_RV += noise_RV.where(~is_greedy, 0.0)
    ids = scores_RV.nan_to_num().argmax(dim=1)
    return ids.where(logits_RV.isfinite().all(dim=1), BAD_LOGITS.value)


@triton.jit
def _gumbel(bits):
    """-log(-log(1 - u)) of the uniform u that 32 random bits are."""
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    # -log(1 - u) loses small u, where the large values come from: there, its power series.
    series = 0.125
    for i in tl.static_range(1, 8):
        series = series * u + 1.0 / (8 - i)
    exponential = tl.where(u < 0.1, series * u, -tl.log(1.0 - u))
    return -tl.log(exponential)


@triton.jit
def gumbel_noise(
    first_id, seed_R, position_R, sample_R, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr
):
    """[BLOCK_V, BLOCK_R] noise of BLOCK_V ids from first_id on, which is a multiple of 4."""
    GROUPS: tl.constexpr = BLOCK_V // 4
    groups = first_id // 4 + tl.arange(0, GROUPS)
    shape: tl.constexpr = (GROUPS, BLOCK_R)
    c0 = tl.broadcast_to(groups.to(tl.uint32)[:, None], shape)
    c1 = tl.broadcast_to(position_R.to(tl.int64).to(tl.uint32)[None, :], shape)
    c2 = tl.broadcast_to(sample_R.to(tl.int64).to(tl.uint32)[None, :], shape)
    seed = tl.broadcast_to(seed_R[None, :], shape)
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, c2, c0 * 0)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [.., i, j] is word 2 i + j
    bits = tl.reshape(tl.permute(words, (0, 2, 3, 1)), (BLOCK_V, BLOCK_R))
    return _gumbel(bits)


@triton.jit
def _best_key(
    logits, first_id, vocab_size, temperature_R, seed_R, position_R, sample_R,
    BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """[BLOCK_R] the best score and id of logits [BLOCK_V, BLOCK_R], packed."""
    scores = logits
    if tl.max(temperature_R, axis=0) >= GREEDY_BELOW:  # else no row needs noise
        noise = gumbel_noise(first_id, seed_R, position_R, sample_R, BLOCK_V, BLOCK_R)
        is_greedy = temperature_R < GREEDY_BELOW
        scale = tl.broadcast_to(tl.where(is_greedy, 1.0, temperature_R)[None, :], logits.shape)
        scores = tl.where(is_greedy[None, :], logits, tl.div_rn(logits, scale) + noise)
    scores = tl.where(scores == 0.0, 0.0, scores)  # -0 equals 0, but its bits are lower
    bits = scores.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    ids = (first_id + tl.arange(0, BLOCK_V))[:, None]
    keys = (ordered << 32) | (_ID_BITS - ids.to(tl.int64))
    keys = tl.where(tl.abs(logits) < float("inf"), keys, _BAD)
    keys = tl.where(ids < vocab_size, keys, _LOWEST)
    return tl.max(keys, axis=0)


@triton.jit
def _choose(
    best_R, r, is_r, key_ptr, counter_ptr, num_programs, rows_ptr, last_tokens_ptr, out_ptr
):
    """Add this program's best to the others'; the last of num_programs writes the ids."""
    tl.atomic_max(key_ptr + r, best_R, mask=is_r, sem="relaxed")
    tl.debug_barrier()  # all threads have stored before one of them says so
    num_done = tl.atomic_add(counter_ptr, 1, sem="acq_rel")
    if num_done == num_programs - 1:
        tl.debug_barrier()
        key = tl.load(key_ptr + r, mask=is_r, other=0, cache_modifier=".cg")
        is_bad = key == _BAD
        ids = _ID_BITS - (key & _ID_BITS)
        row = tl.load(rows_ptr + r, mask=is_r, other=0)
        tl.store(out_ptr + r, tl.where(is_bad, BAD_LOGITS, ids), mask=is_r)
        tl.store(last_tokens_ptr + row, tl.where(is_bad, 0, ids), mask=is_r)
        tl.store(key_ptr + r, tl.full(r.shape, _LOWEST, tl.int64), mask=is_r)
        tl.store(counter_ptr, 0)


@triton.jit
def _state(rows_ptr, positions_ptr, temperatures_ptr, seeds_ptr, samples_ptr, r, is_r):
    """Temperature, seed, position and sample index of requests r. All lie complete before the
    step's first kernel."""
    row = tl.load(rows_ptr + r, mask=is_r, other=0)
    temperature = tl.load(temperatures_ptr + row, mask=is_r, other=0.0)
    seed = tl.load(seeds_ptr + row, mask=is_r, other=0)
    sample = tl.load(samples_ptr + row, mask=is_r, other=0)
    position = tl.load(positions_ptr + r, mask=is_r, other=0)
    return temperature, seed, position, sample


@triton.jit(do_not_specialize=["vocab_size"])
def _head_gemv_kernel(
    x_ptr, norm_ptr, head_ptr, rows_ptr, positions_ptr, temperatures_ptr, seeds_ptr, samples_ptr,
    last_tokens_ptr, key_ptr, counter_ptr, out_ptr,
    eps, vocab_size,
    V: tl.constexpr, E: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NUM_TILES: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """One request. A warp takes whole rows of the head, a program NUM_TILES times BLOCK_N."""
    let_next_start(USE_PDL)
    pid = tl.program_id(0)
    r = tl.arange(0, 1)
    temperature, seed, position, sample = _state(
        rows_ptr, positions_ptr, temperatures_ptr, seeds_ptr, samples_ptr, r, r < 1
    )
    first_id = pid * NUM_TILES * BLOCK_N
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)[None, :]
    x_k = tl.broadcast_to(k, (BLOCK_N, BLOCK_K))
    IS_RAGGED: tl.constexpr = E % (GROUP * BLOCK_K) != 0
    tile = tl.arange(0, NUM_TILES)
    logits = tl.zeros((NUM_TILES, BLOCK_N), tl.float32)
    wait_for_inputs(USE_PDL)
    for t in tl.range(0, NUM_TILES):
        rows = first_id + t * BLOCK_N + n
        # Rows past the head's end are read as its last one: they are no ids.
        in_head = tl.minimum(rows, V - 1).to(tl.int64)
        acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        for k0 in tl.range(0, E, GROUP * BLOCK_K):
            group = ()
            for i in tl.static_range(GROUP):
                at = k0 + i * BLOCK_K + k
                pointers = head_ptr + in_head[:, None] * E + at
                if IS_RAGGED:
                    w = tl.load(pointers, mask=at < E, other=0.0, eviction_policy="evict_first")
                else:
                    w = tl.load(pointers, eviction_policy="evict_first")
                group += (w,)
            for i in tl.static_range(GROUP):
                at = k0 + i * BLOCK_K + x_k
                x = tl.load(x_ptr + at, mask=at < E, other=0.0).to(tl.float32)
                norm = tl.load(norm_ptr + at, mask=at < E, other=0.0).to(tl.float32)
                acc += group[i].to(tl.float32) * (x * norm)
        sums = tl.sum(acc, axis=1)
        logits = tl.where(tile[:, None] == t, sums[None, :], logits)

    squares = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for k0 in tl.range(0, E, BLOCK_K):
        x = tl.load(x_ptr + k0 + x_k, mask=k0 + x_k < E, other=0.0).to(tl.float32)
        squares += x * x
    scale = tl.rsqrt(tl.sum(squares, axis=1) / E + eps)
    logits = (logits * scale[None, :]).to(x_ptr.dtype.element_ty).to(tl.float32)
    best = _best_key(
        tl.reshape(logits, (NUM_TILES * BLOCK_N, 1)), first_id, vocab_size, temperature, seed,
        position, sample, NUM_TILES * BLOCK_N, 1,
    )  # fmt: skip
    _choose(
        best, r, r < 1, key_ptr, counter_ptr, tl.num_programs(0), rows_ptr, last_tokens_ptr, out_ptr
    )


@triton.jit(do_not_specialize=["R", "vocab_size"])
def _head_dot_kernel(
    x_ptr, norm_ptr, head_ptr, rows_ptr, positions_ptr, temperatures_ptr, seeds_ptr, samples_ptr,
    last_tokens_ptr, key_ptr, counter_ptr, out_ptr,
    eps, R, vocab_size,
    V: tl.constexpr, E: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Up to MAX_ROWS requests and BLOCK_N rows of the head."""
    let_next_start(USE_PDL)
    pid = tl.program_id(0)
    r = tl.arange(0, BLOCK_R)
    temperature, seed, position, sample = _state(
        rows_ptr, positions_ptr, temperatures_ptr, seeds_ptr, samples_ptr, r, r < R
    )
    rows = pid * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = rows < V
    SPAN: tl.constexpr = (E + BLOCK_K - 1) // BLOCK_K * BLOCK_K
    k = tl.arange(0, BLOCK_K)
    first_w = tl.load(
        head_ptr + rows.to(tl.int64)[:, None] * E + k[None, :],
        mask=is_row[:, None] & (k < E)[None, :], other=0.0, eviction_policy="evict_first",
    )  # fmt: skip
    wait_for_inputs(USE_PDL)
    acc, square = dot_rows(
        first_w, x_ptr, head_ptr, norm_ptr, rows, is_row, R, 0, E,
        E, SPAN, BLOCK_R, BLOCK_N, BLOCK_K, 1, True, True, PRECISION,
    )  # fmt: skip
    dtype = x_ptr.dtype.element_ty
    logits = (acc * rms_scale(square, eps, E, dtype)[None, :]).to(dtype).to(tl.float32)
    best = _best_key(
        logits, pid * BLOCK_N, vocab_size, temperature, seed, position, sample, BLOCK_N, BLOCK_R
    )
    _choose(
        best, r, r < R, key_ptr, counter_ptr, tl.num_programs(0), rows_ptr, last_tokens_ptr, out_ptr
    )


@triton.jit(do_not_specialize=["vocab_size"])
def _sample_logits_kernel(
    logits_ptr, rows_ptr, positions_ptr, temperatures_ptr, seeds_ptr, samples_ptr,
    last_tokens_ptr, key_ptr, counter_ptr, out_ptr,
    vocab_size, row_stride,
    BLOCK_V: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """One request and every NUM_PROGRAMS-th block of its logits."""
    let_next_start(USE_PDL)
    r = tl.program_id(0) + tl.arange(0, 1)
    is_r = r >= 0
    temperature, seed, position, sample = _state(
        rows_ptr, positions_ptr, temperatures_ptr, seeds_ptr, samples_ptr, r, is_r
    )
    logits_ptr += tl.program_id(0).to(tl.int64) * row_stride
    v = tl.arange(0, BLOCK_V)
    best = tl.full((1,), _LOWEST, tl.int64)
    wait_for_inputs(USE_PDL)
    block = tl.program_id(1)
    while block * BLOCK_V < vocab_size:
        ids = block * BLOCK_V + v
        logits = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=0.0).to(tl.float32)
        key = _best_key(
            logits[:, None], block * BLOCK_V, vocab_size, temperature, seed, position, sample,
            BLOCK_V, 1,
        )  # fmt: skip
        best = tl.maximum(best, key)
        block += tl.num_programs(1)
    counter_ptr += tl.program_id(0)
    _choose(
        best, r, is_r, key_ptr, counter_ptr, tl.num_programs(1), rows_ptr, last_tokens_ptr, out_ptr
    )


@dataclass(frozen=True, slots=True)
class HeadScratch:
    """What the programs of one choice share, as every launch finds and leaves it."""

    keys: Tensor
    """[MAX_REQUESTS] int64, the lowest there is."""
    counters: Tensor
    """[MAX_REQUESTS] int32, zeros."""

    MAX_REQUESTS = 4096

    @classmethod
    def allocate(cls, device: torch.device) -> HeadScratch:
        return cls(
            torch.full((cls.MAX_REQUESTS,), _LOWEST.value, dtype=torch.int64, device=device),
            torch.zeros(cls.MAX_REQUESTS, dtype=torch.int32, device=device),
        )


def head_sample(
    x_RE: Tensor,
    norm_E: Tensor,
    eps: float,
    head_VE: Tensor,
    *,
    vocab_size: int,
    rows_R: Tensor,
    positions_R: Tensor,
    temperatures_W: Tensor,
    seeds_W: Tensor,
    sample_indices_W: Tensor,
    last_tokens_W: Tensor,
    scratch: HeadScratch,
    out_R: Tensor,
) -> None:
    """Choose each request's next token from the last hidden state: norm, head and sampling.

    Shapes:
        x_RE              bf16, fp16 or fp32, contiguous, R from 1 to MAX_ROWS; not yet normalised
        norm_E, head_VE   dtype of x, contiguous
        vocab_size        ids from here on are no tokens
        rows_R            int32, the row of the batch state that belongs to each request
        positions_R       int32 or int64, place of the new token in its request
        temperatures_W    fp32; below 1e-5 the highest logit wins, the lowest id among equals
        seeds_W, sample_indices_W   int64, any seed, indices in [0, 2**32)
        last_tokens_W     int64, set to the chosen id, or 0 for none, at each request's row
        out_R             int64, set to the chosen ids, or -2 where a token's logit is NaN or Inf

    Raises:
        ValueError: R outside 1..MAX_ROWS, or shapes, dtypes or strides that do not fit.

    Not checked: rows in range, and no row twice. Sums in fp32, then rounded to the dtype of x like
    a head's output. Same ids as head_sample_reference of those logits, other roundings apart. A
    request's noise does not depend on the batch.
    Source: Gumbel-max, Maddison et al. 2014, arXiv:1411.0030; Philox, Salmon et al. 2011.
    """
    R, (V, E) = x_RE.shape[0], head_VE.shape
    if not 1 <= R <= MAX_ROWS:
        raise ValueError(f"{R} requests; this kernel takes 1 to {MAX_ROWS}")
    if x_RE.shape != (R, E) or norm_E.shape != (E,):
        raise ValueError(
            f"x is {tuple(x_RE.shape)}, norm {tuple(norm_E.shape)}, not {(R, E)} and {(E,)}"
        )
    if not x_RE.dtype == norm_E.dtype == head_VE.dtype:
        raise ValueError(
            f"dtypes differ: x {x_RE.dtype}, norm {norm_E.dtype}, head {head_VE.dtype}"
        )
    if not (x_RE.is_contiguous() and norm_E.is_contiguous() and head_VE.is_contiguous()):
        raise ValueError("x, norm and head must be contiguous")
    _check(R, V, vocab_size, rows_R, positions_R, out_R)
    arguments = (
        x_RE, norm_E, head_VE, rows_R, positions_R, temperatures_W, seeds_W, sample_indices_W,
        last_tokens_W, scratch.keys, scratch.counters, out_R, eps,
    )  # fmt: skip
    options = launch_options(x_RE.device)
    itemsize = x_RE.element_size()
    if R == 1:
        tile = gemv_options(E, itemsize)
        grid = (triton.cdiv(V, tile["BLOCK_N"] * tile["NUM_TILES"]),)
        _head_gemv_kernel[grid](*arguments, vocab_size, V=V, E=E, **tile, **options)
        return
    tile = dot_options(R, E, itemsize)
    _head_dot_kernel[(triton.cdiv(V, tile["BLOCK_N"]),)](
        *arguments, R, vocab_size, V=V, E=E,
        PRECISION="ieee" if x_RE.dtype == torch.float32 else "tf32", **tile, **options,
    )  # fmt: skip


def sample_logits(
    logits_RV: Tensor,
    *,
    vocab_size: int,
    rows_R: Tensor,
    positions_R: Tensor,
    temperatures_W: Tensor,
    seeds_W: Tensor,
    sample_indices_W: Tensor,
    last_tokens_W: Tensor,
    scratch: HeadScratch,
    out_R: Tensor,
) -> None:
    """Choose each request's next token from its logits: head_sample for any number of requests.

    Shapes:
        logits_RV   bf16, fp16 or fp32, last dim contiguous; R up to HeadScratch.MAX_REQUESTS
        the rest    as head_sample

    Raises:
        ValueError: more requests than the scratch has room for, or shapes that do not fit.
    """
    R, V = logits_RV.shape
    if not 1 <= R <= scratch.keys.shape[0]:
        raise ValueError(f"{R} requests; the scratch takes 1 to {scratch.keys.shape[0]}")
    if logits_RV.stride(1) != 1:
        raise ValueError(f"logits have strides {logits_RV.stride()}; ids must be contiguous")
    _check(R, V, vocab_size, rows_R, positions_R, out_R)
    num_programs = max(1, min(1056 // R, triton.cdiv(vocab_size, SAMPLE_BLOCK)))
    _sample_logits_kernel[(R, num_programs)](
        logits_RV, rows_R, positions_R, temperatures_W, seeds_W, sample_indices_W, last_tokens_W,
        scratch.keys, scratch.counters, out_R, vocab_size, logits_RV.stride(0),
        BLOCK_V=SAMPLE_BLOCK, num_warps=4, **launch_options(logits_RV.device),
    )  # fmt: skip


SAMPLE_BLOCK = 1024
"""Logits that a program of sample_logits takes at a time."""


def gemv_options(E: int, itemsize: int) -> dict[str, int]:
    """A warp reads 512 bytes of a row at once, up to 3 KB of each of its two rows."""
    width = 512 // itemsize
    group = min(6, triton.cdiv(E, width))
    return {"BLOCK_N": 8, "BLOCK_K": width, "GROUP": group, "NUM_TILES": 4, "num_warps": 4}


def dot_options(R: int, E: int, itemsize: int) -> dict[str, int]:
    block_k = max(16, min(256 // itemsize, triton.next_power_of_2(E)))
    block_r = max(16, triton.next_power_of_2(R))
    return {"BLOCK_R": block_r, "BLOCK_N": 64, "BLOCK_K": block_k, "num_warps": 4}


def _check(
    R: int, V: int, vocab_size: int, rows_R: Tensor, positions_R: Tensor, out_R: Tensor
) -> None:
    if not 1 <= vocab_size <= V:
        raise ValueError(f"vocab_size {vocab_size} is not from 1 to the {V} logits there are")
    for name, tensor in (("rows", rows_R), ("positions", positions_R), ("out", out_R)):
        if tensor.shape != (R,) or not tensor.is_contiguous():
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not {(R,)}, or has gaps")
