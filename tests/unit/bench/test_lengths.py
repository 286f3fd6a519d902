from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from pico_vllm.bench.lengths import (
    Lengths,
    UniformLengths,
    check_lengths,
    parse_bounds,
    read_lengths,
)
from pico_vllm.errors import ConfigError

LINES = (
    '{"prompt_tokens": 10, "output_tokens": 3}\n\n{"prompt_tokens": 4, "output_tokens": 90, "x": 1}'
)


def test_a_constant_and_a_range() -> None:
    """A number is both bounds; all values between bounds come up, the bounds included."""
    assert parse_bounds("prompt-tokens", "128") == (128, 128)
    assert parse_bounds("prompt-tokens", "100 - 1024") == (100, 1024)
    source = UniformLengths(prompt_tokens=(2, 5), output_tokens=(7, 7))
    drawn = source.draw(4000, np.random.default_rng(0))
    counts = Counter(each.prompt_tokens for each in drawn)
    assert {each.output_tokens for each in drawn} == {7} and sorted(counts) == [2, 3, 4, 5]
    assert all(count == pytest.approx(1000, abs=120) for count in counts.values())
    assert source.longest()[1] == Lengths(5, 7)


@pytest.mark.parametrize("text", ["", "0", "-5", "5-", "a", "9-3", "1.5", "3-4-5", str(1 << 31)])
def test_bounds_that_are_none(text: str) -> None:
    """The option and what was typed are named."""
    with pytest.raises(ConfigError, match="must be a whole number from 1 up") as error:
        parse_bounds("output-tokens", text)
    assert error.value.message.startswith(f"--output-tokens {text!r}")
    assert error.value.param == "output_tokens"


@pytest.mark.parametrize("is_list", [False, True])
def test_pairs_of_a_file_stay_together(tmp_path: Path, is_list: bool) -> None:
    """Lines or a list; drawn with replacement, evenly, the same again from the same seed."""
    path = tmp_path / "lengths.json"
    lines = [line for line in LINES.split("\n") if line]
    path.write_text(f"\n [{', '.join(lines)}]" if is_list else LINES)
    source = read_lengths(path)
    drawn = source.draw(1000, np.random.default_rng(3))
    counts = Counter(drawn)
    assert set(counts) == {Lengths(10, 3), Lengths(4, 90)}
    assert counts[Lengths(10, 3)] == pytest.approx(500, abs=60)
    assert source.draw(1000, np.random.default_rng(3)) == drawn
    assert source.draw(1000, np.random.default_rng(4)) != drawn
    place = "entry 2" if is_list else "line 3"
    assert source.longest() == (f"{path}, {place},", Lengths(4, 90))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; give lines like"),
        ("\n \n", "is empty; give lines like"),
        ("[]", "is empty; give lines like"),
        ("[1, 2", "list, is not JSON: "),
        ('{"prompt_tokens": 1, "output_tokens": 1}\nnope', "line 2, is not JSON: "),
        ("7", "line 1: 7; each needs prompt_tokens"),
        ('[{"prompt_tokens": 1}]', "entry 1: output_tokens is None; each needs"),
        ('{"prompt_tokens": "9", "output_tokens": 1}', "line 1: prompt_tokens is '9'; each"),
        ('{"prompt_tokens": true, "output_tokens": 1}', "line 1: prompt_tokens is True; each"),
        ('{"prompt_tokens": 1.5, "output_tokens": 1}', "line 1: prompt_tokens is 1.5; each"),
        ('{"prompt_tokens": 5, "output_tokens": 0}', "line 1: output_tokens is 0; each"),
    ],
)
def test_a_file_that_holds_something_else(tmp_path: Path, text: str, message: str) -> None:
    """The file, the place in it, the value and what is wanted."""
    path = tmp_path / "lengths.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_lengths(path)
    assert error.value.message.startswith(f"--lengths {path}") and message in error.value.message


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """Missing, a folder, or bytes that are no text."""
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_lengths(tmp_path / "missing")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_lengths(tmp_path)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read: it is not UTF-8 text"):
        read_lengths(tmp_path / "bytes")


def test_lengths_past_the_window(tmp_path: Path) -> None:
    """The longest that could be drawn counts, and is told with its place; equal is enough."""
    uniform = UniformLengths(prompt_tokens=(1, 60), output_tokens=(1, 5))
    check_lengths(uniform, 65)
    check_lengths(uniform, None)
    with pytest.raises(ConfigError) as error:
        check_lengths(uniform, 64)
    assert error.value.message.startswith(
        "--prompt-tokens 60, --output-tokens 5 needs 65 tokens a request and the window holds 64; "
    )
    path = tmp_path / "lengths.jsonl"
    path.write_text(LINES)
    check_lengths(read_lengths(path), 94)
    with pytest.raises(ConfigError, match="line 3, needs 94 tokens a request and the window holds"):
        check_lengths(read_lengths(path), 93)
