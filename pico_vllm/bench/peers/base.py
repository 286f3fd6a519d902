"""What the bench needs of an engine: ours or a peer's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class BenchEngine(Protocol):
    name: str

    def generate(self, prompts: Sequence[list[int]], num_output_tokens: Sequence[int]) -> None:
        """Generate exactly that many greedy tokens for each prompt, all prompts at once."""
        ...
