"""The engine on token ids alone: what it refuses, seeds, events, and memory of the head's rows."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from tiny import Canary, assert_idle, greedy, random_prompts

from pico_vllm import LLM, SamplingParams
from pico_vllm.engine.engine import _fresh_seed
from pico_vllm.errors import InvalidRequestError
from pico_vllm.request import FinishReason


def test_fresh_seeds() -> None:
    """Requests without a seed get int64 seeds that differ between requests and between engine
    seeds, and are the same in the next run."""
    engine_seeds = [0, 1, -1, 2**63 - 1, -(2**63)]
    seeds = [_fresh_seed(s, number) for s in engine_seeds for number in range(1000)]
    assert len(set(seeds)) == len(seeds)
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert _fresh_seed(0, 0) == _fresh_seed(0, 0)


def test_unseeded_requests_repeat_with_the_engine(tiny_model: Any) -> None:
    """Two engines with one seed give the same unseeded answers, with another seed others."""
    params = SamplingParams(max_tokens=12, temperature=1.5, ignore_eos=True)

    def answers(seed: int) -> list[list[int]]:
        with LLM(str(tiny_model.folder), dtype="float32", num_kv_blocks=32, seed=seed) as llm:
            outputs = llm.generate(["a", "a", "b"], params)
            return [output.outputs[0].token_ids for output in outputs]

    first = answers(5)
    assert first == answers(5) and first != answers(6)
    assert first[0] != first[1]


def test_more_ids_to_hold_back_than_there_is_room_for(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """min_tokens with too many stop ids is refused with the limit and what helps; without
    min_tokens it is not."""
    monkeypatch.setattr(llm.engine, "eos_token_ids", frozenset(range(200)))
    stops = list(range(150, 278))
    with pytest.raises(InvalidRequestError, match=r"278 ids.* more than 256.*ignore_eos"):
        llm.engine.check([1], SamplingParams(min_tokens=1, stop_token_ids=stops))
    llm.engine.check([1], SamplingParams(stop_token_ids=stops))
    llm.engine.check([1], SamplingParams(min_tokens=1, stop_token_ids=stops, ignore_eos=True))


def test_events_of_a_step(llm: LLM) -> None:
    """A step's events name each request that got a token, with the reason where it ended."""
    engine = llm.engine
    short = engine.add_request([1, 2, 3], greedy(1))
    long = engine.add_request([4, 5], greedy(2))
    first, second, third = engine.step(), engine.step(), engine.step()
    assert first.request_ids == (short, long)
    assert first.finish_reasons == (FinishReason.LENGTH, None)
    assert (second.request_ids, second.finish_reasons) == ((long,), (FinishReason.LENGTH,))
    assert third.request_ids == () and not engine.has_work()


def test_abort_of_any_request(llm: LLM) -> None:
    """abort says whether there was something to end, twice, unknown and finished included."""
    engine = llm.engine
    request_id = engine.add_request([1, 2, 3], greedy(50))
    engine.step()
    assert engine.abort(request_id) is True
    assert engine.abort(request_id) is False
    assert engine.abort("unknown") is False
    assert engine.step().request_ids == ()
    assert_idle(llm)


def test_request_ids_are_fresh(llm: LLM) -> None:
    """No id is given twice, though requests end and are refused between."""
    ids = [llm.generate([1, 2], greedy(1))[0].request_id for _ in range(5)]
    assert len(set(ids)) == 5


@pytest.mark.parametrize("num_rows", [1, 2, 3, 1000])
def test_prompt_logprobs_in_chunks_of_rows(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, num_rows: int
) -> None:
    """Prompt log-probabilities do not depend on how many rows of the head are computed at once, and
    no more than that many are."""
    (prompt,) = random_prompts([75])
    params = greedy(2, prompt_logprobs=3)
    whole = llm.generate(prompt, params)[0].prompt_logprobs
    computed = llm.engine._runner._prompt_logprobs
    monkeypatch.setattr(computed, "_chunk", num_rows)
    model = llm.engine._runner._model
    head, sizes = model.logits, []

    def counted(hidden_NE: Any) -> Any:
        sizes.append(len(hidden_NE))
        return head(hidden_NE)

    monkeypatch.setattr(model, "logits", counted)
    chunked = llm.generate(prompt, params)[0].prompt_logprobs
    assert sizes and max(sizes) <= num_rows
    assert whole is not None and chunked is not None and len(whole) == len(chunked) == 75
    for a, b in zip(whole[1:], chunked[1:], strict=True):
        assert a is not None and b is not None and list(a) == list(b)
        assert [e.rank for e in a.values()] == [e.rank for e in b.values()]
        assert [e.logprob for e in a.values()] == pytest.approx(
            [e.logprob for e in b.values()], abs=1e-5
        )


def test_logits_only_where_a_token_is_chosen(llm: LLM) -> None:
    """The head runs for one row a request and step, not for a whole prompt, nor for a chunk that
    ends before the prompt does."""
    model = llm.engine._runner._model
    head, sizes = model.logits, []

    def counted(hidden_NE: Any) -> Any:
        sizes.append(len(hidden_NE))
        return head(hidden_NE)

    model.logits = counted
    try:
        llm.generate(random_prompts([200]), greedy(3))  # chunks of 64, 64, 64 and 8
    finally:
        model.logits = head
    assert sizes == [1, 1, 1]


def test_graphs_are_made_and_change_nothing(tiny_model: Any) -> None:
    """Decode steps replayed as graphs give the tokens of those run op by op, while the number of
    requests and their lengths change."""
    prompts = random_prompts([1, 30, 31, 90, 7], seed=20)
    params = [greedy(length) for length in (90, 70, 50, 90, 25)]
    settings: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 64, "num_threads": 1}
    found = []
    for cpu_graph in ("on", "off"):
        with LLM(str(tiny_model.folder), cpu_graph=cpu_graph, **settings) as llm:
            outputs = llm.generate(prompts, params)
            found.append([output.outputs[0].token_ids for output in outputs])
            graphs = llm.engine._runner._graphs
            if cpu_graph == "on":
                assert graphs is not None and {size for size, _ in graphs._graphs} >= {2, 4, 5}
            tiny_model.canary.check(llm)
    wanted = [
        tiny_model.oracle.greedy(prompt, each.max_tokens)
        for prompt, each in zip(prompts, params, strict=True)
    ]
    assert found == [wanted, wanted]


def test_canary_is_worth_its_name(tiny_model: Any) -> None:
    """The canary's answer is no repetition, so that few faults would leave it alone."""
    answer = tiny_model.canary.answer
    assert len(answer) == Canary.COUNT and len(set(answer)) >= 6
    assert not any(a == b for a, b in itertools.pairwise(answer))
