"""Which decoding requests have a prefix in common, by their block tables."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pico_vllm.engine.shared_prefixes import SharedPrefix, SharedPrefixes
from pico_vllm.step import NewBlocks

S = 8


def made(tables: list[list[int]]) -> SharedPrefixes:
    prefixes = SharedPrefixes(len(tables) + 1, 80, S)
    prefixes.take([NewBlocks(row=row, index=0, block_ids=ids) for row, ids in enumerate(tables)])
    return prefixes


def find(prefixes: SharedPrefixes, rows: list[int], contexts: list[int]) -> SharedPrefix | None:
    return prefixes.find(np.array(rows, np.int32), np.array(contexts, np.int32))


def lens_of(prefixes: SharedPrefixes, rows: list[int], contexts: list[int]) -> list[int] | None:
    found = find(prefixes, rows, contexts)
    if found is None:
        return None
    assert found.num_requests == np.count_nonzero(found.lens)
    assert found.num_tokens == found.lens.max()
    return [int(n) for n in found.lens]


@pytest.mark.parametrize(
    ("tables", "contexts", "expected"),
    [
        ([[1, 2, 3], [4, 5]], [20, 12], None),
        ([[1], [1]], [8, 7], None),  # the second one's block is not full
        ([[1, 2, 3], [1, 2, 4]], [20, 17], [16, 16]),
        ([[1, 2, 3], [1, 2, 3, 4]], [23, 26], [16, 16]),
        ([[9], [1, 2, 3], [1, 2, 4], [8, 7]], [8, 20, 17, 9], [0, 16, 16, 0]),
        # Three share one block, two of them five: that saves more. And less.
        ([[1, 2, 3, 4, 5, 6], [1, 9], [1, 2, 3, 4, 5]], [48, 10, 40], [40, 0, 40]),
        ([[1, 2, 3], [1, 9], [1, 2], [1, 8]], [24, 10, 16, 11], [8, 8, 8, 8]),
        # Of two prefixes that of more requests.
        ([[1, 2], [5], [1, 2], [5, 6], [5]], [16, 8, 16, 9, 8], [0, 8, 0, 8, 8]),
    ],
)
def test_what_is_found(
    tables: list[list[int]], contexts: list[int], expected: list[int] | None
) -> None:
    """Whole blocks with KV, in the order of the step, and whom most is saved for."""
    assert lens_of(made(tables), list(range(len(tables))), contexts) == expected


def test_what_an_earlier_request_left_in_a_row_is_not_found() -> None:
    """Entries of a table past a request's end may be anything."""
    prefixes = made([[1, 2, 3, 4], [1, 2, 3, 4]])
    prefixes.take([NewBlocks(row=1, index=0, block_ids=[1, 2])])
    assert lens_of(prefixes, [1, 0], [16, 32]) == [16, 16]


def test_found_again_where_something_changed() -> None:
    """Not where blocks are appended; but where other rows decode, a row has another request, or
    blocks come in place of others."""
    prefixes = made([[1, 2], [1, 2], [1, 3]])
    first = find(prefixes, [0, 1], [16, 16])
    prefixes.take([NewBlocks(row=0, index=2, block_ids=[7])])
    prefixes.take([NewBlocks(row=0, index=3, block_ids=[8])])
    assert first is not None and find(prefixes, [0, 1], [30, 17]) is first
    assert lens_of(prefixes, [0, 1, 2], [30, 17, 17]) == [16, 16, 0]
    prefixes.take([NewBlocks(row=2, index=1, block_ids=[2])])
    assert lens_of(prefixes, [0, 1, 2], [30, 17, 17]) == [16, 16, 16]
    prefixes.take([NewBlocks(row=1, index=0, block_ids=[4, 5])])
    assert lens_of(prefixes, [0, 1, 2], [30, 17, 17]) == [16, 0, 16]


def test_random_trees() -> None:
    """As found block by block, among requests whose blocks are paths of a tree."""
    for seed in range(60):
        random.seed(seed)
        ids = iter(range(1, 10**6))
        paths: list[list[int]] = [[]]
        for _ in range(12):
            parent = random.choice(paths)
            paths.append(parent + [next(ids) for _ in range(random.randint(1, 6))])
        tables = [[*random.choice(paths), next(ids)] for _ in range(10)]
        contexts = [len(table) * S - random.randint(0, S - 1) for table in tables]
        found = lens_of(made(tables), list(range(10)), contexts)
        firsts = [table[0] for table in tables]
        if max(map(firsts.count, firsts)) < 2:
            assert found is None
            continue
        assert found is not None
        sharing = [r for r in range(10) if found[r]]
        prefixes = {tuple(tables[r][: found[r] // S]) for r in sharing}
        assert len(sharing) > 1 and len(prefixes) == 1
        assert all(found[r] <= contexts[r] for r in sharing)
        # Nobody else has that prefix.
        prefix = list(prefixes.pop())
        for r in set(range(10)) - set(sharing):
            assert tables[r][: len(prefix)] != prefix or contexts[r] < len(prefix) * S
