"""The choice of the next token, from the last hidden state or from logits.

R requests, E hidden size, V rows of the head, W rows of the batch state

A program keeps the best of some ids of a request. Score and id are packed into one int64, larger
for a higher score and, among equal scores, for a lower id, so that the best of all programs is an
atomic maximum, in any order. The program that is done last writes the id.

A request with a temperature of 1e-5 or more takes the maximum of logits / temperature plus Gumbel
noise, which is a sample of the softmax. Noise is Philox4x32-10 of the request's seed and place:
key = seed, counter = (id // 4, position, sample index, 0), word id % 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pico_vllm.kernels.launch import cdiv, launch_options, let_next_start, wait_for_inputs
from pico_vllm.kernels.small_linear import LinearScratch, small_linear

GREEDY_BELOW = tl.constexpr(1e-5)
BLOCK_V = 1024
"""Logits that a program takes at a time."""
MOST_PROGRAMS = 1056
"""Eight on each of 132 multiprocessors."""
MAX_REGISTERS = 96
"""Per thread, of which noise would take more, and greedy rows wait for room. 256 rows of 151,936
logits took 38.7 us on an H200, so 35.5; with one load a turn, logit by logit, 46.5."""
BAD_LOGITS = tl.constexpr(-2)
"""Instead of an id, where a logit is NaN or infinite."""
_LOWEST = tl.constexpr(-(2**63))
_BAD = tl.constexpr(2**63 - 1)
_INFINITY_BITS = tl.constexpr(0x7F800000)
LOWEST_FP16, LOWEST_BF16, LOWEST_FP32 = (
    tl.constexpr(torch.finfo(dtype).min) for dtype in (torch.float16, torch.bfloat16, torch.float32)
)
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
def gumbel_noise(first_id, seed, position, sample, BLOCK_V: tl.constexpr):
    """[BLOCK_V] noise of the ids from first_id on, which is a multiple of 4."""
    c0 = (first_id // 4 + tl.arange(0, BLOCK_V // 4)).to(tl.uint32)
    zeros = c0 * 0
    c1 = zeros + position.to(tl.int64).to(tl.uint32)
    c2 = zeros + sample.to(tl.int64).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, c2, zeros)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [.., i, j] is word 2 i + j
    return _gumbel(tl.reshape(words, (BLOCK_V,)))


@triton.jit
def gumbel_noise_of(ids, seed, position, sample):
    """The noise of any ids."""
    c0 = (ids // 4).to(tl.uint32)
    zeros = c0 * 0
    c1 = zeros + position.to(tl.int64).to(tl.uint32)
    c2 = zeros + sample.to(tl.int64).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, c2, zeros)
    word = ids % 4
    return _gumbel(tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3)))


@triton.jit
def _load_block(logits_ptr, block, vocab_size, fill, BLOCK_V: tl.constexpr):
    """In fp32; `fill` past the vocabulary."""
    v = block * BLOCK_V + tl.arange(0, BLOCK_V)
    logits = tl.full((BLOCK_V,), fill, logits_ptr.dtype.element_ty)
    # A load without a mask is several times wider.
    if (block + 1) * BLOCK_V <= vocab_size:
        logits = tl.load(logits_ptr + v)
    elif block * BLOCK_V < vocab_size:
        logits = tl.load(logits_ptr + v, mask=v < vocab_size, other=fill)
    return logits.to(tl.float32)


@triton.jit
def _load_blocks(logits_ptr, block, step, vocab_size, fill, BLOCK_V: tl.constexpr):
    """Four loads are under way: few programs share a multiprocessor."""
    return (
        _load_block(logits_ptr, block, vocab_size, fill, BLOCK_V),
        _load_block(logits_ptr, block + step, vocab_size, fill, BLOCK_V),
        _load_block(logits_ptr, block + 2 * step, vocab_size, fill, BLOCK_V),
        _load_block(logits_ptr, block + 3 * step, vocab_size, fill, BLOCK_V),
    )


@triton.jit
def _best_logit(logits_ptr, vocab_size, BLOCK_V: tl.constexpr):
    """The highest logit of a program's blocks, the lowest id that has it, and whether any of them
    is NaN or infinite. Where it lies among four blocks is looked up at the end."""
    v = tl.arange(0, BLOCK_V)
    best = tl.full((BLOCK_V,), float("-inf"), tl.float32)
    best_block = tl.zeros((BLOCK_V,), tl.int32)
    zeros = tl.zeros((BLOCK_V,), tl.float32)
    # The lowest there is: no logit is below it, and among equals a token's id is.
    fill: tl.constexpr = LOWEST_FP16 if logits_ptr.dtype.element_ty == tl.float16 else (
        LOWEST_BF16 if logits_ptr.dtype.element_ty == tl.bfloat16 else LOWEST_FP32
    )  # fmt: skip
    block, step = tl.program_id(1), tl.num_programs(1)
    while block * BLOCK_V < vocab_size:
        x0, x1, x2, x3 = _load_blocks(logits_ptr, block, step, vocab_size, fill, BLOCK_V)
        zeros += ((x0 - x0) + (x1 - x1)) + ((x2 - x2) + (x3 - x3))  # NaN of what is not finite
        highest = tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))
        best_block = tl.where(highest > best, block, best_block)
        best = tl.maximum(highest, best)
        block += 4 * step
    is_bad = tl.max((zeros != 0.0).to(tl.int32), axis=0) != 0
    score = tl.max(best, axis=0)
    if step * BLOCK_V >= vocab_size:  # each program has one block
        best_id = tl.where(best == score, best_block * BLOCK_V + v, 0x7FFFFFFF)
    else:
        best_id = tl.full((BLOCK_V,), 0x7FFFFFFF, tl.int32)
        for i in tl.static_range(4):
            ids = (best_block + i * step) * BLOCK_V + v
            is_there = (best == score) & (ids < vocab_size)
            x = tl.load(logits_ptr + ids, mask=is_there, other=0.0).to(tl.float32)
            best_id = tl.minimum(best_id, tl.where(is_there & (x == score), ids, 0x7FFFFFFF))
    return score, tl.min(best_id, axis=0), is_bad


@triton.jit
def _best_with_noise(
    logits_ptr, vocab_size, per_temperature, seed, position, sample, BLOCK_V: tl.constexpr
):
    """The same of logits / temperature + Gumbel noise."""
    v = tl.arange(0, BLOCK_V)
    best = tl.full((BLOCK_V,), float("-inf"), tl.float32)
    best_block = tl.zeros((BLOCK_V,), tl.int32)
    largest = tl.zeros((BLOCK_V,), tl.int32)
    block, step = tl.program_id(1), tl.num_programs(1)
    while block * BLOCK_V < vocab_size:
        loaded = _load_blocks(logits_ptr, block, step, vocab_size, 0.0, BLOCK_V)
        for i in tl.static_range(4):
            if block * BLOCK_V < vocab_size:
                logits = loaded[i]
                # Without the sign the bits of Inf and NaN are the largest.
                largest = tl.maximum(largest, logits.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
                noise = gumbel_noise(block * BLOCK_V, seed, position, sample, BLOCK_V)
                scores = logits * per_temperature + noise
                is_better = (block * BLOCK_V + v < vocab_size) & (scores > best)
                best = tl.where(is_better, scores, best)
                best_block = tl.where(is_better, block, best_block)
            block += step
    score = tl.max(best, axis=0)
    ids = tl.where(best == score, best_block * BLOCK_V + v, 0x7FFFFFFF)
    return score, tl.min(ids, axis=0), tl.max(largest, axis=0) >= _INFINITY_BITS


@triton.jit(do_not_specialize=["vocab_size"])
def _sample_logits_kernel(
    logits_ptr, rows_ptr, positions_ptr, temperatures_ptr, seeds_ptr, samples_ptr,
    last_tokens_ptr, key_ptr, counter_ptr, out_ptr,
    vocab_size, row_stride,
    BLOCK_V: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """One request and every num_programs(1)-th block of its logits."""
    let_next_start(USE_PDL)
    r = tl.program_id(0)
    # What the requests ask for lies complete before the step's first kernel.
    row = tl.load(rows_ptr + r)
    temperature = tl.load(temperatures_ptr + row)
    seed = tl.load(seeds_ptr + row)
    sample = tl.load(samples_ptr + row)
    position = tl.load(positions_ptr + r)
    is_sampled = temperature >= GREEDY_BELOW
    per_temperature = 1.0 / tl.where(is_sampled, temperature, 1.0)
    logits_ptr += r.to(tl.int64) * row_stride
    wait_for_inputs(USE_PDL)
    if is_sampled:
        score, token_id, is_bad = _best_with_noise(
            logits_ptr, vocab_size, per_temperature, seed, position, sample, BLOCK_V
        )
    else:
        score, token_id, is_bad = _best_logit(logits_ptr, vocab_size, BLOCK_V)

    score = tl.where(score == 0.0, 0.0, score)  # -0 equals 0, but its bits are lower
    bits = score.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    key = (ordered << 32) | (_ID_BITS - token_id.to(tl.int64))
    key = tl.where(is_bad, _BAD, key)
    tl.atomic_max(key_ptr + r, key, sem="relaxed")
    num_done = tl.atomic_add(counter_ptr + r, 1, sem="acq_rel")
    if num_done == tl.num_programs(1) - 1:
        # A read that no other program's write can have missed, and that puts the key back.
        key = tl.atomic_xchg(key_ptr + r, tl.full((), _LOWEST, tl.int64), sem="relaxed")
        is_bad = key == _BAD
        best_id = _ID_BITS - (key & _ID_BITS)
        tl.store(out_ptr + r, tl.where(is_bad, BAD_LOGITS, best_id))
        tl.store(last_tokens_ptr + row, tl.where(is_bad, 0, best_id))
        tl.store(counter_ptr + r, 0)


@dataclass(frozen=True, slots=True)
class HeadScratch:
    """What the programs of one choice share, as every launch finds and leaves it."""

    keys: Tensor
    """[MAX_REQUESTS] int64, the lowest there is."""
    counters: Tensor
    """[MAX_REQUESTS] int32, zeros."""
    linear: LinearScratch

    MAX_REQUESTS = 4096

    @classmethod
    def allocate(cls, device: torch.device) -> HeadScratch:
        return cls(
            torch.full((cls.MAX_REQUESTS,), _LOWEST.value, dtype=torch.int64, device=device),
            torch.zeros(cls.MAX_REQUESTS, dtype=torch.int32, device=device),
            LinearScratch.allocate(device),
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
) -> Tensor:
    """Choose each request's next token from the last hidden state: norm, head and sampling.

    Shapes:
        x_RE              bf16, fp16 or fp32, contiguous, R from 1 to MAX_ROWS; not yet normalised
        norm_E, head_VE   dtype of x, contiguous
        the rest          as sample_logits
        returns           the logits, [R, V] in dtype of x, for whoever chooses once more

    Raises:
        ValueError: R outside 1..MAX_ROWS, or shapes, dtypes or strides that do not fit.

    The logits exist in memory, for one more short kernel: with the choice at the end of the head's
    own programs both took longer (114 us instead of 105 at one request, 159 instead of 131 at 64).
    """
    vectors = {"rows": rows_R, "positions": positions_R, "out": out_R}
    check_requests(x_RE.shape[0], head_VE.shape[0], vocab_size, vectors)
    logits_RV = small_linear(x_RE, head_VE, norm_K=norm_E, eps=eps, scratch=scratch.linear)
    sample_logits(
        logits_RV, vocab_size=vocab_size, rows_R=rows_R, positions_R=positions_R,
        temperatures_W=temperatures_W, seeds_W=seeds_W, sample_indices_W=sample_indices_W,
        last_tokens_W=last_tokens_W, scratch=scratch, out_R=out_R,
    )  # fmt: skip
    return logits_RV


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
    """Choose each request's next token from its logits.

    Shapes:
        logits_RV         bf16, fp16 or fp32, ids contiguous; R up to HeadScratch.MAX_REQUESTS
        vocab_size        ids from here on are no tokens
        rows_R            int32, the row of the batch state that belongs to each request
        positions_R       int32 or int64, place of the new token in its request
        temperatures_W    fp32; below 1e-5 the highest logit wins, the lowest id among equals
        seeds_W, sample_indices_W   int64, any seed, indices in [0, 2**32)
        last_tokens_W     int64, set to the chosen id, or 0 for none, at each request's row
        out_R             int64, set to the chosen ids, or -2 where a token's logit is NaN or Inf

    Raises:
        ValueError: more requests than the scratch has room for, or shapes that do not fit.

    Not checked: rows in range, and no row twice. Same ids as head_sample_reference, but where the
    noise's rounding decides. A request's id does not depend on the batch.
    Source: Gumbel-max, Maddison et al. 2014, arXiv:1411.0030; Philox, Salmon et al. 2011.
    """
    R, V = logits_RV.shape
    if not 1 <= R <= scratch.keys.shape[0]:
        raise ValueError(f"{R} requests; the scratch takes 1 to {scratch.keys.shape[0]}")
    if logits_RV.stride(1) != 1:
        raise ValueError(f"logits have strides {logits_RV.stride()}; ids must be contiguous")
    vectors = {"rows": rows_R, "positions": positions_R, "out": out_R}
    check_requests(R, V, vocab_size, vectors)
    num_programs = max(1, min(MOST_PROGRAMS // R, cdiv(vocab_size, BLOCK_V)))
    _sample_logits_kernel[(R, num_programs)](
        logits_RV, rows_R, positions_R, temperatures_W, seeds_W, sample_indices_W, last_tokens_W,
        scratch.keys, scratch.counters, out_R, vocab_size, logits_RV.stride(0),
        BLOCK_V=BLOCK_V, num_warps=4, maxnreg=MAX_REGISTERS, **launch_options(logits_RV.device),
    )  # fmt: skip


def check_requests(R: int, V: int, vocab_size: int, vectors: Mapping[str, Tensor]) -> None:
    """Raises ValueError where ids are more than the head has, or a vector is not of requests."""
    if not 1 <= vocab_size <= V:
        raise ValueError(f"vocab_size {vocab_size} is not from 1 to the {V} logits there are")
    for name, tensor in vectors.items():
        if tensor.shape != (R,) or not tensor.is_contiguous():
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not {(R,)}, or has gaps")
