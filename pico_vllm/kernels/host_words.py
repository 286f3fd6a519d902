"""A step's words and changes of the batch state from pinned host memory, and its ids back to there:
its first and its last kernel.

U turns of pinned memory, N words of a step, C most changes, S words of the state, R requests

The kernels read and write host memory themselves, over the bus, as pinned memory has an address on
the device. So both are part of a step's graph, and the host calls the driver once a step. Caches of
the device are passed by: what the host wrote since the last step is read, and ids arrive while the
kernel that writes them ends.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pico_vllm.kernels.launch import cdiv, launch_options, let_next_start, wait_for_inputs

PIECE = 4
"""Words that are read at once: 16 bytes."""
BLOCK_N = 8192
"""Words under way at once: those of a step of 1,000 decoding requests, or of 2,700 tokens."""
EARLY_C = 256
"""Changes that are read beside the words, whether there are any or not: those of a request of 3,000
tokens that enters. One way over the bus less than asking for them once their number is known."""
BLOCK_C = 2048
"""Of the others, under way at once: those of ten requests."""
BLOCK_R = 1024
NUM_CHANGES = tl.constexpr(1)
"""Which of a step's words says how many changes there are."""


def fetch_words_reference(
    host_UN: Tensor, changes_U2C: Tensor, counter: Tensor, words_N: Tensor, state_S: Tensor
) -> None:
    turn = int(counter) % len(host_UN)
    words_N.copy_(host_UN[turn, : len(words_N)])
    places, values = changes_U2C[turn, :, : int(host_UN[turn, NUM_CHANGES.value])].to(
        state_S.device
    )
    state_S[places.long()] = values
    counter += 1


def publish_ids_reference(ids_R: Tensor, turn: Tensor, host_UR: Tensor) -> None:
    host_UR[int(turn), : len(ids_R)] = ids_R.to(host_UR.device)


