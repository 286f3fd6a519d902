"""Preemption through the real engine, scheduler and batch builder, over a simulated model: whatever
happens to a request, it answers what it answers alone."""

from __future__ import annotations

import itertools
import tempfile
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)
from simulated import Clients, answer_alone, simulated_engine

from pico_vllm.request import FinishReason, Request
from pico_vllm.scheduler.policy import POLICIES
from pico_vllm.step import StepPlan

SMALL: dict[str, Any] = {"num_blocks": 8, "block_size": 16, "max_num_seqs": 4, "budget": 64}
"""128 tokens in all."""


def force_preemption(clients: Clients, request: Request) -> None:
    """As if others had taken its blocks."""
    scheduler = clients.engine._scheduler
    scheduler._preempt(request)
    # Forced ones are no plan's fault.
    scheduler._num_fruitless_steps = 0
    clients.engine.check_invariants()


def clients_of(**others: Any) -> Clients:
    return Clients(simulated_engine(**({"overlap": False} | SMALL | others)))


@pytest.mark.parametrize("overlap", [False, True])
def test_two_long_requests_and_short_ones(overlap: bool) -> None:
    """Two requests that together exceed the pool, and four short ones: all finish within three
    times the steps of one after another, victims are always the latest, and the sum of what was
    computed at most grows at least every 2 * max_num_seqs steps."""
    clients = clients_of(overlap=overlap)
    scheduler = clients.engine._scheduler
    victims: list[str] = []
    preempt = scheduler._preempt

    def watched(request: Request) -> None:
        running = scheduler._running.values()
        assert request.place == max(each.place for each in running) and len(running) > 1
        victims.append(request.request_id)
        preempt(request)

    scheduler._preempt = watched  # type: ignore[method-assign]
    lengths = [(40, 80), (40, 80), (3, 5), (9, 20), (17, 2), (33, 12)]
    for prompt_len, max_tokens in lengths:
        clients.add(prompt_len, max_tokens)
    most: dict[str, int] = {}
    num_steps = last_gain = 0
    while clients.engine.has_work():
        before = sum(most.values())
        clients.step()
        num_steps += 1
        for request in scheduler._running.values():
            computed = int(scheduler._rows.num_scheduled[request.row])
            most[request.request_id] = max(most.get(request.request_id, 0), computed)
        if sum(most.values()) > before:
            last_gain = num_steps
        assert num_steps - last_gain < 2 * SMALL["max_num_seqs"]
    clients.check()
    assert victims and "r0" not in victims
    assert num_steps <= 3 * sum(max_tokens for _, max_tokens in lengths)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("max_prompt_tokens", [None, 7])
def test_preemptions_at_every_step(overlap: bool, max_prompt_tokens: int | None) -> None:
    """One to four preemptions of a request, beginning at any of its steps and one or three steps
    apart, beside another that goes on: both answer as ever."""
    for count, gap in [(1, 1), *itertools.product((2, 3, 4), (1, 3))]:
        for first in range(26):
            clients = clients_of(overlap=overlap, max_prompt_tokens=max_prompt_tokens)
            hit = clients.add(33, 16, prompt_logprobs=0)
            clients.add(5, 30)
            wanted = set(range(first, first + count * gap, gap))
            num_steps = 0
            while clients.engine.has_work():
                if num_steps in wanted and hit.row >= 0:
                    force_preemption(clients, hit)
                clients.step()
                num_steps += 1
            clients.check()


@pytest.mark.parametrize("overlap", [False, True])
def test_abort_amid_a_prompt_and_reuse_of_its_blocks(overlap: bool) -> None:
    """A request is aborted in the second of four chunks, its blocks go to another at once, and the
    steps that still write to them run as late as they can, or at a random time: what comes after is
    answered as if alone."""
    random = np.random.default_rng(0)
    clients = clients_of(overlap=overlap, num_blocks=9, budget=16)
    for _ in range(1000 if overlap else 100):  # in the plain loop nothing is under way
        doomed = clients.add(64, 30)
        for _ in range(2):
            clients.step()
        assert clients.engine._scheduler._rows.num_scheduled[doomed.row] == 32
        blocks = set(doomed.block_ids)
        clients.abort(doomed.request_id)
        after = clients.add(int(random.integers(1, 80)), int(random.integers(2, 5)))
        if overlap and random.integers(0, 2):
            clients.engine._runner.run_next()
        clients.step()
        assert blocks & set(after.block_ids)
        clients.run()
    clients.check()


