"""Engine: requests of token ids in, StepEvents out. It has never seen a string.

plan = scheduler.schedule(); pending = runner.launch(plan); events = scheduler.commit(plan,
pending.result())

With overlap a step is launched before the one before it is committed, so that the device never
waits for the host; `step` then returns the events of the earlier one.
"""

from __future__ import annotations

import itertools
import logging
import struct
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from pico_vllm.cache.prefix_cache import CacheStats
from pico_vllm.config.engine import EngineConfig
from pico_vllm.engine.host_clock import HostClock
from pico_vllm.engine.model_runner import PendingResult, Runner
from pico_vllm.errors import (
    ContextLengthError,
    EmptyPromptError,
    InvalidRequestError,
    ModelLoadError,
    TokenOutOfRangeError,
    show,
)
from pico_vllm.outputs import StepEvents
from pico_vllm.request import FinishReason, Request
from pico_vllm.sampling_params import MAX_ENDING_IDS, SamplingParams
from pico_vllm.scheduler.scheduler import Scheduler
from pico_vllm.step import StepPlan

logger = logging.getLogger(__name__)

SAVING_TIME_S = 5.0
"""For prefixes that are not on disk yet when an engine ends."""


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """One that can run on the engine that checked it."""

    token_ids: NDArray[np.int32]
    params: SamplingParams
    max_tokens: int
    """Resolved: never None."""


