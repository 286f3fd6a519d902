"""The scheduler alone, over a simulated model whose every token depends on every block being
right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from simulated import SimulatedRunner, answer_alone, make_request

from pico_vllm.cache.block_manager import BlockManager
from pico_vllm.cache.prefix_cache import PrefixCache
from pico_vllm.outputs import StepEvents
from pico_vllm.request import FinishReason, Request, RequestStatus
from pico_vllm.scheduler import scheduler as scheduler_module
from pico_vllm.scheduler.queues import WaitingQueue
from pico_vllm.scheduler.scheduler import Scheduler
from pico_vllm.step import BAD_LOGITS, NO_TOKEN, StepPlan, StepResult


class World:
    """Scheduler and runner, with the rules that every plan must obey checked at every step."""

    def __init__(
        self,
        *,
        num_blocks: int = 8,
        block_size: int = 16,
        max_num_seqs: int = 4,
        budget: int = 64,
        keeps_kv: bool = True,
        policy: str = "fcfs",
        max_prompt_tokens: int | None = None,
        has_cache: bool = False,
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.max_num_seqs, self.budget, self.keeps_kv = max_num_seqs, budget, keeps_kv
        self.blocks = BlockManager(num_blocks)
        self.scheduler = Scheduler(
            self.blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            keeps_kv=keeps_kv,
            policy=policy,
            max_prompt_tokens=max_prompt_tokens,
            prefix_cache=PrefixCache(self.blocks, block_size=block_size) if has_cache else None,
        )
        self.policy, self.has_cache = policy, has_cache
        self.runner = SimulatedRunner(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=num_blocks * block_size,
        )
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}
        self.first_scheduled: list[str] = []
        self.num_planned: dict[str, int] = {}
        """Tokens that the plans so far compute, by request."""

    def add(self, prompt_len: int, max_tokens: int, **others: Any) -> Request:
        number = len(self.requests)
        prompt = np.random.default_rng(number).integers(0, 1000, prompt_len).tolist()
        return self.ask(prompt, max_tokens, **others)

    def ask(self, prompt: list[int], max_tokens: int, **others: Any) -> Request:
        number = len(self.requests)
        request = make_request(number, prompt, max_tokens, **others)
        self.requests[request.request_id] = request
        self.answers[request.request_id] = []
        self.scheduler.add(request)
        return request

    def abort(self, request_id: str) -> bool:
        is_aborted = self.scheduler.abort(request_id)
        assert is_aborted is (request_id in self.requests and request_id not in self.ended)
        if is_aborted:
            self.ended[request_id] = FinishReason.ABORT
        return is_aborted

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        self.scheduler_invariants(committed=False)
        if plan is None:
            assert not self.unfinished(), "nothing to do with requests left"
            return None
        self.check_plan(plan)
        return plan

    def plan_and_commit(self) -> StepPlan | None:
        plan = self.plan()
        if plan is not None:
            self.take(self.scheduler.commit(plan, self.runner.run(plan)))
        return plan

    def step(self) -> StepEvents:
        plan = self.plan()
        if plan is None:
            return StepEvents()
        events = self.scheduler.commit(plan, self.runner.run(plan))
        self.take(events)
        self.scheduler_invariants(committed=True)
        return events

    def take(self, events: StepEvents) -> None:
        for request_id, token_id, reason in zip(
            events.request_ids, events.token_ids, events.finish_reasons, strict=True
        ):
            assert request_id not in self.ended, "an event after the last one"
            if token_id >= 0:
                self.answers[request_id].append(token_id)
            if reason is not None:
                self.ended[request_id] = reason

    def run(self) -> int:
        num_steps = 0
        while self.scheduler.has_work():
            self.step()
            num_steps += 1
            assert num_steps < 10_000
        return num_steps

    def unfinished(self) -> set[str]:
        return set(self.requests) - set(self.ended)

    def check_plan(self, plan: StepPlan) -> None:
        num_requests = len(plan.request_ids)
        assert len(set(plan.request_ids)) == num_requests <= self.max_num_seqs
        assert len(set(plan.rows.tolist())) == num_requests
        assert int(plan.query_lens.min()) > 0
        if self.keeps_kv:
            assert plan.num_tokens <= self.budget
        requests = [self.requests[request_id] for request_id in plan.request_ids]
        entering = {new.row for new in plan.new_rows}
        # Decode rows first; after them prompts in order of arrival.
        is_decode = [request.status is RequestStatus.DECODING for request in requests]
        if self.keeps_kv:
            assert is_decode == [True] * plan.num_decodes + [False] * (
                num_requests - plan.num_decodes
            )
            assert set(plan.query_lens[: plan.num_decodes].tolist()) <= {1}
            prefills = [int(r.request_id[1:]) for r in requests[plan.num_decodes :]]
            assert self.policy != "fcfs" or prefills == sorted(prefills)
            # No decode row waits.
            running = self.scheduler._running.values()
            decoding = [r.request_id for r in running if r.status is RequestStatus.DECODING]
            assert sorted(plan.request_ids[: plan.num_decodes]) == sorted(decoding)
        for index, request in enumerate(requests):
            end = int(plan.context_lens[index] + plan.query_lens[index])
            num_tokens = request.num_prompt_tokens + len(request.output_token_ids)
            assert end <= num_tokens
            assert bool(plan.is_sampled[index]) is (end == num_tokens)
            if int(plan.rows[index]) in entering:
                num_cached = int(plan.context_lens[index]) if self.has_cache else 0
                self.num_planned[request.request_id] = num_cached
            assert int(plan.context_lens[index]) == self.num_planned.get(request.request_id, 0)
            if self.keeps_kv:
                self.num_planned[request.request_id] = end
            assert len(request.block_ids) == -(-end // self.block_size)
        self.first_scheduled += [
            request_id for request_id in plan.request_ids if request_id not in self.first_scheduled
        ]

    def scheduler_invariants(self, *, committed: bool) -> None:
        if committed:
            self.scheduler.check_invariants()
        else:
            self.blocks.check_invariants()
        running = [request.place for request in self.scheduler._running.values()]
        waiting = [request.place for request in self.scheduler._waiting._requests.values()]
        if self.policy == "fcfs" and running and waiting:
            assert max(running) < min(waiting), "one that came later runs while this one waits"

    def check_done(self) -> None:
        """Everything finished as it should and nothing is held."""
        assert not self.unfinished()
        self.scheduler.check_invariants()
        assert (self.scheduler.num_running, self.scheduler.num_waiting) == (0, 0)
        assert self.scheduler._num_available_blocks == self.num_blocks
        assert len(self.scheduler._rows._free) == self.max_num_seqs
        for request_id, request in self.requests.items():
            answer, wanted = self.answers[request_id], answer_alone(request)
            if self.ended[request_id] is FinishReason.ABORT:
                assert answer == wanted[: len(answer)]
                continue
            assert answer == wanted == request.output_token_ids
            is_stop = answer[-1] in request.stop_token_ids
            is_stop = is_stop and len(answer) > request.params.min_tokens
            assert self.ended[request_id] is (FinishReason.STOP if is_stop else FinishReason.LENGTH)
            assert request.finish_reason is self.ended[request_id]


@pytest.mark.parametrize("prompt_len", [15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("budget", [64, 16, 5])
def test_lengths_on_block_boundaries(prompt_len: int, budget: int) -> None:
    """At every step a request has ceil(tokens / block size) blocks, each token goes to the slot
    that the table says, none is written twice, and the answer is right."""
    for max_tokens in range(1, 34):
        world = World(budget=budget)
        request = world.add(prompt_len, max_tokens)
        written: list[int] = []
        table: list[int] = []
        while world.scheduler.has_work():
            plan = world.plan()
            assert plan is not None
            table += [i for new in plan.new_blocks for i in new.block_ids]
            result = world.runner.run(plan)
            written += world.runner.slots[0]
            assert len(request.block_ids) == len(table) == -(-len(written) // 16)
            world.take(world.scheduler.commit(plan, result))
            world.scheduler_invariants(committed=True)
        # The last token is chosen and never computed.
        num_tokens = prompt_len + max_tokens - 1
        assert written == [table[p // 16] * 16 + p % 16 for p in range(num_tokens)]
        world.check_done()


def test_the_whole_pool_for_one_request() -> None:
    """A request that takes every token of the pool finishes; the next one comes after it."""
    world = World(num_blocks=8)
    world.add(127, 1)
    world.add(1, 127)
    world.add(64, 64)
    world.add(3, 3)
    world.run()
    world.check_done()


def test_a_request_larger_than_the_pool_is_our_error() -> None:
    """The engine refuses such a request; should one come through, add says so at once and does not
    wait for ever."""
    world = World(num_blocks=8)
    with pytest.raises(AssertionError):
        world.add(128, 1)


def test_two_long_requests_and_short_ones() -> None:
    """Two requests that together exceed the pool, and short ones behind: the later long one is
    preempted and never the oldest, and all finish in fewer steps than one after another."""
    world = World(num_blocks=8)
    for prompt_len, max_tokens in [(40, 80), (40, 80), (3, 5), (4, 5), (5, 5), (6, 5)]:
        world.add(prompt_len, max_tokens)
    num_steps = world.run()
    world.check_done()
    assert num_steps <= 80 + 80 + 4 * 5
    assert world.scheduler.num_preemptions > 0 and world.requests["r1"].num_computed > 40
    assert world.requests["r0"].num_computed == 0


def test_nobody_overtakes_the_head_of_the_line() -> None:
    """A short request behind one that waits for blocks waits too, so that the long one's turn
    comes."""
    world = World(num_blocks=8, max_num_seqs=4)
    world.add(70, 20)
    world.add(60, 60)
    world.add(1, 1)
    world.step()
    assert world.scheduler.num_running == 1 and world.scheduler.num_waiting == 2
    world.run()
    world.check_done()
    assert world.first_scheduled == ["r0", "r1", "r2"]


def test_decode_rows_come_before_prompts() -> None:
    """A long prompt is cut into chunks beside decoding requests, which get their token at every
    step."""
    world = World(num_blocks=16, budget=8)
    world.add(2, 30)
    world.add(2, 30)
    world.step()
    world.add(60, 2)
    gaps = []
    for _ in range(12):
        events = world.step()
        gaps.append(events.request_ids)
    assert all(request_ids[:2] == ("r0", "r1") for request_ids in gaps)
    assert [len(request_ids) for request_ids in gaps] == [2] * 9 + [3, 3, 2]
    world.run()
    world.check_done()


def test_the_budget_is_used_up() -> None:
    """Prompts fill the budget to the last token, across requests."""
    world = World(num_blocks=16, budget=20)
    for _ in range(3):
        world.add(15, 4)
    query_lens = []
    for _ in range(3):
        plan = world.plan()
        assert plan is not None
        query_lens.append(plan.query_lens.tolist())
        world.take(world.scheduler.commit(plan, world.runner.run(plan)))
    assert query_lens == [[15, 5], [1, 10, 9], [1, 1, 6]]
    world.run()
    world.check_done()


def test_a_prompt_that_the_next_step_takes_whole_is_not_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From some tokens of other prompts on; the first prompt of a step is cut all the same."""
    monkeypatch.setattr(scheduler_module, "ENOUGH_TOKENS", 15)
    world = World(num_blocks=32, budget=20, max_num_seqs=8)
    for prompt_len in (15, 15, 4, 18, 30):
        world.add(prompt_len, 6)
    plans = [world.plan_and_commit() for _ in range(6)]
    assert [plan.query_lens.tolist() for plan in plans] == [
        [15],  # five more would fit, and fifteen do in the next step
        [1, 15, 4],
        [1, 1, 1, 17],  # 18 do not fit beside those that decode
        [1, 1, 1, 1, 16],  # the first prompt's last token is not another prompt of 15
        [1, 1, 1, 1, 14],
        [1, 1, 1, 1, 1],
    ]
    world.run()
    world.check_done()


