"""A row of logits in scratch memory, and the list of its largest: what choosing from a long row
without sorting it begins with.

    R requests, V tokens, C = V rounded up to whole blocks, L = LIST_DEPTH BLOCK_V entries of a list

Tokens rank by logit, the lower id first among equals. A key is a logit as an integer of the same
order. A copy's columns from V on, and what a list does not fill, hold minus infinity: loops over
those need no mask.

A lane is every BLOCK_V-th token. The k-th largest of the lanes' largest is a lower bound of the
k-th largest token: what reaches it is little more than k tokens, few in each lane. The list has
LIST_DEPTH entries a lane, so that each lane counts its own and no thread waits for another. That is
enough for k up to some 2,500 of 4,096 lanes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pico_vllm.kernels.launch import cdiv

BLOCK_V = 4096
"""Logits that a program takes at a time; also lanes."""
LIST_DEPTH = tl.constexpr(8)
"""Most tokens of a lane that a list takes."""
NUM_STAGES = tl.constexpr(3)
"""Blocks under way in loops over a row: a program waits for memory, not for its arithmetic."""
LOWEST_KEY = tl.constexpr(-(2**31))
"""Below every logit's."""
MINUS_INFINITY = tl.constexpr(float("-inf"))
MINUS_INFINITY_KEY = tl.constexpr(-2139095041)


def num_columns(vocab_size: int) -> int:
    return cdiv(vocab_size, BLOCK_V) * BLOCK_V


@dataclass(frozen=True, slots=True)
class RowScratch:
    """What kernels that choose from rows write and read again. Its contents outlive no kernel."""

    values_RC: Tensor
    """[R, C + L] fp32: the row, then the list."""
    ids_RL: Tensor
    """[R, L] int32"""

    @classmethod
    def allocate(cls, max_requests: int, vocab_size: int, device: torch.device) -> RowScratch:
        listed = LIST_DEPTH.value * BLOCK_V
        values = torch.empty((max_requests, num_columns(vocab_size) + listed), device=device)
        ids = torch.empty((max_requests, listed), dtype=torch.int32, device=device)
        return cls(values, ids)

    @property
    def num_columns(self) -> int:
        return self.values_RC.shape[1] - self.ids_RL.shape[1]


@triton.jit
def to_key(x):
    """Of a float that is no NaN and not -0."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def from_key(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def is_above(keys, ids, key, token_id):
    """Whether tokens rank above this one."""
    return (keys > key) | ((keys == key) & (ids < token_id))


@triton.jit
def without_minus_zero(x):
    return tl.where(x == 0.0, 0.0, x)


@triton.jit
def load_last(row_ptr, start, num_values, BLOCK_V: tl.constexpr):
    """Of a row's last block, minus infinity past its end."""
    v = start + tl.arange(0, BLOCK_V)
    x = tl.load(row_ptr + v, mask=v < num_values, other=MINUS_INFINITY)
    return without_minus_zero(x.to(tl.float32))


@triton.jit
def find_lanes(row_ptr, num_values, BLOCK_V: tl.constexpr):
    """The lanes' largest."""
    v = tl.arange(0, BLOCK_V)
    lanes = tl.full((BLOCK_V,), MINUS_INFINITY, tl.float32)
    num_full = num_values // BLOCK_V * BLOCK_V
    # A load without a mask is several times wider.
    for start in tl.range(0, num_full, BLOCK_V, num_stages=NUM_STAGES):
        x = without_minus_zero(tl.load(row_ptr + start + v).to(tl.float32))
        lanes = tl.maximum(lanes, x)
    if num_full < num_values:
        lanes = tl.maximum(lanes, load_last(row_ptr, num_full, num_values, BLOCK_V))
    return lanes


@triton.jit
def keep_logits(logits_ptr, row_ptr, num_columns, vocab_size, threshold, BLOCK_V: tl.constexpr):
    """Copy a row to scratch memory as fp32, without -0, and minus infinity past the vocabulary.
    Returns the lanes' largest, and in each lane how many are above the threshold."""
    v = tl.arange(0, BLOCK_V)
    lanes = tl.full((BLOCK_V,), MINUS_INFINITY, tl.float32)
    num_above = tl.zeros((BLOCK_V,), tl.int32)
    num_full = vocab_size // BLOCK_V * BLOCK_V
    for start in tl.range(0, num_full, BLOCK_V, num_stages=NUM_STAGES):
        x = without_minus_zero(tl.load(logits_ptr + start + v).to(tl.float32))
        tl.store(row_ptr + start + v, x)
        lanes = tl.maximum(lanes, x)
        num_above += (x > threshold).to(tl.int32)
    if num_full < num_columns:
        x = load_last(logits_ptr, num_full, vocab_size, BLOCK_V)
        tl.store(row_ptr + num_full + v, x)
        lanes = tl.maximum(lanes, x)
        num_above += (x > threshold).to(tl.int32)
    tl.debug_barrier()
    return lanes, num_above


