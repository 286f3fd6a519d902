"""The list of planted faults keeps up with the source."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

from planted_faults import PLANTS, ROOT


def test_every_plant_can_be_planted() -> None:
    """The text that a plant replaces occurs exactly once in its file, and what comes of it is
    another program of Python."""
    assert len(PLANTS) >= 30 and len({plant.name for plant in PLANTS}) == len(PLANTS)
    for plant in PLANTS:
        text = Path(ROOT / plant.file).read_text("utf-8")
        assert text.count(plant.old) == 1, plant
        planted = text.replace(plant.old, plant.new)
        assert program_of(planted) != program_of(text), plant


@functools.cache
def program_of(text: str) -> str:
    """What Python makes of it: neither layout nor comments."""
    return ast.dump(ast.parse(text))
