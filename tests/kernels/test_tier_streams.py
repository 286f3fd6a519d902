"""A plan's stores and loads on a device: who waits for whom. On a GPU the copies take long enough
that whoever does not wait reads what was there before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pico_vllm.cache.tiers.host_pool import HostPool
from pico_vllm.cache.tiers.streams import TierStreams
from pico_vllm.step import BlockCopies, StepPlan

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
NUM_BLOCKS = 500 if HAS_GPU else 3
BLOCK_SIZE = 16 if HAS_GPU else 2
MODEL: Any = SimpleNamespace(num_kv_heads=2, num_layers=28 if HAS_GPU else 2, head_dim=128)


def plan(number: int, **others: Any) -> StepPlan:
    """Without requests."""
    none = np.zeros(0, np.int32)
    return StepPlan(
        request_ids=(), rows=none, context_lens=none, query_lens=none,
        is_sampled=none.astype(np.bool_), num_decodes=0, number=number, **others,
    )  # fmt: skip


@pytest.fixture
def host_pool() -> HostPool:
    return HostPool(NUM_BLOCKS, BLOCK_SIZE, MODEL, dtype=torch.bfloat16, is_pinned=HAS_GPU)


@pytest.fixture
def device_pool(host_pool: HostPool) -> torch.Tensor:
    """A block more than the host's, of zeros."""
    shape = (NUM_BLOCKS + 1, *host_pool.blocks.shape[1:])
    return torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE)


def test_who_awaits_loads_reads_what_they_bring(
    host_pool: HostPool, device_pool: torch.Tensor
) -> None:
    """All blocks, though nobody asked whether the copies have ended; and the end is told once."""
    streams = TierStreams(device_pool, host_pool)
    host_pool.blocks.fill_(3)
    copies = BlockCopies(range(NUM_BLOCKS), range(1, NUM_BLOCKS + 1))
    streams.launch(plan(7, loads=copies))
    streams.launch(plan(8, awaits_loads=True))
    found = device_pool[1:].clone()
    assert streams.take_loaded(waits=True) == (7,) and streams.take_loaded() == ()
    assert (found == 3).all() and not device_pool[0].any()
    streams.close()


def test_loads_come_behind_the_stores_of_their_plan(
    host_pool: HostPool, device_pool: torch.Tensor
) -> None:
    """What a block held goes down before others' KV comes up into it, and what steps before it
    wrote is in both."""
    streams = TierStreams(device_pool, host_pool)
    half = NUM_BLOCKS // 2
    host_pool.blocks[half:] = 3
    device_pool[1:] = 5
    numbers, slots = range(1, half + 1), range(half)
    streams.launch(
        plan(
            0, stores=BlockCopies(numbers, slots), loads=BlockCopies(range(half, 2 * half), numbers)
        )
    )
    streams.wait_for_stores()
    assert (host_pool.blocks[:half] == 5).all() and (host_pool.blocks[half:] == 3).all()
    assert streams.take_loaded(waits=True) == (0,)
    assert (device_pool[1 : half + 1] == 3).all() and (device_pool[half + 1 :] == 5).all()
    streams.close()
