"""Policies: who comes next in the waiting line. Host only.

A policy gives each request a place when it arrives, a number; the lowest comes first. The place
never changes, so waiting is bounded: every policy's places grow with the number of arrivals, and a
request can only be overtaken by those that arrive while theirs is still lower, or not lower by more
than they have cached tokens under RANKED_BY_PREFIX.

To add one: a function here, and its line in POLICIES.
"""

from __future__ import annotations

from collections.abc import Callable

from pico_vllm.request import Request

Policy = Callable[[Request, int], int]
"""(request, how many arrived before it) -> its place."""
PREEMPTING = frozenset({"priority"})
"""Policies whose first in line may preempt running requests of later places in order to enter. With
the others a request is preempted only where those before it run out of blocks."""
RANKED_BY_PREFIX = frozenset({"longest-prefix-match"})
"""Policies under which a request that waits stands before its place by its cached tokens."""
MAX_RANKED = 64
"""So many of those that came first are asked for theirs; the others stand at their places."""
ARRIVALS_PER_LEVEL = 256
"""What a level of priority is worth: it overtakes as many earlier arrivals of the level below."""
TOKENS_PER_ARRIVAL = 64
"""By how much a waiting prompt counts as shorter with each arrival after it."""


def fcfs(request: Request, num_before: int) -> int:
    """First come, first served."""
    return num_before


def priority(request: Request, num_before: int) -> int:
    """The lowest `priority` first, in order of arrival among equals; but a request is overtaken by
    no more than ARRIVALS_PER_LEVEL later ones for each level between them."""
    return request.params.priority * ARRIVALS_PER_LEVEL + num_before


def shortest_prompt(request: Request, num_before: int) -> int:
    """The shortest prompt first; while it waits it grows shorter by TOKENS_PER_ARRIVAL with each
    request that comes after it."""
    return request.num_prompt_tokens + TOKENS_PER_ARRIVAL * num_before


def longest_prefix_match(request: Request, num_before: int) -> int:
    """The one with the longest cached prefix first, as the cache is when one is let in; in order of
    arrival among equals. Each cached token is worth one, each arrival TOKENS_PER_ARRIVAL: a prefix
    of the whole window overtakes a bounded number of earlier ones."""
    return TOKENS_PER_ARRIVAL * num_before


POLICIES: dict[str, Policy] = {
    "fcfs": fcfs,
    "priority": priority,
    "shortest-prompt": shortest_prompt,
    "longest-prefix-match": longest_prefix_match,
}
