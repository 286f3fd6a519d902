"""Request: one prompt on its way to one answer. Host only."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pico_vllm.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    PREEMPTED = "preempted"
    """Waiting again, with what it generated so far."""
    PREFILL = "prefill"
    DECODING = "decoding"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """The scheduler owns every field that changes; only `Scheduler.commit` makes a request grow or
    end."""

    request_id: str
    prompt_token_ids: NDArray[np.int32]
    params: SamplingParams
    max_tokens: int
    """Resolved: prompt + max_tokens never exceeds the window."""
    stop_token_ids: frozenset[int]
    """EOS ids (unless ignored) and the caller's own."""
    seed: int
    sample_index: int = 0

    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    """Of the device pool, in token order."""
    row: int = -1
    """Row of the runner's batch state while running."""
    place: tuple[int, int] = (0, 0)
    """Place by the policy, then order of arrival. It is given when the request arrives and stays,
    through preemptions too: the lowest is the first in line and the last to be preempted."""
    entered_at: int = 0
    """Number of the first plan that may hold it since it last entered; results of earlier ones are
    not taken."""
    num_computed: int = 0
    """Most tokens that were computed before it was preempted."""
    num_cached_tokens: int | None = None
    """Prefix-cache hit when it first entered; None before."""
    num_waits: int = 0
    """Times that it waited for blocks from tiers below the device, since it last entered."""
    num_prompt_logprobs: int = 0
    """Prompt tokens whose log-probabilities were given."""
    finish_reason: FinishReason | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def max_total_tokens(self) -> int:
        return len(self.prompt_token_ids) + self.max_tokens
