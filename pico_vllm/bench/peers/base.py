"""What the bench needs of an engine: ours or a peer's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pico_vllm.engine.host_clock import HostClock


class BenchEngine(Protocol):
    name: str
    host_clock: HostClock | None
    """None where the host's part of a step cannot be told from the device's."""

    def generate(self, prompts: Sequence[list[int]], num_output_tokens: Sequence[int]) -> None:
        """Generate exactly that many greedy tokens for each prompt, all prompts at once."""
        ...
