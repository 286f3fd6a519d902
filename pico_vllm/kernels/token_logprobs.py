"""Log-probabilities of the chosen tokens and of the most likely ones.

R requests, V tokens, W rows of the batch state

One program a request; those of requests that do not ask leave at once. The most likely tokens come
from the list of the row's largest, or from the row itself where equal logits do not fit into it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pico_vllm.kernels import candidates
from pico_vllm.kernels.candidates import (
    LIST_DEPTH,
    RowScratch,
    check_scratch,
    from_key,
    is_above,
    keep_logits,
    lane_bound,
    list_largest,
    load_candidates,
    to_key,
)
from pico_vllm.kernels.full_sample import FIRST_SAMPLED, NUM_LOGPROBS, NUM_NUMBERS
from pico_vllm.kernels.launch import launch_options, let_next_start, wait_for_inputs

LOWEST_LOGPROB = tl.constexpr(-9999.0)
CHOSEN = tl.constexpr(0)
"""Places of an answer's words: the chosen token's log-probability, its rank, then those of the most
likely tokens and their ids."""
RANK = tl.constexpr(1)
FIRST_TOP = tl.constexpr(2)


def num_words(max_logprobs: int) -> int:
    """Of one request's answer."""
    return FIRST_TOP.value + 2 * max_logprobs


def token_logprobs_reference(logits_V: Tensor, token_id: int, num_top: int) -> Tensor:
    """[2 + 2 num_top] fp64: log-probability, rank, the most likely ones, their ids."""
    logprobs_V = logits_V.double().log_softmax(0)
    top, ids = logprobs_V.sort(descending=True, stable=True)
    chosen = logprobs_V[token_id]
    rank = (logits_V > logits_V[token_id]).sum() + 1
    values = (chosen[None], rank[None], top[:num_top], ids[:num_top])
    return torch.cat([value.double() for value in values]).clamp(min=LOWEST_LOGPROB.value)


@triton.jit
def _best_below(
    values_ptr, list_ids_ptr, num_values, is_list, key, token_id, BLOCK_V: tl.constexpr
):
    """Key and id of the token that ranks next below this one."""
    best = tl.full((BLOCK_V,), -(2**31), tl.int32)
    best_ids = tl.full((BLOCK_V,), 0x7FFFFFFF, tl.int32)
    for start in range(0, num_values, BLOCK_V):
        x, ids = load_candidates(values_ptr, list_ids_ptr, start, is_list, BLOCK_V)
        keys = to_key(x)
        is_below = is_above(keys, ids, key, token_id + 1) == 0
        is_better = is_below & (keys > best)
        best = tl.where(is_better, keys, best)
        best_ids = tl.where(is_better, ids, best_ids)
    best_key = tl.max(best, axis=0)
    return best_key, tl.min(tl.where(best == best_key, best_ids, 0x7FFFFFFF), axis=0)


