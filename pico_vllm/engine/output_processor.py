"""OutputProcessor: from StepEvents to text. Finds stop strings, keeps one detokenizer an answer
while it runs."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from pico_vllm.outputs import CompletionDelta, CompletionOutput, Logprob, RequestOutput, StepEvents
from pico_vllm.request import FinishReason
from pico_vllm.sampling_params import SamplingParams
from pico_vllm.step import TokenLogprobs
from pico_vllm.tokenizer.detokenizer import IncrementalDetokenizer
from pico_vllm.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class AnswerGroup:
    """The n answers to one prompt."""

    def __init__(
        self,
        output: RequestOutput,
        *,
        keeps_deltas: bool = False,
        finished: deque[AnswerGroup] | None = None,
    ) -> None:
        """finished: where the group puts itself when its last answer has ended."""
        self.output = output
        self.request_ids: list[str] = []
        """In the engine, one for each answer."""
        self.deltas: deque[CompletionDelta] | None = deque() if keeps_deltas else None
        self._finished = finished

    @property
    def num_tokens(self) -> int:
        """Of all its answers, so far."""
        return sum(len(output.token_ids) for output in self.output.outputs)

    def answer_ended(self) -> None:
        if self._finished is not None and self.output.finished:
            self._finished.append(self)
            self._finished = None  # once, even if telling of the end fails


class _Answer:
    def __init__(
        self, group: AnswerGroup, index: int, params: SamplingParams, tokenizer: Tokenizer | None
    ) -> None:
        self.group = group
        self.output = CompletionOutput(index=index)
        self._params = params
        self._tokenizer = tokenizer
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer,
                group.output.prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                stop=params.stop_strings,
                include_stop_str_in_output=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
        if params.logprobs is not None:
            self.output.logprobs = []
            self.output.cumulative_logprob = 0.0
        self._keeps_ids_alone = (
            self._detokenizer is None and params.logprobs is None and group.deltas is None
        )

    def update(
        self,
        token_id: int,
        reason: FinishReason | None,
        logprobs: TokenLogprobs | None,
        eos_token_ids: frozenset[int],
    ) -> None:
        output, text = self.output, ""
        token_ids = (token_id,) if token_id >= 0 else ()
        output.token_ids.extend(token_ids)
        if reason is None and self._keeps_ids_alone:
            return
        if reason is FinishReason.STOP and token_id not in eos_token_ids:
            output.stop_reason = token_id
        if self._detokenizer is not None:
            text = self._detokenizer.append(token_ids)
            if reason is not None and self._detokenizer.stop_reason is None:
                text += self._detokenizer.finish()
            if self._detokenizer.stop_reason is not None:
                reason = FinishReason.STOP
                output.stop_reason = self._detokenizer.stop_reason
        output.text += text
        entries: tuple[dict[int, Logprob], ...] = ()
        if logprobs is not None:
            assert output.logprobs is not None and output.cumulative_logprob is not None
            entries = (_by_token(logprobs, self._tokenizer),)
            output.logprobs.extend(entries)
            output.cumulative_logprob += logprobs.logprobs[0]
        self._give(text, token_ids, entries, reason)
        if reason is not None:
            self.end(reason)

    def end(self, reason: FinishReason) -> None:
        """The last delta is there already: another thread may leave its loop once it sees this."""
        self.output.finish_reason = reason.value
        self._detokenizer = None
        self.group.answer_ended()

    def add_prompt_logprobs(self, values: Sequence[TokenLogprobs]) -> None:
        """Take over those of a chunk of the prompt; the first of n answers has them for all."""
        if self.output.index == 0 and self.group.output.prompt_logprobs is not None:
            entries = [_by_token(value, self._tokenizer) for value in values]
            self.group.output.prompt_logprobs += entries

    def fail(self) -> None:
        """End it with what it has: our fault."""
        self._give("", (), (), FinishReason.ERROR)
        self.end(FinishReason.ERROR)

    def _give(
        self,
        text: str,
        token_ids: tuple[int, ...],
        logprobs: tuple[dict[int, Logprob], ...],
        reason: FinishReason | None,
    ) -> None:
        if self.group.deltas is not None:
            self.group.deltas.append(
                CompletionDelta(
                    index=self.output.index,
                    text=text,
                    token_ids=token_ids,
                    finish_reason=None if reason is None else reason.value,
                    stop_reason=self.output.stop_reason,
                    logprobs=logprobs,
                )
            )


class OutputProcessor:
    """Owns the answers in flight, by request id of the engine."""

    def __init__(self, tokenizer: Tokenizer | None, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._answers: dict[str, _Answer] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, request_id: str, group: AnswerGroup, index: int, params: SamplingParams) -> None:
        answer = _Answer(group, index, params, self._tokenizer)
        group.output.outputs.append(answer.output)
        self._answers[request_id] = answer
        if params.prompt_logprobs is not None and index == 0:
            group.output.prompt_logprobs = [None]

    def process(self, events: StepEvents) -> list[str]:
        """Take over what a step produced. Returns the requests that ended here, by a stop string or
        a fault: the engine must abort them."""
        ended = []
        for request_id, values in events.prompt_logprobs.items():
            answer = self._answers.get(request_id)
            if answer is None:
                continue
            try:
                answer.add_prompt_logprobs(values)
            except Exception:
                self._fail_alone(request_id, answer)
                del self._answers[request_id]
                ended.append(request_id)
        for request_id, num_cached in events.num_cached_tokens.items():
            answer = self._answers.get(request_id)
            if answer is not None and answer.output.index == 0:
                answer.group.output.num_cached_tokens = num_cached
        answers, logprobs, eos_token_ids = self._answers, events.logprobs, self._eos_token_ids
        for request_id, token_id, reason in zip(
            events.request_ids, events.token_ids, events.finish_reasons, strict=True
        ):
            answer = answers.get(request_id)
            if answer is None:
                continue
            try:
                answer.update(
                    token_id, reason, logprobs.get(request_id) if logprobs else None, eos_token_ids
                )
            except Exception:
                self._fail_alone(request_id, answer)
            if answer.output.finish_reason is not None:
                del self._answers[request_id]
                if reason is None:
                    ended.append(request_id)
        return ended

    def _fail_alone(self, request_id: str, answer: _Answer) -> None:
        """What goes wrong with one answer's text must not cost the others theirs."""
        logger.exception("answer_failed request_id=%s", request_id)
        answer.fail()

    def fail(self, request_ids: Sequence[str]) -> None:
        """End the answers of a step whose events were not taken over whole."""
        for request_id in request_ids:
            answer = self._answers.pop(request_id, None)
            if answer is not None:
                answer.fail()

    def discard(self, request_id: str) -> None:
        """Forget a request that the caller gave up."""
        answer = self._answers.pop(request_id, None)
        if answer is not None:
            answer.end(FinishReason.ABORT)


def _by_token(value: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """The token itself first (with its rank), then the most likely ones."""

    def entry(index: int, rank: int | None) -> Logprob:
        token_id = value.token_ids[index]
        text = "" if tokenizer is None else tokenizer.token_text(token_id)
        return Logprob(logprob=value.logprobs[index], rank=rank, decoded_token=text)

    found = {value.token_ids[0]: entry(0, value.rank)}
    for index in range(1, len(value.token_ids)):
        found.setdefault(value.token_ids[index], entry(index, index))
    return found
