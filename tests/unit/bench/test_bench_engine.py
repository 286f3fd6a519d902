from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from pico_vllm.bench import engine as bench_engine
from pico_vllm.bench.engine import KEYS, REPEATS, ReadFloor, run_workloads
from pico_vllm.bench.workload import Workload
from pico_vllm.engine.host_clock import HostClock

FLOOR = ReadFloor(weight_bytes=3_000_000, kv_bytes_per_token=1000, limit_bytes_s=1e9)


class FakeEngine:
    """30 ms for the prompts of a call, 4 ms a further step, 1.5 of them the host's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, has_clock: bool = True) -> None:
        self.name = "fake"
        self.now_s = 0.0
        self.host_clock = HostClock() if has_clock else None
        self.calls: list[tuple[list[list[int]], list[int]]] = []
        clock = SimpleNamespace(perf_counter=lambda: self.now_s)
        monkeypatch.setattr(bench_engine, "time", clock)

    def generate(self, prompts: Sequence[list[int]], num_output_tokens: Sequence[int]) -> None:
        self.calls.append((list(prompts), list(num_output_tokens)))
        num_steps = max(num_output_tokens) - 1
        self.now_s += 0.030 + 0.004 * num_steps
        if self.host_clock is not None:
            for _ in range(2):  # with prompts
                self.host_clock.all_steps.add(0.0035)
            for _ in range(num_steps):
                self.host_clock.all_steps.add(0.0015)
                self.host_clock.decode_steps.add(0.0015)


def lines(engine: FakeEngine, workload: Workload) -> dict[str, object]:
    (line,) = run_workloads([engine], [workload], vocab_size=100, seed=3, floor=FLOOR)
    return line


def test_decode_is_the_difference_of_two_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts and first tokens cancel out; the host's part is of steps that decode."""
    engine = FakeEngine(monkeypatch)
    line = lines(engine, Workload(id="d", kind="decode", batch=2, prompt=50, out=101))
    assert set(KEYS) <= set(line)
    assert line["ms_per_step"] == 4.0 and line["host_ms_per_step"] == 1.5
    assert line["decode_tok_s"] == 500.0 and line["ttft_ms"] == 30.0
    assert line["e2e_tok_s"] == pytest.approx(202 / 0.430, abs=1e-3)
    # 3 MB of weights and 2 x (50 + 50.5) tokens of KV at 1 GB/s are 3.201 ms.
    assert line["pct_of_read_limit"] == pytest.approx(100 * 3.201 / 4.0, abs=1e-3)
    assert line["cold_ms"] is None and line["out_tok_s"] is None
    # One call in four warms up; no prompt is given twice.
    assert len(engine.calls) == 2 * (REPEATS + 1)
    prompts = [tuple(prompt) for call in engine.calls for prompt in call[0]]
    assert len(set(prompts)) == len(prompts) and {len(prompt) for prompt in prompts} == {50}
    assert all(0 <= token_id < 100 for prompt in prompts for token_id in prompt)


def test_host_time_is_null_where_nobody_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine without a clock has no figure, not a zero."""
    engine = FakeEngine(monkeypatch, has_clock=False)
    line = lines(engine, Workload(id="d", kind="decode", batch=1, prompt=5, out=3))
    assert line["ms_per_step"] == 4.0 and line["host_ms_per_step"] is None


def test_other_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """ttft, mixed and prefix as the workloads' docstring counts them."""
    engine = FakeEngine(monkeypatch)
    ttft = lines(engine, Workload(id="t", kind="ttft", batch=2, prompt=60))
    assert (ttft["ttft_ms"], ttft["prefill_tok_s"]) == (30.0, 4000.0)
    mixed = lines(engine, Workload(id="m", kind="mixed", batch=3, prompt=(4, 9), out=11))
    assert mixed["out_tok_s"] == pytest.approx(33 / 0.070, abs=1e-3)
    assert mixed["host_ms_per_step"] == pytest.approx((7 + 15) / 12, abs=1e-3)
    shared = Workload(id="p", kind="prefix", shared=20, suffix=(2, 4), requests=3)
    prefix = lines(engine, shared)
    assert (prefix["cold_ms"], prefix["warm_ms"], prefix["warm_best_ms"]) == (30.0, 30.0, 30.0)
    last = [call[0][0] for call in engine.calls[-3:]]
    assert last[0][:20] == last[1][:20] == last[2][:20] and len({tuple(p) for p in last}) == 3
