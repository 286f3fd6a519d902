"""Copying blocks between two pools: the Triton kernel against its plain twin, bit for bit; on a GPU
from and to pinned host memory."""

from __future__ import annotations

import pytest
import torch
from pairwise import pairwise
from torch import Tensor

from pico_vllm.kernels.swap_blocks import swap_blocks, swap_blocks_reference

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")


def pool_of(num_blocks: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random numbers and some NaN, in pinned memory where there is a GPU."""
    pool = torch.randn(num_blocks, *shape)
    pool[1::5] = torch.nan
    pool = pool.to(dtype)
    return pool.pin_memory() if HAS_GPU else pool


def check(
    num_copies: int, num_kv_heads: int, num_layers: int, block_size: int, head_dim: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Both ways, between pools of different sizes, and blocks all over them."""
    shape = (num_kv_heads, num_layers, 2, block_size, head_dim)
    host, other = pool_of(2 * num_copies + 1, shape, dtype), pool_of(num_copies + 2, shape, dtype)
    device = other.to(DEVICE, copy=True)
    of_host = torch.randperm(len(host), dtype=torch.int32)[:num_copies]
    of_device = torch.randperm(len(device), dtype=torch.int32)[:num_copies]
    for source, target, ids in (
        (device, host, torch.stack((of_device, of_host))),
        (host, device, torch.stack((of_host.flip(0), of_device))),
    ):
        expected = target.clone()
        swap_blocks_reference(source, expected, ids)
        swap_blocks(source, target, ids.to(DEVICE))
        if HAS_GPU:
            torch.cuda.synchronize()
        assert torch.equal(target.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(
    ("num_copies", "num_kv_heads", "num_layers", "block_size", "head_dim", "dtype"),
    [
        (0, 2, 3, 16, 64, torch.float32),
        (1, 1, 1, 1, 8, torch.float32),
        pytest.param(3, 2, 5, 8, 80, torch.bfloat16, marks=pytest.mark.memcheck),
        pytest.param(5, 3, 2, 16, 96, torch.float16, marks=pytest.mark.memcheck),
    ],
)
def test_copies_equal_reference(
    num_copies: int, num_kv_heads: int, num_layers: int, block_size: int, head_dim: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """The whole target holds the same bits after both, and only named blocks have changed."""
    check(num_copies, num_kv_heads, num_layers, block_size, head_dim, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_kv_heads", "num_layers", "block_size", "head_dim", "dtype"),
    pairwise(
        [1, 2, 3, 8],
        [1, 5, 28],
        [8, 16, 32, 64],
        [64, 80, 96, 128, 256],
        [torch.float32, torch.bfloat16, torch.float16],
    ),
)
def test_grid(
    num_kv_heads: int, num_layers: int, block_size: int, head_dim: int, dtype: torch.dtype
) -> None:
    """Every head count, depth, block size, head dim and dtype: pairwise, any two of these values
    meet in a case."""
    check(7, num_kv_heads, num_layers, block_size, head_dim, dtype)


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31() -> None:
    """Of a device pool of more than 2^31 elements the last block is read and written."""
    pool = torch.zeros((70_000, 2, 8, 2, 16, 64), dtype=torch.bfloat16, device=DEVICE)
    host = torch.ones(2, *pool.shape[1:], dtype=torch.bfloat16).pin_memory()
    swap_blocks(host, pool, torch.tensor([[1], [69_999]], dtype=torch.int32, device=DEVICE))
    assert (pool[-1] == 1).all() and pool.count_nonzero() == pool[0].numel()
    pool[-1] = 2
    swap_blocks(pool, host, torch.tensor([[69_999], [0]], dtype=torch.int32, device=DEVICE))
    torch.cuda.synchronize()
    assert (host[0] == 2).all() and (host[1] == 1).all()


def test_arguments_that_are_refused() -> None:
    """Each error names what it met."""
    pool = torch.zeros(3, 2, 1, 2, 4, 8, device=DEVICE)
    copies = torch.zeros(2, 2, dtype=torch.int32, device=DEVICE)
    cases = [
        ((pool[:, :, 0], pool, copies), r"a pool is \[3, 2, 2, 4, 8\]"),
        ((pool, pool[:, :1], copies), "contiguous"),
        ((pool, pool.bfloat16(), copies), "must be alike"),
        ((pool, pool, copies.long()), r"copies are \[2, 2\] torch.int64"),
        ((pool, pool, copies[0]), r"copies are \[2\]"),
        ((pool, pool, copies.T), r"copies have strides \(1, 2\)"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            swap_blocks(*arguments)
