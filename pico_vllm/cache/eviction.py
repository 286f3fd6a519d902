"""Eviction policies: which cached leaf goes first when blocks are needed. Host only.

A policy gives a leaf its place when it becomes evictable: the lowest goes first. What the place is
made of changes only while somebody uses the leaf, so it holds for as long as the leaf waits.

To add one: a function here, and its line in EVICTION_POLICIES.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Usage(Protocol):
    """What a node of the tree knows of its past."""

    created: int
    """Times are counts of the tree's clock, which goes on with each request that enters."""
    last_used: int
    num_uses: int
    """Requests that have used it."""
    priority: int
    """The best (lowest) priority of a request that has used it."""


EvictionPolicy = Callable[[Usage], tuple[int, int]]


def lru(usage: Usage) -> tuple[int, int]:
    """The one whose last use is longest ago."""
    return usage.last_used, 0


def lfu(usage: Usage) -> tuple[int, int]:
    """The one that fewest requests have used; of those the one whose last use is longest ago."""
    return usage.num_uses, usage.last_used


def fifo(usage: Usage) -> tuple[int, int]:
    """The oldest, however much it is used."""
    return usage.created, 0


def priority(usage: Usage) -> tuple[int, int]:
    """What only requests of the worst (highest) `priority` have used; of those as with lru."""
    return -usage.priority, usage.last_used


EVICTION_POLICIES: dict[str, EvictionPolicy] = {
    "lru": lru,
    "lfu": lfu,
    "fifo": fifo,
    "priority": priority,
}
