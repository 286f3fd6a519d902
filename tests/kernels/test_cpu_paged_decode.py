"""Paged decode against its reference and against dense attention in fp64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from paged import TOLERANCE, PagedCase, dense_attention, paged_case

from pico_vllm.kernels.cpu.paged_decode import paged_decode, plan_decode
from pico_vllm.kernels.cpu.tiles import TILE_BYTES, tile_tokens
from pico_vllm.kernels.paged_decode import paged_decode_reference

SCALE = 0.125
TILE_TOKENS = 4096


def queries(case: PagedCase, num_heads: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(case.seq_lens), num_heads, case.k_BGSD.shape[3])
    return torch.randn(shape, generator=generator).to(case.k_BGSD.dtype)


def decode(case: PagedCase, q_RHD: torch.Tensor, most_tokens: int = TILE_TOKENS) -> torch.Tensor:
    block_size = case.k_BGSD.shape[2]
    plan = plan_decode(case.block_table, case.seq_lens, block_size, tile_tokens=most_tokens)
    return paged_decode(q_RHD, case.k_BGSD, case.v_BGSD, plan, scale=SCALE)


def assert_right(case: PagedCase, num_heads: int, most_tokens: int = TILE_TOKENS) -> None:
    """Both the fast version and the reference equal dense attention."""
    q_RHD = queries(case, num_heads)
    reference = paged_decode_reference(
        q_RHD,
        case.k_BGSD,
        case.v_BGSD,
        torch.from_numpy(case.block_table),
        torch.from_numpy(case.seq_lens),
        scale=SCALE,
    )
    fast = decode(case, q_RHD, most_tokens)
    assert fast.dtype == q_RHD.dtype
    tolerance = TOLERANCE[q_RHD.dtype]
    for request, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        expected = torch.zeros(q_RHD.shape[1:], dtype=torch.float64)
        if len(keys):
            expected = dense_attention(q_RHD[request : request + 1], keys, values, SCALE)[0]
        torch.testing.assert_close(fast[request].double(), expected, atol=tolerance, rtol=0)
        torch.testing.assert_close(reference[request].double(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 64])
def test_lengths_around_blocks(block_size: int, dtype: torch.dtype) -> None:
    """Lengths 1, block_size - 1, block_size, block_size + 1 and 3 blocks give dense attention."""
    lengths = [1, max(block_size - 1, 1), block_size, block_size + 1, 3 * block_size]
    assert_right(paged_case(lengths, block_size=block_size, dtype=dtype), num_heads=9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ratio", range(1, 9))
def test_heads_per_kv_head(ratio: int, dtype: torch.dtype) -> None:
    """Every ratio of query to KV heads reads its own KV head."""
    assert_right(paged_case([5, 40], num_kv_heads=2, dtype=dtype), num_heads=2 * ratio)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [2, 20, 64, 96, 128])
@pytest.mark.parametrize("num_kv_heads", [1, 5])
def test_head_sizes(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """Odd sizes of head work, alone and in a batch."""
    for lengths in ([33], [7, 33]):
        case = paged_case(lengths, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
        assert_right(case, num_heads=num_kv_heads)


def test_shared_blocks() -> None:
    """A block in several tables counts for each of them."""
    assert_right(paged_case([3, 20, 1], num_shared=2), num_heads=6)


def test_consecutive_blocks() -> None:
    """Tables in physical order give the same as shuffled ones."""
    assert_right(paged_case([50, 20], is_shuffled=False), num_heads=6)


def test_lengths_far_apart() -> None:
    """A batch that is attended in several groups keeps the order of its requests."""
    case = paged_case([3, 900, 0, 40, 700, 1, 35], head_dim=16)
    plan = plan_decode(case.block_table, case.seq_lens, 16, tile_tokens=TILE_TOKENS)
    assert [len(group.requests) for group in plan.groups] == [2, 4]
    assert_right(case, num_heads=3)


def test_empty_rows_give_zeros() -> None:
    """Rows with seq_len 0 give zeros, among others and alone."""
    case = paged_case([0, 17, 0])
    assert_right(case, num_heads=9)
    out = decode(paged_case([0, 0]), torch.full((2, 9, 64), float("nan")))
    assert torch.equal(out, torch.zeros(2, 9, 64))


def test_unused_slots_are_never_read() -> None:
    """Whatever unused slots, other layers and the null block hold, the bits stay the same."""
    case = paged_case([1, 15, 16, 17, 0, 100], dtype=torch.bfloat16)
    q_RHD = queries(case, 9)
    with_nan = decode(case, q_RHD)
    for pool in (case.k_BGSD, case.v_BGSD):
        pool.nan_to_num_(nan=1e30)
    assert torch.equal(with_nan, decode(case, q_RHD))
    assert with_nan.isfinite().all()


def test_views_of_queries() -> None:
    """Queries cut from a fused projection give the same bits as a copy of them."""
    case = paged_case([9, 30])
    fused = torch.randn(2, 15, 64)
    q_RHD = fused[:, :9]
    assert torch.equal(decode(case, q_RHD), decode(case, q_RHD.contiguous()))


def test_plan_serves_all_layers() -> None:
    """A plan bound to one layer reads another layer's own values."""
    pool = torch.randn(4, 2, 3, 2, 8, 16)
    table, lens = np.array([[2, 3, 1]], np.int32), np.array([19], np.int32)
    plan = plan_decode(table, lens, 8, tile_tokens=TILE_TOKENS)
    q_RHD = torch.randn(1, 4, 16)
    for layer in range(3):
        k, v = pool[:, :, layer, 0], pool[:, :, layer, 1]
        expected = paged_decode_reference(
            q_RHD, k, v, torch.from_numpy(table), torch.from_numpy(lens), scale=SCALE
        )
        fast = paged_decode(q_RHD, k, v, plan, scale=SCALE)
        torch.testing.assert_close(fast, expected, atol=2e-6, rtol=0)


