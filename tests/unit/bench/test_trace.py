from __future__ import annotations

from typing import Any

import pytest

from pico_vllm.bench.trace import STEP, Share, steps_in_trace


def event(cat: str, name: str, ts: float, dur: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 1, **more}


def launch(ts: float, correlation: int, cat: str = "cuda_runtime") -> dict[str, Any]:
    return event(cat, "cudaGraphLaunch", ts, 4.0, args={"correlation": correlation})


def kernel(name: str, ts: float, dur: float, correlation: int) -> dict[str, Any]:
    return event("kernel", name, ts, dur, args={"correlation": correlation})


def test_work_on_a_gpu_belongs_to_the_step_that_launched_it() -> None:
    """Two steps, launched before the device comes to them, with a copy and a graph of two kernels
    each; what another step launched before is not counted."""
    events = [
        {"ph": "M", "name": "process_name"},
        event("user_annotation", STEP, 100.0, 50.0),
        event("user_annotation", STEP, 150.0, 50.0),
        launch(10.0, 1),
        kernel("old", 90.0, 100.0, 1),
        event("cuda_driver", "cuMemcpy", 110.0, 1.0, args={"correlation": 2}),
        launch(120.0, 3),
        event("cuda_driver", "cuMemcpy", 160.0, 1.0, args={"correlation": 4}),
        launch(170.0, 5),
        event("gpu_memcpy", "Memcpy HtoD", 190.0, 10.0, args={"correlation": 2}),
        kernel("gemm", 200.0, 60.0, 3),
        kernel("norm", 250.0, 30.0, 3),  # began while the one before still ran
        event("gpu_memcpy", "Memcpy HtoD", 290.0, 10.0, args={"correlation": 4}),
        kernel("gemm", 310.0, 60.0, 5),
        kernel("norm", 370.0, 30.0, 5),
    ]
    found = steps_in_trace(events, is_gpu=True)
    assert found.num_steps == 2
    assert found.wall_us == 100.0  # from the first work of a step to that of the next
    assert found.busy_us == (90.0 + 100.0) / 2
    assert found.gaps_us == (10.0,)
    assert (found.mean_gap_us, found.max_gap_us) == (10.0, 10.0)
    assert found.idle_within_us == 100.0 - 95.0 - 5.0
    assert (found.num_launches, found.num_works) == (2.0, 3.0)
    assert found.shares == (
        Share("gemm", 2, 120.0, 0.6),
        Share("norm", 2, 60.0, 0.3),
        Share("Memcpy HtoD", 2, 20.0, 0.1),
    )


def test_work_on_a_cpu_is_what_an_operation_does_itself() -> None:
    """An operation's time does not hold that of the operations it calls."""
    events = [
        event("user_annotation", STEP, 0.0, 100.0),
        event("user_annotation", STEP, 110.0, 100.0),
        event("cpu_op", "aten::linear", 10.0, 50.0),
        event("cpu_op", "aten::mm", 20.0, 30.0),
        event("cpu_op", "aten::add", 70.0, 10.0),
        event("cpu_op", "aten::linear", 120.0, 50.0),
        event("cpu_op", "aten::mm", 130.0, 40.0),
        event("cpu_op", "aten::add", 300.0, 10.0),  # after the last step
        event("cpu_op", "aten::mm", 15.0, 20.0) | {"tid": 2},
    ]
    found = steps_in_trace(events, is_gpu=False)
    assert found.wall_us == 105.0
    assert found.busy_us == (60.0 + 50.0) / 2
    assert found.gaps_us == (40.0,)
    assert (found.num_launches, found.num_works) == (2.0, 3.0)
    assert [(share.name, share.count, share.total_us) for share in found.shares] == [
        ("aten::mm", 3, 90.0),
        ("aten::linear", 2, 30.0),
        ("aten::add", 1, 10.0),
    ]
    assert sum(share.share for share in found.shares) == pytest.approx(1.0)


def test_a_trace_without_work_has_no_time() -> None:
    """A profiler that may not look at the GPU gives zeros, not an error."""
    events = [event("user_annotation", STEP, 0.0, 100.0)]
    found = steps_in_trace(events, is_gpu=True)
    assert (found.wall_us, found.busy_us, found.gaps_us, found.shares) == (100.0, 0.0, (), ())
    assert (found.mean_gap_us, found.max_gap_us) == (0.0, 0.0)
