"""LLM: text in, text out, in the caller's process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

from pico_vllm.config.engine import EngineConfig, KvKind, WeightFormat
from pico_vllm.engine.loading import load_model
from pico_vllm.engine.output_processor import AnswerGroup, OutputProcessor
from pico_vllm.errors import ConfigError, InvalidRequestError
from pico_vllm.outputs import CompletionDelta, RequestOutput
from pico_vllm.sampling_params import SamplingParams
from pico_vllm.tokenizer.tokenizer import Tokenizer

Prompt = str | Sequence[int]


class LLM:
    """An engine with its tokenizer.

        with LLM("smollm2-135m") as llm:
            print(llm.generate("The capital of France is")[0].outputs[0].text)

    Calls from several threads take turns step by step.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 2048,
        block_size: int = 16,
        num_kv_blocks: int | None = None,
        gpu_memory_utilization: float = 0.9,
        kv: KvKind = "paged",
        weight_format: WeightFormat = "auto",
        load_format: str = "auto",
        seed: int = 0,
        num_threads: int | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """The settings are those of EngineConfig. on_progress is told (tensors loaded, tensors in
        all).

        Raises:
            ModelLoadError: the model is missing, damaged or not supported.
            ConfigError: a setting cannot be used, alone or with this model or machine.
        """
        config = EngineConfig(
            model=model,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            num_kv_blocks=num_kv_blocks,
            gpu_memory_utilization=gpu_memory_utilization,
            kv=kv,
            weight_format=weight_format,
            load_format=load_format,
            seed=seed,
            num_threads=num_threads,
        )
        loaded = load_model(config, on_progress=on_progress)
        self.engine = loaded.engine
        self.model_config = loaded.model_config
        self.weight_bytes = loaded.weight_bytes
        """Memory of all weights, each counted once."""
        self.config = loaded.engine.config
        """Resolved: nothing in it is "auto"."""
        self._tokenizer = loaded.tokenizer
        self._processor = OutputProcessor(loaded.tokenizer, loaded.engine.eos_token_ids)
        # Held for one step or one hand-over, so that a stream and a generate can run side by side.
        self._lock = threading.RLock()
        self._is_closed = False

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises InvalidRequestError for a model that was loaded without one."""
        if self._tokenizer is None:
            raise InvalidRequestError(
                f"{self.config.model} was loaded without a tokenizer; give prompts as lists of "
                "token ids",
                param="prompt",
            )
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_finish: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts, in their order. A str or a list of ids is one prompt; a list of those is
        several.

        params: one for all, or one each; None is SamplingParams(). on_finish is called as each
        prompt is done.

        Raises:
            InvalidRequestError: a prompt or its parameters cannot be used; nothing was started.
        """
        prompt_list = _as_prompts(prompts)
        token_lists = [self._encode(prompt) for prompt in prompt_list]
        texts = [prompt if isinstance(prompt, str) else None for prompt in prompt_list]
        return self._run(token_lists, texts, _one_each(params, len(prompt_list)), on_finish)

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_finish: Callable[[RequestOutput], None] | None = None,
        **template_variables: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template.

        Raises:
            ChatTemplateError: there is no template, or it refuses the messages.
        """
        is_single = not messages or isinstance(messages[0], dict)
        conversations: Sequence[Any] = [messages] if is_single else messages
        token_lists = [
            self.tokenizer.encode_chat(each, **template_variables) for each in conversations
        ]
        return self._run(
            token_lists, [None] * len(token_lists), _one_each(params, len(token_lists)), on_finish
        )

    def stream(
        self, prompt: Prompt | Sequence[dict[str, Any]], params: SamplingParams | None = None
    ) -> Iterator[CompletionDelta]:
        """Answer one prompt, or one conversation, giving what each step adds. Leaving the loop ends
        the request.

        Parameters are checked at this call, before anything is given.
        """
        if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], dict):
            token_ids = self.tokenizer.encode_chat(prompt)
        else:
            token_ids = self._encode(prompt)  # type: ignore[arg-type]
        params = SamplingParams() if params is None else params
        self.engine.check(token_ids, params)
        group, request_ids = self._add(
            token_ids, prompt if isinstance(prompt, str) else None, params, keeps_deltas=True
        )
        return self._stream(group, request_ids)

    def close(self) -> None:
        """Give memory and helper processes back. Further calls are refused; a second close does
        nothing."""
        if not self._is_closed:
            self._is_closed = True
            if self._tokenizer is not None:
                self._tokenizer.close()
            del self.engine

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            self.tokenizer.check_text_length(prompt, self.engine.max_model_len)
            return self.tokenizer.encode(prompt)
        return list(prompt)

    def _run(
        self,
        token_lists: Sequence[list[int]],
        texts: Sequence[str | None],
        params: Sequence[SamplingParams],
        on_finish: Callable[[RequestOutput], None] | None,
    ) -> list[RequestOutput]:
        self._check_open()
        for token_ids, each in zip(token_lists, params, strict=True):
            self.engine.check(token_ids, each)
        groups: list[AnswerGroup] = []
        request_ids: list[str] = []
        try:
            for token_ids, text, each in zip(token_lists, texts, params, strict=True):
                group, ids = self._add(token_ids, text, each, keeps_deltas=False)
                groups.append(group)
                request_ids += ids
            unfinished = dict(enumerate(groups))
            while unfinished:
                self._step()
                for index in [i for i, group in unfinished.items() if group.output.finished]:
                    group = unfinished.pop(index)
                    if on_finish is not None:
                        on_finish(group.output)
        finally:
            # Only a caller's interrupt or error leaves something to give up.
            self._abort(request_ids)
        return [group.output for group in groups]

    def _stream(self, group: AnswerGroup, request_ids: list[str]) -> Iterator[CompletionDelta]:
        assert group.deltas is not None
        try:
            while True:
                while group.deltas:
                    yield group.deltas.popleft()
                if group.output.finished:
                    return
                self._step()
        finally:
            self._abort(request_ids)

    def _add(
        self, token_ids: list[int], text: str | None, params: SamplingParams, *, keeps_deltas: bool
    ) -> tuple[AnswerGroup, list[str]]:
        self._check_open()
        with self._lock:
            output = RequestOutput(
                request_id="", prompt=text, prompt_token_ids=token_ids, outputs=[]
            )
            group = AnswerGroup(output, keeps_deltas=keeps_deltas)
            request_ids = [
                self.engine.add_request(token_ids, params, sample_index=i) for i in range(params.n)
            ]
            output.request_id = request_ids[0]
            for index, request_id in enumerate(request_ids):
                self._processor.add(request_id, group, index, params)
        return group, request_ids

    def _step(self) -> None:
        with self._lock:
            self._check_open()
            for request_id in self._processor.process(self.engine.step()):
                self.engine.abort(request_id)

    def _abort(self, request_ids: Sequence[str]) -> None:
        with self._lock:
            for request_id in request_ids:
                if not self._is_closed:
                    self.engine.abort(request_id)
                self._processor.discard(request_id)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigError("this LLM was closed; make a new one")


def _as_prompts(prompts: object) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise InvalidRequestError(
            "prompts must be a string, a list of token ids, or a list of either, not "
            f"{type(prompts).__name__}",
            param="prompt",
        )
    if prompts and not any(isinstance(each, (str, list, tuple)) for each in prompts):
        return [prompts]
    for index, each in enumerate(prompts):
        if not isinstance(each, (str, list, tuple)):
            raise InvalidRequestError(
                f"prompt {index} is {str(each)[:40]}; a prompt is a string or a list of token ids",
                param="prompt",
            )
    return list(prompts)


def _one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count or not all(isinstance(each, SamplingParams) for each in params):
        raise InvalidRequestError(
            f"{len(params)} sampling params for {count} prompts; give one for all or one each",
            param="params",
        )
    return list(params)
