from __future__ import annotations

import subprocess
import sys
import time

import pytest

from pico_vllm.bench import clock

PROGRAM = (
    "import time; time.sleep(0.3)\n"
    "from pico_vllm.bench.clock import StartupClock\n"
    "c = StartupClock(); print(c.counts_from, c.elapsed_s())"
)


def test_a_start_counts_from_the_process() -> None:
    """What ran before the clock was made is in its figure."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    outside_s = time.perf_counter() - start
    source, seconds = done.stdout.split()
    assert source == "process", done.stderr
    assert 0.3 < float(seconds) < outside_s + 0.02  # the kernel counts in ticks of 10 ms


@pytest.mark.parametrize("age_s", [None, clock.MAX_LAUNCH_S + 1, -5.0])
def test_a_process_that_began_as_something_else_does_not_count(
    monkeypatch: pytest.MonkeyPatch, age_s: float | None
) -> None:
    """Without an age that can be believed the clock counts from its own making."""
    monkeypatch.setattr(clock, "process_age_s", lambda: age_s)
    made = clock.StartupClock()
    assert made.counts_from == "command"
    assert made.elapsed_s() < 1.0


def test_the_age_grows_with_time() -> None:
    """The kernel's books and the clock agree on how time passes."""
    before = clock.process_age_s()
    time.sleep(0.05)
    after = clock.process_age_s()
    assert before is not None and after is not None
    assert 0.05 <= after - before < 5.0