class Engine:
    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        runner: Runner,
        *,
        vocab_size: int,
        eos_token_ids: Collection[int],
    ) -> None:
        """config is resolved: its max_model_len fits the pool. vocab_size: ids that the tokenizer
        knows."""
        assert config.max_model_len is not None
        self.config = config
        self.max_model_len = config.max_model_len
        self.vocab_size = vocab_size
        self._scheduler = scheduler
        self._runner = runner
        self._num_pool_blocks = config.num_kv_blocks
        self.eos_token_ids = frozenset(eos_token_ids)
        self._request_numbers = itertools.count()
        self.host_clock = HostClock()
        self._warm_up_stats = CacheStats()
        """What warming up added to the scheduler's."""
        self._in_flight: tuple[StepPlan, PendingResult] | None = None
        self._undelivered: StepEvents | None = None
        """Of a step that an interrupt ended: the next step tells whose requests were lost."""
        self.last_failure: str | None = None
        """Why requests ended with finish reason `error`, those that did last."""

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> CheckedRequest:
        """Refuse a request that could not run; otherwise return it as `add` takes it.

        Raises:
            EmptyPromptError, TokenOutOfRangeError, ContextLengthError, InvalidRequestError: nothing
            was changed.
        """
        num_prompt_tokens = len(prompt_token_ids)
        if num_prompt_tokens == 0:
            raise EmptyPromptError("the prompt has no tokens; give at least one", param="prompt")
        # A prompt far too long is refused before its tokens are looked at one by one.
        if num_prompt_tokens >= self.max_model_len:
            raise ContextLengthError(
                f"the prompt has {num_prompt_tokens} tokens and the window holds "
                f"{self.max_model_len}, "
                "one of them for the answer; shorten the prompt",
                param="prompt",
            )
        # A pass in C, which the first token waits for.
        try:
            packed = struct.pack(f"{num_prompt_tokens}q", *prompt_token_ids)
        except (struct.error, TypeError):
            self._refuse_token(prompt_token_ids)
        token_ids = np.frombuffer(packed, np.int64)
        lowest = token_ids.min()
        if lowest < 0 or token_ids.max() >= self.vocab_size:
            self._refuse_token(prompt_token_ids)
        if lowest <= 1:  # or a bool, which counts as one of these
            of_these = (token_ids <= 1).nonzero()[0].tolist()
            if any(isinstance(prompt_token_ids[index], bool) for index in of_these):
                self._refuse_token(prompt_token_ids)
        room = self.max_model_len - num_prompt_tokens
        if params.max_tokens is not None and params.max_tokens > room:
            raise ContextLengthError(
                f"the prompt has {num_prompt_tokens} tokens and max_tokens is "
                f"{params.max_tokens}, together more than "
                f"the window of {self.max_model_len}; shorten the prompt or ask for at most "
                f"{room} tokens",
                param="max_tokens",
            )
        if params.min_tokens > room:
            raise InvalidRequestError(
                f"min_tokens is {params.min_tokens} but the window leaves {room} tokens; lower "
                "min_tokens",
                param="min_tokens",
            )
        num_ending_ids = len(self._ending_ids(params))
        if params.min_tokens and num_ending_ids > MAX_ENDING_IDS:
            raise InvalidRequestError(
                f"min_tokens would hold back {num_ending_ids} ids, stop_token_ids and the model's "
                f"EOS ids, more than {MAX_ENDING_IDS}; give fewer stop_token_ids or set ignore_eos",
                param="stop_token_ids",
            )
        max_n = self.config.max_num_seqs
        if params.n > max_n:
            raise InvalidRequestError(
                f"n is {params.n}, more than max_num_seqs {max_n}; ask for fewer", param="n"
            )
        for name, ids in (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
        ):
            for token_id in ids or ():
                if token_id >= self.vocab_size:
                    raise InvalidRequestError(
                        f"{name} names token {token_id}; ids go from 0 to {self.vocab_size - 1}",
                        param=name,
                    )
        max_tokens = room if params.max_tokens is None else params.max_tokens
        return CheckedRequest(token_ids.astype(np.int32), params, max_tokens)

    def _refuse_token(self, prompt_token_ids: Sequence[int]) -> NoReturn:
        index = next(
            index
            for index, token_id in enumerate(prompt_token_ids)
            if not isinstance(token_id, Integral)
            or isinstance(token_id, bool)
            or not 0 <= token_id < self.vocab_size
        )
        raise TokenOutOfRangeError(
            f"prompt token {index} is {show(prompt_token_ids[index])}; ids are whole numbers from "
            f"0 to {self.vocab_size - 1}",
            param="prompt",
        )

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        sample_index: int = 0,
    ) -> str:
        """Check one request, put it in line and return its id. `params.n` is the caller's affair:
        one request is one answer."""
        return self.add(self.check(prompt_token_ids, params), sample_index=sample_index)

    def add(self, checked: CheckedRequest, *, sample_index: int = 0) -> str:
        params = checked.params
        number = next(self._request_numbers)
        request = Request(
            request_id=str(number),
            prompt_token_ids=checked.token_ids,
            params=params,
            max_tokens=checked.max_tokens,
            stop_token_ids=self._ending_ids(params),
            seed=_fresh_seed(self.config.seed, number) if params.seed is None else params.seed,
            sample_index=sample_index,
        )
        self._scheduler.add(request)
        return request.request_id

    def _ending_ids(self, params: SamplingParams) -> frozenset[int]:
        stop_token_ids = frozenset(params.stop_token_ids or ())
        return stop_token_ids if params.ignore_eos else stop_token_ids | self.eos_token_ids

    def abort(self, request_id: str) -> bool:
        """End a request early; False (and no error) if it is unknown or has ended."""
        return self._scheduler.abort(request_id)

    @property
    def num_preemptions(self) -> int:
        """Times that a request gave its blocks back, since the engine began."""
        return self._scheduler.num_preemptions

    def cache_stats(self) -> CacheStats:
        """What the prefix cache did since the engine began, and what it is now."""
        return self._scheduler.cache_stats().since(self._warm_up_stats)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Requests that run go on with the blocks that they hold."""
        self._scheduler.reset_prefix_cache()

    def restart(self, config: EngineConfig) -> None:
        """Go on, idle as it is, with a new scheduler and an empty cache. config: the engine's, but
        for how requests are scheduled and cached; with fewer blocks, the first ones of the pool are
        used."""
        assert not self.has_work(), "requests would be lost"
        assert not self.config.has_lower_tiers, "what lies below the device would be lost"
        assert config.max_model_len is not None and config.num_kv_blocks is not None
        assert config.num_kv_blocks <= (self._num_pool_blocks or 0), "more blocks than there are"
        self._scheduler = Scheduler.from_config(config)
        self._warm_up_stats = CacheStats()
        self.config = config
        self.max_model_len = config.max_model_len

    def has_work(self) -> bool:
        return (
            self._undelivered is not None
            or self._in_flight is not None
            or self._scheduler.has_work()
        )

    def step(self) -> StepEvents:
        """Compute one step. If it raises, only the requests in it end, with finish reason
        `error`.

        An interrupt (KeyboardInterrupt) leaves no half-done step behind either: it is raised on,
        and the next call reports whose requests it cost.
        """
        if self._undelivered is not None:
            events, self._undelivered = self._undelivered, None
            return events
        plan = None
        try:
            plan = self._scheduler.schedule()
            launched = None
            if plan is not None:
                launched = (plan, self._runner.launch(plan))
                is_decode = plan.num_decodes == len(plan.rows) > 0
                self.host_clock.launched(is_decode=is_decode)
            if self.config.overlap == "on":
                # The step just launched stays under way while the one before it is committed.
                launched, self._in_flight = self._in_flight, launched
            if launched is not None:
                plan, pending = launched
            self._scheduler.release_ended()
            if launched is None:
                return StepEvents()
            result = pending.result()
            self.host_clock.received()
            events = self._scheduler.commit(plan, result)
            if not self.has_work():
                self.host_clock.idle()
        except Exception as error:
            self.last_failure = _in_one_line(error)
            self._wait_for_transfers()
            events = self._scheduler.fail(plan)
            logger.exception("step_failed num_requests=%d", len(events.request_ids))
            self._wait_for_step_in_flight()
            return events
        except BaseException as error:
            self.last_failure = _in_one_line(error)
            self._wait_for_transfers()
            self._undelivered = self._scheduler.fail(plan)
            raise
        if FinishReason.ERROR in events.finish_reasons:
            self.last_failure = "the model gave NaN or infinity; check its weight files"
            logger.warning(
                "bad_logits: NaN or infinity ended %d",
                events.finish_reasons.count(FinishReason.ERROR),
            )
        return events

    def _wait_for_transfers(self) -> None:
        """Before blocks of copies that may be under way are given to others."""
        if self.config.has_lower_tiers:
            with suppress(Exception):  # a device that failed copies nothing more
                self._runner.wait_for_transfers()

    def _wait_for_step_in_flight(self) -> None:
        """A launch that failed may have been under way too: the step before it is over first."""
        if self._in_flight is not None:
            with suppress(Exception):  # told when its turn comes
                self._in_flight[1].result()

    def close(self) -> None:
        """Stop: what is under way ends, and nobody is told. The engine is not used again."""
        self._in_flight = None
        if self.config.kv_disk_path is not None:
            self._save_prefixes()
        self._runner.close()
        self._scheduler.close()

    def _save_prefixes(self) -> None:
        """Let the next engine find on disk what the pool alone has, as much as SAVING_TIME_S
        allow."""
        until = time.monotonic() + SAVING_TIME_S
        try:
            while (left_s := until - time.monotonic()) > 0:
                plan = self._scheduler.plan_to_save(left_s)
                if plan is None:
                    return
                self._scheduler.commit(plan, self._runner.launch(plan).result())
        except Exception:
            logger.exception("kv_save_failed")

    def warm_up(self, num_tokens: int) -> None:
        """Decode one request of that many tokens before anybody waits, so that what is made on
        first use is there. Leaves no trace: the first real request is still number 0."""
        num_tokens = min(num_tokens, self.max_model_len - 1)
        if num_tokens > 0:
            params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
            self.add_request([0], params)
            while self.has_work():
                if FinishReason.ERROR in self.step().finish_reasons:
                    raise ModelLoadError(
                        f"the model cannot compute a first answer: {self.last_failure}",
                        param="model",
                    )
            self._request_numbers = itertools.count()
            self._scheduler.reset_prefix_cache(with_tiers=False)
            self._warm_up_stats = self._scheduler.cache_stats()

    def check_invariants(self) -> None:
        self._scheduler.check_invariants()


def _in_one_line(error: BaseException) -> str:
    name = type(error).__name__
    if name == "OutOfMemoryError":  # of torch, which this module does without
        return (
            "the device is out of memory; lower max_num_seqs, max_num_batched_tokens or "
            "gpu_memory_utilization, or free the device"
        )
    lines = str(error).splitlines()
    return f"{name}: {lines[0]}" if lines else name


_GOLDEN_64 = 0x9E3779B97F4A7C15


def _fresh_seed(engine_seed: int, number: int) -> int:
    """A different int64 for every request that brings no seed, the same again in the next run."""
    bits = (engine_seed * _GOLDEN_64 + number + 1) * _GOLDEN_64 % 2**64
    return bits - 2**64 if bits >= 2**63 else bits
