"""Workloads: what is timed, read from the JSON files that every engine is timed on.

Prompts are random ids below min(150,000, vocabulary), fresh for every repeat, so that a prefix
cache helps only where a workload shares prefixes on purpose.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pico_vllm.errors import ConfigError

DATA = Path(__file__).parent / "data"
MAX_RANDOM_ID = 150_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Counted as its `kind` says.

    decode: (time of prompt + out) - (time of the same prompt with one output), over out - 1.
    ttft: wall time of a one-token request. mixed: output tokens over wall time, all at once.
    prefix: requests in sequence that share a prefix never seen before, the first one cold.
    """

    id: str
    kind: str
    batch: int = 1
    prompt: int | tuple[int, int] = 0
    """Tokens, or the bounds of a uniform draw."""
    out: int | tuple[int, int] = 1
    shared: int = 0
    suffix: tuple[int, int] = (0, 0)
    requests: int = 1

    @property
    def max_total_tokens(self) -> int:
        longest_prompt = _highest(self.prompt) + self.shared + self.suffix[1]
        return longest_prompt + _highest(self.out)


def read_workloads(device: str) -> list[Workload]:
    """The file for this kind of device."""
    name = "workloads-cpu.json" if device == "cpu" else "workloads.json"
    entries = json.loads((DATA / name).read_text())["workloads"]
    return [
        Workload(**{k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()})
        for entry in entries
    ]


def select(workloads: list[Workload], only: str | None) -> list[Workload]:
    """Those whose ids are in the comma-separated list `only`; all of them without one."""
    if only is None:
        return workloads
    by_id = {workload.id: workload for workload in workloads}
    ids = [each.strip() for each in only.split(",")]
    unknown = [each for each in ids if each not in by_id]
    if unknown:
        raise ConfigError(
            f"no workload {', '.join(unknown)}; there are {', '.join(by_id)}", param="only"
        )
    return [by_id[each] for each in ids]


class PromptSource:
    """Random prompts, none given twice."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._limit = min(MAX_RANDOM_ID, vocab_size)
        self._random = np.random.default_rng(seed)

    def prompt(self, num_tokens: int) -> list[int]:
        ids: list[int] = self._random.integers(0, self._limit, num_tokens).tolist()
        return ids

    def draw(self, bounds: int | tuple[int, int]) -> int:
        if isinstance(bounds, int):
            return bounds
        return int(self._random.integers(bounds[0], bounds[1] + 1))


def _highest(bounds: int | tuple[int, int]) -> int:
    return bounds if isinstance(bounds, int) else bounds[1]
