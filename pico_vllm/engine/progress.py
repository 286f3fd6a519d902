"""How far a call with many prompts has come, as a line on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

BAR_CELLS = 20
TERMINAL_INTERVAL_S, LOG_INTERVAL_S = 0.1, 30.0
"""A terminal's line is overwritten; a file gets a line now and then."""


class ProgressLine:
    """`[#####---------------]  25% 1000/4000 prompts, 5120 tok/s, 12 s left`"""

    def __init__(
        self,
        num_prompts: int,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._num_prompts = num_prompts
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._is_terminal = self._stream.isatty()
        self._interval_s = TERMINAL_INTERVAL_S if self._is_terminal else LOG_INTERVAL_S
        self._width = 0
        self._start_s = clock()
        self._next_s = self._start_s + self._interval_s

    def is_due(self) -> bool:
        return self._clock() >= self._next_s

    def show(self, num_finished: int, num_tokens: int) -> None:
        """num_tokens: output tokens so far, those of unfinished answers included."""
        now_s = self._clock()
        self._next_s = now_s + self._interval_s
        elapsed_s = max(now_s - self._start_s, 1e-9)
        done = num_finished / max(self._num_prompts, 1)
        num_cells = int(done * BAR_CELLS)
        line = (
            f"[{'#' * num_cells}{'-' * (BAR_CELLS - num_cells)}] {done:4.0%} "
            f"{num_finished}/{self._num_prompts} prompts, {num_tokens / elapsed_s:.0f} tok/s"
        )
        if 0 < done < 1:
            line += f", {elapsed_s * (1 - done) / done:.0f} s left"
        elif done:
            line += f", {elapsed_s:.1f} s"
        start, end = ("\r", "") if self._is_terminal else ("", "\n")
        # What is left of a longer line before it is overwritten by spaces.
        self._stream.write(f"{start}{line.ljust(self._width)}{end}")
        self._stream.flush()
        self._width = len(line) if self._is_terminal else 0

    def close(self, num_finished: int, num_tokens: int) -> None:
        """The last line, also where an error ends the call: whatever is written next begins a new
        one."""
        self.show(num_finished, num_tokens)
        if self._is_terminal:
            self._stream.write("\n")
            self._stream.flush()
