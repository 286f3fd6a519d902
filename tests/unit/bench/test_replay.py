from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pico_vllm.bench.prompt_trace import TraceRequest
from pico_vllm.bench.replay import Replay, TierSizes, _Disk, replay, shared_prefixes
from pico_vllm.cache.tiers.disk import ALIGNMENT, ENTRY_BYTES, DiskTier, num_records_in
from pico_vllm.config.engine import EngineConfig
from pico_vllm.request import Request
from pico_vllm.sampling_params import SamplingParams


def traced(
    prompt: Sequence[int],
    num_outputs: int = 1,
    *,
    output: Sequence[int] | None = None,
    arrival_s: float = 0.0,
    salt: str | None = None,
) -> TraceRequest:
    return TraceRequest(
        where="",
        prompt=np.array(prompt, np.int32),
        output=None if output is None else np.array(output, np.int32),
        arrival_s=arrival_s,
        params=SamplingParams(
            max_tokens=num_outputs if output is None else len(output), cache_salt=salt
        ),
    )


def run(
    requests: Sequence[TraceRequest], *, step_s: float = 0.01, below: TierSizes | None = None,
    **settings: Any,
) -> Replay:  # fmt: skip
    defaults: dict[str, Any] = {
        "model": "none", "num_kv_blocks": 100, "block_size": 4, "max_num_seqs": 1,
        "max_num_batched_tokens": 64, "enable_prefix_caching": "on", "cow_min_tokens": 1,
    }  # fmt: skip
    config = EngineConfig(**(defaults | settings))
    return replay(requests, config, step_s=step_s, below=below)


def ids(random: np.random.Generator, low: int, high: int) -> list[int]:
    found: list[int] = random.integers(0, 50, int(random.integers(low, high))).tolist()
    return found


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def test_one_after_another_is_the_longest_common_beginning() -> None:
    """In a pool without end each request saves what it has in common with any before of its salt,
    answers but for their last token included, and computes the rest."""
    random = np.random.default_rng(0)
    headers = [ids(random, 5, 30) for _ in range(4)]
    trace, before, wanted = [], [], []
    for number in range(80):
        prompt = headers[int(random.integers(4))][: int(random.integers(1, 30))] + ids(random, 1, 9)
        output, salt = ids(random, 1, 12), None if number % 3 else "other"
        seen = (num_common(prompt, other) for of, other in before if of == salt)
        wanted.append(min(max(seen, default=0), len(prompt) - 1))
        before.append((salt, prompt + output[:-1]))
        trace.append(traced(prompt, output=output, salt=salt))
    found = run(trace, num_kv_blocks=5000)
    assert [each.num_cached_tokens for each in found.requests] == wanted
    figures = found.figures()
    num_tokens = sum(len(each.prompt) for each in trace)
    assert figures["saved_tokens"] == sum(wanted) > 300
    assert figures["computed_tokens"] == num_tokens - sum(wanted)
    assert figures["hit_rate"] == sum(wanted) / num_tokens
    assert figures["num_hits"] == sum(hit > 0 for hit in wanted)
    outputs = [each.output_token_ids for each in found.requests]
    assert outputs == [each.output.tolist() for each in trace if each.output is not None]
    assert figures["output_tokens"] == sum(map(len, outputs))
    assert (figures["evicted_blocks"], figures["num_preemptions"]) == (0, 0)
    assert figures["peak_cached_blocks"] == figures["cached_blocks"] >= figures["num_nodes"]
    pieces = shared_prefixes(found.requests, 1000)
    assert sum(piece.num_saved_tokens for piece in pieces) == sum(wanted)


def test_the_off_switch_and_a_pool_too_small() -> None:
    """Without the cache all is computed and nothing found; where three prompts take turns in a
    pool for one and a half, the last used longest ago is always the one that comes next."""
    prompts = [[number] * 8 for number in range(3)] * 4
    trace = [traced(prompt) for prompt in prompts]
    off = run(trace, enable_prefix_caching="off").figures()
    assert (off["computed_tokens"], off["num_requests"], off["hit_rate"]) == (96, 12, None)
    small = run(trace, num_kv_blocks=3).figures()
    assert (small["saved_tokens"], small["computed_tokens"]) == (0, 96)
    assert small["evicted_blocks"] == 12 * 2 - small["cached_blocks"]
    assert small["peak_held_blocks"] == 2 and small["peak_cached_blocks"] <= 3
    enough = run(trace, num_kv_blocks=8).figures()
    assert (enough["saved_tokens"], enough["num_copies"]) == (9 * 7, 9)


