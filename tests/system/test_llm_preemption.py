"""Preemption with a real model on the CPU: tokens, text and log-probabilities are those of a run in
which nobody was preempted."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import tiny
from tiny import TinyModel, assert_idle, greedy, random_prompts

from pico_vllm import LLM, RequestOutput, SamplingParams

# The plain loop with whole prompts, and overlap with prompts in chunks.
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"overlap": "off"},
    "overlapped-chunks": {"overlap": "on", "long_prefill_token_threshold": 16},
}


@pytest.fixture(scope="module", params=list(WAYS))
def small(tiny_model: TinyModel, request: Any) -> Iterator[LLM]:
    """T-small: a pool of 128 tokens."""
    with LLM(str(tiny_model.folder), **tiny.FIXTURE_T_SMALL, **WAYS[request.param]) as llm:
        yield llm


@contextmanager
def preempting(llm: LLM, steps: Set[int]) -> Iterator[None]:
    """Whoever runs longest is preempted before the given steps are planned."""
    scheduler = llm.engine._scheduler
    schedule, num_steps = scheduler.schedule, 0

    def preempt_and_schedule() -> Any:
        nonlocal num_steps
        if num_steps in steps and scheduler._running:
            scheduler._preempt(next(iter(scheduler._running.values())))
            scheduler.check_invariants()
        num_steps += 1
        return schedule()

    scheduler.schedule = preempt_and_schedule  # type: ignore[method-assign]
    try:
        yield
    finally:
        scheduler.schedule = schedule  # type: ignore[method-assign]


def values_of(entries: Any) -> list[float]:
    return [each.logprob for entry in entries or () for each in (entry or {}).values()]


def assert_same(found: list[RequestOutput], wanted: list[RequestOutput]) -> None:
    """Ids, text, reasons, and which tokens log-probabilities are of; their values as far as sums in
    other chunks round."""
    for ours, theirs in zip(found, wanted, strict=True):
        for mine, other in zip(ours.outputs, theirs.outputs, strict=True):
            assert mine.token_ids == other.token_ids and mine.text == other.text
            assert (mine.finish_reason, mine.stop_reason) == (
                other.finish_reason,
                other.stop_reason,
            )
            assert values_of(mine.logprobs) == pytest.approx(values_of(other.logprobs), abs=1e-4)
        prompts = [output.prompt_logprobs for output in (ours, theirs)]
        assert values_of(prompts[0]) == pytest.approx(values_of(prompts[1]), abs=1e-4)


EVERYTHING = SamplingParams(
    max_tokens=14, min_tokens=9, temperature=0.8, seed=2, top_p=0.95, presence_penalty=0.8,
    frequency_penalty=0.6, repetition_penalty=1.2, logprobs=2, prompt_logprobs=1,
    stop_token_ids=list(range(0, 300, 3)),
)  # fmt: skip


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_preemptions_at_every_step(small: LLM, count: int) -> None:
    """One to four preemptions, beginning at any step: a sampled request with penalties, min_tokens
    and log-probabilities of all kinds, and a greedy one, get what they get undisturbed."""
    prompts = random_prompts([35, 20], seed=4)
    params = [EVERYTHING, greedy(14)]
    wanted = small.generate(prompts, params)
    # It ends by a stop id, as soon as min_tokens let it.
    assert len(wanted[0].outputs[0].token_ids) == 10
    assert wanted[0].outputs[0].finish_reason == "stop"
    assert len(wanted[0].prompt_logprobs or ()) == 35
    for first in range(18):
        with preempting(small, set(range(first, first + 2 * count, 2))):
            assert_same(small.generate(prompts, params), wanted)
        while small.engine.has_work():  # the step after a stop id that was found late
            assert small.engine.step().request_ids == ()
        assert_idle(small)


def test_a_stream_has_no_repeat_and_no_gap(small: LLM) -> None:
    """A stream that is preempted at any step gives each token and each piece of text once."""
    (prompt,) = random_prompts([33], seed=9)
    params = greedy(12, logprobs=1)
    wanted = small.generate(prompt, params)[0].outputs[0]
    for first in range(14):
        with preempting(small, {first, first + 1, first + 4}):
            deltas = list(small.stream(prompt, params))
        assert [i for delta in deltas for i in delta.token_ids] == wanted.token_ids
        assert "".join(delta.text for delta in deltas) == wanted.text
        assert sum(len(delta.logprobs) for delta in deltas) == 12
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]
    assert_idle(small)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_blocks", [64, 15, 8, 4])
def test_pressure_changes_nothing(tiny_model: TinyModel, num_blocks: int, way: str) -> None:
    """Greedy requests get the oracle's tokens, sampled ones those of a large pool, whether the pool
    holds plenty, 110 % or 60 % of what may run at once comes to need, or one request."""
    random = np.random.default_rng(1)
    prompts = random_prompts(random.integers(1, 40, 14).tolist(), seed=2)
    params = [
        greedy(int(random.integers(1, 25)))
        if number % 2
        else SamplingParams(
            max_tokens=24, ignore_eos=True, seed=number, presence_penalty=0.5, temperature=1.0
        )
        for number in range(14)
    ]
    settings = tiny.FIXTURE_T | {"num_kv_blocks": num_blocks, "max_model_len": 64} | WAYS[way]
    with LLM(str(tiny_model.folder), **settings) as llm:
        found = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        assert_idle(llm)
        num_preemptions = llm.engine._scheduler.num_preemptions
    assert (num_preemptions > 0) is (num_blocks < 15)
    for number, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        if number % 2:
            assert found[number] == tiny_model.oracle.greedy(prompt, each.max_tokens)
    assert [found[number] for number in range(0, 14, 2)] == sampled_alone(
        tiny_model, prompts[::2], params[::2]
    )


def sampled_alone(
    tiny_model: TinyModel, prompts: list[list[int]], params: list[SamplingParams]
) -> list[list[int]]:
    with LLM(str(tiny_model.folder), **tiny.FIXTURE_T) as llm:
        return [
            llm.generate(prompt, each)[0].outputs[0].token_ids
            for prompt, each in zip(prompts, params, strict=True)
        ]
