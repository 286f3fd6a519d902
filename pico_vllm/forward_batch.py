"""ForwardBatch: the tensors of one forward pass, decode rows and prompt chunks together.

T tokens this step, R requests this step, M block-table width, W rows of the batch state
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFeed:
    """What a batch has where the batch state lies on the device, and ids may be known there alone.

    Tables are then whole: [W, M], with `table_rows` naming each request's row. Ids of -1 stand for
    the row's last token; padding tokens have position -1, padding requests seq_len 0.
    """

    token_rows: Tensor
    """[T] int32, row of each token's request"""
    table_rows: Tensor
    """[R] int32, row of each request"""
    last_tokens: Tensor
    """[W] int64"""
    sample_at: Tensor
    """[R] int32, the token after which each request's next one comes"""
    block_size: int
    is_long: bool
    """Whether keys are cut into more splits: where all decode, or all are attended alike."""
    prefix_lens: Tensor | None = None
    """[R] int32, of a decoding batch: first tokens that all those which have any here share; None
    where attention does not ask."""
    decode_lens: Tensor | None = None
    """[R] int32, seq_lens of the requests that decode beside others, 0 of the others; None where
    those that decode are alone, or are attended like others."""
    older_starts: Tensor | None = None
    """[R + 1] int32, query_start_loc of the requests whose tokens are attended behind a context,
    where all others have none; None without such."""
    fresh_starts: Tensor | None = None
    """Likewise of the requests without a context, all of whose keys are of this step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """Tokens lie request after request; request r owns tokens query_start_loc[r] to
    query_start_loc[r + 1].

    The first `num_decodes` requests have query_len 1 and their last sampled token as input. On a
    device of its own that is all or 0, where the others' ids say so (DeviceFeed).
    """

    token_ids: Tensor
    """[T] int64"""
    positions: Tensor
    """[T] int64, place of each token in its request"""
    slot_mapping: Tensor
    """[T] int64, block_id * block_size + position % block_size; -1 is padding, never written"""
    block_table: Tensor
    """[R, M] int32, physical block ids; entries past ceil(seq_len / block_size) are never read"""
    seq_lens: Tensor
    """[R] int32, tokens that attention reads: context_len + query_len"""
    query_start_loc: Tensor
    """[R + 1] int32"""

    num_decodes: int
    rows: NDArray[np.int32]
    """[R] row of each request in the batch state, on the host"""
    context_lens: NDArray[np.int32]
    """[R] tokens whose KV was cached before this step, on the host"""
    query_lens: NDArray[np.int32]
    """[R] tokens computed in this step, on the host"""
    feed: DeviceFeed | None = None
    """None where the host knows all."""

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])
