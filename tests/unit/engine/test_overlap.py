"""A step launched before the one before it is committed: same tokens as one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tiny
from tiny import assert_idle, greedy, random_prompts

from pico_vllm import LLM, SamplingParams
from pico_vllm.errors import ConfigError
from pico_vllm.step import StepResult


@pytest.fixture(scope="module")
def engines(tiny_model: Any) -> Iterator[tuple[LLM, LLM]]:
    """The plain loop and the overlapped one."""
    folder = str(tiny_model.folder)
    with (
        LLM(folder, overlap="off", **tiny.FIXTURE_T_SMALL) as plain,
        LLM(folder, overlap="on", **tiny.FIXTURE_T_SMALL) as overlapped,
    ):
        yield plain, overlapped


def _random_params(random: np.random.Generator) -> SamplingParams:
    kind = random.integers(0, 6)
    common: dict[str, Any] = {
        "max_tokens": int(random.integers(1, 20)),
        "ignore_eos": bool(random.integers(0, 2)),
        "temperature": float(random.choice([0.0, 1.0])),
        "seed": int(random.integers(0, 1000)),
    }
    if kind == 1:
        common["stop_token_ids"] = random.integers(0, 300, 60).tolist()
    elif kind == 2:
        common |= {"top_p": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.3}
    elif kind == 3:
        common |= {"logprobs": 2, "prompt_logprobs": 1}
    elif kind == 4:
        common |= {"stop": ["a", "e"]}
    elif kind == 5:
        common |= {"min_tokens": common["max_tokens"], "n": 2}
    return SamplingParams(**common)


@pytest.mark.parametrize("seed", range(6))
def test_overlap_gives_the_same_answers(engines: tuple[LLM, LLM], seed: int) -> None:
    """Random requests, more than fit at once, with ends of every kind: every token, text, reason
    and log-probability is that of the plain loop."""
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, 300, random.integers(1, 40)).tolist() for _ in range(24)]
    params = [_random_params(random) for _ in prompts]
    plain, overlapped = (engine.generate(prompts, params) for engine in engines)
    for ours, theirs in zip(overlapped, plain, strict=True):
        for mine, other in zip(ours.outputs, theirs.outputs, strict=True):
            assert mine.token_ids == other.token_ids and mine.text == other.text
            assert mine.finish_reason == other.finish_reason
            assert mine.stop_reason == other.stop_reason
            # Requests meet in other batches, whose sums round otherwise.
            assert mine.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-4)
        prompts_of = [output.prompt_logprobs for output in (ours, theirs)]
        values = [
            [entry.logprob for each in (given or [])[1:] for entry in (each or {}).values()]
            for given in prompts_of
        ]
        assert values[0] == pytest.approx(values[1], abs=1e-4)
    for engine in engines:
        engine.engine.check_invariants()


def test_a_step_runs_ahead(engines: tuple[LLM, LLM]) -> None:
    """The first call launches and has no events; each later one commits the step before."""
    engine = engines[1].engine
    while engine.has_work():
        engine.step()
    request_id = engine.add_request([1, 2, 3], greedy(2))
    events = [engine.step() for _ in range(3)]
    assert [each.request_ids for each in events] == [(), (request_id,), (request_id,)]
    assert not engine.has_work()


def test_a_late_end_costs_one_discarded_token(engines: tuple[LLM, LLM]) -> None:
    """An EOS is seen when the next step is under way: its token reaches nobody, and all blocks are
    back once it is over."""
    plain, overlapped = engines
    (prompt,) = random_prompts([9])
    answer = plain.generate(prompt, greedy(6))[0].outputs[0].token_ids
    first_at = {token: answer.index(token) for token in reversed(answer)}
    stop = next(token for token in answer if first_at[token] >= 2)
    engine, launched = overlapped.engine, []
    launch = engine._runner.launch
    engine._runner.launch = lambda plan: launched.append(plan) or launch(plan)  # type: ignore[method-assign]
    try:
        output = overlapped.generate(prompt, greedy(6, stop_token_ids=[stop]))[0].outputs[0]
        while engine.has_work():
            assert engine.step().request_ids == ()
    finally:
        del engine._runner.launch
    assert output.token_ids == answer[: first_at[stop] + 1] and output.finish_reason == "stop"
    assert len(launched) == len(output.token_ids) + 1
    assert_idle(overlapped)


def test_no_token_past_the_length(engines: tuple[LLM, LLM]) -> None:
    """max_tokens is known beforehand: no step is launched for a token that nobody wants."""
    engine, launched = engines[1].engine, []
    launch = engine._runner.launch
    engine._runner.launch = lambda plan: launched.append(plan) or launch(plan)  # type: ignore[method-assign]
    try:
        engines[1].generate(random_prompts([5])[0], greedy(7))
    finally:
        del engine._runner.launch
    assert len(launched) == 7


def test_abort_in_flight(engines: tuple[LLM, LLM]) -> None:
    """A request aborted while its step is under way gets nothing more; the others go on as ever."""
    plain, overlapped = engines
    prompts = random_prompts([7, 11])
    expected = plain.generate(prompts[1], greedy(8))[0].outputs[0].token_ids
    engine = overlapped.engine
    doomed, other = (engine.add_request(prompt, greedy(8)) for prompt in prompts)
    engine.step()
    events = engine.step()
    assert events.request_ids == (doomed, other)
    engine.abort(doomed)
    got = [events.token_ids[1]]
    while engine.has_work():
        events = engine.step()
        assert doomed not in events.request_ids
        got += events.token_ids
        engine.check_invariants()
    assert got == expected
    assert_idle(overlapped)


def test_a_failed_step_ends_its_requests_alone(engines: tuple[LLM, LLM]) -> None:
    """When a launch raises, its requests end with an error, and the step under way before it does
    no harm and is waited for; the next request is served."""
    engine = engines[1].engine
    launch = engine._runner.launch
    (prompt,) = random_prompts([6])
    request_id = engine.add_request(prompt, greedy(5))
    engine.step()

    def broken(plan: Any) -> Any:
        raise RuntimeError("planted")

    assert engine._in_flight is not None
    plan, pending = engine._in_flight
    waited = []

    class Watched:
        def result(self) -> StepResult:
            waited.append(True)
            return pending.result()

    engine._in_flight = (plan, Watched())
    engine._runner.launch = broken  # type: ignore[method-assign]
    try:
        events = engine.step()
    finally:
        engine._runner.launch = launch  # type: ignore[method-assign]
    assert events.request_ids == (request_id,) and waited
    while engine.has_work():
        assert engine.step().request_ids == ()
    answer = engines[0].generate(prompt, greedy(5))[0].outputs[0].token_ids
    assert engines[1].generate(prompt, greedy(5))[0].outputs[0].token_ids == answer
    assert_idle(engines[1])


def test_close_with_a_step_under_way(tiny_model: Any) -> None:
    """Closing amid a request ends what is under way, and the engine says that it is closed."""
    llm = LLM(str(tiny_model.folder), overlap="on", **tiny.FIXTURE_T_SMALL)
    engine, closed = llm.engine, []
    engine._runner.close = lambda: closed.append(engine._in_flight)  # type: ignore[method-assign]
    engine.add_request([1, 2, 3], greedy(4))
    engine.step()
    assert engine.has_work()
    llm.close()
    llm.close()
    assert closed == [None]
    with pytest.raises(ConfigError, match="closed"):
        llm.generate([1], greedy(1))