@triton.jit(do_not_specialize=["vocab_size"])
def _token_logprobs_kernel(
    logits_ptr, rows_ptr, positions_ptr, numbers_ptr, chosen_ptr, values_ptr, list_ids_ptr, out_ptr,
    vocab_size, row_stride, num_columns,
    NUM_NUMBERS: tl.constexpr, MAX_TOP: tl.constexpr, BLOCK_V: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(USE_PDL)
    r = tl.program_id(0).to(tl.int64)
    # What the requests ask for lies complete before the step's first kernel.
    position = tl.load(positions_ptr + r)
    numbers_ptr += tl.load(rows_ptr + r).to(tl.int64) * NUM_NUMBERS
    num_top = tl.load(numbers_ptr + NUM_LOGPROBS)
    is_chosen = (position > 0) & (position >= tl.load(numbers_ptr + FIRST_SAMPLED))
    wait_for_inputs(USE_PDL)
    chosen = tl.load(chosen_ptr + r)
    if not ((num_top >= 0) & is_chosen & (chosen >= 0)):
        return

    num_top = tl.minimum(tl.minimum(num_top, MAX_TOP), vocab_size)
    logits_ptr += r * row_stride
    values_ptr += r * (num_columns + LIST_DEPTH * BLOCK_V)
    list_ids_ptr += r * (LIST_DEPTH * BLOCK_V)
    out_ptr += r * (FIRST_TOP + 2 * MAX_TOP)
    x_chosen = tl.load(logits_ptr + chosen).to(tl.float32)
    lanes, num_larger = keep_logits(
        logits_ptr, values_ptr, num_columns, vocab_size, x_chosen, BLOCK_V
    )
    largest = tl.max(lanes, axis=0)
    bound = lane_bound(lanes, tl.maximum(num_top, 1), BLOCK_V)
    num_listed, total = list_largest(
        values_ptr, num_columns, bound, largest, 1.0, values_ptr + num_columns, list_ids_ptr,
        BLOCK_V,
    )  # fmt: skip
    log_total = tl.log(total)
    logprob = tl.maximum(x_chosen - largest - log_total, LOWEST_LOGPROB)
    tl.store(out_ptr + CHOSEN, logprob.to(tl.int32, bitcast=True))
    tl.store(out_ptr + RANK, tl.sum(num_larger, axis=0) + 1)

    is_list = num_listed <= LIST_DEPTH * BLOCK_V
    num_values = tl.where(is_list, num_listed, num_columns)
    source_ptr = values_ptr + tl.multiple_of(tl.where(is_list, num_columns, 0), 16)
    key = tl.full((), 0x7FFFFFFF, tl.int32)
    token_id = tl.full((), 0, tl.int32)
    for i in range(num_top):
        key, token_id = _best_below(
            source_ptr, list_ids_ptr, num_values, is_list, key, token_id, BLOCK_V
        )
        logprob = tl.maximum(from_key(key) - largest - log_total, LOWEST_LOGPROB)
        tl.store(out_ptr + FIRST_TOP + i, logprob.to(tl.int32, bitcast=True))
        tl.store(out_ptr + FIRST_TOP + MAX_TOP + i, token_id)


def token_logprobs(
    logits_RV: Tensor,
    *,
    vocab_size: int,
    rows_R: Tensor,
    positions_R: Tensor,
    numbers_WF: Tensor,
    chosen_R: Tensor,
    scratch: RowScratch,
    out_RN: Tensor,
) -> None:
    """Log-probabilities of the model itself, before all that sampling does to its logits.

    Shapes:
        logits_RV    bf16, fp16 or fp32, ids contiguous
        rows_R, positions_R, numbers_WF   as full_sample: NUM_LOGPROBS says how many are asked for
        chosen_R     int64, the ids that were chosen; below 0 is none
        out_RN       int32, N = num_words(n): logprob of the chosen token as bits of a float, its
                     rank, n log-probabilities, n ids, of which each request's first are set, the
                     most likely token first and the lower id first among equals

    Raises:
        ValueError: more requests or tokens than the scratch has room for, or strides that do not
        fit.

    Rows that do not ask keep what is there. Same values as token_logprobs_reference, whose sums are
    not in fp32; the rank counts larger logits. A request's bits do not depend on the batch.
    """
    check_scratch(logits_RV, vocab_size, scratch)
    _token_logprobs_kernel[(logits_RV.shape[0],)](
        logits_RV, rows_R, positions_R, numbers_WF, chosen_R, scratch.values_RC, scratch.ids_RL,
        out_RN, vocab_size, logits_RV.stride(0), scratch.num_columns,
        NUM_NUMBERS=NUM_NUMBERS, MAX_TOP=(out_RN.shape[1] - FIRST_TOP.value) // 2,
        BLOCK_V=candidates.BLOCK_V, num_warps=16, **launch_options(logits_RV.device),
    )  # fmt: skip
