"""The prefix cache through the real engine, scheduler and batch builder, over a simulated model: a
block of other tokens, a stale one or one that is not computed yet would change an answer."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from simulated import VOCAB, Clients, simulated_engine
from test_preemption import force_preemption

from pico_vllm.cache.prefix_cache import CacheStats
from pico_vllm.request import FinishReason, Request
from pico_vllm.step import BAD_LOGITS, StepPlan, StepResult

SMALL: dict[str, Any] = {"num_blocks": 8, "block_size": 16, "max_num_seqs": 4, "budget": 64}
NO_FOLLOWING = 10**6


def clients_of(cow_min_tokens: int = 1, **others: Any) -> Clients:
    cache = {"cow_min_tokens": cow_min_tokens} | others.pop("cache", {})
    return Clients(simulated_engine(**({"overlap": False, "cache": cache} | SMALL | others)))


def ids(length: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng([9, seed]).integers(0, VOCAB, length).tolist()
    return found


def ask(clients: Clients, prompt: list[int], max_tokens: int = 4, **others: Any) -> Request:
    """Alone, to its end."""
    request = clients.ask(prompt, max_tokens, **others)
    clients.run()
    return request


def num_computed(clients: Clients) -> list[int]:
    """Tokens of each step from now on."""
    found: list[int] = []
    clients.engine._runner.on_run = lambda plan: found.append(plan.num_tokens)
    return found


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("length", "with_copy", "without"), [(16, 15, 0), (17, 16, 16), (31, 30, 16), (32, 31, 16)]
)
def test_a_prompt_that_is_cached_whole(
    length: int, with_copy: int, without: int, overlap: bool
) -> None:
    """At least its last token is computed, once more into a block of its own where the whole block
    is cached, whose copy is cached for the third."""
    for cow_min_tokens, wanted in ((1, with_copy), (99, without)):
        clients = clients_of(cow_min_tokens, overlap=overlap)
        assert ask(clients, ids(length)).num_cached_tokens == 0
        computed = num_computed(clients)
        for _ in range(2):
            assert ask(clients, ids(length)).num_cached_tokens == wanted
        # With overlap an end is known late.
        assert computed[0] == length - wanted
        clients.check()


@pytest.mark.parametrize("overlap", [False, True])
def test_whole_blocks_twice(overlap: bool) -> None:
    """Prompts and answers that fill their blocks exactly, again and again, alone and at once."""
    for num_blocks in (1, 2, 3):
        clients = clients_of(overlap=overlap)
        for max_tokens in (1, 2, 16, 17):
            for _ in range(2):
                clients.ask(ids(16 * num_blocks), max_tokens)
                clients.ask(ids(16 * num_blocks), max_tokens)
                clients.run()
        clients.check()


def test_reused_blocks_are_not_found() -> None:
    """A prompt whose blocks others have taken is computed anew."""
    clients = clients_of()
    ask(clients, ids(40))
    for seed in (1, 2, 3):
        ask(clients, ids(100, seed))
    assert ask(clients, ids(40)).num_cached_tokens == 0
    assert ask(clients, ids(40)).num_cached_tokens == 39
    clients.check()


@pytest.mark.parametrize("overlap", [False, True])
def test_the_same_prompt_computed_side_by_side(overlap: bool) -> None:
    """Three of one prompt in one step, ending in any order: they go on with the blocks of one of
    them, and at the end the cache alone holds each."""
    for order in itertools.permutations((3, 6, 9)):
        clients = clients_of(overlap=overlap, min_awaited_tokens=NO_FOLLOWING, num_blocks=12)
        requests = [clients.ask(ids(20), max_tokens) for max_tokens in order]
        clients.step()
        if overlap:
            clients.step()
        assert len({request.block_ids[0] for request in requests}) == 1
        clients.run()
        clients.check()
        scheduler = clients.engine._scheduler
        for block_id in scheduler._prefixes.cache.block_ids():
            assert scheduler._blocks.ref_count(block_id) == 1
        assert ask(clients, ids(20)).num_cached_tokens == 19


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("max_prompt_tokens", [None, 20])
def test_one_computes_for_all(overlap: bool, max_prompt_tokens: int | None) -> None:
    """The same prompt many times at once is computed once, but for the last token of each; then a
    request that needs the whole pool gets it."""
    clients = clients_of(overlap=overlap, max_prompt_tokens=max_prompt_tokens)
    computed = num_computed(clients)
    requests = [clients.ask(ids(50), 1) for _ in range(20)]
    clients.run()
    assert sum(computed) == 50 + 19
    assert [request.num_cached_tokens for request in requests] == [0] + 19 * [49]
    ask(clients, ids(120, 1), 8)
    assert ask(clients, ids(50)).num_cached_tokens == 0
    clients.check()


def test_others_pass_those_who_follow() -> None:
    """A follower holds up nobody behind it, and comes before those that arrived later once the
    blocks are there."""
    clients = clients_of(num_blocks=20, max_prompt_tokens=16)
    leader = clients.ask(ids(60), 4)
    followers = [clients.ask([*ids(60), number], 2) for number in range(2)]
    other = clients.ask(ids(10, 1), 1)
    clients.step()
    assert other.request_id in clients.ended and len(leader.block_ids) == 1
    assert [each.row for each in followers] == [-1, -1]
    for _ in range(2):
        clients.step()
        assert [each.row for each in followers] == [-1, -1]
    late = [clients.ask(ids(10, seed), 2) for seed in (2, 3, 4)]
    clients.step()
    clients.step()
    # The leader goes on in its fourth block.
    assert [each.num_cached_tokens for each in followers] == [48, 48]
    assert late[2].num_cached_tokens is None  # no row was left
    clients.run()
    clients.check()


def test_a_common_header_makes_nobody_wait() -> None:
    """Where little is saved, or little of the whole, requests are computed side by side."""
    for header, own, min_awaited_tokens in ((16, 30, 1), (20, 0, 64)):
        clients = clients_of(num_blocks=20, budget=200, min_awaited_tokens=min_awaited_tokens)
        requests = [clients.ask(ids(header) + ids(own, 1 + number), 2) for number in range(3)]
        clients.step()
        assert all(len(request.output_token_ids) == 1 for request in requests)
        clients.run()
        clients.check()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("end", ["abort", "preempt", "fail"])
def test_a_leader_that_goes(end: str, overlap: bool) -> None:
    """Whose leader is aborted, preempted or fails in the second chunk goes on at once, with what
    was published by then; the answers to the prompt are right ever after."""
    clients = clients_of(overlap=overlap, max_prompt_tokens=20)
    leader = clients.ask(ids(70), 4)
    followers = [clients.ask(ids(70), 4) for _ in range(2)]
    for _ in range(2):
        clients.step()
    assert [each.row for each in followers] == [-1, -1]
    if end == "abort":
        clients.abort(leader.request_id)
    elif end == "preempt":
        force_preemption(clients, leader)
    else:
        clients.engine._runner.on_run = lambda plan: 1 / 0
        clients.step()
        clients.engine._runner.on_run = lambda plan: None
        assert clients.ended == {leader.request_id: FinishReason.ERROR}
    clients.step()
    running = clients.engine._scheduler._running
    assert len(running) == 1 and (end == "preempt" or followers[0].row >= 0)
    clients.run()
    for _ in range(5):
        ask(clients, ids(70))
    clients.check()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", [15, 16, 17, 24, 31])
def test_nothing_is_published_early(chunk: int, overlap: bool) -> None:
    """A prompt in chunks can be found up to its last full block of a committed step, no further;
    what an error ended publishes nothing more."""
    clients = clients_of(overlap=overlap, max_prompt_tokens=chunk, min_awaited_tokens=NO_FOLLOWING)
    clients.ask(ids(100), 4)
    cache = clients.engine._scheduler._prefixes.cache
    num_full = 0
    for step in range(3):
        clients.step()
        num_full = chunk * (step + 1 - overlap) // 16
        assert cache.num_cached_blocks == num_full
    clients.engine._runner.on_run = lambda plan: 1 / 0
    clients.step()
    assert cache.num_cached_blocks == num_full
    clients.engine._runner.on_run = lambda plan: None
    assert ask(clients, ids(100)).num_cached_tokens == num_full * 16
    clients.check()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failing_step_keeps_no_answers(overlap: bool) -> None:
    """Of a request that an error ended the prompt stays cached, as far as it was published, and
    nothing of its answer."""
    clients = clients_of(overlap=overlap)
    request = clients.ask(ids(20), 40)
    for _ in range(25):
        clients.step()
    clients.engine._runner.on_run = lambda plan: 1 / 0
    clients.step()
    clients.engine._runner.on_run = lambda plan: None
    turn = [*ids(20), *request.output_token_ids]
    assert len(turn) > 40 and ask(clients, turn).num_cached_tokens == 16
    clients.check()


@pytest.mark.parametrize("overlap", [False, True])
def test_bad_logits_empty_the_cache(overlap: bool) -> None:
    """Whoever shares a prompt that gave NaN after its first chunks were published does not get them
    from the cache."""
    clients = clients_of(overlap=overlap, max_prompt_tokens=16)
    runner = clients.engine._runner
    run = runner._run

    def poisoned(plan: StepPlan) -> StepResult:
        found = run(plan)
        token_ids = np.where(plan.is_sampled, BAD_LOGITS, found.token_ids)
        return StepResult(token_ids=token_ids)

    runner._run = poisoned
    request = ask(clients, ids(60))
    assert clients.ended == {request.request_id: FinishReason.ERROR}
    runner._run = run
    assert ask(clients, ids(60)).num_cached_tokens == 0
    clients.check()


@pytest.mark.parametrize("overlap", [False, True])
def test_answers_are_cached_too(overlap: bool) -> None:
    """The next turn of a conversation finds the last answer but its last token, which was sampled
    and never computed."""
    clients = clients_of(overlap=overlap)
    first = ask(clients, ids(21), 20)
    turn = [*ids(21), *first.output_token_ids]
    second = ask(clients, [*turn, 5, 6, 7], 9)
    assert second.num_cached_tokens == 40
    third = ask(clients, [*turn, 5, 6, 7, *second.output_token_ids, 8], 9)
    assert third.num_cached_tokens == 40 + 4 + 8
    clients.check()


@pytest.mark.parametrize("case", ["nobody asks", "one waits", "one lacks a block"])
@pytest.mark.parametrize("overlap", [False, True])
def test_blocks_of_ended_requests_go_behind_the_next_launch(
    overlap: bool, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are cached while the device computes; before it launches where somebody waits, who finds
    them, or a running request lacks one; and at once where nobody else runs."""
    num_blocks = 7 if case == "one lacks a block" else 16
    clients = clients_of(overlap=overlap, num_blocks=num_blocks, budget=128)
    scheduler, order = clients.engine._scheduler, []
    runner, prefixes = clients.engine._runner, scheduler._prefixes
    assert prefixes is not None
    for place, name in ((prefixes, "leave"), (runner, "launch")):
        inner = getattr(place, name)

        def seen(*arguments: Any, inner: Any = inner, name: str = name) -> Any:
            order.append(name)
            return inner(*arguments)

        monkeypatch.setattr(place, name, seen)
    first = clients.ask(ids(60), 5)
    # Its fourth block is wanted by the plan after the first one's end is known.
    second = clients.ask(ids(43 if overlap else 44, 1), 12)
    while first.request_id not in clients.ended:
        clients.step()
    assert "leave" not in order and scheduler.num_held_blocks == 7
    order.clear()
    third = None
    if case == "one waits":
        third = clients.ask(ids(60) + first.output_token_ids, 2)
    clients.step()
    is_before = case != "nobody asks"
    assert order == (["leave", "launch"] if is_before else ["launch", "leave"])
    clients.run()
    assert third is None or third.num_cached_tokens == 64
    assert second.request_id in clients.ended and order[-1] == "leave"
    assert clients.engine.num_preemptions == 0
    clients.check()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_preempted_request_finds_its_own_blocks(overlap: bool) -> None:
    """All that committed steps computed of it is there when it enters again, unless others took the
    blocks; the hit that is reported stays that of its first entry."""
    clients = clients_of(overlap=overlap)
    request = clients.ask(ids(30), 30)
    for _ in range(8):
        clients.step()
    computed = num_computed(clients)
    num_tokens = request.num_tokens
    force_preemption(clients, request)
    clients.step()
    # All but the last token, whose KV the step under way would have written.
    assert computed[-1] == 1 and request.num_tokens >= num_tokens
    assert request.num_cached_tokens == 0
    force_preemption(clients, request)
    clients.ask(ids(100, 1), 4, priority=0)
    clients.run()
    clients.check()


