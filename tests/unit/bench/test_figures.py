"""What a line says of figures."""

from __future__ import annotations

import pytest

from pico_vllm.bench.figures import rounded


@pytest.mark.parametrize("value", [0.0628123456, 127.01522123, 43807.654321, 3.5e-7, 2.1e11])
def test_a_figure_of_any_size_keeps_its_digits(value: float) -> None:
    """Of seconds as of tokens a second so much is left that a ratio of two holds."""
    found = rounded({"x": value})["x"]
    assert found == pytest.approx(value, rel=1e-5)
    assert found == float(f"{found:.6g}")


def test_what_is_no_float_is_left() -> None:
    """Whole numbers of any size, names and what is missing."""
    line = {"n": 12_345_678_901, "none": None, "name": "b", "yes": True, "zero": 0.0}
    assert rounded(line) == line and rounded(line)["yes"] is True