def test_a_step_like_the_last_one_is_planned_like_it() -> None:
    """Steps in which the same requests decode are made from the one before, and are the same."""
    world, plain = World(num_blocks=16, block_size=4), World(num_blocks=16, block_size=4)
    num_repeats = 0
    for step in range(40):
        if step in (0, 3, 9):
            for each in (world, plain):
                each.add(3 + step, 9 + step)
        plain.scheduler._plans._last = None
        ours, theirs = world.plan_and_commit(), plain.plan_and_commit()
        if theirs is None:
            assert ours is None
            break
        assert ours is not None and not theirs.repeats
        num_repeats += ours.repeats
        for name in StepPlan.__dataclass_fields__:
            if name not in ("repeats", "new_rows", "new_blocks"):
                mine, other = getattr(ours, name), getattr(theirs, name)
                assert np.array_equal(mine, other), (step, name, mine, other)
                assert getattr(mine, "dtype", None) == getattr(other, "dtype", None), name
        assert [list(b.block_ids) for b in ours.new_blocks] == [
            list(b.block_ids) for b in theirs.new_blocks
        ]
    assert num_repeats >= 8
    world.check_done()


def test_abort_is_idempotent() -> None:
    """Aborting a waiting, running, finished or unknown request, and again, says whether it did
    anything and never frees twice."""
    world = World(max_num_seqs=1, num_blocks=8)
    running, waiting = world.add(5, 20), world.add(5, 20)
    world.step()
    for request in (running, waiting):
        assert world.abort(request.request_id) is True
        assert world.abort(request.request_id) is False
        assert request.finish_reason is FinishReason.ABORT
        assert (request.block_ids, request.row) == ([], -1)
    assert world.abort("nobody") is False
    done = world.add(5, 1)
    world.run()
    assert world.abort(done.request_id) is False
    world.check_done()


