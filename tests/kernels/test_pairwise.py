from __future__ import annotations

import itertools

from pairwise import pairwise


def test_any_two_values_meet() -> None:
    """Every pair of values of two factors is in a case, and there are far fewer cases than all."""
    factors = (["a", "b", "c"], [64, 80, 96, 128, 256], range(8), [False, True])
    cases = pairwise(*factors)
    for (i, first), (j, second) in itertools.combinations(enumerate(factors), 2):
        met = {(case[i], case[j]) for case in cases}
        assert met == set(itertools.product(first, second))
    assert 40 <= len(cases) <= 45
