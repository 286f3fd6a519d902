"""Copying blocks within the pool: the Triton kernel against its plain twin, bit for bit."""

from __future__ import annotations

import pytest
import torch
from pairwise import pairwise

from pico_vllm.kernels.copy_blocks import copy_blocks, copy_blocks_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check(
    num_copies: int, num_kv_heads: int, num_layers: int, block_size: int, head_dim: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Sources and targets all over the pool; a source may have several copies. Unused memory is
    NaN."""
    num_blocks = 2 * num_copies + 3
    expected = torch.full(
        (num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim), torch.nan
    )
    expected = expected.to(dtype)
    ids = torch.randperm(num_blocks, dtype=torch.int32)
    sources, targets = ids[:num_copies], ids[num_copies : 2 * num_copies]
    sources[1::3] = sources[:1]
    expected[sources.long()] = torch.randn(num_copies, *expected.shape[1:]).to(dtype)
    pool = expected.to(DEVICE, copy=True)
    copies_2C = torch.stack((sources, targets))
    copy_blocks_reference(expected, copies_2C)
    copy_blocks(pool, copies_2C.to(DEVICE))
    assert torch.equal(pool.cpu().view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(
    ("num_copies", "num_kv_heads", "num_layers", "block_size", "head_dim", "dtype"),
    [
        (0, 2, 3, 16, 64, torch.float32),
        (1, 1, 1, 1, 8, torch.float32),
        pytest.param(3, 2, 5, 8, 80, torch.bfloat16, marks=pytest.mark.memcheck),
        pytest.param(4, 3, 2, 16, 96, torch.float16, marks=pytest.mark.memcheck),
    ],
)
def test_copies_equal_reference(
    num_copies: int, num_kv_heads: int, num_layers: int, block_size: int, head_dim: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """The whole pool holds the same bits after both, and only targets have changed."""
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
    """In a pool of more than 2^31 elements the last block is read and written, and no other."""
    pool = torch.zeros((70_000, 2, 8, 2, 16, 64), dtype=torch.bfloat16, device=DEVICE)
    assert pool.numel() > 2**31
    pool[-1] = 1
    copies = torch.tensor([[69_999, 69_999], [1, 69_998]], dtype=torch.int32, device=DEVICE)
    copy_blocks(pool, copies)
    assert (pool[[1, -2, -1]] == 1).all()
    assert pool.count_nonzero() == 3 * pool[0].numel()


def test_arguments_that_are_refused() -> None:
    """Each error names what it met."""
    pool = torch.zeros(3, 2, 1, 2, 4, 8, device=DEVICE)
    copies = torch.zeros(2, 2, dtype=torch.int32, device=DEVICE)
    cases = [
        ((pool[:, :, 0], copies), r"the pool is \[3, 2, 2, 4, 8\]"),
        ((pool[:, :1], copies), "contiguous"),
        ((pool, copies.long()), r"copies are \[2, 2\] torch.int64"),
        ((pool, copies[0]), r"copies are \[2\]"),
        ((pool, copies.T), r"copies have strides \(1, 2\)"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            copy_blocks(*arguments)