def test_an_abort_amid_a_step_yields_no_event() -> None:
    """A request aborted between plan and commit has no event in that step, and its blocks are free
    after it."""
    world = World()
    aborted, kept = world.add(5, 20), world.add(6, 20)
    world.step()
    plan = world.plan()
    assert plan is not None
    result = world.runner.run(plan)
    world.abort(aborted.request_id)
    events = world.scheduler.commit(plan, result)
    world.take(events)
    assert events.request_ids == (kept.request_id,)
    world.scheduler_invariants(committed=True)
    world.run()
    world.check_done()


def test_bad_logits_end_one_request() -> None:
    """BAD_LOGITS ends its request with reason error and no token, and nobody else's."""
    world = World()
    hit, other = world.add(5, 20), world.add(6, 20)
    world.step()
    plan = world.plan()
    assert plan is not None
    result = world.runner.run(plan)
    token_ids = result.token_ids.copy()
    token_ids[0] = BAD_LOGITS
    events = world.scheduler.commit(plan, StepResult(token_ids=token_ids))
    world.take(events)
    assert events.finish_reasons == (FinishReason.ERROR, None)
    assert len(hit.output_token_ids) == 1 and hit.finish_reason is FinishReason.ERROR
    world.run()
    assert world.answers[other.request_id] == answer_alone(other)
    assert world.blocks.num_free_device_blocks == world.num_blocks


