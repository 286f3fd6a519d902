from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from pico_vllm.engine import host_clock
from pico_vllm.engine.host_clock import HostClock, HostTime


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, Callable[[], None]], None]:
    """Call something at a moment."""

    def call(moment: float, what: Callable[[], None]) -> None:
        monkeypatch.setattr(host_clock, "perf_counter", lambda: moment)
        what()

    return call


def test_time_from_ids_to_the_next_launch_counts_and_waiting_does_not(
    at: Callable[[float, Callable[[], None]], None],
) -> None:
    """The plain loop: launch, wait, commit. Only commit to launch is the host's."""
    clock = HostClock()
    launched = partial(clock.launched, is_decode=True)
    at(0.0, launched)  # a first step has no ids before it
    at(10.0, clock.received)
    at(10.5, launched)
    at(20.0, clock.received)
    at(20.25, launched)
    assert clock.all_steps == clock.decode_steps == HostTime(0.75, 2)


def test_overlap_launches_one_step_ahead(
    at: Callable[[float, Callable[[], None]], None],
) -> None:
    """Two launches before the first ids: still one interval a step."""
    clock = HostClock()
    launched = partial(clock.launched, is_decode=True)
    at(0.0, launched)
    at(1.0, launched)
    at(5.0, clock.received)
    at(5.5, launched)
    at(9.0, clock.received)
    at(9.25, clock.received)  # the last step: there was nothing more to launch
    at(9.25, clock.idle)
    assert clock.all_steps == clock.decode_steps == HostTime(0.5, 1)


def test_an_idle_engine_takes_no_host_time(
    at: Callable[[float, Callable[[], None]], None],
) -> None:
    """The time until the next request comes is not the engine's."""
    clock = HostClock()
    launched = partial(clock.launched, is_decode=True)
    at(0.0, launched)
    at(1.0, clock.received)
    at(1.0, clock.idle)
    at(1000.0, launched)
    assert clock.all_steps == clock.decode_steps == HostTime()


def test_steps_that_decode_are_counted_apart(
    at: Callable[[float, Callable[[], None]], None],
) -> None:
    """Those with a prompt count among all alone; a reading says what came since."""
    clock = HostClock()
    at(0.0, clock.received)
    at(0.5, partial(clock.launched, is_decode=False))
    before = replace(clock.all_steps)
    assert clock.decode_steps == HostTime() and clock.decode_steps.ms_per_step(HostTime()) is None
    at(1.0, clock.received)
    at(1.25, partial(clock.launched, is_decode=True))
    assert (clock.all_steps, clock.decode_steps) == (HostTime(0.75, 2), HostTime(0.25, 1))
    assert clock.all_steps.ms_per_step(before) == 250.0
