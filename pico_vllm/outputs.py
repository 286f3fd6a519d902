"""What comes out: StepEvents for one step (engine to detokenizer), RequestOutput for one request
(to the caller)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pico_vllm.request import FinishReason
from pico_vllm.step import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvents:
    """One object a step. Entry i says that a request got a token, and whether it ended with it."""

    request_ids: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    """Negative where a request ended in an error without a token."""
    finish_reasons: tuple[FinishReason | None, ...] = ()
    logprobs: Mapping[str, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: Mapping[str, Sequence[TokenLogprobs]] = field(default_factory=dict)
    num_cached_tokens: Mapping[str, int] = field(default_factory=dict)
    """Of requests that got their first token, where any of the prompt was cached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    logprob: float
    """Natural logarithm, from the model's raw distribution; at least -9999.0 so that JSON can hold
    it."""
    rank: int | None
    """1 for the most likely token; None where it was not computed."""
    decoded_token: str


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One answer of a request."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """With the EOS or stop id that ended it."""
    finish_reason: str | None = None
    """stop, length, abort or error; None while it runs."""
    stop_reason: str | int | None = None
    """The stop string or stop id; None where EOS or the length ended it."""
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """None for the first token, which nothing predicts."""
    num_cached_tokens: int = 0
    """Tokens of the prompt whose KV was cached when the first answer began, so that they were not
    computed."""

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionDelta:
    """What one step added to one answer of a stream."""

    index: int
    text: str
    """May be empty while a character or a possible stop string is incomplete."""
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[dict[int, Logprob], ...] = ()
