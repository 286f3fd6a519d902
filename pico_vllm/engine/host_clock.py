"""HostClock: the CPU time of steps that no device hides: from a step's ids to the next launch."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter


@dataclass(slots=True)
class HostTime:
    seconds: float = 0.0
    num_steps: int = 0
    """Steps that were timed: those launched after another one's ids were received."""

    def add(self, seconds: float) -> None:
        self.seconds += seconds
        self.num_steps += 1

    def ms_per_step(self, before: HostTime) -> float | None:
        """Since an earlier reading; None where there was no step."""
        num_steps = self.num_steps - before.num_steps
        return 1e3 * (self.seconds - before.seconds) / num_steps if num_steps else None


class HostClock:
    """Adds up, over the life of an engine, what the host does between two waits for the device.

    The engine calls `launched` when a launch has returned, `received` when a step's ids are there,
    and `idle` when no work is left: from then on time belongs to whoever brings the next request.
    Two readings of the clock a step.
    """

    __slots__ = ("_since", "all_steps", "decode_steps")

    def __init__(self) -> None:
        self.all_steps = HostTime()
        self.decode_steps = HostTime()
        """Of those, in which all requests decode."""
        self._since: float | None = None

    def launched(self, *, is_decode: bool) -> None:
        if self._since is not None:
            seconds = perf_counter() - self._since
            self.all_steps.add(seconds)
            if is_decode:
                self.decode_steps.add(seconds)
            self._since = None

    def received(self) -> None:
        self._since = perf_counter()

    def idle(self) -> None:
        self._since = None
