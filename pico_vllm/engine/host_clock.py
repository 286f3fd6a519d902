"""HostClock: the CPU time of steps that no device hides: from a step's ids to the next launch."""

from __future__ import annotations

from time import perf_counter


class HostClock:
    """Adds up, over the life of an engine, what the host does between two waits for the device.

    The engine calls `launched` when a launch has returned, `received` when a step's ids are there,
    and `idle` when no work is left: from then on time belongs to whoever brings the next request.
    Two readings of the clock a step.
    """

    __slots__ = ("_since", "host_s", "num_steps")

    def __init__(self) -> None:
        self.host_s = 0.0
        self.num_steps = 0
        """Steps that were timed: those launched after another one's ids were received."""
        self._since: float | None = None

    def launched(self) -> None:
        if self._since is not None:
            self.host_s += perf_counter() - self._since
            self.num_steps += 1
            self._since = None

    def received(self) -> None:
        self._since = perf_counter()

    def idle(self) -> None:
        self._since = None
