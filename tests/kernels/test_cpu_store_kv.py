"""Storing new KV against its reference, bit for bit."""

from __future__ import annotations

import pytest
import torch
from paged import LAYER, NUM_LAYERS, empty_layer

from pico_vllm.kernels.cpu.store_kv import plan_store, store_kv
from pico_vllm.kernels.store_kv import store_kv_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_kv_heads", [1, 3])
@pytest.mark.parametrize(("block_size", "head_dim"), [(1, 8), (16, 64), (64, 20)])
@pytest.mark.parametrize("num_tokens", [0, 1, 8, 37])
def test_store_equals_reference(
    num_tokens: int, block_size: int, head_dim: int, num_kv_heads: int, dtype: torch.dtype
) -> None:
    """The whole pool holds the same bits after both, whether or not some tokens are padding."""
    num_blocks = 1 + 60 // block_size + 5
    slots = torch.randperm((num_blocks - 1) * block_size)
    if len(slots) < num_tokens:
        slots = slots.repeat(num_tokens)
    slots = slots[:num_tokens].unique() + block_size
    slots = slots[torch.randperm(len(slots))]
    fused = torch.randn(len(slots), 3 * num_kv_heads, head_dim).to(dtype)
    kv = fused[:, num_kv_heads:]
    padded = torch.where(torch.arange(len(slots)) % 3 == 1, -1, slots)
    for slot_mapping in (slots, padded):
        layers = [
            empty_layer(num_blocks, num_kv_heads, block_size, head_dim, dtype) for _ in range(2)
        ]
        store_kv(kv, *layers[0], slot_mapping)
        store_kv_reference(kv, *layers[1], slot_mapping)
        for stored, expected in zip(*layers, strict=True):
            torch.testing.assert_close(stored, expected, atol=0, rtol=0, equal_nan=True)


def test_padding_only() -> None:
    """A step of padding rows writes nothing."""
    k_BGSD, v_BGSD = empty_layer(3, 2, 4, 8, torch.float32)
    store_kv(torch.ones(2, 4, 8), k_BGSD, v_BGSD, torch.tensor([-1, -1]))
    assert k_BGSD.isnan().all() and v_BGSD.isnan().all()


def test_other_layers_stay() -> None:
    """Writing a layer leaves the memory of the others, holes between heads, as it was."""
    pool = torch.zeros(4, 2, NUM_LAYERS, 2, 4, 8)
    kv = torch.tensor([1.0, 1.0, 2.0, 2.0])[None, :, None].expand(2, 4, 8)
    store_kv(kv, pool[:, :, LAYER, 0], pool[:, :, LAYER, 1], torch.tensor([5, 14]))
    assert pool[:, :, LAYER].sum() == 2 * 2 * 8 * (1 + 2)
    assert pool.sum() == pool[:, :, LAYER].sum()


def test_plan_serves_all_layers() -> None:
    """One plan writes each layer to the same slots of its own memory."""
    pool = torch.full((4, 2, NUM_LAYERS, 2, 4, 8), float("nan"))
    plan = plan_store(torch.tensor([6, -1, 9]))
    for layer in range(NUM_LAYERS):
        new = torch.full((3, 2, 8), float(layer))
        store_kv(torch.cat((new, new + 0.5), 1), pool[:, :, layer, 0], pool[:, :, layer, 1], plan)
    for layer in range(NUM_LAYERS):
        for block, slot in ((1, 2), (2, 1)):
            assert (pool[block, :, layer, 0, slot] == layer).all()
            assert (pool[block, :, layer, 1, slot] == layer + 0.5).all()
    assert (~pool.isnan()).sum() == NUM_LAYERS * 2 * 2 * 2 * 8


def test_refuses_tensors_that_are_no_pool() -> None:
    """K and V of different pools are an error, not a write to a wrong place."""
    k_BGSD, _ = empty_layer(3, 2, 4, 8, torch.float32)
    _, v_BGSD = empty_layer(3, 2, 4, 8, torch.float32)
    new = torch.ones(1, 4, 8)
    with pytest.raises(ValueError, match="one layer of a pool"):
        store_kv(new, k_BGSD, v_BGSD, torch.tensor([4]))