def lengths_of(num_requests: int, seed: int, longest: int) -> list[tuple[int, int]]:
    random = np.random.default_rng(seed)
    found = []
    for _ in range(num_requests):
        prompt_len = int(random.integers(1, longest - 1))
        found.append((prompt_len, int(random.integers(1, longest - prompt_len + 1))))
    return found


def blocks_of(demand: int | str, lengths: list[tuple[int, int]], max_num_seqs: int) -> int:
    """A pool by the part of what the largest requests that may run at once come to need."""
    sizes = sorted((-(-(p + m) // 16) for p, m in lengths), reverse=True)
    if demand == "minimum":
        return sizes[0]
    return max(sizes[0], sum(sizes[:max_num_seqs]) * int(demand) // 100)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("max_prompt_tokens", [None, 11])
@pytest.mark.parametrize("demand", [1000, 110, 60, "minimum"])
def test_pressure_changes_nothing(
    demand: int | str, max_prompt_tokens: int | None, overlap: bool
) -> None:
    """200 requests get the tokens that they get alone in pools from plenty to the least, and where
    blocks run out requests are preempted."""
    lengths = lengths_of(200, seed=3, longest=90)
    clients = clients_of(
        num_blocks=blocks_of(demand, lengths, SMALL["max_num_seqs"]),
        overlap=overlap,
        max_prompt_tokens=max_prompt_tokens,
    )
    for prompt_len, max_tokens in lengths:
        clients.add(prompt_len, max_tokens)
    clients.run()
    clients.check()
    assert (clients.engine._scheduler.num_preemptions > 0) is (demand in (60, "minimum"))


def test_a_result_of_before_is_not_taken_after() -> None:
    """A request that was preempted with a step under way, and is back in a later plan before that
    step is committed, gets each token once."""
    clients = clients_of(overlap=True)
    request = clients.add(5, 6, prompt_logprobs=0)
    scheduler, runner = clients.engine._scheduler, clients.engine._runner
    before = scheduler.schedule()
    assert before is not None
    pending = runner.launch(before)
    force_preemption(clients, request)
    after = scheduler.schedule()
    assert after is not None and after.request_ids == before.request_ids == ("r0",)
    pending_after = runner.launch(after)
    events = scheduler.commit(before, pending.result())
    assert (events.request_ids, events.prompt_logprobs) == ((), {})
    events = scheduler.commit(after, pending_after.result())
    assert events.token_ids == (answer_alone(request)[0],)
    assert len(events.prompt_logprobs["r0"]) == 4


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failing_step_and_one_that_was_preempted_meanwhile(overlap: bool) -> None:
    """A step that raises ends its requests also if they wait again by then, and tells of each."""
    clients = clients_of(overlap=overlap)
    hit = clients.add(5, 6)
    clients.step()
    scheduler, runner = clients.engine._scheduler, clients.engine._runner

    def raising(plan: StepPlan) -> None:
        runner.on_run = lambda plan: None
        if hit.row >= 0:
            force_preemption(clients, hit)
        raise RuntimeError("planted")

    runner.on_run = raising
    clients.step()
    assert clients.ended == {"r0": FinishReason.ERROR} and scheduler.num_waiting == 0
    clients.add(7, 3)
    clients.run()
    clients.check()


def test_requests_that_end_with_the_step_under_way_are_waited_for() -> None:
    """Where blocks are lacking that a request gives back at the next commit, nobody is preempted
    for them: who needs one stays out of one step."""
    clients = clients_of(overlap=True, num_blocks=3)
    clients.add(14, 2)
    late = clients.add(15, 4)
    ending = clients.add(14, 3)
    clients.run()
    clients.check()
    assert clients.engine._scheduler.num_preemptions == 0
    assert list(clients.ended) == ["r0", ending.request_id, late.request_id]


CACHES = (
    {"cow_min_tokens": 1},
    {"cow_min_tokens": 4, "eviction_policy": "lfu", "max_cached_fraction": 0.5},
    {"cow_min_tokens": 1, "eviction_policy": "priority"},
    {"cow_min_tokens": 99, "eviction_policy": "fifo"},
)


class EngineMachine(RuleBasedStateMachine):
    """Random arrivals, aborts, failing steps and preemptions in a random pool, with and without a
    prefix cache."""

    caches: tuple[dict[str, Any] | None, ...] = (None, *CACHES, *CACHES)
    tiers: tuple[dict[str, Any] | None, ...] = (None,)
    """Below the device: of `simulated_engine`; the disk's folder is made here."""

    @initialize(
        data=st.data(),
        block_size=st.sampled_from([1, 3, 8, 16]),
        num_blocks=st.integers(2, 12),
        max_num_seqs=st.integers(1, 5),
        spare=st.integers(0, 20),
        overlap=st.booleans(),
        policy=st.sampled_from(list(POLICIES)),
        max_prompt_tokens=st.sampled_from([None, None, 1, 5]),
        min_awaited_tokens=st.sampled_from([1, 6, 64]),
    )
    def start(
        self,
        data: st.DataObject,
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        spare: int,
        overlap: bool,
        policy: str,
        max_prompt_tokens: int | None,
        min_awaited_tokens: int,
    ) -> None:
        tiers = data.draw(st.sampled_from(self.tiers))
        self.folder = tempfile.TemporaryDirectory() if tiers and "num_records" in tiers else None
        if tiers is not None and self.folder is not None:
            tiers = tiers | {"disk": self.folder.name}
        self.engine = simulated_engine(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            budget=max_num_seqs + spare,
            overlap=overlap,
            policy=policy,
            max_prompt_tokens=max_prompt_tokens,
            cache=data.draw(st.sampled_from(self.caches)),
            min_awaited_tokens=min_awaited_tokens,
            tiers=tiers,
            max_load_delay=data.draw(st.integers(0, 4)) if tiers else 0,
        )
        self.clients = Clients(self.engine)
        self.num_tokens = num_blocks * block_size
        self.num_failing = 0
        """Requests in the steps that were made to raise. With overlap they learn of it a step
        later."""

    @rule(data=st.data(), priority=st.integers(-2, 2), has_stops=st.booleans())
    def add(self, data: st.DataObject, priority: int, has_stops: bool) -> None:
        prompt_len = data.draw(st.integers(1, self.num_tokens - 1))
        max_tokens = data.draw(st.integers(1, self.num_tokens - prompt_len))
        # Some begin like others, or like others' answers.
        prompt = np.random.default_rng(data.draw(st.integers(0, 3))).integers(0, 1000, prompt_len)
        if self.clients.requests and data.draw(st.booleans()):
            other = data.draw(st.sampled_from(list(self.clients.requests.values())))
            begin = [*other.prompt_token_ids.tolist(), *other.output_token_ids]
            begin = begin[: data.draw(st.integers(0, prompt_len))]
            prompt[: len(begin)] = begin
        self.clients.ask(
            prompt.tolist(),
            max_tokens,
            cache_salt=data.draw(st.sampled_from([None, None, None, "salt"])),
            priority=priority,
            stop=range(0, 1000, 9) if has_stops else (),
            min_tokens=data.draw(st.integers(0, max_tokens)) if has_stops else 0,
            prompt_logprobs=data.draw(st.sampled_from([None, 0])),
        )

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.clients.step()

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.clients.abort(data.draw(st.sampled_from([*self.clients.requests, "unknown"])))

    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        running = list(self.engine._scheduler._running.values())
        if running:
            force_preemption(self.clients, data.draw(st.sampled_from(running)))

    @rule()
    def reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()
        self.engine.check_invariants()

    @rule(is_launch=st.booleans())
    def fail(self, is_launch: bool) -> None:
        """The next step raises, when it is launched or while it runs."""
        runner = self.engine._runner

        def raising(plan: StepPlan) -> Any:
            self.num_failing += len(plan.request_ids)
            scheduler = self.engine._scheduler
            if scheduler._prefixes is not None and scheduler._prefixes.cache.trusts_loads:
                self.num_failing += scheduler.num_running
            raise RuntimeError("planted")

        name = "launch" if is_launch else "on_run"
        original = getattr(runner, name)
        setattr(runner, name, raising)
        self.clients.step()
        setattr(runner, name, original)

    def teardown(self) -> None:
        if hasattr(self, "clients"):
            self.clients.run()
            self.clients.check()
            errors = list(self.clients.ended.values()).count(FinishReason.ERROR)
            assert errors <= self.num_failing, "an error that nobody planted"
            if self.folder is not None:
                self.engine._scheduler.close()
                self.folder.cleanup()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=200,
    stateful_step_count=80,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.slow
def test_engine_machine_at_release_size() -> None:
    """The same in longer lives and more of them."""
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(TestEngineMachine.settings, max_examples=10_000, stateful_step_count=300),
    )
