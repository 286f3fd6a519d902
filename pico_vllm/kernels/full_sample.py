"""The choice of the next token where a request asks for more than temperature: logit bias,
penalties, a minimum of tokens, top-k, top-p and min-p.

R requests, V tokens, W rows of the batch state, C columns: V rounded up, F numbers, B biases,
E ending ids

It follows `sample_logits`, whose choice stands for all other requests and is the first candidate
where only filters are asked for. One program a request; those without anything to do leave at once.

Nothing is sorted. What filters keep is the top of the ranking, so a candidate is drawn from all
that may still be kept, and if it is not kept itself then nothing ranked below it is: the next one
is drawn from what ranks above. This samples exactly, and ends, since the largest is always kept.
Candidates are looked for in a list of the largest where it is known to hold all that is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pico_vllm.kernels import candidates
from pico_vllm.kernels.candidates import (
    LIST_DEPTH,
    LOWEST_KEY,
    MINUS_INFINITY,
    NUM_STAGES,
    RowScratch,
    check_scratch,
    find_lanes,
    from_key,
    is_above,
    keep_logits,
    lane_bound,
    list_largest,
    load_candidates,
    load_last,
    to_key,
    without_minus_zero,
)
from pico_vllm.kernels.head_sample import (
    BAD_LOGITS,
    GREEDY_BELOW,
    gumbel_noise,
    gumbel_noise_of,
)
from pico_vllm.kernels.launch import (
    NUM_MULTIPROCESSORS,
    launch_options,
    let_next_start,
    wait_for_inputs,
)

# Places of a row's numbers; the fp32 ones as their bits.
TOP_K = tl.constexpr(0)  # 0 keeps all
TOP_P = tl.constexpr(1)
MIN_P = tl.constexpr(2)
PRESENCE = tl.constexpr(3)
FREQUENCY = tl.constexpr(4)
REPETITION = tl.constexpr(5)
HAS_PENALTIES = tl.constexpr(6)
NUM_BIASES = tl.constexpr(7)
NUM_ENDING_IDS = tl.constexpr(8)
MAY_END_AT = tl.constexpr(9)
"""Ending ids are masked before this position."""
FIRST_SAMPLED = tl.constexpr(10)
"""Before this position nothing is chosen: the prompt is not complete."""
NUM_LOGPROBS = tl.constexpr(11)
"""-1 for none, not even of the chosen token."""
NUM_NUMBERS = tl.constexpr(12)
GUESS_LANES = tl.constexpr(8)
"""Where no top-k says it, the list begins at the largest BLOCK_V / GUESS_LANES lanes."""


@dataclass(frozen=True, slots=True)
class AskedRows:
    """What the requests of the batch state ask for."""

    numbers_WF: Tensor
    """int32 [W, NUM_NUMBERS]"""
    bias_ids_WB: Tensor
    """int32"""
    biases_WB: Tensor
    """fp32"""
    ending_ids_WE: Tensor
    """int32"""
    counts_WC: Tensor
    """int32, as in kernels/penalty_counts.py; of rows without penalties undefined"""


def full_sample_reference(
    logits_V: Tensor,
    noise_V: Tensor,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    repetition: float = 1.0,
    counts_V: Tensor | None = None,
    biases: Mapping[int, float] | None = None,
    ending_ids: Sequence[int] = (),
) -> int:
    """One request. ending_ids: those that are masked now."""
    if not bool(logits_V.isfinite().all()):
        return BAD_LOGITS.value
    x_V = logits_V.float().clone()
    for token_id, bias in (biases or {}).items():
        x_V[token_id] += bias
    if counts_V is not None:
        num_output_V = counts_V & 0x7FFFFFFF
        penalised_V = torch.where(x_V > 0, x_V / repetition, x_V * repetition)
        x_V = torch.where(counts_V != 0, penalised_V, x_V)
        x_V = x_V - frequency * num_output_V - presence * (num_output_V > 0)
    x_V[list(ending_ids)] = float("-inf")
    if temperature < GREEDY_BELOW.value:
        return int(x_V.argmax())
    x_V = (x_V - x_V.max()) / temperature
    sorted_V, ids_V = x_V.sort(descending=True, stable=True)
    is_kept_V = torch.arange(len(x_V), device=x_V.device) < (top_k or len(x_V))
    probs_V = sorted_V.exp() * is_kept_V
    is_kept_V &= probs_V.cumsum(0) - probs_V < top_p * probs_V.sum()
    is_kept_V &= probs_V >= min_p
    is_kept_V[0] = True
    scores_V = (sorted_V + noise_V[ids_V]).where(is_kept_V, float("-inf"))
    return int(ids_V[scores_V == scores_V.max()].min())


@triton.jit
def _penalised(x, count, repetition, frequency, presence):
    num_outputs = (count & 0x7FFFFFFF).to(tl.float32)
    factored = tl.where(x > 0.0, tl.div_rn(x, repetition + tl.zeros_like(x)), x * repetition)
    x = tl.where(count != 0, factored, x)
    x = x - frequency * num_outputs
    x = tl.where(num_outputs > 0.0, x - presence, x)
    return tl.where(x == 0.0, 0.0, x)


@triton.jit
def _keep_penalised(
    logits_ptr, row_ptr, counts_ptr, num_columns, vocab_size, repetition, frequency, presence,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """As keep_logits. What lies in the count of no token does not matter."""
    v = tl.arange(0, BLOCK_V)
    lanes = tl.full((BLOCK_V,), MINUS_INFINITY, tl.float32)
    num_full = vocab_size // BLOCK_V * BLOCK_V
    for start in tl.range(0, num_full, BLOCK_V, num_stages=NUM_STAGES):
        x = tl.load(logits_ptr + start + v).to(tl.float32)
        count = tl.load(counts_ptr + start + v)
        x = _penalised(x, count, repetition, frequency, presence)
        tl.store(row_ptr + start + v, x)
        lanes = tl.maximum(lanes, x)
    if num_full < num_columns:
        x = load_last(logits_ptr, num_full, vocab_size, BLOCK_V)
        count = tl.load(counts_ptr + num_full + v, mask=num_full + v < vocab_size, other=0)
        x = _penalised(x, count, repetition, frequency, presence)
        tl.store(row_ptr + num_full + v, x)
        lanes = tl.maximum(lanes, x)
    tl.debug_barrier()
    return lanes


@triton.jit
def _keep_adjusted(
    logits_ptr, row_ptr, num_columns, numbers_ptr, counts_ptr, bias_ids_ptr, biases_ptr,
    ending_ids_ptr, num_ending_ids, vocab_size, BLOCK_V: tl.constexpr, BLOCK_IDS: tl.constexpr,
):  # fmt: skip
    """Copy a row to scratch memory with logit biases, penalties and masks; returns the lanes'
    largest of that."""
    has_penalties = tl.load(numbers_ptr + HAS_PENALTIES) != 0
    repetition = tl.load(numbers_ptr + REPETITION).to(tl.float32, bitcast=True)
    frequency = tl.load(numbers_ptr + FREQUENCY).to(tl.float32, bitcast=True)
    presence = tl.load(numbers_ptr + PRESENCE).to(tl.float32, bitcast=True)
    num_biases = tl.load(numbers_ptr + NUM_BIASES)
    if has_penalties:
        lanes = _keep_penalised(
            logits_ptr, row_ptr, counts_ptr, num_columns, vocab_size, repetition, frequency,
            presence, BLOCK_V,
        )  # fmt: skip
    else:
        lanes, _ = keep_logits(
            logits_ptr, row_ptr, num_columns, vocab_size, MINUS_INFINITY, BLOCK_V
        )
    i = tl.arange(0, BLOCK_IDS)
    for start in range(0, num_biases, BLOCK_IDS):
        is_there = start + i < num_biases
        ids = tl.load(bias_ids_ptr + start + i, mask=is_there, other=0)
        biases = tl.load(biases_ptr + start + i, mask=is_there, other=0.0)
        x = without_minus_zero(tl.load(logits_ptr + ids).to(tl.float32) + biases)
        if has_penalties:
            x = _penalised(x, tl.load(counts_ptr + ids), repetition, frequency, presence)
        tl.store(row_ptr + ids, x, mask=is_there)
    tl.debug_barrier()
    for start in range(0, num_ending_ids, BLOCK_IDS):
        is_there = start + i < num_ending_ids
        ids = tl.load(ending_ids_ptr + start + i, mask=is_there, other=0)
        tl.store(row_ptr + ids, tl.full((BLOCK_IDS,), MINUS_INFINITY, tl.float32), mask=is_there)
    tl.debug_barrier()
    if num_biases + num_ending_ids > 0:
        lanes = find_lanes(row_ptr, num_columns, BLOCK_V)
    return lanes


@triton.jit
def _cut_after(
    values_ptr, list_ids_ptr, num_values, is_list, k, num_columns, BLOCK_V: tl.constexpr
):
    """Key and id of which exactly k tokens are above."""
    key = tl.full((), LOWEST_KEY, tl.int64)
    num_above = 0
    num_reaching = 0
    for i in range(32):
        trial = key + (tl.full((), 1, tl.int64) << (31 - i))
        counts = tl.zeros((BLOCK_V,), tl.int32)
        for start in range(0, num_values, BLOCK_V):
            keys = to_key(tl.load(values_ptr + start + tl.arange(0, BLOCK_V)))
            counts += (keys >= trial.to(tl.int32)).to(tl.int32)
        count = tl.sum(counts, axis=0)
        key = tl.where(count >= k, trial, key)
        num_reaching = tl.where(count >= k, count, num_reaching)
        num_above = tl.where(count >= k, num_above, count)
    kth_key = key.to(tl.int32)
    cut_id = 0x7FFFFFFF
    if num_reaching > k:
        # Of the tokens equal to the k-th those of lower ids. The largest id below which there are
        # fewer than that many of them is the last one's.
        last_id = 0
        step = 1
        while step < num_columns:
            step *= 2
        while step > 0:
            counts = tl.zeros((BLOCK_V,), tl.int32)
            for start in range(0, num_values, BLOCK_V):
                x, ids = load_candidates(values_ptr, list_ids_ptr, start, is_list, BLOCK_V)
                is_below = (to_key(x) == kth_key) & (ids < last_id + step)
                counts += is_below.to(tl.int32)
            last_id = tl.where(tl.sum(counts, axis=0) < k - num_above, last_id + step, last_id)
            step >>= 1
        cut_id = last_id + 1
    return kth_key, cut_id


@triton.jit
def _mass_above(
    values_ptr, list_ids_ptr, num_values, is_list, key, token_id, largest, per_temperature,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The sum of exp((logit - largest) / temperature) over what ranks above a token."""
    masses = tl.zeros((BLOCK_V,), tl.float32)
    for start in range(0, num_values, BLOCK_V):
        x, ids = load_candidates(values_ptr, list_ids_ptr, start, is_list, BLOCK_V)
        mass = tl.exp((x - largest) * per_temperature)
        masses += tl.where(is_above(to_key(x), ids, key, token_id), mass, 0.0)
    return tl.sum(masses, axis=0)


