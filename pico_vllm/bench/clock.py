"""When the clock of a start begins: with the process, so that imports count."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Literal

MAX_LAUNCH_S = 3.0
"""An interpreter that takes longer than this to come to its command was something else before."""


def process_age_s() -> float | None:
    """Seconds since this process was made, from Linux's own books; None where they cannot be
    read."""
    try:
        # The name of the program, in brackets, may hold anything; field 22 is its start in ticks.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, ValueError, IndexError, AttributeError):
        return None


class StartupClock:
    """Counts from the start of the process, if that was for this command.

    A shell that runs some commands and then becomes the last one (`sh -c 'a; b'`) keeps its
    process: a start that lies suspiciously far back is not taken, and the clock counts from its own
    making. What other commands took before a short start is counted rather than left out.
    """

    def __init__(self) -> None:
        age_s = process_age_s()
        is_ours = age_s is not None and 0 <= age_s <= MAX_LAUNCH_S
        self.counts_from: Literal["process", "command"] = "process" if is_ours else "command"
        self._start = time.perf_counter() - (age_s if age_s is not None and is_ours else 0.0)

    def elapsed_s(self) -> float:
        return time.perf_counter() - self._start