def test_the_longest_contexts_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among many requests that decode; prompts come behind them in order of arrival. Who came last
    among equals stays behind, and answers are those of their requests."""
    monkeypatch.setattr("pico_vllm.scheduler.rows.SORTED_FROM", 4)
    world = World(num_blocks=32, max_num_seqs=8, budget=256)
    for length in (10, 30, 20, 30):
        world.add(length, 6)
    world.step()
    for length in (12, 40):
        world.add(length, 6)
    assert world.plan_and_commit().request_ids == ("r1", "r3", "r2", "r0", "r4", "r5")
    world.add(5, 2)
    assert world.plan_and_commit().request_ids == ("r5", "r1", "r3", "r2", "r4", "r0", "r6")
    world.run()
    world.check_done()


@pytest.mark.parametrize("has_plan", [False, True])
def test_a_failed_step(has_plan: bool) -> None:
    """fail ends the requests of the plan, or all that run where none was made, and those that wait
    are served next."""
    world = World(max_num_seqs=2)
    for length in (5, 6, 7):
        world.add(length, 9)
    world.step()
    plan = world.plan()
    events = world.scheduler.fail(plan if has_plan else None)
    assert events.request_ids == ("r0", "r1")
    assert events.finish_reasons == (FinishReason.ERROR,) * 2
    assert set(events.token_ids) == {NO_TOKEN}
    world.take(events)
    world.scheduler_invariants(committed=True)
    assert world.blocks.num_free_device_blocks == world.num_blocks
    world.run()
    assert world.answers["r2"] == answer_alone(world.requests["r2"])


def test_a_failed_step_whose_evictions_fail_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All of its requests end and are named, whatever their blocks' release raises at its end."""
    world = World(max_num_seqs=3, num_blocks=16, has_cache=True)
    for length in (20, 21, 22):
        world.add(length, 9)
    world.step()
    release = PrefixCache.release

    def fails_behind(cache: PrefixCache, *arguments: Any) -> None:
        release(cache, *arguments)
        raise OSError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(PrefixCache, "release", fails_behind)
        events = world.scheduler.fail(world.plan())
    assert events.request_ids == ("r0", "r1", "r2")
    assert [record.message for record in caplog.records if "eviction_failed" in record.message] == [
        f"eviction_failed behind request {request_id}" for request_id in events.request_ids
    ]
    world.take(events)
    world.scheduler_invariants(committed=True)
    other = world.add(5, 3)
    world.run()
    assert world.answers[other.request_id] == answer_alone(other)