@triton.jit
def _draw(
    values_ptr, list_ids_ptr, num_values, is_list, key, token_id, is_sampled, largest,
    per_temperature, log_min_p, seed, position, sample, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The best score among what ranks above a token and has min-p, and there the lowest id."""
    best = tl.full((BLOCK_V,), MINUS_INFINITY, tl.float32)
    best_ids = tl.full((BLOCK_V,), 0x7FFFFFFF, tl.int32)
    for start in range(0, num_values, BLOCK_V):
        x, ids = load_candidates(values_ptr, list_ids_ptr, start, is_list, BLOCK_V)
        distances = (x - largest) * per_temperature
        scores = x
        if is_sampled:
            if is_list:
                noise = gumbel_noise_of(ids, seed, position, sample)
            else:
                noise = gumbel_noise(start, seed, position, sample, BLOCK_V)
            # The largest has a finite score, so there is always a best one.
            scores = distances + noise
        is_better = is_above(to_key(x), ids, key, token_id) & (distances >= log_min_p)
        is_better &= scores > best
        best = tl.where(is_better, scores, best)
        best_ids = tl.where(is_better, ids, best_ids)
    best_ids = tl.where(best == tl.max(best, axis=0), best_ids, 0x7FFFFFFF)
    return tl.min(best_ids, axis=0)


@triton.jit
def _logit_of(token_id, logits_ptr, values_ptr, is_adjusted):
    """As it was kept, where it was adjusted."""
    if is_adjusted:
        x = tl.load(values_ptr + token_id)
    else:
        x = without_minus_zero(tl.load(logits_ptr + token_id).to(tl.float32))
    return x


@triton.jit(do_not_specialize=["vocab_size"])
def _full_sample_kernel(
    logits_ptr, rows_ptr, positions_ptr, temperatures_ptr, seeds_ptr, samples_ptr,
    numbers_ptr, bias_ids_ptr, biases_ptr, ending_ids_ptr, counts_ptr,
    last_tokens_ptr, values_ptr, list_ids_ptr, out_ptr,
    vocab_size, row_stride, num_columns, counts_stride,
    NUM_NUMBERS: tl.constexpr, MAX_BIASES: tl.constexpr, MAX_ENDING_IDS: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_IDS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(USE_PDL)
    r = tl.program_id(0).to(tl.int64)
    # What the requests ask for lies complete before the step's first kernel.
    row = tl.load(rows_ptr + r).to(tl.int64)
    position = tl.load(positions_ptr + r)
    temperature = tl.load(temperatures_ptr + row)
    seed = tl.load(seeds_ptr + row)
    sample = tl.load(samples_ptr + row)
    numbers_ptr += row * NUM_NUMBERS
    top_k = tl.load(numbers_ptr + TOP_K)
    top_p = tl.load(numbers_ptr + TOP_P).to(tl.float32, bitcast=True)
    min_p = tl.load(numbers_ptr + MIN_P).to(tl.float32, bitcast=True)
    has_penalties = tl.load(numbers_ptr + HAS_PENALTIES) != 0
    num_ending_ids = tl.load(numbers_ptr + NUM_ENDING_IDS)
    num_ending_ids = tl.where(position < tl.load(numbers_ptr + MAY_END_AT), num_ending_ids, 0)
    is_adjusted = has_penalties | (tl.load(numbers_ptr + NUM_BIASES) + num_ending_ids > 0)
    is_sampled = temperature >= GREEDY_BELOW
    is_filtered = is_sampled & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))
    is_chosen = (position > 0) & (position >= tl.load(numbers_ptr + FIRST_SAMPLED))
    wait_for_inputs(USE_PDL)
    candidate = tl.load(out_ptr + r).to(tl.int32)
    if not ((is_adjusted | is_filtered) & is_chosen & (candidate >= 0)):
        return

    per_temperature = 1.0 / tl.where(is_sampled, temperature, 1.0)
    logits_ptr += r * row_stride
    counts_ptr += row * counts_stride
    values_ptr += r * (num_columns + LIST_DEPTH * BLOCK_V)
    list_ids_ptr += r * (LIST_DEPTH * BLOCK_V)
    # Rows that nothing is added to are read where they are.
    if is_adjusted:
        lanes = _keep_adjusted(
            logits_ptr, values_ptr, num_columns, numbers_ptr, counts_ptr,
            bias_ids_ptr + row * MAX_BIASES, biases_ptr + row * MAX_BIASES,
            ending_ids_ptr + row * MAX_ENDING_IDS, num_ending_ids, vocab_size, BLOCK_V, BLOCK_IDS,
        )  # fmt: skip
    else:
        lanes = find_lanes(logits_ptr, vocab_size, BLOCK_V)
    largest = tl.max(lanes, axis=0)
    # Also where all tokens are masked.
    is_bad = (largest == MINUS_INFINITY) | (largest == float("inf"))

    log_min_p = tl.where(min_p > 0.0, tl.log(tl.maximum(min_p, 1e-38)), MINUS_INFINITY)
    # At most 0, whatever the logarithm of 1 rounds to: the largest is kept, so that searches end.
    log_min_p = tl.where(is_sampled, tl.minimum(log_min_p, 0.0), MINUS_INFINITY)
    top_p = tl.where(is_sampled, top_p, 1.0)
    is_list = position < 0  # False
    num_values = num_columns
    source = 0
    total = 1.0
    cut_key = tl.full((), LOWEST_KEY, tl.int32)
    cut_id = tl.full((), 0, tl.int32)
    if is_filtered & (is_bad == 0):
        list_ptr = values_ptr + num_columns
        wanted = tl.where(top_k > 0, top_k, tl.maximum(BLOCK_V // GUESS_LANES, 1))
        bound = lane_bound(lanes, wanted, BLOCK_V)
        if is_adjusted:
            num_listed, total = list_largest(
                values_ptr, num_columns, bound, largest, per_temperature, list_ptr, list_ids_ptr,
                BLOCK_V,
            )  # fmt: skip
        else:
            num_listed, total = list_largest(
                logits_ptr, vocab_size, bound, largest, per_temperature, list_ptr, list_ids_ptr,
                BLOCK_V,
            )  # fmt: skip
        # With top-k the list holds all k. Without, all that may be kept, if it has the mass of
        # top-p or what ranks below it is too small for min-p.
        has_all = (top_k > 0) | ((from_key(bound) - largest) * per_temperature < log_min_p)
        is_list = num_listed <= LIST_DEPTH * BLOCK_V
        if is_list & (has_all == 0):
            listed_mass = _mass_above(
                list_ptr, list_ids_ptr, num_listed, True, LOWEST_KEY, 0, largest, per_temperature,
                BLOCK_V,
            )  # fmt: skip
            has_all = listed_mass >= top_p * total
        is_list &= has_all
        if is_list:
            num_values = num_listed
            source = num_columns
        elif not is_adjusted:
            keep_logits(logits_ptr, values_ptr, num_columns, vocab_size, MINUS_INFINITY, BLOCK_V)
        if top_k > 0:
            cut_key, cut_id = _cut_after(
                values_ptr + tl.multiple_of(source, 16), list_ids_ptr, num_values, is_list, top_k,
                num_columns, BLOCK_V,
            )  # fmt: skip
            total = _mass_above(
                values_ptr + tl.multiple_of(source, 16), list_ids_ptr, num_values, is_list,
                cut_key, cut_id, largest, per_temperature, BLOCK_V,
            )  # fmt: skip
    source_ptr = values_ptr + tl.multiple_of(source, 16)

    candidate = tl.maximum(candidate, 0)
    x = _logit_of(candidate, logits_ptr, values_ptr, is_adjusted)
    is_there = is_above(to_key(x), candidate, cut_key, cut_id)
    must_draw = is_adjusted | (is_there == 0)
    is_searching = is_bad == 0
    while is_searching:
        if must_draw:
            candidate = _draw(
                source_ptr, list_ids_ptr, num_values, is_list, cut_key, cut_id, is_sampled,
                largest, per_temperature, log_min_p, seed, position, sample, BLOCK_V,
            )  # fmt: skip
            candidate = tl.minimum(candidate, vocab_size - 1)
        must_draw = position >= 0  # True
        x = _logit_of(candidate, logits_ptr, values_ptr, is_adjusted)
        cut_key, cut_id = to_key(x), candidate
        is_searching = (x - largest) * per_temperature < log_min_p
        # Without min-p its mass does not matter: there is another draw.
        if (top_p < 1.0) & (is_searching == 0):
            mass = _mass_above(
                source_ptr, list_ids_ptr, num_values, is_list, cut_key, cut_id, largest,
                per_temperature, BLOCK_V,
            )  # fmt: skip
            # The largest has nothing above it, whatever p rounds to.
            is_searching = (mass >= top_p * total) & (mass > 0.0)

    tl.store(out_ptr + r, tl.where(is_bad, BAD_LOGITS, candidate).to(tl.int64))
    tl.store(last_tokens_ptr + row, tl.where(is_bad, 0, candidate).to(tl.int64))
    if has_penalties & (is_bad == 0):
        tl.atomic_add(counts_ptr + candidate, 1, sem="relaxed")


def full_sample(
    logits_RV: Tensor,
    *,
    vocab_size: int,
    rows_R: Tensor,
    positions_R: Tensor,
    temperatures_W: Tensor,
    seeds_W: Tensor,
    sample_indices_W: Tensor,
    asked: AskedRows,
    last_tokens_W: Tensor,
    scratch: RowScratch,
    out_R: Tensor,
) -> None:
    """Choose anew where a request asks for more than temperature, and count what it chose.

    Shapes:
        logits_RV      as sample_logits has just read them, and so is the rest that it knows
        asked          numbers, biases, ending ids and counts of W rows; ids below vocab_size
        out_R          holds what sample_logits chose: BAD_LOGITS stays, as does the id of a request
                       that asks for nothing more, or whose prompt is not complete; the others are
                       replaced, by BAD_LOGITS where all tokens are masked
        last_tokens_W  set as out_R

    Raises:
        ValueError: more requests or tokens than the scratch has room for, or strides that do not
        fit.

    Not checked: rows in range, and no row twice but that of padding, which has position 0.

    Order and meaning are those of sampler/sampler.py: bias, repetition, frequency, presence, ending
    ids, temperature, exactly k tokens, the smallest set that reaches p of what top-k left, min-p of
    the largest; the lower id first among equals. Same ids as full_sample_reference, but where
    rounding decides: the noise's; whether the mass above a token, a sum in fp32, is below p; and
    whether its distance from the largest, divided by the temperature, is log(min_p) or just below.
    A request's id does not depend on the batch.
    Source: Gumbel-max, Maddison et al. 2014, arXiv:1411.0030; rejection instead of sorting,
    FlashInfer, arXiv:2501.01005, here in one ranking, so that no rejected token is drawn again.
    """
    R = logits_RV.shape[0]
    check_scratch(logits_RV, vocab_size, scratch)
    options: dict[str, Any] = launch_options(logits_RV.device)
    if R > NUM_MULTIPROCESSORS:
        options["maxnreg"] = 64  # of 128, for two programs on a multiprocessor
    _full_sample_kernel[(R,)](
        logits_RV, rows_R, positions_R, temperatures_W, seeds_W, sample_indices_W,
        asked.numbers_WF, asked.bias_ids_WB, asked.biases_WB, asked.ending_ids_WE,
        asked.counts_WC, last_tokens_W, scratch.values_RC, scratch.ids_RL, out_R,
        vocab_size, logits_RV.stride(0), scratch.num_columns, asked.counts_WC.shape[1],
        NUM_NUMBERS=NUM_NUMBERS, MAX_BIASES=asked.bias_ids_WB.shape[1],
        MAX_ENDING_IDS=asked.ending_ids_WE.shape[1], BLOCK_V=candidates.BLOCK_V, BLOCK_IDS=256,
        num_warps=16, **options,
    )  # fmt: skip