@triton.jit(do_not_specialize=["num_turns", "num_pieces", "capacity"])
def _fetch_words_kernel(
    host_ptr, changes_ptr, counter_ptr, words_ptr, state_ptr,
    host_stride, changes_stride, num_turns, num_pieces, capacity,
    PIECE: tl.constexpr, BLOCK_N: tl.constexpr, EARLY_C: tl.constexpr, BLOCK_C: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """One program, which reads the counter and counts in one."""
    let_next_start(USE_PDL)
    turn = tl.atomic_add(counter_ptr, 1, sem="relaxed") % num_turns
    host_ptr += turn * host_stride
    changes_ptr += turn * changes_stride
    num_changes = tl.load(host_ptr + NUM_CHANGES, volatile=True)
    early = tl.arange(0, EARLY_C)
    early_place = tl.load(changes_ptr + early, mask=early < capacity, volatile=True)
    early_value = tl.load(changes_ptr + capacity + early, mask=early < capacity, volatile=True)
    for first in range(0, num_pieces * PIECE, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        is_there = n < num_pieces * PIECE
        words = tl.load(host_ptr + n, mask=is_there, volatile=True)
        tl.store(words_ptr + n, words, mask=is_there)
    tl.store(state_ptr + early_place.to(tl.int64), early_value, mask=early < num_changes)
    for first in range(EARLY_C, num_changes, BLOCK_C):
        at = first + tl.arange(0, BLOCK_C)
        is_change = at < num_changes
        place = tl.load(changes_ptr + at, mask=is_change, volatile=True).to(tl.int64)
        value = tl.load(changes_ptr + capacity + at, mask=is_change, volatile=True)
        tl.store(state_ptr + place, value, mask=is_change)


@triton.jit(do_not_specialize=["num_ids"])
def _publish_ids_kernel(
    ids_ptr, turn_ptr, host_ptr, host_stride, num_ids,
    BLOCK_R: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    # What the step fetched lies complete before its second kernel.
    turn = tl.load(turn_ptr).to(tl.int64)
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_there = r < num_ids
    wait_for_inputs(USE_PDL)
    ids = tl.load(ids_ptr + r, mask=is_there)
    tl.store(host_ptr + turn * host_stride + r, ids, mask=is_there, cache_modifier=".wt")


def fetch_words(
    host_UN: Tensor, changes_U2C: Tensor, counter: Tensor, words_N: Tensor, state_S: Tensor
) -> None:
    """Bring the next turn's words, change the state, and count: turn = counter % U; words =
    host[turn, :N]; state[changes[turn, 0, :n]] = changes[turn, 1, :n] where n is host[turn, 1];
    counter += 1.

    Shapes:
        host_UN      int32, words contiguous, rows at least as long as words_N; in pinned memory
        changes_U2C  int32, contiguous, as many turns or more; in pinned memory
        counter      [1] int64, on the device, at least 0
        words_N      int32, contiguous, N a multiple of 4
        state_S      int32, contiguous

    Raises:
        ValueError: another shape, dtype or layout.

    Not checked, as the host may not know it yet: n at most C, places below S, none twice.
    It never starts before earlier work is done. Rows that begin at 16 bytes are read fastest.
    Same words and state as fetch_words_reference.
    """
    num_words = words_N.shape[0]
    for name, tensor in (
        ("host", host_UN), ("changes", changes_U2C), ("words", words_N), ("state", state_S)
    ):  # fmt: skip
        if tensor.dtype != torch.int32 or tensor.stride(-1) != 1:
            raise ValueError(
                f"{name} is {tensor.dtype} with strides {tensor.stride()}; it must be torch.int32 "
                "and contiguous"
            )
    if host_UN.dim() != 2 or num_words > host_UN.shape[1] or num_words % PIECE:
        raise ValueError(
            f"{num_words} words of {list(host_UN.shape)}; they must be a multiple of {PIECE}, and "
            "no more than a row has"
        )
    shape = changes_U2C.shape
    if len(shape) != 3 or shape[0] < len(host_UN) or shape[1] != 2:
        raise ValueError(f"changes are {list(shape)}; [U, 2, C] for {len(host_UN)} turns")
    if counter.dtype != torch.int64 or counter.numel() != 1:
        raise ValueError(
            f"the counter is {list(counter.shape)} {counter.dtype}; it must be [1] torch.int64"
        )
    options = launch_options(words_N.device) | {"launch_pdl": False}
    _fetch_words_kernel[(1,)](
        host_UN, changes_U2C, counter, words_N, state_S,
        host_UN.stride(0), changes_U2C.stride(0), host_UN.shape[0], num_words // PIECE, shape[2],
        PIECE=PIECE, BLOCK_N=BLOCK_N, EARLY_C=EARLY_C, BLOCK_C=BLOCK_C, num_warps=8, **options,
    )  # fmt: skip


def publish_ids(ids_R: Tensor, turn: Tensor, host_UR: Tensor) -> None:
    """Hand ids to the host: host[turn, :R] = ids. Who sees an id there knows that all kernels
    before this one are over; ids become visible one by one, in any order.

    Shapes:
        ids_R     int64, contiguous
        turn      [1] int32, on the device, below U; there before the step's second kernel
        host_UR   int64, ids contiguous, rows at least as long as ids_R; in pinned memory

    Raises:
        ValueError: another shape, dtype or layout.

    Not checked, as it would stall the stream: the turn in range.
    """
    num_ids = ids_R.shape[0]
    for name, tensor in (("ids", ids_R), ("host", host_UR)):
        if tensor.dtype != torch.int64 or tensor.stride(-1) != 1:
            raise ValueError(
                f"{name} is {tensor.dtype} with strides {tensor.stride()}; it must be torch.int64 "
                "and contiguous"
            )
    if host_UR.dim() != 2 or num_ids > host_UR.shape[1]:
        raise ValueError(f"{num_ids} ids do not fit into a row of {list(host_UR.shape)}")
    if turn.dtype != torch.int32 or turn.numel() != 1:
        raise ValueError(f"the turn is {list(turn.shape)} {turn.dtype}; it must be [1] torch.int32")
    _publish_ids_kernel[(cdiv(num_ids, BLOCK_R),)](
        ids_R, turn, host_UR, host_UR.stride(0), num_ids, BLOCK_R=BLOCK_R, num_warps=4,
        **launch_options(ids_R.device),
    )  # fmt: skip
