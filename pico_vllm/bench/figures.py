"""Figures as a line shows them. Host only, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SIGNIFICANT_DIGITS = 6


def rounded(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Floats to the significant digits that a line shows: a figure of any size keeps them."""
    return {
        name: float(f"{value:.{SIGNIFICANT_DIGITS}g}") if isinstance(value, float) else value
        for name, value in figures.items()
    }


def flat(shape: Any) -> dict[str, Any]:
    """The fields of a dataclass of numbers, bounds as `8-16`."""
    values = {name: getattr(shape, name) for name in shape.__dataclass_fields__}
    return {k: "-".join(map(str, v)) if isinstance(v, tuple) else v for k, v in values.items()}
