"""Thousands of prompts in one call: in order, each once, with few of them in the engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from tiny import FIXTURE_T, TinyModel, assert_idle, greedy, random_prompts

from pico_vllm import LLM, SamplingParams
from pico_vllm.errors import ContextLengthError, InvalidRequestError

ROWS = 16
SETTINGS = FIXTURE_T | {"max_num_seqs": ROWS, "max_num_batched_tokens": 256}


@pytest.fixture(scope="module")
def llm(tiny_model: TinyModel) -> Iterator[LLM]:
    with LLM(str(tiny_model.folder), **SETTINGS) as engine:
        yield engine


@pytest.fixture(autouse=True)
def canary_after(llm: LLM, tiny_model: TinyModel) -> Iterator[None]:
    """Nothing is left behind, and the engine gives the known answer."""
    yield
    assert_idle(llm)
    tiny_model.canary.check(llm)


class Crowd:
    """How many requests stood in line and had their answer kept, at most; and how many ran at
    least, while some were not in the engine yet."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch, *, num_requests: int) -> None:
        self.max_waiting = self.max_answers = self.num_added = 0
        self.min_running = ROWS
        add, step, scheduler = llm.engine.add, llm.engine.step, llm.engine._scheduler

        def counted(*args: Any, **kwargs: Any) -> str:
            self.num_added += 1
            return add(*args, **kwargs)

        def watched() -> Any:
            self.max_waiting = max(self.max_waiting, scheduler.num_waiting)
            self.max_answers = max(self.max_answers, len(llm._processor))
            events = step()
            if self.num_added < num_requests:
                self.min_running = min(self.min_running, len(events.request_ids))
            return events

        monkeypatch.setattr(llm.engine, "add", counted)
        monkeypatch.setattr(llm.engine, "step", watched)


def test_thousands_of_prompts(
    llm: LLM, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers come in the order of the prompts, duplicates and several answers included; no more
    than twice the rows are in the engine, and a row is never left free."""
    crowd = Crowd(llm, monkeypatch, num_requests=3006)
    prompts = random_prompts([1 + i % 11 for i in range(3000)], seed=4)
    prompts[1000:1010] = prompts[:10]
    prompts[2999] = prompts[0]
    lengths = [1 + i % 4 for i in range(3000)]
    params = [greedy(length, n=2 if i % 500 == 7 else 1) for i, length in enumerate(lengths)]
    finished: list[int] = []
    outputs = llm.generate(prompts, params, on_finish=lambda output: finished.append(id(output)))
    assert [output.prompt_token_ids for output in outputs] == prompts
    found = [[len(answer.token_ids) for answer in output.outputs] for output in outputs]
    assert found == [[m] * p.n for m, p in zip(lengths, params, strict=True)]
    assert sorted(finished) == sorted(map(id, outputs)) and len(set(finished)) == 3000
    for index in (0, 7, 1003, 1500, 2507, 2999):
        wanted = tiny_model.oracle.greedy(prompts[index], lengths[index])
        assert all(answer.token_ids == wanted for answer in outputs[index].outputs)
    # Prompts of two answers may stand among the 2 * ROWS.
    assert ROWS <= crowd.max_answers <= 2 * ROWS + 2
    assert crowd.max_waiting <= 2 * ROWS + 2
    assert (crowd.num_added, crowd.min_running) == (3006, ROWS)


def test_seeds_are_those_of_one_after_the_other(llm: LLM) -> None:
    """A prompt's own randomness comes from its place in the call, not from when it got in."""
    prompts = random_prompts([5] * 200, seed=6)
    params = [SamplingParams(max_tokens=1 + i % 5, seed=i, temperature=1.5) for i in range(200)]
    together = llm.generate(prompts, params)
    for index in range(0, 200, 23):
        (alone,) = llm.generate([prompts[index]], params[index])
        assert alone.outputs[0].token_ids == together[index].outputs[0].token_ids


def test_a_bad_prompt_among_thousands_starts_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before the first step, by its own error."""
    prompts: list[Any] = random_prompts([4] * 2000)
    crowd = Crowd(llm, monkeypatch, num_requests=2000)
    prompts[1500] = [1] * 300
    with pytest.raises(ContextLengthError, match="the prompt has 300 tokens"):
        llm.generate(prompts, greedy(2))
    prompts[1500] = 7.5
    with pytest.raises(InvalidRequestError, match=r"prompt 1500 is 7\.5"):
        llm.generate(prompts, greedy(2))
    assert crowd.num_added == 0


@pytest.mark.parametrize("call", [1, 40])
def test_an_interrupt_among_thousands(llm: LLM, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """What runs and what waits in the engine is given up, what was never fed never comes."""
    forward, count = llm.engine._runner.launch, itertools.count(1)

    def interrupted(plan: Any) -> Any:
        if next(count) == call:
            raise KeyboardInterrupt
        return forward(plan)

    monkeypatch.setattr(llm.engine._runner, "launch", interrupted)
    finished: list[Any] = []
    with pytest.raises(KeyboardInterrupt):
        llm.generate(random_prompts([4] * 2000), greedy(5), on_finish=finished.append)
    assert len(finished) < 300
    llm.engine.step()  # the news for requests that are gone


def test_an_error_in_on_finish_among_thousands(llm: LLM) -> None:
    """The caller's error comes out at once."""
    count = itertools.count(1)

    def on_finish(output: Any) -> None:
        if next(count) == 100:
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        llm.generate(random_prompts([4] * 2000), greedy(3), on_finish=on_finish)
    assert next(count) == 101


def test_a_policy_sees_the_whole_line(tiny_model: TinyModel) -> None:
    """With priorities the last of many prompts runs first if it is the most urgent."""
    prompts = random_prompts([4] * 200)
    finished: list[str] = []
    params = [greedy(2, priority=0 if i < 199 else -1) for i in range(200)]
    settings = FIXTURE_T | {"scheduling_policy": "priority"}
    with LLM(str(tiny_model.folder), **settings) as llm:
        outputs = llm.generate(prompts, params, on_finish=lambda o: finished.append(o.request_id))
    assert outputs[199].request_id in finished[:4]


def test_progress_is_shown(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    """The last line has all prompts and a speed; unasked for there is none."""
    llm.generate(["a", "b", "c"], greedy(4))
    assert capsys.readouterr().err == ""
    llm.generate(["a", "b", "c"], greedy(4), show_progress=True)
    line = capsys.readouterr().err
    assert line.startswith("[####################] 100% 3/3 prompts, ") and " tok/s, " in line
    llm.chat([{"role": "user", "content": "hi"}], greedy(4), show_progress=True)
    assert "100% 1/1 prompts" in capsys.readouterr().err
