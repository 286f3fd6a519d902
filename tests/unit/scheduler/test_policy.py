"""Policies of the waiting line: their order, and how long anyone can be made to wait."""

from __future__ import annotations

from typing import Any

import pytest
from simulated import make_request
from test_scheduler import World

from pico_vllm.config.engine import EngineConfig
from pico_vllm.errors import ConfigError
from pico_vllm.request import RequestStatus
from pico_vllm.scheduler.policy import (
    ARRIVALS_PER_LEVEL,
    POLICIES,
    TOKENS_PER_ARRIVAL,
    priority,
    shortest_prompt,
)
from pico_vllm.scheduler.queues import WaitingQueue


def line(policy: str, requests: list[dict[str, Any]]) -> list[str]:
    """The ids in the order in which they leave."""
    queue = WaitingQueue(POLICIES[policy])
    for number, each in enumerate(requests):
        prompt = [0] * each.get("prompt_len", 1)
        queue.push(make_request(number, prompt, 4, priority=each.get("priority", 0)))
    return [queue.pop().request_id for _ in requests]


def test_order_of_each_policy() -> None:
    """fcfs goes by arrival, priority by priority and then arrival, shortest-prompt by length and
    then arrival."""
    requests = [
        {"prompt_len": 900, "priority": 2},
        {"prompt_len": 300, "priority": -1},
        {"prompt_len": 5, "priority": 2},
        {"prompt_len": 300, "priority": -1},
    ]
    assert line("fcfs", requests) == ["r0", "r1", "r2", "r3"]
    assert line("priority", requests) == ["r1", "r3", "r0", "r2"]
    assert line("shortest-prompt", requests) == ["r2", "r1", "r3", "r0"]


@pytest.mark.parametrize("policy", list(POLICIES))
def test_the_oldest_finishes_whatever_arrives(policy: str) -> None:
    """One request of the lowest rank, with a single row to run on, and an endless stream of others
    that the policy likes better: it ends before more of them than the policy allows have."""
    world = World(num_blocks=80, max_num_seqs=1, budget=2000, policy=policy)
    world.add(4, 2)
    oldest = world.add(1200, 2, priority=1)
    bound = {
        "fcfs": 0,
        "priority": ARRIVALS_PER_LEVEL,
        "shortest-prompt": 1200 // TOKENS_PER_ARRIVAL,
        "longest-prefix-match": 0,  # without a cache
    }
    num_ended = 0
    while oldest.request_id not in world.ended:
        world.add(1, 1)
        world.step()
        num_ended = len(world.ended)
        assert num_ended < 2 + bound[policy] + 2
    assert num_ended >= min(bound[policy], 1)
    world.run()
    world.check_done()