@triton.jit
def lane_bound(lanes, k, BLOCK_V: tl.constexpr):
    """A key that at least k lanes reach, in its upper half the largest such; minus infinity's where
    k is more than there are."""
    keys = to_key(lanes)
    bound = tl.full((), LOWEST_KEY, tl.int64)
    for i in range(16):
        trial = bound + (tl.full((), 1, tl.int64) << (31 - i))
        count = tl.sum((keys >= trial.to(tl.int32)).to(tl.int32), axis=0)
        bound = tl.where(count >= k, trial, bound)
    # Below minus infinity are the keys of NaNs.
    return tl.maximum(bound.to(tl.int32), MINUS_INFINITY_KEY)


@triton.jit
def _list_block(
    x, start, bound, largest, per_temperature, masses, counts, list_ptr, list_ids_ptr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    v = tl.arange(0, BLOCK_V)
    masses += tl.exp((x - largest) * per_temperature)
    is_listed = (to_key(x) >= bound) & (x > MINUS_INFINITY)
    at = counts * BLOCK_V + v
    fits = is_listed & (counts < LIST_DEPTH)
    tl.store(list_ptr + at, x, mask=fits)
    tl.store(list_ids_ptr + at, start + v, mask=fits)
    return masses, counts + is_listed.to(tl.int32)


@triton.jit
def list_largest(
    row_ptr, num_values, bound, largest, per_temperature, list_ptr, list_ids_ptr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """List the tokens whose key is at least `bound`. Returns how many entries that takes, in whole
    blocks: with more than LIST_DEPTH of them not all tokens are there; and the mass of the row
    relative to its largest logit."""
    v = tl.arange(0, BLOCK_V)
    masses = tl.zeros((BLOCK_V,), tl.float32)
    counts = tl.zeros((BLOCK_V,), tl.int32)
    num_full = num_values // BLOCK_V * BLOCK_V
    for start in tl.range(0, num_full, BLOCK_V, num_stages=NUM_STAGES):
        x = without_minus_zero(tl.load(row_ptr + start + v).to(tl.float32))
        masses, counts = _list_block(
            x, start, bound, largest, per_temperature, masses, counts, list_ptr, list_ids_ptr,
            BLOCK_V,
        )  # fmt: skip
    if num_full < num_values:
        x = load_last(row_ptr, num_full, num_values, BLOCK_V)
        masses, counts = _list_block(
            x, num_full, bound, largest, per_temperature, masses, counts, list_ptr, list_ids_ptr,
            BLOCK_V,
        )  # fmt: skip
    depth = tl.max(counts, axis=0)
    for i in range(tl.minimum(depth, LIST_DEPTH)):
        at, is_free = i * BLOCK_V + v, counts <= i
        tl.store(list_ptr + at, tl.full((BLOCK_V,), MINUS_INFINITY, tl.float32), mask=is_free)
        tl.store(list_ids_ptr + at, v * 0 + 0x7FFFFFFF, mask=is_free)
    tl.debug_barrier()
    return depth * BLOCK_V, tl.sum(masses, axis=0)


@triton.jit
def load_candidates(values_ptr, list_ids_ptr, start, is_list, BLOCK_V: tl.constexpr):
    """Logits and ids from `start` on of the list, or of the row, whose places are its ids."""
    v = tl.arange(0, BLOCK_V)
    x = tl.load(values_ptr + start + v)
    ids = start + v
    if is_list:
        ids = tl.load(list_ids_ptr + start + v)
    return x, ids


def check_scratch(logits_RV: Tensor, vocab_size: int, scratch: RowScratch) -> None:
    """Raises ValueError where the logits do not fit into the scratch."""
    R, V = logits_RV.shape
    if not 1 <= R <= scratch.values_RC.shape[0]:
        raise ValueError(f"{R} requests; the scratch takes 1 to {scratch.values_RC.shape[0]}")
    if not 1 <= vocab_size <= V or num_columns(vocab_size) != scratch.num_columns:
        raise ValueError(
            f"vocab_size {vocab_size} is not from 1 to the {V} logits there are, or does not end "
            f"in the last block of the scratch's {scratch.num_columns} columns"
        )
    if logits_RV.stride(1) != 1:
        raise ValueError(f"logits have strides {logits_RV.stride()}; ids must be contiguous")
