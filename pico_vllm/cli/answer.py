"""One streamed answer: its text as it comes, what it was in the end, and how fast."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pico_vllm.cli.options import DEFAULT_MAX_TOKENS
from pico_vllm.errors import PicoError

if TYPE_CHECKING:
    from pico_vllm.engine.llm import LLM
    from pico_vllm.outputs import CompletionDelta, CompletionOutput
    from pico_vllm.sampling_params import SamplingParams


@dataclass(slots=True)
class Answer:
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    ttft_s: float | None = None
    """From the request to its first token; None where none came."""
    end_s: float = 0.0
    """From the request to its last token."""

    def add(self, delta: CompletionDelta, now_s: float) -> None:
        output = self.outputs[delta.index]
        output.text += delta.text
        output.token_ids += delta.token_ids
        output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.logprobs:
            output.logprobs = [*(output.logprobs or []), *delta.logprobs]
        if delta.token_ids:
            self.ttft_s = now_s if self.ttft_s is None else self.ttft_s
            self.end_s = now_s

    @property
    def num_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens a second after the first of each output; None where there were too few to tell."""
        num_later = self.num_tokens - len(self.outputs)
        if self.ttft_s is None or num_later < 1 or self.end_s <= self.ttft_s:
            return None
        return num_later / (self.end_s - self.ttft_s)

    def speed(self) -> str:
        """Like: 12 tokens, first after 85 ms, 93.1 tokens/s."""
        parts = [f"{self.num_tokens} token{'' if self.num_tokens == 1 else 's'}"]
        if self.ttft_s is not None:
            parts.append(f"first after {self.ttft_s * 1e3:.0f} ms")
        if self.decode_tok_s is not None:
            parts.append(f"{self.decode_tok_s:.1f} tokens/s")
        return ", ".join(parts)


def fit_max_tokens(llm: LLM, prompt_token_ids: list[int], params: SamplingParams) -> SamplingParams:
    """Ask for no more tokens than the window leaves, but for one: the engine says why not."""
    room = max(1, llm.engine.max_model_len - len(prompt_token_ids))
    return replace(params, max_tokens=min(params.max_tokens or DEFAULT_MAX_TOKENS, room))


def stream_answer(
    llm: LLM,
    prompt_token_ids: list[int],
    params: SamplingParams,
    on_delta: Callable[[CompletionDelta], None],
    is_stopped: Callable[[], bool] = lambda: False,
) -> Answer:
    """Generate, until the end or until `is_stopped` after a token.

    Raises:
        InvalidRequestError: prompt or parameters cannot be used.
        PicoError: the engine failed; what it gave before was handed to `on_delta`.
    """
    from pico_vllm.outputs import CompletionOutput

    answer = Answer(prompt_token_ids, [CompletionOutput(index=i) for i in range(params.n)])
    start = time.perf_counter()
    with closing(llm.stream(prompt_token_ids, params)) as deltas:  # type: ignore[type-var]
        for delta in deltas:
            answer.add(delta, time.perf_counter() - start)
            on_delta(delta)
            if is_stopped():
                break
    if any(output.finish_reason == "error" for output in answer.outputs):
        raise PicoError(
            f"the engine failed at this answer: {llm.engine.last_failure}; run again with --debug "
            "to see where"
        )
    return answer
