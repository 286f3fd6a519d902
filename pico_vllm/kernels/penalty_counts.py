"""Which tokens a request has seen, for penalties.

W rows of the batch state, C columns: the vocabulary or more, N requests that enter the batch

A count is one int32 a token: its sign bit says that the prompt holds the token, the others how
often it was generated. `full_sample` adds what it chooses.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
IN_PROMPT = tl.constexpr(-(2**31))
HEADER_WORDS = 4
"""Of each request that enters: row, tokens of the prompt, tokens, where its ids begin."""


def rebuild_counts_reference(counts_WC: Tensor, words: Tensor, num_requests: int) -> None:
    for row, num_prompt, num_tokens, start in words[: HEADER_WORDS * num_requests].view(-1, 4):
        ids = words[start : start + num_tokens].long()
        counts = torch.bincount(ids[num_prompt:], minlength=counts_WC.shape[1]).int()
        counts[ids[:num_prompt]] |= IN_PROMPT.value
        counts_WC[row] = counts


@triton.jit
def _rebuild_counts_kernel(
    counts_ptr, words_ptr, num_columns, HEADER_WORDS: tl.constexpr, BLOCK: tl.constexpr
):
    header = words_ptr + tl.program_id(0) * HEADER_WORDS
    counts_ptr += tl.load(header).to(tl.int64) * num_columns
    num_prompt, num_tokens = tl.load(header + 1), tl.load(header + 2)
    ids_ptr = words_ptr + tl.load(header + 3)
    i = tl.arange(0, BLOCK)
    for start in range(0, num_columns, BLOCK):
        zeros = tl.zeros((BLOCK,), tl.int32)
        tl.store(counts_ptr + start + i, zeros, mask=start + i < num_columns)
    tl.debug_barrier()
    for start in range(0, num_prompt, BLOCK):
        is_there = start + i < num_prompt
        token_ids = tl.load(ids_ptr + start + i, mask=is_there, other=0)
        tl.store(counts_ptr + token_ids, tl.full((BLOCK,), IN_PROMPT, tl.int32), mask=is_there)
    tl.debug_barrier()
    for start in range(num_prompt, num_tokens, BLOCK):
        is_there = start + i < num_tokens
        token_ids = tl.load(ids_ptr + start + i, mask=is_there, other=0)
        tl.atomic_add(counts_ptr + token_ids, 1, mask=is_there, sem="relaxed")


def rebuild_counts(counts_WC: Tensor, words: Tensor, num_requests: int) -> None:
    """Make the counts of requests that enter the batch, whatever their rows held before.

    Shapes:
        counts_WC      int32, contiguous
        words          int32, contiguous: HEADER_WORDS of each request, the last of them the place
                       of its first id in `words`; then the ids

    Raises:
        ValueError: another dtype or layout.

    Not checked: rows and ids in range, and no row twice.
    """
    for name, tensor in (("counts", counts_WC), ("words", words)):
        if tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {tensor.dtype} with strides {tensor.stride()}; it must be int32 and "
                "contiguous"
            )
    _rebuild_counts_kernel[(num_requests,)](
        counts_WC, words, counts_WC.shape[1], HEADER_WORDS=HEADER_WORDS, BLOCK=BLOCK, num_warps=8
    )