def test_places_never_change_and_grow_with_arrivals() -> None:
    """What bounds the waiting: for any request there is a number of arrivals after which even the
    best one comes later."""
    worst = make_request(0, [0] * 5000, 1, priority=1000)
    best = make_request(1, [0], 1, priority=-1000)
    assert priority(worst, 0) < priority(best, 2000 * ARRIVALS_PER_LEVEL + 1)
    assert shortest_prompt(worst, 0) < shortest_prompt(best, 5000 // TOKENS_PER_ARRIVAL + 1)


def test_removal_leaves_nothing_behind() -> None:
    """Requests removed from behind one that waits do not pile up, and the order of the others
    stays."""
    queue = WaitingQueue()
    for number in range(500):
        queue.push(make_request(number, [0], 1))
        if number not in (0, 7, 300):
            assert queue.remove(f"r{number}") is not None
    assert queue.remove("r5") is None
    assert len(queue) == 3 and len(queue._line) < 30
    assert [queue.pop().request_id for _ in range(3)] == ["r0", "r7", "r300"]


def test_config_names_what_there_is() -> None:
    """scheduling_policy takes the registered names, and refuses others by naming them."""
    for name in POLICIES:
        EngineConfig(model="m", scheduling_policy=name)
    with pytest.raises(ConfigError, match="shortest-prompt, longest-prefix-match, not 'fair'"):
        EngineConfig(model="m", scheduling_policy="fair")
    with pytest.raises(ConfigError, match="long_prefill_token_threshold"):
        EngineConfig(model="m", long_prefill_token_threshold=0)


def test_long_prompts_leave_room_for_others() -> None:
    """With a threshold of 20 tokens a prompt of 100 takes five steps, and the two after it start in
    the first one."""
    world = World(num_blocks=20, budget=64, max_prompt_tokens=20)
    world.add(100, 3)
    world.add(15, 3)
    world.add(30, 3)
    plan = world.plan()
    assert plan is not None and plan.query_lens.tolist() == [20, 15, 20]
    world.take(world.scheduler.commit(plan, world.runner.run(plan)))
    plan = world.plan()
    assert plan is not None
    assert plan.request_ids == ("r1", "r0", "r2") and plan.query_lens.tolist() == [1, 20, 10]
    world.take(world.scheduler.commit(plan, world.runner.run(plan)))
    world.run()
    world.check_done()


@pytest.mark.parametrize(("prompt_len", "computed"), [(60, [0, 0, 10]), (80, [0, 40, 10])])
def test_a_better_priority_preempts(prompt_len: int, computed: list[int]) -> None:
    """With the policy priority a request of a better one enters at once, at the cost of the last in
    line and of no more of them than it needs; with others it waits."""
    for policy in ("priority", "fcfs"):
        world = World(num_blocks=9, budget=200, policy=policy)
        before = [world.add(30, 20), world.add(40, 20, priority=1), world.add(10, 20, priority=1)]
        world.step()
        urgent = world.add(prompt_len, 4, priority=-1)
        world.step()
        if policy == "priority":
            assert urgent.status is RequestStatus.DECODING
            assert [request.num_computed for request in before] == computed
        else:
            assert urgent.status is RequestStatus.WAITING
            assert world.scheduler.num_preemptions == 0
        world.run()
        world.check_done()


@pytest.mark.parametrize(("prompt_len", "level"), [(60, 0), (20, 2), (20, 3)])
def test_a_worse_priority_preempts_nobody(prompt_len: int, level: int) -> None:
    """Nobody is preempted for a request of the same or a worse priority, nor where all that come
    after it would not give enough."""
    world = World(num_blocks=8, budget=200, max_num_seqs=3, policy="priority")
    world.add(70, 30, priority=0)
    world.add(16, 10, priority=2)
    world.step()
    world.add(prompt_len, 3, priority=level)
    world.step()
    assert world.scheduler.num_running == 2 and world.scheduler.num_preemptions == 0
    world.run()
    world.check_done()


def test_a_row_is_reason_enough() -> None:
    """Where rows and not blocks are lacking, one later request gives up its own."""
    world = World(num_blocks=40, max_num_seqs=2, policy="priority")
    world.add(5, 30, priority=1)
    world.add(5, 30, priority=2)
    world.step()
    world.add(5, 3, priority=-1)
    world.step()
    assert list(world.scheduler._running) == ["r0", "r2"]
    assert world.scheduler.num_preemptions == 1
    world.run()
    world.check_done()


def test_a_place_is_kept() -> None:
    """One put back stands where it stood, before all that came after it."""
    queue = WaitingQueue()
    requests = [make_request(number, [1], 1) for number in range(4)]
    for request in requests:
        queue.push(request)
    first, second = queue.pop(), queue.pop()
    queue.put_back(second)
    queue.put_back(first)
    queue.push(make_request(9, [1], 1))
    assert [queue.pop().request_id for _ in range(5)] == ["r0", "r1", "r2", "r3", "r9"]


def ranked_world(num_blocks: int = 200, max_num_seqs: int = 1) -> World:
    return World(
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        budget=2000,
        policy="longest-prefix-match",
        has_cache=True,
    )


def test_the_longest_prefix_first() -> None:
    """Of those that wait the one with most cached tokens comes first, by what is cached when a row
    is free, not when they arrived; among equals the first to come."""
    world = ranked_world()
    known, other = list(range(1000)), list(range(5, 905))
    first = world.ask(known, 3)
    world.step()  # before anything is cached
    requests = [
        world.ask(other, 2),
        world.ask(known[:500], 2),
        world.ask(known[:900], 2),
        world.ask([7, *known], 2),
        world.ask(other[:800], 2),
    ]
    world.run()
    ended = [int(request_id[1:]) for request_id in world.ended]
    assert ended == [0, 3, 2, 1, 5, 4]
    assert [each.num_cached_tokens for each in (first, *requests)] == [0, 0, 496, 896, 0, 799]
    world.check_done()


def test_a_long_prefix_overtakes_a_bounded_number() -> None:
    """Who has nothing cached ends although others with a cached prefix of 640 tokens never stop
    coming: each arrival counts for TOKENS_PER_ARRIVAL."""
    world = ranked_world()
    known = list(range(640))
    world.ask(known, 1)
    world.run()
    world.ask(known, 2)
    world.step()
    oldest = world.ask(list(range(2000, 2050)), 2)
    num_before = len(world.ended)
    while oldest.request_id not in world.ended:
        world.ask(known, 1)
        world.step()
    assert (
        640 // TOKENS_PER_ARRIVAL - 2
        <= len(world.ended) - num_before
        <= 640 // TOKENS_PER_ARRIVAL + 4
    )
    world.run()
    world.check_done()


def test_ranks_in_the_line() -> None:
    """Whoever is ranked anew is found once, in its new rank; who is held is passed by, and comes
    up at its place when let go; neither outlives its removal."""
    queue = WaitingQueue()
    for number in range(4):
        queue.push(make_request(number, [0], 1))
    queue.rank(queue._requests["r2"], 5)
    queue.rank(queue._requests["r3"], 4)
    queue.rank(queue._requests["r3"], 1)
    queue.check_invariants()
    assert queue.hold().request_id == "r2"
    queue.rank(queue._requests["r2"], 9)
    assert [queue.pop().request_id for _ in range(3)] == ["r0", "r1", "r3"]
    assert len(queue) == 1 and not queue.has_next()
    queue.let_go("r2")
    queue.let_go("r2")
    queue.let_go("r0")
    queue.check_invariants()
    assert queue.has_next() and queue.remove("r2") is not None
    assert len(queue) == 0 and not queue.has_next()


def test_who_is_removed_while_held_stays_away() -> None:
    """A follower that is aborted does not come back when its leader goes."""
    queue = WaitingQueue()
    for number in range(2):
        queue.push(make_request(number, [0], 1))
    queue.hold()
    assert queue.remove("r0") is not None
    queue.let_go("r0")
    queue.check_invariants()
    assert queue.pop().request_id == "r1" and len(queue) == 0
