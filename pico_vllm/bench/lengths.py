"""How long prompts and answers are: drawn evenly between bounds, or from the pairs of a file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from pico_vllm.errors import ConfigError, show


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of one request, in tokens."""

    prompt_tokens: int
    output_tokens: int

    @property
    def total(self) -> int:
        return self.prompt_tokens + self.output_tokens


class LengthSource(Protocol):
    def draw(self, count: int, random: np.random.Generator) -> list[Lengths]: ...

    def longest(self) -> tuple[str, Lengths]:
        """Of all that could be drawn, and where it is asked for."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformLengths:
    """Both drawn by themselves, bounds included."""

    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]

    def draw(self, count: int, random: np.random.Generator) -> list[Lengths]:
        low, high = zip(self.prompt_tokens, self.output_tokens, strict=True)
        drawn = random.integers(low, high, size=(count, 2), endpoint=True)
        return [Lengths(prompt, output) for prompt, output in drawn.tolist()]

    def longest(self) -> tuple[str, Lengths]:
        found = Lengths(self.prompt_tokens[1], self.output_tokens[1])
        where = f"--prompt-tokens {found.prompt_tokens}, --output-tokens {found.output_tokens}"
        return where, found


@dataclass(frozen=True, slots=True)
class FileLengths:
    """Pairs drawn with replacement: a prompt keeps its answer, the file may be shorter than the
    run."""

    path: Path
    entries: Sequence[tuple[str, Lengths]]
    """Each with its place in the file."""

    def draw(self, count: int, random: np.random.Generator) -> list[Lengths]:
        chosen = random.integers(0, len(self.entries), count)
        return [self.entries[index][1] for index in chosen.tolist()]

    def longest(self) -> tuple[str, Lengths]:
        where, found = max(self.entries, key=lambda entry: entry[1].total)
        return f"{self.path}, {where},", found


def read_lengths(path: Path) -> FileLengths:
    """A JSON list of objects with prompt_tokens and output_tokens, or such an object a line. Other
    keys are passed over.

    Raises:
        ConfigError: the file cannot be read, is empty, or an entry is not two whole numbers from 1
        up; with its place.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"--lengths {path} cannot be read: {reason}", param="lengths") from None
    entries = [(where, _lengths(path, where, value)) for where, value in _values(path, text)]
    if not entries:
        raise ConfigError(
            f'--lengths {path} is empty; give lines like {{"prompt_tokens": 100, '
            '"output_tokens": 20}',
            param="lengths",
        )
    return FileLengths(path, entries)


def parse_bounds(option: str, text: str) -> tuple[int, int]:
    """`100` or `100-1024` as the lowest and the highest.

    Raises:
        ConfigError: neither.
    """
    low, is_range, high = (each.strip() for each in text.partition("-"))
    bounds = (low, high if is_range else low)
    if all(each.isdecimal() and 0 < int(each) < 1 << 31 for each in bounds):
        numbers = (int(bounds[0]), int(bounds[1]))
        if numbers[0] <= numbers[1]:
            return numbers
    raise ConfigError(
        f"--{option} {text!r} must be a whole number from 1 up, or two like 100-1024, the lower "
        "first",
        param=option.replace("-", "_"),
    )


def check_lengths(lengths: LengthSource, max_model_len: int | None) -> None:
    """Refuse what could draw a request that does not fit the window. None is not known yet.

    Raises:
        ConfigError: where it is asked for, its need, the limit and the way out.
    """
    where, longest = lengths.longest()
    if max_model_len is not None and longest.total > max_model_len:
        raise ConfigError(
            f"{where} needs {longest.total} tokens a request and the window holds "
            f"{max_model_len}; give smaller ones or raise --max-model-len",
            param="max_model_len",
        )


def _values(path: Path, text: str) -> Iterator[tuple[str, object]]:
    if text.lstrip().startswith("["):
        values = _parse(path, "list", text)
        assert isinstance(values, list), values
        yield from ((f"entry {number}", value) for number, value in enumerate(values, 1))
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"line {number}", _parse(path, f"line {number}", line)


def _parse(path: Path, where: str, text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", "it cannot be parsed")
        raise ConfigError(
            f"--lengths {path}, {where}, is not JSON: {reason}", param="lengths"
        ) from None


def _lengths(path: Path, where: str, value: object) -> Lengths:
    numbers = []
    for key in ("prompt_tokens", "output_tokens"):
        number = value.get(key) if isinstance(value, Mapping) else None
        if type(number) is not int or number < 1:
            shown = f"{key} is {show(number)}" if isinstance(value, Mapping) else show(value)
            raise ConfigError(
                f"--lengths {path}, {where}: {shown}; each needs prompt_tokens and output_tokens, "
                "whole numbers from 1 up",
                param="lengths",
            )
        numbers.append(number)
    return Lengths(*numbers)
