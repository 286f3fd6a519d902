from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pico_vllm.bench import load
from pico_vllm.bench.arrivals import Arrivals
from pico_vllm.bench.lengths import UniformLengths
from pico_vllm.bench.load import DueRequest, plan_load, run_load
from pico_vllm.bench.plot import plot_load
from pico_vllm.bench.workload import PromptSource
from pico_vllm.engine.engine import CheckedRequest
from pico_vllm.outputs import StepEvents
from pico_vllm.request import FinishReason
from pico_vllm.sampling_params import SamplingParams

STEP_S = 1.0


class FakeEngine:
    """A step takes a second and gives every request a token; its clock is all the time there is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.left: dict[str, int] = {}
        self.added_s: list[float] = []
        self.checked: list[tuple[int, int]] = []
        self.failing: str | None = None
        self.interrupt_at_s: float | None = None
        clock = SimpleNamespace(perf_counter=lambda: self.now_s, sleep=self._sleep)
        monkeypatch.setattr(load, "time", clock)

    def _sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds

    def check(self, token_ids: list[int], params: SamplingParams) -> CheckedRequest:
        assert params.max_tokens is not None and params.ignore_eos
        self.checked.append((len(token_ids), params.max_tokens))
        return due(0.0, params.max_tokens, len(token_ids)).request

    def add(self, request: CheckedRequest) -> str:
        request_id = str(len(self.added_s))
        self.added_s.append(self.now_s - 100.0)
        self.left[request_id] = request.max_tokens
        return request_id

    def abort(self, request_id: str) -> bool:
        return self.left.pop(request_id, None) is not None

    def has_work(self) -> bool:
        return bool(self.left)

    def step(self) -> StepEvents:
        self.now_s += STEP_S
        if self.interrupt_at_s is not None and self.now_s - 100 >= self.interrupt_at_s:
            raise KeyboardInterrupt
        ids, tokens, reasons = [], [], []
        for request_id in list(self.left):
            self.left[request_id] -= 1
            ids.append(request_id)
            reason = FinishReason.LENGTH if self.left[request_id] == 0 else None
            if request_id == self.failing:
                reason = FinishReason.ERROR
            tokens.append(-1 if reason is FinishReason.ERROR else 7)
            reasons.append(reason)
            if reason is not None:
                del self.left[request_id]
        return StepEvents(
            request_ids=tuple(ids), token_ids=tuple(tokens), finish_reasons=tuple(reasons)
        )


def due(arrival_s: float, num_tokens: int, num_prompt_tokens: int = 3) -> DueRequest:
    token_ids = np.zeros(num_prompt_tokens, np.int32)
    return DueRequest(arrival_s, CheckedRequest(token_ids, SamplingParams(), num_tokens))


def test_waiting_counts_from_the_scheduled_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that became due amid a step is handed over after it, and its TTFT holds that wait."""
    engine: Any = FakeEngine(monkeypatch)
    first, second = run_load(engine, [due(0.0, 3), due(0.25, 2)])
    assert engine.added_s == [0.0, 1.0]
    assert first.token_s == [1.0, 2.0, 3.0] and second.token_s == [2.0, 3.0]
    assert second.ttft_s == 1.75
    assert (second.num_prompt_tokens, second.num_output_tokens) == (3, 2)


def test_arrivals_do_not_wait_for_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late the engine is, all that are due are handed over together."""
    engine: Any = FakeEngine(monkeypatch)
    times = run_load(engine, [due(0.0, 1), due(0.1, 1), due(0.2, 1), due(0.9, 1), due(1.1, 1)])
    assert engine.added_s == [0.0, 1.0, 1.0, 1.0, 2.0]
    assert [each.ttft_s for each in times] == pytest.approx([1.0, 1.9, 1.8, 1.1, 1.9])


def test_an_idle_engine_sleeps_until_the_next_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is made for nobody, and the next request starts on time."""
    engine: Any = FakeEngine(monkeypatch)
    times = run_load(engine, [due(0.0, 1), due(7.5, 2)])
    assert engine.added_s == [0.0, 7.5]
    assert [each.token_s for each in times] == [[1.0], [8.5, 9.5]]


def test_a_request_that_fails_does_not_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is left incomplete; the others get all their tokens."""
    engine: Any = FakeEngine(monkeypatch)
    engine.failing = "0"
    times = run_load(engine, [due(0.0, 4), due(0.0, 2)])
    assert [each.is_complete for each in times] == [False, True]


def test_an_interrupt_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs is aborted, what had not come yet never comes."""
    engine: Any = FakeEngine(monkeypatch)
    engine.interrupt_at_s = 2.0
    with pytest.raises(KeyboardInterrupt):
        run_load(engine, [due(0.0, 9), due(0.5, 9), due(50.0, 9)])
    assert len(engine.added_s) == 2 and not engine.has_work()


def test_rates_differ_in_their_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same seed draws the same lengths at every rate, and fresh prompts; another seed does
    not."""
    engine: Any = FakeEngine(monkeypatch)
    lengths = UniformLengths(prompt_tokens=(5, 50), output_tokens=(1, 90))
    prompts = PromptSource(100, 0)
    plans = [
        plan_load(
            engine,
            Arrivals(rate_req_s=rate),
            lengths,
            num_requests=20,
            seed=seed,
            prompts=prompts,
        )
        for rate, seed in ((1.0, 5), (4.0, 5), (1.0, 6))
    ]
    drawn = [engine.checked[at : at + 20] for at in (0, 20, 40)]
    assert drawn[0] == drawn[1] != drawn[2]
    times = [[each.arrival_s for each in plan] for plan in plans]
    assert times[0] == pytest.approx([4 * each for each in times[1]])
    assert times[0] == sorted(times[0]) != times[2]


def test_a_plot_of_load_leaves_out_what_was_not_measured(tmp_path: Path) -> None:
    """Both percentiles of both latencies over the load; answers of one token have no ITL."""
    pytest.importorskip("matplotlib")

    def line(offered: float | None, itl_ms: float | None) -> dict[str, float | None]:
        keys = [f"{name}_ms_{of}" for name in ("ttft", "itl") for of in ("p50", "p99")]
        return dict(zip(keys, (20.0, 40.0, itl_ms, itl_ms), strict=True)) | {
            "offered_req_s": offered
        }

    path = tmp_path / "new" / "load.svg"
    plot_load(path, [line(2.0, 3.0), line(1.0, 5.0), line(None, 9.0)], "a model on a machine")
    drawn = path.read_text()
    for text in ("a model on a machine", "load (requests/s)", "TTFT (ms)", "ITL p50", "ITL p99"):
        assert f"<!-- {text} -->" in drawn, text
    plot_load(path, [line(2.0, None)], "a model on a machine")
    assert "<!-- TTFT p99 -->" in path.read_text() and "ITL p50" not in path.read_text()