def test_refuses_what_it_cannot_take() -> None:
    """Heads that do not divide and tensors that are no layer of a pool are named in the error."""
    case = paged_case([4])
    plan = plan_decode(case.block_table, case.seq_lens, 16, tile_tokens=TILE_TOKENS)
    with pytest.raises(ValueError, match="7 query heads are not a multiple of 3"):
        paged_decode(torch.zeros(1, 7, 64), case.k_BGSD, case.v_BGSD, plan, scale=SCALE)
    plan = plan_decode(case.block_table, case.seq_lens, 16, tile_tokens=TILE_TOKENS)
    with pytest.raises(ValueError, match="one layer of a pool"):
        paged_decode(torch.zeros(1, 9, 64), case.k_BGSD, case.v_BGSD.clone(), plan, scale=SCALE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("most_tokens", [16, 64, 128])
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_lengths_around_tiles(off: int, most_tokens: int, dtype: torch.dtype) -> None:
    """Lengths about half a tile, one tile and several, alone and in a batch, with NaN past their
    ends, give dense attention."""
    lengths = [max(most_tokens * tenths // 10 + off, 1) for tenths in (5, 10, 20, 37)]
    for batch in ([length] for length in lengths):
        assert_right(paged_case(batch, head_dim=16, dtype=dtype), 6, most_tokens)
    assert_right(paged_case([*lengths, 0, 3], head_dim=16, dtype=dtype), 6, most_tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "lengths",
    [[2032], [2047], [2048], [2049], [600, 590, 601, 592], [3000, 5], [505, 500, 510, 503, 3]],
)
def test_whole_blocks(lengths: list[int], dtype: torch.dtype) -> None:
    """Tiles large enough to be gathered in whole blocks hide what follows a request's end."""
    case = paged_case(lengths, head_dim=16, num_kv_heads=2, dtype=dtype)
    plan = plan_decode(case.block_table, case.seq_lens, 16, tile_tokens=TILE_TOKENS)
    paged_decode(queries(case, 4), case.k_BGSD, case.v_BGSD, plan, scale=SCALE)
    assert plan.tiles is not None
    is_blockwise = any(tile.block_size == 16 for tile in plan.tiles.tiles)
    assert is_blockwise == (lengths != [2032])
    assert_right(case, 4)


def test_no_copy_is_larger_than_a_tile() -> None:
    """However long the requests, never more than a tile of the pool is gathered."""
    case = paged_case([1000, 130, 64, 40, 40, 40, 1], head_dim=16)
    plan = plan_decode(case.block_table, case.seq_lens, 16, tile_tokens=128)
    paged_decode(queries(case, 6), case.k_BGSD, case.v_BGSD, plan, scale=SCALE)
    assert plan.tiles is not None
    copied = [
        len(tile.rows) * (tile.block_size or 1) / (2 * plan.tiles.num_kv_heads)
        for tile in plan.tiles.tiles
    ]
    assert max(copied) <= 128 and sum(copied) >= 1315


def test_tile_holds_its_bytes() -> None:
    """A tile is whole blocks, as many as fit into TILE_BYTES, and one at least."""
    assert tile_tokens(3, 64, 2, 16) * 2 * 3 * 64 * 2 == TILE_BYTES
    assert tile_tokens(5, 80, 4, 16) == 16 * (TILE_BYTES // (2 * 5 * 80 * 4 * 16))
    assert tile_tokens(512, 512, 4, 64) == 64