def test_the_clock_of_arrivals() -> None:
    """Who arrives while others run is there a step after; a gap is skipped, not stepped through."""
    prompts = [[1] * 8, [2] * 8, [3] * 8]
    times = (0.0, 0.0, 60.0)
    trace = [traced(p, 4, arrival_s=s) for p, s in zip(prompts, times, strict=True)]
    found = run(trace, max_num_seqs=4)
    assert (found.num_steps, found.peak_held_blocks) == (8, 6)
    at_once = run([traced(prompt, 4) for prompt in prompts], max_num_seqs=4)
    assert (at_once.num_steps, at_once.peak_held_blocks) == (4, 9)
    late = [traced([1] * 8, 4), traced([1] * 8, 4, arrival_s=0.025)]
    assert run(late, max_num_seqs=4, step_s=0.01).num_steps == 7
    assert run(late, max_num_seqs=4, step_s=0.1).num_steps == 5


def test_preemptions_are_computed_again_but_counted_once() -> None:
    """Answers that come to need more than there is."""
    trace = [traced([number] * 8, 24) for number in range(4)]
    found = run(trace, num_kv_blocks=12, max_num_seqs=4)
    figures = found.figures()
    assert figures["num_preemptions"] > 0
    assert (figures["num_requests"], figures["prompt_tokens"], figures["saved_tokens"]) == (
        4,
        32,
        0,
    )
    assert figures["computed_tokens"] > 32 and figures["output_tokens"] == 96
    assert figures["peak_held_blocks"] <= 12


def test_the_same_prompt_gets_the_same_answer() -> None:
    """Made-up answers depend on the prompt alone."""
    trace = [traced([5, 6], 9), traced([5, 7], 9), traced([5, 6], 9)]
    one, other, again = (each.output_token_ids for each in run(trace).requests)
    assert one == again != other and len(one) == 9


@pytest.mark.parametrize("seed", range(3))
def test_shared_prefixes_against_a_count_of_all(seed: int) -> None:
    """Each token position that was found is in one piece, as often as requests found it; pieces are
    as long as the same requests have them, and come in order of what they saved."""
    random = np.random.default_rng(seed)
    header, trunks = ids(random, 20, 30), [ids(random, 2, 9) for _ in range(5)]
    requests = []
    for number in range(60):
        prompt = header[: int(random.integers(1, 30))] + trunks[int(random.integers(5))]
        params = SamplingParams(cache_salt="s" if number % 4 == 0 else None)
        requests.append(
            Request(
                request_id=str(number),
                prompt_token_ids=np.array(prompt, np.int32),
                params=params,
                max_tokens=1,
                stop_token_ids=frozenset(),
                seed=0,
                num_cached_tokens=int(random.integers(0, len(prompt) + 1)) if number % 5 else None,
            )
        )
    counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for request in requests:
        for end in range(1, (request.num_cached_tokens or 0) + 1):
            salt = request.params.cache_salt or ""
            counts[salt, tuple(request.prompt_token_ids[:end].tolist())] += 1
    pieces = shared_prefixes(requests, 10**6)
    assert sum(piece.num_own_tokens for piece in pieces) == len(counts)
    assert sum(piece.num_saved_tokens for piece in pieces) == sum(counts.values())
    # A position's requests and depth, from both sides.
    by_piece = Counter(
        (piece.num_tokens - offset, piece.num_requests)
        for piece in pieces
        for offset in range(piece.num_own_tokens)
    )
    assert by_piece == Counter((len(key), count) for (_, key), count in counts.items())
    saved = [piece.num_saved_tokens for piece in pieces]
    assert saved == sorted(saved, reverse=True)
    assert shared_prefixes(requests, 2) == pieces[:2]


def test_a_piece_says_how_it_begins() -> None:
    """What stands in front of it is the business of others."""
    system, users = [1, 2, 3, 4], ([5] * 40, [6] * 8)
    trace = [traced(system + user) for user in (users[0], users[1], users[0], users[1])]
    found = shared_prefixes(run(trace).requests, 3)
    assert [(each.num_tokens, each.num_own_tokens, each.num_requests) for each in found] == [
        (43, 39, 1),
        (4, 4, 3),
        (11, 7, 1),
    ]
    assert [each.begin[:2] for each in found] == [[5, 5], [1, 2], [6, 6]]
    assert len(found[0].begin) == 32


def conversations(num_users: int, num_turns: int) -> list[TraceRequest]:
    """Each user's turn after those of the others."""
    random, trace = np.random.default_rng(2), []
    talks: list[list[int]] = [[user] for user in range(num_users)]
    for turn in range(num_turns):
        for user, talk in enumerate(talks):
            talk += ids(random, 4, 12)
            output = ids(random, 2, 9)
            number = turn * num_users + user
            trace.append(traced(talk, output=output, arrival_s=float(number)))
            talk += output
    return trace


def test_tiers_below_save_what_a_larger_pool_would() -> None:
    """With room for all below, in host memory or on disk, as much is found as in a pool for all,
    in whole blocks; each figure by tier adds up, and moves what it says."""
    trace = conversations(6, 5)
    plain = {"num_kv_blocks": 32, "cow_min_tokens": 4}
    alone = run(trace, **plain).figures()
    pool = run(trace, **plain | {"num_kv_blocks": 1000}).figures()
    host = run(trace, **plain, below=TierSizes(num_host_blocks=1000, block_bytes=10)).figures()
    sizes = TierSizes(num_host_blocks=32, num_disk_blocks=1000)
    disk = run(trace, **plain, below=sizes).figures()
    wanted = pool["device_hit_blocks"]
    assert 0 < alone["device_hit_blocks"] < wanted / 4 and pool["saved_tokens"] == 4 * wanted
    for found in (alone, pool, host, disk):
        tiers = ("device", "host", "disk")
        hits = [found[f"{tier}_hit_tokens"] or 0 for tier in tiers]
        assert sum(hits) == found["saved_tokens"]
        assert found["saved_tokens"] + found["computed_tokens"] == found["prompt_tokens"]
        rates = [found[f"{tier}_hit_rate"] or 0.0 for tier in tiers]
        assert sum(rates) == pytest.approx(found["hit_rate"])
        evicted = found["device_down_blocks"] + found["device_away_blocks"]
        assert evicted == found["evicted_blocks"]
    assert alone["host_hit_rate"] is None and host["disk_hit_rate"] is None
    for found in (host, disk):
        assert sum(found[f"{tier}_hit_blocks"] or 0 for tier in tiers) == wanted
        below = found["host_hit_blocks"] + (found["disk_hit_blocks"] or 0)
        assert found["loaded_blocks"] == below
    assert host["loaded_bytes"] == 10 * host["host_hit_blocks"] > 0
    assert (host["host_away_blocks"], host["stored_blocks"]) == (0, host["host_cached_blocks"])
    assert disk["disk_hit_blocks"] > disk["host_hit_blocks"] and disk["disk_away_blocks"] == 0
    assert disk["loaded_bytes"] is None and disk["read_blocks"] >= disk["disk_hit_blocks"]
    small = run(trace, **plain, below=TierSizes(num_host_blocks=16, num_disk_blocks=40)).figures()
    for found in (host, disk, small):
        evicted = found["host_down_blocks"] + found["host_away_blocks"]
        came = found["stored_blocks"] + (found["read_blocks"] or 0)
        assert came == found["host_cached_blocks"] + evicted
    assert small["disk_away_blocks"] > 0 and small["disk_cached_blocks"] == 40
    assert alone["saved_tokens"] < small["saved_tokens"] < disk["saved_tokens"]
    never = TierSizes(num_host_blocks=1000, min_host_tokens=None)
    assert run(trace, **plain, below=never).figures()["loaded_blocks"] == 0


def test_the_disk_without_a_file_keeps_what_the_real_one_does(tmp_path: Path) -> None:
    """The same answers to the same calls."""
    max_bytes = 2 * ALIGNMENT + 5 * (ALIGNMENT + ENTRY_BYTES)
    real = DiskTier(
        str(tmp_path), max_bytes=max_bytes, layout={}, identity=bytes(32), block_tokens_bytes=4,
        block_bytes=8,
    )  # fmt: skip
    books = _Disk(num_records_in(max_bytes, 4, 8))
    assert books.num_records == real.num_records == 5
    random = np.random.default_rng(1)
    for number in range(600):
        key, tokens = bytes([int(random.integers(9))] * 32), b"abcd"
        kv = np.zeros(8, np.uint8)
        match int(random.integers(3)):
            case 0:
                is_wanted = partial(bool, int(random.integers(4)))
                is_new = real.write(key, key, tokens, kv, is_wanted)
                assert is_new is books.write(key, key, tokens, kv, is_wanted)
            case 1:
                assert real.read(key, key, tokens, kv) is books.read(key, key, tokens, kv)
            case _:
                assert real.contains(key) is books.contains(key)
        if number == 300:
            real.clear()
            books.clear()
        assert len(real) == len(books) and real.num_evicted == books.num_evicted
    assert books.num_evicted > 30
    real.close()
