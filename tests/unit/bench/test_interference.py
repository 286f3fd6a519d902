from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pico_vllm.bench import interference
from pico_vllm.bench.interference import LEAD_IN, Scenario, measure
from pico_vllm.bench.workload import PromptSource
from pico_vllm.config.engine import EngineConfig
from pico_vllm.engine.engine import CheckedRequest
from pico_vllm.errors import PicoError
from pico_vllm.outputs import StepEvents
from pico_vllm.request import FinishReason
from pico_vllm.sampling_params import SamplingParams

SCENARIO = Scenario(num_decoding=2, context=5, prompt_tokens=100, num_prompts=3, idle_steps=10)


class FakeEngine:
    """A decode step takes 1 s. One with a chunk of a prompt, 40 tokens, takes 3 s, and 5 s where it
    is the first of its kind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.config = SimpleNamespace(max_num_batched_tokens=42, long_prefill_token_threshold=None)
        self.now_s = 0.0
        self.decoding: list[str] = []
        self.prompts: dict[str, int] = {}
        self.num_asked: set[int] = set()
        self._number = 0
        self._is_warm = False
        clock = SimpleNamespace(perf_counter=lambda: self.now_s)
        monkeypatch.setattr(interference, "time", clock)

    def check(self, token_ids: list[int], params: SamplingParams) -> CheckedRequest:
        self.now_s += 0.5  # must not be in any gap
        assert params.max_tokens is not None
        return CheckedRequest(np.array(token_ids, np.int32), params, params.max_tokens)

    def add(self, request: CheckedRequest) -> str:
        self._number += 1
        if request.max_tokens == 1:
            self.prompts[str(self._number)] = len(request.token_ids)
        else:
            self.decoding.append(str(self._number))
            self.num_asked.add(request.max_tokens)
        return str(self._number)

    def abort(self, request_id: str) -> bool:
        is_decoding = request_id in self.decoding
        if is_decoding:
            self.decoding.remove(request_id)
        return is_decoding or self.prompts.pop(request_id, None) is not None

    def has_work(self) -> bool:
        return bool(self.decoding or self.prompts)

    def step(self) -> StepEvents:
        ids, reasons = list(self.decoding), [None] * len(self.decoding)
        self.now_s += 1.0
        for request_id in list(self.prompts):
            self.now_s += 2.0 if self._is_warm else 4.0
            self._is_warm = True
            self.prompts[request_id] -= 40
            if self.prompts[request_id] <= 0:
                del self.prompts[request_id]
                ids.append(request_id)
                reasons.append(FinishReason.LENGTH)  # type: ignore[arg-type]
        return StepEvents(
            request_ids=tuple(ids), token_ids=(7,) * len(ids), finish_reasons=tuple(reasons)
        )


def test_gaps_belong_to_their_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle gaps are decode steps, loaded ones steps with chunks; neither the warm-up prompt nor the
    making of prompts is in them, and a prompt of three chunks takes three steps."""
    engine: Any = FakeEngine(monkeypatch)
    figures = measure(engine, SCENARIO, PromptSource(100, 0))
    of = ("mean", "p50", "p90", "p99")
    wanted = {f"idle_itl_ms_{each}": 1000.0 for each in of}
    wanted |= {f"loaded_itl_ms_{each}": 3000.0 for each in of}
    wanted |= {f"ttft_ms_{each}": 9000.0 for each in of}
    assert figures == pytest.approx(wanted | {"itl_ratio_p50": 3.0, "itl_ratio_p99": 3.0})
    assert not engine.has_work()


def test_a_decoding_request_asks_for_all_steps_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of its own prompts, lead-in, four prompts of three chunks and two more steps each,
    the idle steps, and four to spare; a threshold makes chunks smaller."""
    engine: Any = FakeEngine(monkeypatch)
    measure(engine, SCENARIO, PromptSource(100, 0))
    assert engine.num_asked == {1 + LEAD_IN + 4 * (3 + 2) + 10 + 4}
    small = EngineConfig(model="m", max_num_batched_tokens=42, long_prefill_token_threshold=10)
    assert SCENARIO.num_outputs(small) == 1 + LEAD_IN + 4 * (10 + 2) + 10 + 4


def test_a_decoding_request_that_ends_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller batch would be measured: no figure is given then, and nothing is left."""
    engine: Any = FakeEngine(monkeypatch)
    step = engine.step

    def failing() -> StepEvents:
        events = step()
        if engine.now_s < 60:
            return events
        return replace(events, finish_reasons=(FinishReason.ERROR, *events.finish_reasons[1:]))

    engine.step, engine.last_failure = failing, "the reason"
    with pytest.raises(PicoError, match="a step failed while it was measured: the reason;"):
        measure(engine, SCENARIO, PromptSource(100, 0))
    assert not engine.has_work()
