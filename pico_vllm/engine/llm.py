"""LLM: text in, text out, in the caller's process."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from os import PathLike, fspath
from typing import Any, Self

from pico_vllm.config.engine import EngineConfig, KvKind, WeightFormat
from pico_vllm.engine.engine import CheckedRequest, Engine
from pico_vllm.engine.loading import OnProgress, load_model
from pico_vllm.engine.output_processor import AnswerGroup, OutputProcessor
from pico_vllm.engine.progress import ProgressLine
from pico_vllm.errors import ConfigError, InvalidRequestError, show
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
        model: str | PathLike[str],
        *,
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        block_size: int = 16,
        num_kv_blocks: int | None = None,
        gpu_memory_utilization: float = 0.9,
        kv: KvKind = "paged",
        weight_format: WeightFormat = "auto",
        load_format: str = "auto",
        seed: int = 0,
        cpu_graph: str = "on",
        kernels: str = "auto",
        cuda_graph: str = "lazy",
        batch_invariant: bool = False,
        overlap: str = "auto",
        scheduling_policy: str = "fcfs",
        long_prefill_token_threshold: int | None = None,
        enable_prefix_caching: bool | str = "auto",
        cow_min_tokens: int = 8,
        eviction_policy: str = "lru",
        max_cached_fraction: float = 1.0,
        kv_host_gb: float | None = None,
        kv_disk_path: str | PathLike[str] | None = None,
        kv_disk_gb: float | None = None,
        num_threads: int | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        """The settings are those of EngineConfig; enable_prefix_caching may be True or False as
        well. on_progress is told (phase, done, in all).

        Raises:
            ModelLoadError: the model is missing, damaged or not supported.
            ConfigError: a setting cannot be used, alone or with this model or machine.
        """
        if isinstance(enable_prefix_caching, bool):
            enable_prefix_caching = "on" if enable_prefix_caching else "off"
        config = EngineConfig(
            model=_as_text(model),
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
            cpu_graph=cpu_graph,
            kernels=kernels,
            cuda_graph=cuda_graph,
            batch_invariant=batch_invariant,
            overlap=overlap,
            scheduling_policy=scheduling_policy,
            long_prefill_token_threshold=long_prefill_token_threshold,
            enable_prefix_caching=enable_prefix_caching,
            cow_min_tokens=cow_min_tokens,
            eviction_policy=eviction_policy,
            max_cached_fraction=max_cached_fraction,
            kv_host_gb=kv_host_gb,
            kv_disk_path=_as_text(kv_disk_path),
            kv_disk_gb=kv_disk_gb,
            num_threads=num_threads,
        )
        loaded = load_model(config, on_progress=on_progress)
        self._engine = loaded.engine
        self.model_config = loaded.model_config
        self.weight_bytes = loaded.weight_bytes
        """Memory of all weights, each counted once."""
        self.config = loaded.engine.config
        """Resolved: nothing in it is "auto"."""
        self._tokenizer = loaded.tokenizer
        self._processor = OutputProcessor(loaded.tokenizer, loaded.engine.eos_token_ids)
        # Held for one step or one hand-over, so that a stream and a generate can run side by side.
        self._lock = threading.RLock()
        self._is_stepping = False
        self._given_up: deque[str] = deque()
        """Requests to abort as soon as no step is under way."""
        self._is_closed = False

    @property
    def engine(self) -> Engine:
        """Raises ConfigError once this is closed."""
        self._check_open()
        return self._engine

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises InvalidRequestError for a model that was loaded without one."""
        if self._tokenizer is None:
            raise InvalidRequestError(
                f"{self.config.model} was loaded without a tokenizer; give LLM prompts as lists of "
                "token ids, or measure it with pico-vllm bench or profile",
                param="prompt",
            )
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_finish: Callable[[RequestOutput], None] | None = None,
        show_progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer prompts, in their order. A str or a list of ids is one prompt; a list of those is
        several.

        params: one for all, or one each; None is SamplingParams(). on_finish is called as each
        prompt is done. show_progress: a line on stderr with prompts done and output tokens/s.

        Thousands may be given at once: prompts enter the engine as others leave it.

        Raises:
            InvalidRequestError: a prompt or its parameters cannot be used; nothing was started.
        """
        self._check_open()
        prompt_list = _as_prompts(prompts)
        token_lists = [self._encode(prompt) for prompt in prompt_list]
        texts = [prompt if isinstance(prompt, str) else None for prompt in prompt_list]
        each_params = _one_each(params, len(prompt_list))
        return self._run(token_lists, texts, each_params, on_finish, show_progress)

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        on_finish: Callable[[RequestOutput], None] | None = None,
        show_progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template.

        chat_template_kwargs: variables for the template, such as enable_thinking. The rest is as in
        `generate`.

        Raises:
            ChatTemplateError: there is no template, or it refuses the messages.
        """
        self._check_open()
        is_list = isinstance(messages, (list, tuple)) and len(messages) > 0
        conversations: Sequence[Any] = (
            messages if is_list and not isinstance(messages[0], dict) else [messages]
        )
        token_lists = [self._encode_chat(each, chat_template_kwargs) for each in conversations]
        texts = [None] * len(token_lists)
        each_params = _one_each(params, len(token_lists))
        return self._run(token_lists, texts, each_params, on_finish, show_progress)

    def stream(
        self, prompt: Prompt | Sequence[dict[str, Any]], params: SamplingParams | None = None
    ) -> Iterator[CompletionDelta]:
        """Answer one prompt, or one conversation, giving what each step adds. Leaving the loop ends
        the request.

        Parameters are checked at this call, before anything is given.
        """
        self._check_open()
        if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], dict):
            token_ids = self._encode_chat(prompt, None)
        else:
            (one_prompt,) = _as_prompts([prompt] if isinstance(prompt, (list, tuple)) else prompt)
            token_ids = self._encode(one_prompt)
        (one_params,) = _one_each(params, 1)
        request = self._check(token_ids, one_params)
        output = _output(token_ids, prompt if isinstance(prompt, str) else None)
        group = AnswerGroup(output, keeps_deltas=True)
        deltas = self._stream(group, request)
        next(deltas)  # adds the request; from here on closing the generator ends it
        return deltas  # type: ignore[return-value]

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Requests that run go on with the blocks that they hold."""
        with self._lock:
            self.engine.reset_prefix_cache()

    def close(self) -> None:
        """Give memory and helper processes back. Further calls are refused; a second close does
        nothing."""
        if not self._is_closed:
            self._is_closed = True
            if self._tokenizer is not None:
                self._tokenizer.close()
            self._engine.close()
            del self._engine

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            self.tokenizer.check_text_length(prompt, self.engine.max_model_len)
            return self.tokenizer.encode(prompt)
        token_ids = list(prompt)
        # A prompt far too long is refused by its length alone.
        is_short = 0 < len(token_ids) < self.engine.max_model_len
        if is_short and not type(token_ids[0]) is type(token_ids[-1]) is int:
            return [_plain_int(token_id) for token_id in token_ids]
        return token_ids

    def _encode_chat(self, messages: object, variables: Mapping[str, Any] | None) -> list[int]:
        messages = list(messages) if isinstance(messages, tuple) else messages
        return self.tokenizer.encode_chat(
            messages, max_tokens=self.engine.max_model_len, client_variables=variables
        )

    def _check(self, token_ids: Sequence[int], params: SamplingParams) -> CheckedRequest:
        checked = self.engine.check(token_ids, params)
        if params.stop_strings and self._tokenizer is None:
            raise InvalidRequestError(
                "stop strings need a tokenizer, and this model was loaded without one; use "
                "stop_token_ids",
                param="stop",
            )
        return checked

    def _run(
        self,
        token_lists: Sequence[list[int]],
        texts: Sequence[str | None],
        params: Sequence[SamplingParams],
        on_finish: Callable[[RequestOutput], None] | None,
        show_progress: bool,
    ) -> list[RequestOutput]:
        # All are checked before any starts.
        waiting = deque(
            self._check(token_ids, each)
            for token_ids, each in zip(token_lists, params, strict=True)
        )
        max_unfinished = self._max_unfinished(len(waiting))
        finished: deque[AnswerGroup] = deque()
        unfinished: set[AnswerGroup] = set()
        outputs: list[RequestOutput] = []
        num_tokens = 0
        progress = ProgressLine(len(waiting)) if show_progress else None
        try:
            while waiting or unfinished:
                while waiting and len(unfinished) < max_unfinished:
                    index = len(outputs)
                    output = _output(token_lists[index], texts[index])
                    group = AnswerGroup(output, finished=finished)
                    outputs.append(output)
                    unfinished.add(group)
                    self._add(group, waiting.popleft())
                self._step()
                while finished:
                    group = finished.popleft()
                    unfinished.remove(group)
                    num_tokens += group.num_tokens
                    if on_finish is not None:
                        on_finish(group.output)
                if progress is not None and progress.is_due():
                    num_running_tokens = sum(group.num_tokens for group in unfinished)
                    progress.show(len(outputs) - len(unfinished), num_tokens + num_running_tokens)
        finally:
            # Only a caller's interrupt or error leaves something to give up.
            self._give_up([i for group in unfinished for i in group.request_ids])
            if progress is not None:
                progress.close(len(outputs) - len(unfinished), num_tokens)
        return outputs

    def _max_unfinished(self, num_prompts: int) -> int:
        """Prompts of one call in the engine at once: what a prompt takes while it runs is not taken
        for thousands that wait.

        Twice the rows, as other threads may make steps before this one fills the line up again. A
        policy that chooses among those who wait has to see them all.
        """
        assert self.config.max_num_seqs is not None
        is_in_order = self.config.scheduling_policy == "fcfs"
        return 2 * self.config.max_num_seqs if is_in_order else num_prompts

    def _stream(
        self, group: AnswerGroup, request: CheckedRequest
    ) -> Generator[CompletionDelta | None]:
        """First None, once the request is in line: a generator that never began cannot end it."""
        assert group.deltas is not None
        try:
            self._add(group, request)
            yield None
            while True:
                # Read before the deltas: another thread's step may end the answer after them.
                is_finished = group.output.finished
                while group.deltas:
                    yield group.deltas.popleft()
                if is_finished:
                    return
                self._step()
        finally:
            self._give_up(group.request_ids)

    def _add(self, group: AnswerGroup, request: CheckedRequest) -> None:
        with self._lock:
            self._check_open()
            for index in range(request.params.n):
                if index == 1:
                    # The prompt's log-probabilities are the same for all: one computes them.
                    params = replace(request.params, prompt_logprobs=None)
                    request = replace(request, params=params)
                request_id = self.engine.add(request, sample_index=index)
                group.request_ids.append(request_id)
                self._processor.add(request_id, group, index, request.params)
            group.output.request_id = group.request_ids[0]

    def _step(self) -> None:
        with self._lock:
            self._check_open()
            self._is_stepping = True
            try:
                events = self.engine.step()
                try:
                    ended = self._processor.process(events)
                except BaseException:
                    self._processor.fail(events.request_ids)
                    self._given_up.extend(events.request_ids)
                    raise
                self._given_up.extend(ended)
            finally:
                self._is_stepping = False
                self._abort_given_up()

    def _give_up(self, request_ids: Sequence[str]) -> None:
        """End requests, those that have ended already included."""
        self._given_up.extend(request_ids)
        with self._lock:
            # The garbage collector may close a stream amid a step of this very thread, which the
            # lock lets in.
            if not self._is_stepping:
                self._abort_given_up()

    def _abort_given_up(self) -> None:
        while self._given_up:
            request_id = self._given_up.popleft()
            if not self._is_closed:
                self.engine.abort(request_id)
            self._processor.discard(request_id)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigError("this LLM was closed; make a new one")


def _output(token_ids: list[int], text: str | None) -> RequestOutput:
    return RequestOutput(request_id="", prompt=text, prompt_token_ids=token_ids, outputs=[])


def _plain_int(value: Any) -> Any:
    """NumPy's and other whole numbers as int. What is none stays, to be refused by its place; a
    bool is no id."""
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    return int(value) if is_whole else value


def _as_text(path: Any) -> Any:
    """Of a path object its text; what else was given is checked as it is."""
    return fspath(path) if isinstance(path, PathLike) else path


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
                f"prompt {index} is {show(each)}; a prompt is a string or a list of token ids",
                param="prompt",
            )
    return list(prompts)


def _one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    is_list = isinstance(params, (list, tuple))
    if not is_list or not all(isinstance(each, SamplingParams) for each in params):
        raise InvalidRequestError(
            f"params is {show(params)}; give one SamplingParams for all prompts or a list of them",
            param="params",
        )
    if len(params) != count:
        raise InvalidRequestError(
            f"{len(params)} sampling params for {count} prompts; give one for all or one each",
            param="params",
        )
    return list(params)