def test_requests_share_no_lists() -> None:
    """Two requests never have one list for outputs or blocks."""
    a, b = make_request(0, [1], 1), make_request(1, [1], 1)
    assert a.output_token_ids is not b.output_token_ids
    assert a.block_ids is not b.block_ids


def test_waiting_queue() -> None:
    """The line is first come, first served, and one can leave it from anywhere."""
    queue = WaitingQueue()
    requests = [make_request(number, [1], 1) for number in range(4)]
    for request in requests:
        queue.push(request)
    assert queue.remove("r1") is requests[1]
    assert queue.remove("r1") is None
    assert queue.peek() is requests[0] and len(queue) == 3
    assert [queue.pop() for _ in range(3)] == [requests[0], requests[2], requests[3]]
    assert len(queue) == 0


@pytest.mark.parametrize("threshold", [None, 10])
def test_who_has_no_room_in_two_steps_waits_outside(threshold: int | None) -> None:
    """Requests enter for this step and the next, by what they could compute in them; the others
    when those have got on. A plan is no smaller for that."""
    world = World(num_blocks=600, budget=40, max_num_seqs=16, max_prompt_tokens=threshold)
    for _ in range(12):
        world.add(20, 3)
    world.step()
    assert sum(world.num_planned.values()) == 40
    assert world.scheduler.num_running == (8 if threshold else 4)
    world.step()
    assert sum(world.num_planned.values()) == 80
    assert world.scheduler.num_running == (8 if threshold else 6)
    world.run()
    world.check_done()


def test_a_few_blocks_stay_free() -> None:
    """A request enters beside others only if the blocks of its tokens, those that the running ones
    still need for theirs, and 3 % of the pool are free; alone it may take all."""
    world = World(num_blocks=200, budget=4096, max_num_seqs=4)
    world.add(97 * 16, 2)
    world.add(98 * 16, 2)
    world.step()
    assert (world.scheduler.num_running, world.scheduler.num_waiting) == (1, 1)
    world = World(num_blocks=200, budget=4096, max_num_seqs=4)
    world.add(97 * 16, 2)
    world.add(97 * 16, 2)
    world.add(16, 2)
    world.step()
    assert (world.scheduler.num_running, world.scheduler.num_waiting) == (2, 1)
    world.run()
    world.check_done()
    world.add(200 * 16 - 1, 1)
    world.run()
    world.check_done()


def test_a_request_that_enters_again_brings_its_outputs() -> None:
    """The plan in which a preempted request enters again names prompt and outputs as its tokens,
    the prompt's length as ever, and no decode row."""
    world = World(num_blocks=8)
    request = world.add(20, 9, prompt_logprobs=0)
    for _ in range(3):
        world.step()
    world.scheduler._preempt(request)
    assert (request.status, request.row, request.block_ids) == (RequestStatus.PREEMPTED, -1, [])
    plan = world.plan()
    assert plan is not None and plan.num_decodes == 0 and plan.query_lens.tolist() == [23]
    (new,) = plan.new_rows
    assert new.token_ids.tolist() == [*request.prompt_token_ids, *answer_alone(request)[:3]]
    assert (new.num_prompt_tokens, new.num_prompt_logprobs, new.seed) == (20, 19, request.seed)
    world.take(world.scheduler.commit(plan, world.runner.run(plan)))
    world.run()
    world.check_done()


def test_one_token_of_a_request_that_enters_again_is_no_decode_row() -> None:
    """Its last chunk may be a single token: it comes with the request, and is not what its row
    sampled last."""
    world = World(num_blocks=8, budget=64, max_prompt_tokens=11)
    request = world.add(20, 9)
    for _ in range(4):
        world.step()
    assert request.num_tokens == 23
    world.scheduler._preempt(request)
    chunks = []
    for _ in range(3):
        plan = world.plan()
        assert plan is not None
        chunks.append((plan.query_lens.tolist(), plan.num_decodes))
        world.take(world.scheduler.commit(plan, world.runner.run(plan)))
    assert chunks == [([11], 0), ([11], 0), ([1], 0)]
    world.run()
    world.check_done()