def test_log_probabilities_of_prompts_are_computed() -> None:
    """Who wants those computes the whole prompt, whatever is cached and whoever computes it too;
    others then have it from there."""
    clients = clients_of(num_blocks=20)
    for _ in range(2):
        assert ask(clients, ids(40), prompt_logprobs=0).num_cached_tokens == 0
    together = [clients.ask(ids(50, 1), 2, prompt_logprobs=0) for _ in range(2)]
    follower = clients.ask(ids(50, 1), 2)
    clients.run()
    assert [request.num_cached_tokens for request in together] == [0, 0]
    assert follower.num_cached_tokens == 48
    clients.check()


def test_salts_share_nothing() -> None:
    """The same prompt under another salt, or none, is computed anew and nobody waits for it."""
    clients = clients_of(num_blocks=20)
    requests = [clients.ask(ids(33), 3, cache_salt=salt) for salt in (None, "a", "b", "a")]
    clients.run()
    assert [request.num_cached_tokens for request in requests] == [0, 0, 0, 32]
    assert ask(clients, ids(33), cache_salt="c").num_cached_tokens == 0
    clients.check()


@pytest.mark.parametrize("overlap", [False, True])
def test_reset_at_any_step(overlap: bool) -> None:
    """Nothing of before is found after, and requests that run, follow or are about to copy get
    their answers."""
    for at in range(12):
        clients = clients_of(overlap=overlap, max_prompt_tokens=16, num_blocks=20)
        ask(clients, ids(40))
        for number in range(3):
            clients.ask(ids(40) + ids(20, number % 2), 5)
        for _ in range(at):
            clients.step()
        scheduler = clients.engine._scheduler
        if at == 0:
            scheduler._admit()  # one that no plan has named yet
        clients.engine.reset_prefix_cache()
        clients.engine.check_invariants()
        assert scheduler._prefixes.cache.num_cached_blocks == 0
        clients.run()
        clients.check()
        clients.engine.reset_prefix_cache()
        assert ask(clients, ids(40)).num_cached_tokens == 0
        clients.check()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_restarted_engine(overlap: bool) -> None:
    """Without a cache, in half the pool, and as it was: answers stay what they are, nothing that
    was cached before is found, and counting begins anew."""
    clients = clients_of(overlap=overlap)
    engine, whole = clients.engine, clients.engine.config
    whole = replace(whole, enable_prefix_caching="on", cow_min_tokens=1)
    half = replace(whole, num_kv_blocks=4, max_model_len=64)
    for config in (replace(whole, enable_prefix_caching="off"), half, whole):
        assert ask(clients, ids(40)).num_cached_tokens == 0
        ask(clients, ids(20, 1))
        engine.restart(config)
        assert engine.config == config and engine.max_model_len == config.max_model_len
        num_blocks = 0 if config.enable_prefix_caching == "off" else config.num_kv_blocks
        block_size = 16 if num_blocks else 0
        assert engine.cache_stats() == CacheStats(num_blocks=num_blocks, block_size=block_size)
        assert engine._scheduler._blocks.num_device_blocks == config.num_kv_blocks
    assert ask(clients, ids(40)).num_cached_tokens == 0
    assert ask(clients, ids(40)).num_cached_tokens == 39
    clients.check()
    clients.ask(ids(40), 2)
    with pytest.raises(AssertionError, match="requests would be lost"):
        engine.restart(whole)
    clients.run()
    with pytest.raises(AssertionError, match="more blocks than there are"):
        engine.restart(replace(whole, num_kv_blocks=9))


