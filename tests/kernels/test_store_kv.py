"""Storing new KV: the Triton kernel against its plain twin, bit for bit."""

from __future__ import annotations

import pytest
import torch
from paged import LAYER, empty_layer
from pairwise import pairwise

from pico_vllm.kernels.store_kv import store_kv, store_kv_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check(
    num_tokens: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    """Every third token is padding; the pool of all layers is compared."""
    num_blocks = 2 + 2 * num_tokens // block_size
    slots = torch.randperm((num_blocks - 1) * block_size)[:num_tokens] + block_size
    slots[1::3] = -1
    # Cut from a fused projection: not contiguous.
    fused = torch.randn(num_tokens, 3 * num_kv_heads, head_dim).to(dtype)
    k_BGSD, _ = empty_layer(num_blocks, num_kv_heads, block_size, head_dim, dtype)
    expected = k_BGSD._base
    assert expected is not None
    pool = expected.to(DEVICE, copy=True)
    kv = fused[:, num_kv_heads:]
    store_kv_reference(kv, expected[:, :, LAYER, 0], expected[:, :, LAYER, 1], slots)
    kv = fused.to(DEVICE)[:, num_kv_heads:]
    store_kv(kv, pool[:, :, LAYER, 0], pool[:, :, LAYER, 1], slots.to(DEVICE))
    assert torch.equal(pool.cpu().view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(
    ("num_tokens", "num_kv_heads", "head_dim", "block_size", "dtype"),
    [
        (0, 2, 64, 16, torch.float32),
        (1, 1, 8, 1, torch.float32),
        pytest.param(20, 3, 80, 8, torch.bfloat16, marks=pytest.mark.memcheck),
        pytest.param(33, 2, 96, 64, torch.float16, marks=pytest.mark.memcheck),
    ],
)
def test_store_equals_reference(
    num_tokens: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    """The whole pool holds the same bits after both, padding or not."""
    check(num_tokens, num_kv_heads, head_dim, block_size, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_kv_heads", "head_dim", "block_size", "dtype"),
    pairwise(
        [1, 2, 3, 8, 32],
        [64, 80, 96, 128, 256],
        [8, 16, 32, 64],
        [torch.float32, torch.bfloat16, torch.float16],
    ),
)
def test_grid(num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    """Every head count, head dim, block size and dtype: pairwise, any two of these values meet in a
    case."""
    check(150, num_kv_heads, head_dim, block_size, dtype)


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31() -> None:
    """A pool of more than 2^31 elements is written at its end and nowhere else."""
    num_blocks, shape = 70_000, (2, 8, 2, 16, 64)
    pool = torch.zeros((num_blocks, *shape), dtype=torch.bfloat16, device=DEVICE)
    assert pool.numel() > 2**31
    kv = torch.ones(2, 4, 64, dtype=torch.bfloat16, device=DEVICE)
    slots = torch.tensor([num_blocks * 16 - 1, -1], device=DEVICE)
    store_kv(kv, pool[:, :, 7, 0], pool[:, :, 7, 1], slots)
    assert (pool[-1, :, 7, :, 15] == 1).all()
    assert pool.count_nonzero() == 2 * 2 * 64


def test_arguments_that_are_refused() -> None:
    """Each error names what it met."""
    pool = torch.zeros(3, 2, 1, 2, 4, 8, device=DEVICE)
    k, v = pool[:, :, 0, 0], pool[:, :, 0, 1]
    kv = torch.zeros(5, 4, 8, device=DEVICE)
    slots = torch.zeros(5, dtype=torch.int64, device=DEVICE)
    cases = [
        ((kv[:, :3], k, v, slots), r"kv is \[5, 3, 8\]"),
        ((kv.half(), k, v, slots), "torch.float16; a pool of 2 heads"),
        ((kv, k, v[:2], slots), "they must be alike"),
        ((kv, k, v.contiguous(), slots), "they must be equal"),
        ((kv, k, v, slots[:4]), r"slot_mapping is \[4\]"),
        ((kv, k, v, slots.int()), "torch.int32; 5 tokens need"),
        ((kv.mT.contiguous().mT, k, v, slots), "last stride 1"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            store_kv(*arguments)