@pytest.mark.parametrize("has_chunks", [False, True])
def test_no_progress_is_an_error(has_chunks: bool) -> None:
    """Where no request gets on, neither by a token nor by a chunk that it had not computed before,
    for 2 * max_num_seqs steps and those that computing the pool takes, schedule raises and names
    the state; after that work goes on."""
    world = World(num_blocks=8, budget=8, max_num_seqs=2)
    request = world.add(60, 9)
    num_steps = 2 * 2 + 128 // 8
    if has_chunks:
        for _ in range(4):
            world.step()
    with pytest.raises(RuntimeError, match=r"no request has got on for 20 steps: 1 run with .*r0"):
        for _ in range(num_steps + 2):
            plan = world.scheduler.schedule()
            if has_chunks:
                assert plan is not None
                world.scheduler.commit(plan, world.runner.run(plan))
                world.scheduler._preempt(request)
                world.scheduler._admit()
    world.scheduler.fail(None)
    assert world.scheduler.num_running == 0
    world.ended[request.request_id] = FinishReason.ERROR
    other = world.add(5, 3)
    world.run()
    assert world.answers[other.request_id] == answer_alone(other)


def test_recomputing_is_no_lack_of_progress() -> None:
    """A request that computes a whole pool anew, in small chunks and alone, may take its time."""
    world = World(num_blocks=64, budget=8, max_num_seqs=1)
    request = world.add(1000, 3)
    while not request.output_token_ids:
        world.step()
    world.scheduler._preempt(request)
    world.run()
    world.check_done()


def test_a_failing_plan_where_nobody_runs() -> None:
    """Where planning itself raises and nobody runs, the head of the line ends, so that the next
    one's turn comes."""
    world = World()
    world.add(5, 3)
    world.add(6, 3)
    world.take(world.scheduler.fail(None))
    assert world.ended == {"r0": FinishReason.ERROR}
    world.run()
    assert world.answers["r1"] == answer_alone(world.requests["r1"])
    assert world.scheduler.fail(None).request_ids == ()


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, aborts and steps in a random pool."""

    @initialize(
        block_size=st.sampled_from([1, 3, 8, 16]),
        num_blocks=st.integers(2, 12),
        max_num_seqs=st.integers(1, 5),
        spare=st.integers(0, 20),
        keeps_kv=st.sampled_from([True, True, True, False]),
    )
    def start(
        self, block_size: int, num_blocks: int, max_num_seqs: int, spare: int, keeps_kv: bool
    ) -> None:
        self.world = World(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            budget=max_num_seqs + spare,
            keeps_kv=keeps_kv,
        )
        self.num_tokens = num_blocks * block_size

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        prompt_len = data.draw(st.integers(1, self.num_tokens - 1))
        max_tokens = data.draw(st.integers(1, self.num_tokens - prompt_len))
        stop = data.draw(st.sampled_from([(), tuple(range(0, 1000, 9))]))
        min_tokens = data.draw(st.integers(0, max_tokens)) if stop else 0
        self.world.add(prompt_len, max_tokens, stop=stop, min_tokens=min_tokens)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        names = [*self.world.requests, "unknown"]
        self.world.abort(data.draw(st.sampled_from(names)))

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.world.step()

    @rule(data=st.data())
    def abort_amid_a_step(self, data: st.DataObject) -> None:
        """Between plan and commit, as a client that leaves while the device computes."""
        plan = self.world.plan()
        if plan is not None:
            result = self.world.runner.run(plan)
            for request_id in data.draw(st.lists(st.sampled_from(plan.request_ids), unique=True)):
                self.world.abort(request_id)
            self.world.take(self.world.scheduler.commit(plan, result))
            self.world.scheduler_invariants(committed=True)

    @invariant()
    def in_order(self) -> None:
        if hasattr(self, "world"):
            self.world.scheduler.check_invariants()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.run()
            self.world.check_done()
            order = [int(request_id[1:]) for request_id in self.world.first_scheduled]
            assert order == sorted(order), "first come, first served"


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
