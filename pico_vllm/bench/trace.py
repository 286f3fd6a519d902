"""What a trace of torch.profiler says about the steps in it.

Events are those of a chrome trace, times in microseconds. A step is an annotation named STEP. Its
work is, on a GPU, every kernel and copy whose launch lies in the annotation, wherever the work
itself lies; on a CPU, the operations in it, each without those that it calls.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

STEP = "pico_vllm_step"
GPU_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}
LAUNCH_CATEGORIES = {"cuda_runtime", "cuda_driver"}

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel or copy, or one operation of the CPU."""

    name: str
    step: int
    start_us: float
    end_us: float
    own_us: float
    launch: object
    """What brought it: works of one launch share it."""


@dataclass(frozen=True, slots=True)
class Share:
    """All works of one name."""

    name: str
    count: int
    total_us: float
    share: float
    """Of the sum over all names, from 0 to 1. Under programmatic dependent launch a kernel's time
    holds its wait for the one before."""


@dataclass(frozen=True, slots=True)
class StepsInTrace:
    num_steps: int
    wall_us: float
    """Of a step on average, under the profiler, which makes the host slower."""
    busy_us: float
    """Of a step: the time in which at least one work ran."""
    gaps_us: tuple[float, ...]
    """Between the last work of a step and the first of the next."""
    num_works: float
    """Of a step."""
    num_launches: float
    """Of a step: calls that brought work; a graph is one."""
    shares: tuple[Share, ...]
    """The largest first."""

    @property
    def mean_gap_us(self) -> float:
        return statistics.fmean(self.gaps_us) if self.gaps_us else 0.0

    @property
    def max_gap_us(self) -> float:
        return max(self.gaps_us, default=0.0)

    @property
    def idle_within_us(self) -> float:
        """Of a step: between its works."""
        return max(0.0, self.wall_us - self.busy_us - sum(self.gaps_us) / self.num_steps)


def steps_in_trace(events: Sequence[Event], *, is_gpu: bool) -> StepsInTrace:
    events = [event for event in events if event.get("ph") == "X"]
    marks = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "user_annotation" and event["name"] == STEP
    )
    assert marks, f"the trace has no {STEP}"
    works = list(_gpu_works(events, marks) if is_gpu else _cpu_works(events, marks))
    spans: dict[int, tuple[float, float]] = {}
    for work in works:
        start, end = spans.get(work.step, (work.start_us, work.end_us))
        spans[work.step] = (min(start, work.start_us), max(end, work.end_us))
    ordered = [spans[step] for step in sorted(spans)]
    gaps = [max(0.0, after[0] - before[1]) for before, after in pairwise(ordered)]
    num_steps = len(marks)
    wall_us = (marks[-1][1] - marks[0][0]) / num_steps
    if is_gpu and len(ordered) > 1:
        # The device's own beat: the host may run ahead of it.
        wall_us = (ordered[-1][0] - ordered[0][0]) / (len(ordered) - 1)
    return StepsInTrace(
        num_steps=num_steps,
        wall_us=wall_us,
        busy_us=_busy_us(works) / num_steps,
        gaps_us=tuple(gaps),
        num_works=len(works) / num_steps,
        num_launches=len({(work.step, work.launch) for work in works}) / num_steps,
        shares=tuple(_shares(works)),
    )


def _step_of(marks: Sequence[tuple[float, float]], at_us: float) -> int | None:
    index = bisect_right(marks, (at_us, float("inf"))) - 1
    return index if index >= 0 and at_us < marks[index][1] else None


def _gpu_works(events: Iterable[Event], marks: Sequence[tuple[float, float]]) -> Iterable[Work]:
    launched_at = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in LAUNCH_CATEGORIES and "correlation" in event.get("args", {})
    }
    for event in events:
        if event.get("cat") not in GPU_CATEGORIES:
            continue
        launch = event.get("args", {}).get("correlation")
        step = _step_of(marks, launched_at[launch]) if launch in launched_at else None
        if step is not None:
            start, duration = event["ts"], event["dur"]
            yield Work(event["name"], step, start, start + duration, duration, launch)


def _cpu_works(events: Iterable[Event], marks: Sequence[tuple[float, float]]) -> Iterable[Work]:
    """Operations with their own time; one called by another belongs to the same launch."""
    threads: dict[object, list[Event]] = {}
    for event in events:
        if event.get("cat") == "cpu_op":
            threads.setdefault(event.get("tid"), []).append(event)
    for tid, ops in threads.items():
        ops.sort(key=lambda event: (event["ts"], -event["dur"]))
        inner_us = [0.0] * len(ops)
        launches = list(range(len(ops)))
        open_ops: list[int] = []
        for index, op in enumerate(ops):
            while open_ops and op["ts"] >= _end(ops[open_ops[-1]]):
                open_ops.pop()
            if open_ops:
                inner_us[open_ops[-1]] += op["dur"]
                launches[index] = launches[open_ops[-1]]
            open_ops.append(index)
        for index, op in enumerate(ops):
            step = _step_of(marks, op["ts"])
            if step is not None:
                own_us = max(0.0, op["dur"] - inner_us[index])
                launch = (tid, launches[index])
                yield Work(op["name"], step, op["ts"], _end(op), own_us, launch)


def _end(event: Event) -> float:
    end: float = event["ts"] + event["dur"]
    return end


def _busy_us(works: Iterable[Work]) -> float:
    busy, reached = 0.0, float("-inf")
    for work in sorted(works, key=lambda work: work.start_us):
        busy += max(0.0, work.end_us - max(reached, work.start_us))
        reached = max(reached, work.end_us)
    return busy


def _shares(works: Iterable[Work]) -> list[Share]:
    found: dict[str, list[float]] = {}
    for work in works:
        found.setdefault(work.name, []).append(work.own_us)
    total_us = sum(map(sum, found.values())) or 1.0
    shares = [
        Share(name, len(times), sum(times), sum(times) / total_us) for name, times in found.items()
    ]
    return sorted(shares, key=lambda share: -share.total_us)
