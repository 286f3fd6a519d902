"""Workloads: what is timed, read from the JSON files that every engine is timed on.

Prompts are random ids below min(150,000, vocabulary), fresh for every repeat, so that a prefix
cache helps only where a workload shares prefixes on purpose.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from pico_vllm.errors import ConfigError

DATA = Path(__file__).parent / "data"
MAX_RANDOM_ID = 150_000


KINDS = ("decode", "ttft", "mixed", "prefix")
ALL_USE = {"id", "kind", "out"}
RANGES = ("prompt", "out", "suffix")
"""What may be the bounds of a uniform draw."""


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
    suffix: int | tuple[int, int] = 0
    requests: int = 1

    @property
    def max_total_tokens(self) -> int:
        longest_prompt = _highest(self.prompt) + self.shared + _highest(self.suffix)
        return longest_prompt + _highest(self.out)

    @property
    def mean_context_tokens(self) -> float:
        """Tokens whose KV a decode step reads for a request, on average over its steps: the prompt
        and half of the answer."""
        return _mean(self.prompt) + _mean(self.out) / 2


def read_workloads(device: str, file: Path | None = None) -> list[Workload]:
    """Those of a file, or of our own for this kind of device.

    Raises:
        ConfigError: the file cannot be read, or something in it is no workload.
    """
    file = file or DATA / ("workloads-cpu.json" if device == "cpu" else "workloads.json")
    try:
        content = json.loads(file.read_text())
        if isinstance(content, dict) and "workloads" not in content:
            raise ValueError('an object has them as its "workloads"')
        entries = content["workloads"] if isinstance(content, dict) else content
        workloads = [_workload(entry) for entry in entries]
        if not workloads or len({each.id for each in workloads}) < len(workloads):
            raise ValueError("it takes one at least, and no id twice")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"{file} does not hold workloads: {reason}; see {DATA / 'workloads.json'} "
            "for one that does",
            param="workloads",
        ) from error
    return workloads


def _workload(entry: dict[str, Any]) -> Workload:
    """Raises TypeError or ValueError where it is none."""
    if not isinstance(entry, dict):
        raise ValueError(f"{entry!r} is no object")
    workload = Workload(**{k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()})
    if not isinstance(workload.id, str) or workload.kind not in KINDS:
        raise ValueError(
            f"id {workload.id!r}, kind {workload.kind!r}; kinds are {', '.join(KINDS)}"
        )
    for field in fields(Workload)[2:]:
        value = getattr(workload, field.name)
        bounds = value if isinstance(value, tuple) and field.name in RANGES else (value, value)
        least = 0 if field.name in ("prompt", "shared", "suffix") else 1
        is_range = len(bounds) == 2 and all(type(each) is int for each in bounds)
        if not is_range or not least <= bounds[0] <= bounds[1]:
            raise ValueError(
                f"{workload.id}: {field.name} is {value}; it takes a number from {least} on"
                + ", or two that bound it" * (field.name in RANGES)
            )
    if workload.kind == "decode" and (isinstance(workload.out, tuple) or workload.out < 2):
        raise ValueError(f"{workload.id}: out is {workload.out}; decode takes a number from 2 on")
    if workload.kind == "prefix" and workload.requests < 2:
        raise ValueError(f"{workload.id}: requests is {workload.requests}; prefix takes 2 at least")
    is_prefix = workload.kind == "prefix"
    used = ALL_USE | ({"shared", "suffix", "requests"} if is_prefix else {"batch", "prompt"})
    if workload.kind in ("ttft", "prefix") and workload.out != 1:
        raise ValueError(f"{workload.id}: out is {workload.out}; {workload.kind} takes 1 alone")
    if not entry.keys() <= used:
        names = ", ".join(sorted(entry.keys() - used))
        raise ValueError(f"{workload.id}: {workload.kind} takes no {names}")
    num_tokens = workload.shared + _lowest(workload.suffix) if is_prefix else workload.prompt
    if not _lowest(num_tokens):
        raise ValueError(f"{workload.id}: requests without a token")
    return workload


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


def check_workloads(
    workloads: Sequence[Workload],
    *,
    max_model_len: int | None,
    max_num_seqs: int | None = None,
    num_kv_blocks: int | None = None,
    block_size: int = 16,
) -> None:
    """Refuse what cannot run, or would not measure what it says: a decode step has all requests in
    it. None is not known yet.

    Raises:
        ConfigError: a workload, its need, the limit and the way out.
    """
    for workload in workloads:
        _check(
            workload, "max_model_len", max_model_len, workload.max_total_tokens,
            "tokens a request and the window holds",
        )  # fmt: skip
        if workload.kind != "decode":
            continue
        _check(
            workload, "max_num_seqs", max_num_seqs, workload.batch,
            "requests at once and max_num_seqs is",
        )  # fmt: skip
        blocks_each = -(-workload.max_total_tokens // block_size)
        _check(
            workload, "num_kv_blocks", num_kv_blocks, workload.batch * blocks_each,
            "blocks of KV at once and the pool holds",
        )  # fmt: skip


def _check(workload: Workload, param: str, limit: int | None, need: int, relation: str) -> None:
    if limit is not None and need > limit:
        raise ConfigError(
            f"{workload.id} needs {need} {relation} {limit}; raise "
            f"--{param.replace('_', '-')} or leave it out with --only",
            param=param,
        )


class PromptSource:
    """Random prompts, none given twice."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._limit = min(MAX_RANDOM_ID, vocab_size)
        self._random = np.random.default_rng(seed % 2**64)  # NumPy takes none below 0

    def prompt(self, num_tokens: int) -> list[int]:
        ids: list[int] = self._random.integers(0, self._limit, num_tokens).tolist()
        return ids

    def draw(self, bounds: int | tuple[int, int]) -> int:
        if isinstance(bounds, int):
            return bounds
        return int(self._random.integers(bounds[0], bounds[1] + 1))


def _mean(bounds: int | tuple[int, int]) -> float:
    return bounds if isinstance(bounds, int) else sum(bounds) / 2


def _lowest(bounds: int | tuple[int, int]) -> int:
    return bounds[0] if isinstance(bounds, tuple) else bounds


def _highest(bounds: int | tuple[int, int]) -> int:
    return bounds if isinstance(bounds, int) else bounds[1]