def test_a_source_is_not_given_away_before_it_is_copied() -> None:
    """Where the blocks that a plan takes have to be evicted, the source of a copy in it is not
    among them; and one that no copy has room for is not copied from."""
    clients = clients_of(num_blocks=4)
    ask(clients, ids(16) + ids(16, 1), 1)
    ask(clients, ids(16) + ids(16, 2), 1)
    late = ask(clients, ids(24) + ids(30, 3), 8)
    assert late.num_cached_tokens == 16
    ask(clients, ids(60, 4), 4)
    ask(clients, ids(48), 1)
    # The copy's source is the last block of four: no room beside it.
    assert ask(clients, ids(48), 16).num_cached_tokens in (32, 47)
    clients.check()


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("overlap", [False, True])
def test_conversations_under_pressure(block_size: int, overlap: bool) -> None:
    """Turns of conversations with common headers of lengths that are no multiples of a block, in a
    pool that holds a part of them: what is cached is used, evicted and computed anew, and nobody's
    answer changes."""
    random = np.random.default_rng(block_size)
    clients = clients_of(overlap=overlap, num_blocks=160 // block_size, block_size=block_size)
    headers = [ids(11, 1), ids(37, 2)]
    talks: list[list[int]] = [list(headers[number % 2]) for number in range(6)]
    for _ in range(4):
        asked = []
        for talk in talks:
            talk += random.integers(0, VOCAB, int(random.integers(1, 9))).tolist()
            asked.append(clients.ask(talk, int(random.integers(1, 9))))
        clients.run()
        for talk, request in zip(talks, asked, strict=True):
            talk += request.output_token_ids
    clients.check()
    requests = clients.requests.values()
    num_cached = sum(request.num_cached_tokens or 0 for request in requests)
    assert num_cached > 0.3 * sum(request.num_prompt_tokens for request in requests)
