"""Fewer cases than a full grid, where each case is a kernel to compile."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases of one value of each factor, such that any two values of two factors meet in one.

    Greedy: of all cases the one with most pairs that have not met yet, until all have.
    """
    cases = {
        case: {(a, case[a], b, case[b]) for a, b in itertools.combinations(range(len(case)), 2)}
        for case in itertools.product(*(range(len(values)) for values in factors))
    }
    missing = set().union(*cases.values())
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(cases[case] & missing))
        missing -= cases[best]
        chosen.append(best)
    return [tuple(values[i] for values, i in zip(factors, case, strict=True)) for case in chosen]
