"""Tiers below the device through the real engine and scheduler, over a simulated model whose cells
hold hashes: a block that was stored too late, loaded from a slot given to others or read before it
is there gives a wrong token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from simulated import VOCAB, Clients, simulated_engine
from test_preemption import CACHES, EngineMachine, force_preemption

from pico_vllm.cache.tiers.lower import LowerTiers
from pico_vllm.request import FinishReason, Request
from pico_vllm.step import StepPlan

SMALL: dict[str, Any] = {"num_blocks": 8, "block_size": 16, "max_num_seqs": 4, "budget": 64}


def clients_of(num_host_blocks: int = 40, **others: Any) -> Clients:
    tiers = {"num_host_blocks": num_host_blocks} | others.pop("tiers", {})
    defaults = {"overlap": False, "cache": {"cow_min_tokens": 1}, "tiers": tiers}
    return Clients(simulated_engine(**(defaults | SMALL | others)))


def tiers_of(clients: Clients) -> LowerTiers:
    found = clients.engine._scheduler._prefixes.cache.tiers
    assert isinstance(found, LowerTiers)
    return found


def ids(length: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng([9, seed]).integers(0, VOCAB, length).tolist()
    return found


def ask(clients: Clients, prompt: list[int], max_tokens: int = 4, **others: Any) -> Request:
    """Alone, to its end."""
    request = clients.ask(prompt, max_tokens, **others)
    clients.run()
    return request


def crowd_out(clients: Clients) -> None:
    for seed in (101, 102, 103):
        ask(clients, ids(100, seed))


@pytest.mark.parametrize("delay", [0, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_evicted_blocks_come_up_again(overlap: bool, delay: int) -> None:
    """A prompt whose blocks others have taken is found in host memory, and its answer is the
    same."""
    clients = clients_of(overlap=overlap, max_load_delay=delay)
    first = ask(clients, ids(60))
    crowd_out(clients)
    second = ask(clients, ids(60))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 48)
    counters, stats = tiers_of(clients).counters, clients.engine.cache_stats()
    assert (stats.num_host_hit_tokens, counters.num_loaded_blocks) == (48, 3)
    assert (stats.num_host_hit_blocks, stats.num_device_hit_tokens, stats.num_hits) == (3, 0, 1)
    assert clients.answers[first.request_id][0] is not None
    clients.check()


@pytest.mark.parametrize("overlap", [False, True])
def test_others_run_while_a_prefix_comes_up(overlap: bool) -> None:
    """A request whose prefix is loaded holds up nobody; whoever wants the same waits with it, and
    it is loaded once."""
    clients = clients_of(overlap=overlap, num_blocks=12, budget=100)
    ask(clients, ids(60))
    crowd_out(clients)
    clients.engine._runner.load_delay = lambda: 4
    before = clients.ask(ids(5, 2), 40)
    for _ in range(3):
        clients.step()
    late = [clients.ask(ids(60), 4), clients.ask(ids(60), 5)]
    other = clients.ask(ids(10, 1), 2)
    while other.request_id not in clients.ended:
        clients.step()
        if other.request_id not in clients.ended:
            assert [each.num_cached_tokens for each in late] == [None, None]
    for _ in range(5):
        clients.step()
    assert [each.num_cached_tokens for each in late] == [48, 48]
    assert before.request_id not in clients.ended
    clients.run()
    assert tiers_of(clients).counters.num_loaded_blocks == 3
    stats = clients.engine.cache_stats()
    assert (stats.num_host_hit_tokens, stats.num_device_hit_tokens) == (48, 48), "loaded once"
    clients.check()


def plans_of(clients: Clients) -> list[StepPlan]:
    """Those that are launched from now on."""
    plans: list[StepPlan] = []
    runner = clients.engine._runner
    launch = runner.launch

    def launched(plan: StepPlan) -> Any:
        plans.append(plan)
        return launch(plan)

    runner.launch = launched
    return plans


@pytest.mark.parametrize("delay", [0, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_one_alone_enters_behind_its_loads(overlap: bool, delay: int) -> None:
    """Where nobody else runs the step of a prompt is launched while its prefix comes up."""
    clients = clients_of(overlap=overlap, max_load_delay=delay)
    ask(clients, ids(60))
    crowd_out(clients)
    plans = plans_of(clients)
    again = ask(clients, ids(60))
    assert [bool(plan.loads) for plan in plans[:2]] == [True, False]
    assert [len(plan.rows) for plan in plans[:2]] == [0, 1]
    assert [plan.awaits_loads for plan in plans] == [False, overlap] + [False] * len(plans[2:])
    assert again.num_cached_tokens == 48
    clients.check()


@pytest.mark.parametrize("which", ["its loads", "its step", "its launch"])
def test_what_is_trusted_of_loads_goes_with_a_failure(which: str) -> None:
    """Who entered behind loads of which nobody knows the end ends with a step that fails before
    that, and what they brought is found on the device no more; host memory still has it."""
    clients = clients_of(overlap=True)
    ask(clients, ids(60))
    crowd_out(clients)
    request = clients.ask(ids(60), 4)
    clients.step()
    runner = clients.engine._runner
    launch, run = runner.launch, runner.on_run

    def fail(plan: StepPlan) -> Any:
        if which == "its launch" or bool(plan.loads) == (which == "its loads"):
            raise RuntimeError("planted")

    setattr(runner, "launch" if which == "its launch" else "on_run", fail)
    clients.step()
    assert (request.request_id in clients.ended) == (which != "its step")
    if which == "its step":
        clients.step()
    runner.launch, runner.on_run = launch, run
    clients.run()
    assert clients.ended[request.request_id] is FinishReason.ERROR
    assert ask(clients, ids(60)).num_cached_tokens == 48
    # The first entered with them, and so did the second where they had gone.
    num_times = 1 if which == "its step" else 2
    assert clients.engine.cache_stats().num_host_hit_tokens == 48 * num_times
    clients.check()


@pytest.mark.parametrize("overlap", [False, True])
def test_disk_and_a_restart(tmp_path: Path, overlap: bool) -> None:
    """What host memory has no room for is found on disk, by the next engine too; a salt has its
    own."""
    disk = {"disk": str(tmp_path), "num_records": 64}
    clients = clients_of(4, overlap=overlap, tiers=disk)
    ask(clients, ids(60))
    crowd_out(clients)
    assert ask(clients, ids(60)).num_cached_tokens == 48
    stats = clients.engine.cache_stats()
    assert stats.num_disk_hit_tokens > 0 and stats.num_device_hit_tokens == 0
    assert stats.num_disk_hit_tokens + stats.num_host_hit_tokens == 48 == stats.num_hit_tokens
    crowd_out(clients)
    clients.check()
    clients.engine.close()
    tiers_of(clients).close()
    again = clients_of(4, overlap=overlap, tiers=disk)
    assert ask(again, ids(60)).num_cached_tokens == 48
    assert ask(again, ids(60), cache_salt="a").num_cached_tokens == 0
    assert again.engine.cache_stats().num_disk_hit_tokens == 48
    assert again.engine.cache_stats().disk_hit_rate == 48 / 120
    again.check()


def test_what_just_ended_is_saved_too(tmp_path: Path) -> None:
    """By an engine that closes while others run: its blocks are not given back by then."""
    clients = clients_of(8, tiers={"disk": str(tmp_path), "num_records": 64})
    ended = clients.ask(ids(60), 2)
    other = clients.ask(ids(5, 1), 40)
    while ended.request_id not in clients.ended:
        clients.step()
    scheduler, runner = clients.engine._scheduler, clients.engine._runner
    assert scheduler.num_cached_blocks == 3, "of its prompt"
    num_stored = 0
    while (plan := scheduler.plan_to_save(60.0)) is not None:
        num_stored += len(plan.stores)
        scheduler.commit(plan, runner.launch(plan).result())
    assert num_stored == 3
    assert other.request_id not in clients.ended
    clients.run()
    clients.check()
    clients.engine.close()
    tiers_of(clients).close()


def test_a_small_hit_is_computed() -> None:
    """What takes longer to load than to compute is not loaded."""
    for least, wanted in ((48, 48), (49, 0), (None, 0)):
        clients = clients_of(tiers={"min_host_tokens": least})
        ask(clients, ids(60))
        crowd_out(clients)
        assert ask(clients, ids(60)).num_cached_tokens == wanted
        clients.check()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("end", ["abort", "fail", "launch", "reset"])
def test_a_load_that_nobody_waits_for(end: str, overlap: bool) -> None:
    """After an abort the load ends by itself; after a failure or a reset nothing of it is found,
    and those who waited compute."""
    clients = clients_of(overlap=overlap, num_blocks=12, budget=100)
    ask(clients, ids(60))
    crowd_out(clients)
    runner = clients.engine._runner
    runner.load_delay = lambda: 5
    other = clients.ask(ids(10, 1), 30)
    for _ in range(3):
        clients.step()
    request = clients.ask(ids(60), 4)
    cache = clients.engine._scheduler._prefixes.cache
    if end == "launch":
        launch, runner.launch = runner.launch, lambda plan: 1 / 0
        clients.step()
        runner.launch = launch
        assert clients.ended[other.request_id] is FinishReason.ERROR
        assert cache.num_loading_blocks == 0 and request.row == -1
        clients.run()
        assert request.num_cached_tokens == 48
        return clients.check()
    clients.step()
    clients.step()
    assert cache.num_loading_blocks == 3 and request.row == -1
    if end == "abort":
        clients.abort(request.request_id)
    elif end == "reset":
        clients.engine.reset_prefix_cache()
        assert len(tiers_of(clients).host) == 0
    else:
        runner.on_run = lambda plan: 1 / 0
        clients.step()
        runner.on_run = lambda plan: None
        assert clients.ended[other.request_id] is FinishReason.ERROR
        assert cache.num_loading_blocks == 0
    clients.run()
    assert cache.num_loading_blocks == 0
    if end == "reset":
        assert request.num_cached_tokens == 0
    ask(clients, ids(60))
    clients.check()


@pytest.mark.parametrize("fraction", [0.4, 1.0])
@pytest.mark.parametrize("overlap", [False, True])
def test_an_eviction_that_raises(overlap: bool, fraction: float) -> None:
    """Amid a plan, or as a request ends, it costs those in the step; no row, no block and nobody
    who waits is lost, and others go on."""
    cache = {"cow_min_tokens": 1, "max_cached_fraction": fraction}
    clients = clients_of(overlap=overlap, cache=cache)
    tiers, put = tiers_of(clients), tiers_of(clients).put
    is_armed, num_failures = False, 0

    def failing(*args: Any) -> None:
        nonlocal is_armed, num_failures
        if is_armed:
            is_armed = False
            num_failures += 1
            raise OSError
        put(*args)

    tiers.put = failing  # type: ignore[method-assign]
    random = np.random.default_rng(4)
    for number in range(40):
        clients.ask(ids(int(random.integers(20, 90)), number % 5), int(random.integers(1, 20)))
        for _ in range(int(random.integers(0, 10))):
            is_armed = not random.integers(0, 7)
            clients.step()
    is_armed = False
    clients.run()
    assert num_failures > 1 and len(clients.ended) == 40
    reasons = list(clients.ended.values())
    assert 8 < reasons.count(FinishReason.LENGTH) < 40 and FinishReason.ERROR in reasons
    tiers.put = put  # type: ignore[method-assign]
    request = ask(clients, ids(60, 77))
    assert clients.ended[request.request_id] is FinishReason.LENGTH
    clients.check()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_load_is_in_the_next_plan(overlap: bool) -> None:
    """Also where all that run just decode on, whose plans are the last ones moved on."""
    clients = clients_of(overlap=overlap, num_blocks=12)
    ask(clients, ids(60))
    crowd_out(clients)
    clients.ask(ids(3, 1), 40)
    for _ in range(3):
        clients.step()
    late = clients.ask(ids(60), 4)
    for _ in range(2 + overlap):
        clients.step()
    assert late.num_cached_tokens == 48
    clients.run()
    clients.check()


@pytest.mark.parametrize("overlap", [False, True])
def test_nothing_cached_but_below(overlap: bool) -> None:
    """Where the pool keeps nothing that nobody uses, prefixes come from below alone, each time with
    one load."""
    cache = {"cow_min_tokens": 1, "max_cached_fraction": 0.0}
    clients = clients_of(overlap=overlap, max_load_delay=2, cache=cache)
    # What the last plan left in the pool goes down with the next one.
    assert [ask(clients, ids(60)).num_cached_tokens for _ in range(4)] == [0, 0, 48, 48]
    assert clients.engine._scheduler._prefixes.cache.num_cached_blocks == 0
    assert tiers_of(clients).counters.num_loaded_blocks == 6
    clients.check()


@pytest.mark.parametrize("overlap", [False, True])
def test_who_lacks_blocks_waits_for_loads(overlap: bool) -> None:
    """Blocks that a load holds come free: a running request that needs one waits for that, and is
    not preempted."""
    clients = clients_of(overlap=overlap)
    ask(clients, ids(60))
    crowd_out(clients)
    clients.engine._runner.load_delay = lambda: 1000
    running = clients.ask(ids(60, 1), 60)
    for _ in range(3):
        clients.step()
    late = clients.ask(ids(60), 4)
    clients.step()
    scheduler = clients.engine._scheduler
    assert scheduler._prefixes.cache.num_loading_blocks == 3
    clients.run()
    assert scheduler.num_preemptions == 0 and late.num_cached_tokens == 48
    assert list(clients.ended)[-2:] == [running.request_id, late.request_id]
    assert clients.ended[running.request_id] is FinishReason.LENGTH
    clients.check()


@pytest.mark.parametrize("seed", range(3))
def test_waiting_is_no_standstill(tmp_path: Path, seed: int) -> None:
    """In a pool of three blocks, where each request waits for disk and for loads before it gets on,
    none is taken for one that never does."""
    clients = clients_of(
        4, overlap=True, num_blocks=3, block_size=8, max_num_seqs=1, budget=14, max_load_delay=4,
        cache={"cow_min_tokens": 4, "max_cached_fraction": 0.5},
        tiers={"disk": str(tmp_path), "num_records": 100},
    )  # fmt: skip
    random = np.random.default_rng(seed)
    for _ in range(60):
        clients.ask(ids(int(random.integers(9, 23)), int(random.integers(0, 4))), 2)
        for _ in range(int(random.integers(0, 12))):
            clients.step()
    clients.run()
    clients.check()
    assert FinishReason.ERROR not in clients.ended.values()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("overlap", [False, True])
def test_conversations_under_pressure(tmp_path: Path, overlap: bool, seed: int) -> None:
    """Turns of conversations with common headers in a pool that holds a part of them, host memory
    that holds some more, a small disk, slow loads, aborts, preemptions, failures and resets:
    nobody's answer changes."""
    random = np.random.default_rng([seed, overlap])
    block_size = int(random.choice([1, 4, 16]))
    num_host_blocks = int(random.choice([1, 60 // block_size + 1, 400 // block_size]))
    disk = {"disk": str(tmp_path), "num_records": 400 // block_size, "is_threaded": seed == 5}
    clients = clients_of(
        num_host_blocks,
        overlap=overlap,
        num_blocks=160 // block_size,
        block_size=block_size,
        max_load_delay=int(random.integers(0, 5)),
        policy=str(random.choice(["fcfs", "priority", "longest-prefix-match"])),
        cache={"cow_min_tokens": int(random.integers(1, 9))},
        tiers=disk if seed % 2 else {},
    )
    headers = [ids(11, 1), ids(37, 2)]
    talks: list[list[int]] = [list(headers[number % 2]) for number in range(8)]
    for _ in range(4):
        asked = []
        for talk in talks:
            talk += random.integers(0, VOCAB, int(random.integers(1, 12))).tolist()
            asked.append(
                clients.ask(talk, int(random.integers(1, 12)), priority=int(random.integers(0, 3)))
            )
        while clients.engine.has_work():
            clients.step()
            running = list(clients.engine._scheduler._running.values())
            event = random.integers(0, 40)
            if event == 0 and running:
                force_preemption(clients, running[-1])
            elif event == 1 and running:
                clients.abort(running[0].request_id)
            elif event == 2:
                clients.engine.reset_prefix_cache()
            elif event == 3:
                runner = clients.engine._runner
                runner.on_run = lambda plan: 1 / 0
                clients.step()
                runner.on_run = lambda plan: None
        for talk, request in zip(talks, asked, strict=True):
            talk += request.output_token_ids
            del talk[100:]
    clients.check()
    counters, stats = tiers_of(clients).counters, clients.engine.cache_stats()
    assert counters.num_stored_blocks > 0
    requests = clients.requests.values()
    assert stats.num_hit_tokens <= sum(each.num_cached_tokens or 0 for each in requests)
    of_tiers = (stats.num_device_hit_blocks, stats.num_host_hit_blocks, stats.num_disk_hit_blocks)
    assert min(of_tiers) >= 0 and min(stats.num_device_hit_tokens, stats.num_host_hit_tokens) >= 0
    assert 0 < of_tiers[1] + of_tiers[2] <= counters.num_loaded_blocks
    assert of_tiers[2] <= counters.num_read_blocks
    assert counters.num_lowered_blocks <= stats.num_evicted_blocks
    tiers_of(clients).close()


class TieredEngineMachine(EngineMachine):
    """The same with tiers below the device: of one block, of some, of more than is ever there, and
    with a disk of some blocks below those."""

    caches = CACHES
    tiers = (
        {"num_host_blocks": 1},
        {"num_host_blocks": 5, "min_host_tokens": 3},
        {"num_host_blocks": 200},
        {"num_host_blocks": 4, "num_records": 10},
        {"num_host_blocks": 2, "num_records": 100, "min_disk_tokens": 2},
    )


TestTieredEngineMachine = TieredEngineMachine.TestCase
TestTieredEngineMachine.settings = settings(
    max_examples=40,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.slow
def test_tiered_engine_machine_at_release_size() -> None:
    """The same in longer lives and more of them."""
    run_state_machine_as_test(
        TieredEngineMachine,
        settings=settings(
            TestTieredEngineMachine.settings, max_examples=3_000, stateful_step_count=200
        ),
    )
