"""What long prompts cost those that are decoding: ITL of some requests while prompts arrive one
after another, for several budgets of a step.

For each budget an engine is loaded. Its requests decode undisturbed for a while (idle), then
prompts come, the next as soon as the one before has its first token (loaded). A gap belongs to the
phase in which it ends. One prompt beforehand warms up and is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from pico_vllm.bench.figures import rounded
from pico_vllm.bench.load import greedy
from pico_vllm.bench.memory import free_memory
from pico_vllm.bench.metrics import distribution_ms
from pico_vllm.bench.model_sizes import read_model_config
from pico_vllm.bench.steps import measured_step
from pico_vllm.bench.workload import PromptSource
from pico_vllm.config.engine import EngineConfig
from pico_vllm.engine.engine import CheckedRequest, Engine
from pico_vllm.engine.llm import LLM
from pico_vllm.errors import ConfigError
from pico_vllm.outputs import StepEvents
from pico_vllm.request import FinishReason

LEAD_IN = 32
"""Steps that all requests decode before the first one is counted: enough for what is captured only
after some use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """All counts are at least 1."""

    num_decoding: int
    """Requests whose ITL is measured."""
    context: int
    """Tokens of their prompts."""
    prompt_tokens: int
    """Of each prompt that disturbs them."""
    num_prompts: int
    idle_steps: int

    def num_outputs(self, config: EngineConfig) -> int:
        """Tokens that a decoding request gets at most, with all steps to come."""
        assert config.max_num_batched_tokens is not None
        chunk = config.max_num_batched_tokens - self.num_decoding
        chunk = min(chunk, config.long_prefill_token_threshold or chunk)
        # With overlap up to two steps go by before a first token is known.
        steps_per_prompt = -(-self.prompt_tokens // chunk) + 2
        # The first requests decode while the prompts of the last ones are computed.
        first_steps = -(-self.num_decoding * self.context // config.max_num_batched_tokens)
        num_prompts = 1 + self.num_prompts
        return first_steps + LEAD_IN + num_prompts * steps_per_prompt + self.idle_steps + 4


def run_interference(
    budgets: Sequence[int],
    scenario: Scenario,
    config: EngineConfig,
    load: Callable[[EngineConfig], LLM],
) -> Iterator[tuple[dict[str, Any], EngineConfig]]:
    """One line a budget, as soon as it is measured, with its resolved settings.

    Raises:
        ConfigError: a budget leaves no room for prompts, or the window, the rows or (once loaded)
        the pool do not hold the requests.
    """
    configs = _configs(budgets, scenario, config)
    for each in configs:
        with closing(load(each)) as llm:
            _check_pool(llm, scenario)
            source = PromptSource(llm.engine.vocab_size, config.seed)
            figures = measure(llm.engine, scenario, source)
            shape = {name: getattr(scenario, name) for name in Scenario.__dataclass_fields__}
            budget = each.max_num_batched_tokens
            yield (
                {"id": f"interference-t{budget}", "budget_tokens": budget}
                | rounded(figures)
                | shape
                | {"seed": config.seed},
                llm.config,
            )
        free_memory()


def measure(engine: Engine, scenario: Scenario, source: PromptSource) -> dict[str, float | None]:
    """The engine has nothing else to do, and holds nothing afterwards."""
    decoding = _Decoding(engine)
    # Made beforehand: between two steps it would count as a gap.
    warm_up, *prompts = (
        engine.check(source.prompt(scenario.prompt_tokens), greedy(1))
        for _ in range(1 + scenario.num_prompts)
    )
    num_outputs = scenario.num_outputs(engine.config)
    try:
        for _ in range(scenario.num_decoding):
            decoding.add(engine.check(source.prompt(scenario.context), greedy(num_outputs)))
        while decoding.least_tokens < LEAD_IN:
            decoding.step()
        decoding.ttft_s(warm_up)
        decoding.take_gaps_s()
        for _ in range(scenario.idle_steps):
            decoding.step()
        idle_s = decoding.take_gaps_s()
        ttft_s = [decoding.ttft_s(prompt) for prompt in prompts]
        loaded_s = decoding.take_gaps_s()
    finally:
        decoding.abort()
    idle = distribution_ms("idle_itl", idle_s)
    loaded = distribution_ms("loaded_itl", loaded_s)
    ratios = {
        f"itl_ratio_{of}": loaded[f"loaded_itl_ms_{of}"] / idle[f"idle_itl_ms_{of}"]  # type: ignore[operator]
        for of in ("p50", "p99")
    }
    return idle | loaded | ratios | distribution_ms("ttft", ttft_s)


class _Decoding:
    """The requests that decode, and the gaps between their tokens since these were last taken."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._last_s: dict[str, float | None] = {}
        self._num_tokens: dict[str, int] = {}
        self._gaps_s: list[float] = []
        self._prompt_id: str | None = None

    @property
    def least_tokens(self) -> int:
        return min(self._num_tokens.values())

    def add(self, request: CheckedRequest) -> None:
        request_id = self._engine.add(request)
        self._last_s[request_id] = None
        self._num_tokens[request_id] = 0

    def step(self) -> StepEvents:
        events = measured_step(self._engine)
        now_s = time.perf_counter()
        for request_id, reason in zip(events.request_ids, events.finish_reasons, strict=True):
            if request_id not in self._last_s:
                assert reason is FinishReason.LENGTH, f"a prompt ended with {reason}"
                continue
            # Without it the others would be a smaller batch.
            assert reason is None, f"a decoding request ended with {reason}"
            last_s = self._last_s[request_id]
            if last_s is not None:
                self._gaps_s.append(now_s - last_s)
            self._last_s[request_id] = now_s
            self._num_tokens[request_id] += 1
        return events

    def ttft_s(self, prompt: CheckedRequest) -> float:
        """Send one for a single token, and step until it is there."""
        start_s = time.perf_counter()
        self._prompt_id = self._engine.add(prompt)
        while self._prompt_id not in self.step().request_ids:
            pass
        self._prompt_id = None
        return time.perf_counter() - start_s

    def take_gaps_s(self) -> list[float]:
        gaps_s, self._gaps_s = self._gaps_s, []
        return gaps_s

    def abort(self) -> None:
        for request_id in (*self._last_s, self._prompt_id):
            if request_id is not None:
                self._engine.abort(request_id)
        # With overlap one more step is under way; an interrupt leaves news for who is gone.
        while self._engine.has_work():
            self._engine.step()


def _configs(
    budgets: Sequence[int], scenario: Scenario, config: EngineConfig
) -> list[EngineConfig]:
    """One a budget, alike but for it. Rows and window are no larger than needed, unless somebody
    asked for others."""
    num_rows = scenario.num_decoding + 1
    for budget in budgets:
        if budget < num_rows:
            raise ConfigError(
                f"a budget of {budget} tokens leaves {scenario.num_decoding} decoding requests and "
                f"a prompt no step together; give at least {num_rows} with --budgets, or lower "
                "--decoding",
                param="budgets",
            )
    max_num_seqs = config.max_num_seqs or num_rows
    if max_num_seqs < num_rows:
        raise ConfigError(
            f"{scenario.num_decoding} decoding requests and a prompt need {num_rows} rows and "
            f"max_num_seqs is {max_num_seqs}; raise --max-num-seqs or lower --decoding",
            param="max_num_seqs",
        )
    configs = [
        replace(config, max_num_batched_tokens=budget, max_num_seqs=max_num_seqs)
        for budget in budgets
    ]
    need = max(
        scenario.prompt_tokens + 1,
        *(scenario.context + scenario.num_outputs(each) for each in configs),
    )
    window = read_model_config(config.model).max_model_len_default
    window = min(window, config.max_model_len or window)
    if need > window:
        raise ConfigError(
            f"a request needs {need} tokens and the window holds {window}; lower --prompt-tokens, "
            "--prompts, --idle-steps or --context, or raise --max-model-len or the smallest of "
            "--budgets",
            param="max_model_len",
        )
    return [replace(each, max_model_len=config.max_model_len or need) for each in configs]


def _check_pool(llm: LLM, scenario: Scenario) -> None:
    config = llm.config
    assert config.num_kv_blocks is not None
    totals = [scenario.context + scenario.num_outputs(config)] * scenario.num_decoding
    need = sum(-(-total // config.block_size) for total in (*totals, scenario.prompt_tokens + 1))
    if need > config.num_kv_blocks:
        raise ConfigError(
            f"{scenario.num_decoding} decoding requests and a prompt need {need} KV blocks and the "
            f"pool has {config.num_kv_blocks}; raise --num-kv-blocks, or lower --decoding, "
            "--context or --prompt-tokens",
            param="num_kv_blocks",
        )
