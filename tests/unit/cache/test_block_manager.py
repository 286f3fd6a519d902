"""BlockManager against a brute-force model, and the KV pool's copies with real bytes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pico_vllm.cache.block_manager import NULL_BLOCK, BlockManager
from pico_vllm.cache.kv_pool import PagedKV, allocate_pool
from pico_vllm.config.model import ModelConfig
from pico_vllm.step import BlockCopies

Holder = tuple[int, ...]
"""Blocks of one request, as ids."""


class BlockMachine(RuleBasedStateMachine):
    """Holders allocate, share and free. The model: a plain list of what each holds, and for each
    block the tokens written to it."""

    @initialize(num_blocks=st.integers(1, 9))
    def start(self, num_blocks: int) -> None:
        self.manager = BlockManager(num_blocks)
        self.num_blocks = num_blocks
        self.holders: list[list[int]] = []
        self.content: dict[int, int] = {}
        self.memory: dict[int, int] = {}
        self.num_written = 0

    # What the model knows.

    def live(self) -> Counter[int]:
        return Counter(block for holder in self.holders for block in holder)

    def num_free(self) -> int:
        return self.num_blocks - len(self.live())

    def state(self) -> Any:
        """All that a failing call must leave alone."""
        manager = self.manager
        return {i: manager.ref_count(i) for i in self.live()}, manager._free.ids()

    # Rules.

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        before, free = self.state(), self.num_free()
        blocks = self.manager.allocate(count)
        if count > free:
            assert blocks is None and self.state() == before
            return
        assert blocks is not None and len(set(blocks)) == len(blocks) == count
        assert not set(blocks) & set(self.live()), "an id in use was given again"
        self.holders.append(list(blocks))
        for block in blocks:
            self.num_written += 1
            (place,) = self.manager.device_ids([block])
            self.content[block] = self.memory[place] = self.num_written
        assert NULL_BLOCK not in self.manager.device_ids(blocks)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        if self.holders:
            blocks = data.draw(st.sampled_from(self.holders))
            kept = blocks[: data.draw(st.integers(0, len(blocks)))]
            self.manager.share(kept)
            self.holders.append(list(kept))

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.holders:
            index = data.draw(st.integers(0, len(self.holders) - 1))
            self.manager.free(self.holders.pop(index))

    @rule(data=st.data())
    def free_the_end(self, data: st.DataObject) -> None:
        if self.holders:
            blocks = data.draw(st.sampled_from(self.holders))
            count = data.draw(st.integers(0, len(blocks)))
            tail = blocks[len(blocks) - count :]
            del blocks[len(blocks) - count :]
            self.manager.free(tail)

    # Invariants.

    @invariant()
    def books_are_in_order(self) -> None:
        if not hasattr(self, "manager"):
            return
        manager, live = self.manager, self.live()
        manager.check_invariants()
        assert {block: manager.ref_count(block) for block in live} == dict(live)
        assert set(np.flatnonzero(manager._ref_counts).tolist()) == set(live)
        assert manager.num_free_device_blocks == self.num_free()
        for gone in set(self.content) - set(live):
            assert manager.ref_count(gone) == 0

    @invariant()
    def every_block_holds_what_was_written(self) -> None:
        if hasattr(self, "manager"):
            for block in self.live():
                (place,) = self.manager.device_ids([block])
                assert self.memory[place] == self.content[block]


TestBlockMachine = BlockMachine.TestCase
TestBlockMachine.settings = settings(
    max_examples=300,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def test_lowest_free_block_first() -> None:
    """Blocks come in rising order from 1 on, and freed ones are taken again before higher ones."""
    manager = BlockManager(5)
    blocks = manager.allocate(4)
    assert blocks is not None and manager.device_ids(blocks) == [1, 2, 3, 4]
    manager.free([blocks[2], blocks[0]])
    again = manager.allocate(3)
    assert again is not None and manager.device_ids(again) == [1, 3, 5]
    assert manager.allocate(1) is None


def test_a_shared_block_stays_until_its_last_holder_leaves() -> None:
    """A block held twice survives the first free and goes with the second."""
    manager = BlockManager(2)
    (block,) = manager.allocate(1) or []
    manager.share([block])
    assert manager.ref_count(block) == 2
    manager.free([block])
    assert (manager.ref_count(block), manager.num_free_device_blocks) == (1, 1)
    manager.free([block])
    assert (manager.ref_count(block), manager.num_free_device_blocks) == (0, 2)
    manager.check_invariants()


def test_misuse_is_caught() -> None:
    """Freeing twice, and sharing or asking for a block that is gone, are errors of ours and never
    pass in silence."""
    manager = BlockManager(2)
    (block,) = manager.allocate(1) or []
    manager.free([block])
    for misuse in (manager.free, manager.share, manager.device_ids):
        with pytest.raises(KeyError):
            misuse([block])
    (block,) = manager.allocate(1) or []
    for misuse in (manager.free, manager.share, manager.device_ids):
        with pytest.raises(AssertionError, match="named twice"):
            misuse([block, block])
        with pytest.raises(KeyError, match=r"of the blocks \[1, 2\] block 2 is nobody's"):
            misuse([block, 2])
        assert manager.ref_count(block) == 1, "counted before it was refused"
    manager.check_invariants()


# The bytes.

CONFIG = ModelConfig.from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 8,
        "hidden_size": 12,
        "intermediate_size": 8,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": None,
    }
)


def pools(num_device: int = 6, num_host: int = 5) -> PagedKV:
    """Pools in which every element has another value."""
    kv = PagedKV(
        CONFIG,
        num_device_blocks=num_device,
        block_size=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
        host_pool=allocate_pool(
            num_host, 4, CONFIG, dtype=torch.float32, device=torch.device("cpu")
        ),
    )
    kv.device_pool.copy_(torch.arange(kv.device_pool.numel()).view(kv.device_pool.shape))
    kv.host_pool.copy_(-torch.arange(1, kv.host_pool.numel() + 1).view(kv.host_pool.shape))
    return kv


def test_pool_layout() -> None:
    """The pool is [blocks + null block, KV heads, layers, K and V, slots, head dim], a block one
    piece of memory."""
    kv = pools()
    assert kv.device_pool.shape == (7, 2, 3, 2, 4, 6)
    assert kv.device_pool.is_contiguous() and kv.host_pool.shape[0] == 5


@pytest.mark.parametrize("ids", [[], [1], [6, 1, 3]])
def test_copies_move_bytes(ids: list[int]) -> None:
    """copy_out and copy_in write exactly the named blocks, byte for byte, and touch no other."""
    kv = pools()
    device, host = kv.device_pool.clone(), kv.host_pool.clone()
    out = BlockCopies(ids, [4, 0, 2][: len(ids)])
    kv.copy_out(out)
    expected = host.clone()
    for copy in out:
        expected[copy.target] = device[copy.source]
    assert torch.equal(kv.host_pool, expected) and torch.equal(kv.device_pool, device)
    back = BlockCopies([3, 1, 4][: len(ids)], ids)
    kv.copy_in(back)
    expected_device = device.clone()
    for copy in back:
        expected_device[copy.target] = expected[copy.source]
    assert torch.equal(kv.device_pool, expected_device) and torch.equal(kv.host_pool, expected)
