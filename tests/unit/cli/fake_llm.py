"""An LLM that says what a test tells it, without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from pico_vllm.errors import ContextLengthError
from pico_vllm.outputs import CompletionDelta, Logprob
from pico_vllm.sampling_params import SamplingParams


class FakeLLM:
    """Answers with `pieces`, one token each; a prompt has one token a character."""

    def __init__(self, *pieces: str, window: int = 1000, has_template: bool = True) -> None:
        self.pieces = pieces
        self.finish_reason = "stop"
        self.prompts: list[Any] = []
        """What was encoded: lists of messages, or texts."""
        self.params: list[SamplingParams] = []
        self.before_token: Callable[[int], None] = lambda index: None
        self.num_open_streams = 0
        self.logprobs: dict[int, Logprob] | None = None
        """Given with every token."""
        self.engine = SimpleNamespace(max_model_len=window, last_failure="the reason")
        self.config = SimpleNamespace(model="fake")
        self.tokenizer = SimpleNamespace(
            chat_template="..." if has_template else None,
            encode_chat=self._encode_chat,
            encode=self._encode,
            check_text_length=lambda text, max_tokens: None,
        )

    def _encode_chat(self, messages: list[dict[str, str]], *, max_tokens: int) -> list[int]:
        self.prompts.append([(each["role"], each["content"]) for each in messages])
        return [0] * sum(len(each["content"]) for each in messages)

    def _encode(self, text: str) -> list[int]:
        self.prompts.append(text)
        return [0] * len(text)

    def stream(self, token_ids: list[int], params: SamplingParams) -> Iterator[CompletionDelta]:
        if len(token_ids) >= self.engine.max_model_len:
            raise ContextLengthError(f"the prompt has {len(token_ids)} tokens")
        self.params.append(params)
        return self._stream(params.n)

    def _stream(self, n: int) -> Iterator[CompletionDelta]:
        self.num_open_streams += 1
        try:
            for step, piece in enumerate(self.pieces):
                self.before_token(step)
                is_last = step == len(self.pieces) - 1
                for index in range(n):
                    yield CompletionDelta(
                        index=index,
                        text=piece,
                        token_ids=(step,),
                        finish_reason=self.finish_reason if is_last else None,
                        logprobs=() if self.logprobs is None else (self.logprobs,),
                    )
        finally:
            self.num_open_streams -= 1

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass
