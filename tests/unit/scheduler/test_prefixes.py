"""Prefixes alone: which keys a request that waits is known by below the device."""

from __future__ import annotations

import numpy as np
import pytest

from pico_vllm.cache.block_manager import BlockManager
from pico_vllm.cache.prefix_cache import PrefixCache
from pico_vllm.cache.tiers import chain
from pico_vllm.cache.tiers.chain import MAX_KNOWN
from pico_vllm.cache.tiers.lower import LowerTiers
from pico_vllm.request import Request
from pico_vllm.sampling_params import SamplingParams
from pico_vllm.scheduler.prefixes import Prefixes

SIZE, NUM_BLOCKS = 4, 64


@pytest.fixture
def prefixes() -> Prefixes:
    """Something lies below the device, so whoever comes is looked up there."""
    tiers = LowerTiers(4, block_size=SIZE, is_threaded=False)
    tiers.put(b"root", [b"key"], b"tokens", [1])
    cache = PrefixCache(BlockManager(NUM_BLOCKS), block_size=SIZE, tiers=tiers)
    return Prefixes(cache, lambda request_id: None)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Keys of prompts."""
    seen: list[bytes] = []
    original = chain.chain_keys

    def counted(parent: bytes, tokens: bytes, block_bytes: int) -> list[bytes]:
        keys = original(parent, tokens, block_bytes)
        seen.extend(keys)
        return keys

    monkeypatch.setattr(chain, "chain_keys", counted)
    return seen


def request_of(name: str, first: int) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=np.arange(first, first + 3 * SIZE, dtype=np.int32),
        params=SamplingParams(),
        max_tokens=1,
        stop_token_ids=frozenset(),
        seed=0,
    )


def look_up(prefixes: Prefixes, request: Request) -> None:
    assert not prefixes.bring_up(request, prefixes.match(request)), "nothing of it is there"


def run(prefixes: Prefixes, request: Request) -> None:
    prefixes.enter(request, prefixes.match(request))
    taken = prefixes.cache.allocate(3 - len(request.block_ids))
    assert taken is not None
    request.block_ids += taken
    prefixes.publish(request, 2 * SIZE)
    prefixes.publish(request, 3 * SIZE)
    prefixes.leave(request, 3 * SIZE)


def test_keys_of_who_waits_are_made_once(prefixes: Prefixes, made: list[bytes]) -> None:
    """Whoever else is looked up meanwhile, unless that are many; and they go into the tree when it
    runs, the last block's too."""
    requests = [request_of(str(number), 10 * number) for number in range(MAX_KNOWN)]
    for request in (*requests, *requests):
        look_up(prefixes, request)
    assert len(made) == 3 * MAX_KNOWN
    made.clear()
    run(prefixes, requests[1])
    chains = [node.chain for node in prefixes.cache._tree.nodes() if node.block_ids]
    assert [len(chain or ()) for chain in chains] == [2, 1] and not made
    prefixes.check_invariants([])
    made.clear()
    look_up(prefixes, request_of("another", 10_000))
    assert len(made) == 3
    for request in requests[2:]:
        look_up(prefixes, request)
    assert len(made) == 3
    look_up(prefixes, requests[0])
    assert len(made) == 6, "another came in its place"
