"""StepPlan (what to run) and StepResult (what came out): the hand-offs between scheduler and
runner. Host only.

Both are immutable and carry numbers, not Requests, so that the same plan can be sent to every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pico_vllm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRow:
    """A request that enters the runner's batch state in this step."""

    row: int
    token_ids: NDArray[np.int32]
    """The prompt, and what had been generated where a request enters again."""
    num_prompt_tokens: int
    params: SamplingParams
    stop_token_ids: frozenset[int]
    seed: int
    sample_index: int
    num_prompt_logprobs: int = 0
    """Prompt tokens whose log-probabilities were given before it was preempted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBlocks:
    """Blocks appended to a row's block table, or put there in place of others."""

    row: int
    index: int
    """Place of the first one in the table."""
    block_ids: Sequence[int]
    """Of the device pool."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """One block's KV has to be copied from id `source` to `target`, of the other pool or
    of the same."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """From each source to its target. Numbers alone: hundreds of objects a plan take time to make,
    and the garbage collector more to look at."""

    sources: Sequence[int] = ()
    targets: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.sources)

    def __iter__(self) -> Iterator[BlockCopy]:
        return map(BlockCopy, self.sources, self.targets)


NO_COPIES = BlockCopies()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """R requests in batch order: the first `num_decodes` compute the token that an earlier
    step sampled, then prompts, to which outputs belong where a preempted request enters again."""

    request_ids: tuple[str, ...]
    rows: NDArray[np.int32]
    context_lens: NDArray[np.int32]
    query_lens: NDArray[np.int32]
    is_sampled: NDArray[np.bool_]
    """Whether the last token of this step yields the request's next token (False inside a chunked
    prompt)."""
    num_decodes: int
    number: int = 0
    """Plans of a scheduler are numbered in the order in which they are launched."""
    new_rows: tuple[NewRow, ...] = ()
    new_blocks: tuple[NewBlocks, ...] = ()
    repeats: bool = False
    """Whether the requests are those of the plan before, which all decoded in it and decode on: a
    runner may use again what it made for that one."""
    copies: tuple[BlockCopy, ...] = ()
    """Within the device pool, before anything is computed; no target is a source."""
    stores: BlockCopies = NO_COPIES
    """From the device pool to host memory, before anything else of this plan writes to the device.
    A plan with stores or loads may have no request."""
    loads: BlockCopies = NO_COPIES
    """From host memory to the device pool, after the plan's stores and the steps before. Nothing
    reads the blocks before a result has named the plan in `loaded`, or a plan awaits them."""
    awaits_loads: bool = False
    """Whether it begins when the loads of plans before it have ended: it may read their blocks."""

    @property
    def num_tokens(self) -> int:
        return int(self.query_lens.sum())


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one token: the token itself first, then the most likely ones in
    order."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int
    """1 for the most likely token."""


NO_TOKEN = -1
"""In `StepResult.token_ids`: nothing was sampled for this request."""
BAD_LOGITS = -2
"""In `StepResult.token_ids`: the logits held NaN or infinity, so the request must end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    token_ids: NDArray[np.int64]
    """One a request of the plan, or NO_TOKEN or BAD_LOGITS."""
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    """By index in the plan, for requests that asked."""
    prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    """By index in the plan: of the prompt tokens that this step predicted, in order."""
    loaded: tuple[int, ...] = ()
    """Numbers of plans whose loads are done, each named once, by whichever result comes then."""
