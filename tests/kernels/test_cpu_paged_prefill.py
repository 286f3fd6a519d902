"""Paged prefill against its reference and against dense attention in fp64."""

from __future__ import annotations

import pytest
import torch
from paged import TOLERANCE, dense_attention, paged_case

from pico_vllm.kernels.cpu.paged_prefill import paged_prefill, plan_prefill
from pico_vllm.kernels.paged_prefill import paged_prefill_reference

SCALE = 0.125
TILE_TOKENS = 4096


def assert_right(
    query_lens: list[int],
    context_lens: list[int],
    *,
    num_heads: int = 9,
    num_kv_heads: int = 3,
    head_dim: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    num_shared: int = 0,
    tile_tokens: int = TILE_TOKENS,
) -> None:
    """Both versions equal dense attention; the pool holds the contexts only, NaN elsewhere."""
    case = paged_case(
        context_lens,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        num_shared=num_shared,
    )
    generator = torch.Generator().manual_seed(1)
    num_tokens = sum(query_lens)
    shape = (num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    # Cut from a fused projection: none of the three is contiguous.
    fused = torch.randn(shape, generator=generator).to(dtype)
    q, k, v = fused.split((num_heads, num_kv_heads, num_kv_heads), 1)
    arguments = (q, k, v, case.k_BGSD, case.v_BGSD)
    lens = (query_lens, case.seq_lens)
    plan = plan_prefill(case.block_table, *lens, block_size, tile_tokens=tile_tokens)
    fast = paged_prefill(*arguments, plan, scale=SCALE)
    blocks = torch.from_numpy(case.block_table)
    reference = paged_prefill_reference(*arguments, blocks, *lens, scale=SCALE)
    assert fast.dtype == dtype
    start = 0
    for request, query_len in enumerate(query_lens):
        tokens = slice(start, start + query_len)
        expected = dense_attention(
            q[tokens],
            torch.cat((case.keys[request], k[tokens])),
            torch.cat((case.values[request], v[tokens])),
            SCALE,
        )
        for out in (fast, reference):
            torch.testing.assert_close(
                out[tokens].double(), expected, atol=TOLERANCE[dtype], rtol=0
            )
        start += query_len


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fresh_prompts(dtype: torch.dtype) -> None:
    """Prompts of several lengths in one step see themselves only."""
    assert_right([1, 15, 16, 17, 40], [0, 0, 0, 0, 0], dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 8, 16, 64])
def test_chunks_after_context(block_size: int, dtype: torch.dtype) -> None:
    """Chunks over contexts of block_size - 1, block_size and block_size + 1 tokens."""
    context_lens = [max(block_size - 1, 1), block_size, block_size + 1]
    assert_right([5, 1, 20], context_lens, block_size=block_size, dtype=dtype)


@pytest.mark.parametrize("ratio", range(1, 9))
def test_heads_per_kv_head(ratio: int) -> None:
    """Every ratio of query to KV heads, fresh and after a context."""
    assert_right([6, 3], [0, 18], num_heads=2 * ratio, num_kv_heads=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [2, 20, 128])
def test_head_sizes(head_dim: int, dtype: torch.dtype) -> None:
    """Odd sizes of head, fresh and after a context."""
    assert_right([6, 3], [0, 18], head_dim=head_dim, dtype=dtype)


def test_long_chunk_after_context() -> None:
    """A chunk longer than attention's internal blocks stays causal."""
    assert_right([300], [70], num_heads=2, num_kv_heads=1, head_dim=16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tile_tokens", [16, 48])
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_contexts_around_tiles(off: int, tile_tokens: int, dtype: torch.dtype) -> None:
    """Contexts of about one tile and several, with NaN past their ends, give dense attention."""
    context_lens = [tile_tokens + off, 3 * tile_tokens + off, 0]
    assert_right([5, 20, 7], context_lens, tile_tokens=tile_tokens, dtype=dtype)


def test_scores_far_apart() -> None:
    """New tokens that outweigh their context by far, or hardly count beside it, merge exactly."""
    torch.manual_seed(0)
    for factor in (1e-3, 100.0):
        case = paged_case([40], num_kv_heads=1)
        q, k, v = (torch.randn(3, 1, 64) * size for size in (3.0, factor, 1.0))
        plan = plan_prefill(case.block_table, [3], [40], 16, tile_tokens=16)
        out = paged_prefill(q, k, v, case.k_BGSD, case.v_BGSD, plan, scale=1.0)
        expected = dense_attention(
            q, torch.cat((case.keys[0], k)), torch.cat((case.values[0], v)), 1.0
        )
        torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=0)


def test_shared_context() -> None:
    """Two requests over the same cached blocks, a third without any."""
    assert_right([4, 2, 3], [1, 5, 0], num_shared=2)


def test_chunked_equals_whole() -> None:
    """A prompt in two chunks gives what it gives in one, to fp32 rounding."""
    whole = torch.randn(30, 15, 32)
    q, k, v = whole.split((9, 3, 3), 1)
    case = paged_case([20], head_dim=32)
    for position in range(20):
        block, slot = int(case.block_table[0, position // 16]), position % 16
        case.k_BGSD[block, :, slot], case.v_BGSD[block, :, slot] = k[position], v[position]

    def attend(tokens: slice, context_len: int) -> torch.Tensor:
        new = (q[tokens], k[tokens], v[tokens])
        lens = ([len(new[0])], [context_len])
        plan = plan_prefill(case.block_table, *lens, 16, tile_tokens=TILE_TOKENS)
        return paged_prefill(*new, case.k_BGSD, case.v_BGSD, plan, scale=SCALE)

    once = attend(slice(0, 30), 0)
    first, second = attend(slice(0, 20), 0), attend(slice(20, 30), 20)
    torch.testing.assert_close(torch.cat((first, second)), once, atol=1e-6, rtol=0)


def test_refuses_heads_that_do_not_divide() -> None:
    """The error names both head counts."""
    case = paged_case([4])
    new = torch.zeros(1, 3, 64)
    plan = plan_prefill(case.block_table, [1], [4], 16, tile_tokens=TILE_TOKENS)
    with pytest.raises(ValueError, match="7 query heads are not a multiple of 3"):
        paged_prefill(torch.zeros(1, 7, 64), new, new, case.k_BGSD, case.v_BGSD, plan, scale=SCALE)
