"""Attention of decoding requests with a prefix in common: both kernels against the plain twins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from pairwise import pairwise
from test_hopper_decode import in_parts
from test_paged_decode import ALLOWED, DEVICE, Fused, check_fused, fused
from torch import Tensor

from pico_vllm.kernels import hopper_decode, shared_prefix
from pico_vllm.kernels.gluon import HAS_GLUON
from pico_vllm.kernels.paged_decode import (
    MAX_SPLITS_IN_PLACE,
    DecodeScratch,
    decode_config,
    paged_decode_reference,
    rope_paged_decode,
)
from pico_vllm.kernels.shared_prefix import (
    MIN_SAVED_BYTES,
    MIN_SHARING,
    PrefixConfig,
    attend_prefix,
    is_faster,
    prefix_config,
    shared_prefix_decode,
    shared_prefix_reference,
)

CPU = torch.device("cpu")
needs_gluon = pytest.mark.skipif(not HAS_GLUON, reason="this Triton has no Gluon")
on_hopper = pytest.mark.skipif(
    not hopper_decode.can_take(DEVICE, torch.bfloat16, 12, 2, 128, 16),
    reason="needs a Hopper and Gluon",
)
Config = PrefixConfig


def sharing(
    own_lens: list[int],
    num_shared: int,
    *,
    outsiders: Sequence[int] = (),
    block_size: int = 16,
    device: torch.device = DEVICE,
    **shape: Any,
) -> tuple[Fused, Tensor]:
    """Requests of so many tokens behind num_shared blocks, and their prefix_lens. 0 is padding."""
    made = fused(
        own_lens, block_size=block_size, device=device, num_shared=num_shared,
        outsiders=outsiders, **shape,
    )  # fmt: skip
    lens = [
        num_shared * block_size * (own_len > 0 and r not in outsiders)
        for r, own_len in enumerate(own_lens)
    ]
    # Whatever was in the scratch before.
    for x in (made.it.scratch.partials, made.it.scratch.stats):
        x.fill_(float("nan"))
    return made, torch.tensor(lens, dtype=torch.int32, device=device)


def check(made: Fused, prefix_lens: Tensor, *, num_parts: int = 1, **options: Any) -> Tensor:
    def decode(*inputs: Tensor, **common: Any) -> Tensor:
        return shared_prefix_decode(*inputs, prefix_lens, **common, **options)

    run = decode if num_parts == 1 else in_parts(decode, made.qkv_RND, num_parts)
    out = check_fused(made, lambda: made.decoded_by(run))
    assert not made.it.scratch.counters.any()
    return out


SMALL = Config(block_m=16, block_n=16, num_splits=2, num_warps=4, num_stages=1)


@pytest.mark.parametrize(
    ("own_lens", "num_shared", "outsiders"),
    [
        # The new token alone, blocks' ends, and one of the tile whose prefix is another.
        pytest.param([1, 17, 3], 5, [0], marks=pytest.mark.memcheck),
        # A tile of padding, and less than a round.
        ([40, 1, 0], 1, []),
        # Splits of unequal length, and a last round that is not whole.
        pytest.param([5, 90], 9, [], marks=pytest.mark.memcheck),
    ],
)
def test_lengths_and_members(own_lens: list[int], num_shared: int, outsiders: list[int]) -> None:
    """Every length behind the prefix, requests that share it and others give what dense attention
    gives."""
    made, lens = sharing(
        own_lens, num_shared, outsiders=outsiders, group=7, head_dim=16, dtype=torch.float32,
        has_norm=False,
    )  # fmt: skip
    check(made, lens, config=SMALL)


@pytest.mark.parametrize(
    ("group", "head_dim", "block_size", "has_norm"),
    [(1, 80, 8, True), pytest.param(7, 24, 32, False, marks=pytest.mark.memcheck)],
)
def test_shapes(group: int, head_dim: int, block_size: int, has_norm: bool) -> None:
    """GQA ratios, head dims that are no power of two, QK-norm and block sizes change nothing."""
    made, lens = sharing(
        [3, 33], 3, group=group, head_dim=head_dim, block_size=block_size, dtype=torch.float32,
        has_norm=has_norm,
    )  # fmt: skip
    check(made, lens, config=SMALL)


def test_reference() -> None:
    """Prefix and rest apart, merged, are attention over all."""
    made, lens = sharing(
        [3, 0, 33, 7], 3, outsiders=[3], group=3, head_dim=16, dtype=torch.float32,
        has_norm=False, device=CPU,
    )  # fmt: skip
    case = made.it.case
    inputs = (
        made.q_rot, case.k_BGSD.nan_to_num(), case.v_BGSD.nan_to_num(),
        torch.from_numpy(case.block_table), torch.from_numpy(case.seq_lens),
    )  # fmt: skip
    expected = paged_decode_reference(*inputs, scale=0.25)
    found = shared_prefix_reference(*inputs, lens, scale=0.25)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-6)


@needs_gluon
@pytest.mark.parametrize(("num_splits", "num_parts"), [(1, 1), (3, 2)])
def test_gluon_goes_on_on_cpu(num_splits: int, num_parts: int) -> None:
    """The kernel of many requests goes on behind a prefix, with splits and without, given the sums
    of the other, and both add up a projection in parts: its source equals the reference."""
    from gluon_on_cpu import on_cpu

    made, lens = sharing(
        [1, 0, 65, 130, 16], 5, outsiders=[3], group=6, head_dim=64, dtype=torch.float16,
        has_norm=True, device=CPU,
    )  # fmt: skip
    own = hopper_decode.HopperDecodeConfig(num_splits, num_blocks=2, num_stages=2, min_rounds=1)

    def decode(*inputs: Tensor, k_norm_D: Tensor | None, **common: Any) -> Tensor:
        prefix = attend_prefix(*inputs, lens, num_own_splits=num_splits, config=SMALL, **common)
        return on_cpu(hopper_decode).hopper_rope_decode(
            *inputs, k_norm_D=k_norm_D, config=own, prefix=prefix, **common
        )

    run = decode if num_parts == 1 else in_parts(decode, made.qkv_RND, num_parts)
    check_fused(made, lambda: made.decoded_by(run))


def test_configs_fit_their_scratch() -> None:
    """Whatever the batch, both kernels' splits fit the scratch of the largest one."""
    for num_heads, num_kv_heads in ((12, 2), (32, 8), (7, 7), (71, 1), (300, 2)):
        for max_requests in (1, 4, 8, 64, 256, 1024):
            scratch = DecodeScratch.allocate(max_requests, num_heads, num_kv_heads, 2, CPU)
            for num_requests in {1, 3, 8, 40, 64, 100, 171, 256, 1024}:
                if num_requests > max_requests:
                    continue
                for dtype in (torch.bfloat16, torch.float32):
                    prefix = prefix_config(num_requests, num_heads, num_kv_heads, 128, dtype)
                    assert prefix.block_m >= num_heads // num_kv_heads
                    for is_long in (False, True):
                        own = decode_config(num_requests, num_kv_heads, 256, is_long=is_long)
                        splits = prefix.num_splits + min(own.num_splits, MAX_SPLITS_IN_PLACE)
                        needed = num_requests * num_heads * splits * 2
                        assert needed <= scratch.partials.numel()


def test_when_it_pays() -> None:
    """By what need not be read again, and not for a few requests."""
    assert is_faster(9, MIN_SAVED_BYTES // 8192, 1024)
    assert not is_faster(8, MIN_SAVED_BYTES // 8192, 1024)
    assert not is_faster(MIN_SHARING - 1, 10**9, 1024)
    # The kernel's own work grows with the requests.
    assert is_faster(128, 2048, 1024) and not is_faster(128, 1024, 1024)
    assert is_faster(256, 1024, 1024) and not is_faster(256, 512, 1024)
    assert is_faster(64, 1024, 4096) and not is_faster(1024, 512, 1024)


def test_arguments_that_are_refused() -> None:
    """Each error names what it met."""
    made, lens = sharing([3, 33], 1, group=3, head_dim=16, dtype=torch.float32, has_norm=False)

    def decode(*inputs: Tensor, k_norm_D: None, **common: Any) -> Tensor:
        return attend_prefix(*inputs, lens, **{"num_own_splits": 1} | common)

    def refused(message: str, run: Callable[..., Tensor], **options: Any) -> None:
        with pytest.raises(ValueError, match=message):
            made.decoded_by(run, **options)

    small = DecodeScratch.allocate(1, 6, 2, 2, CPU)
    refused("at most 16 splits", decode, config=Config(16, 16, 32, 4, 1))
    refused("3 heads", decode, config=Config(2, 16, 2, 4, 1))
    refused("2 requests need", decode, num_own_splits=10**9)
    refused("bias is", decode, bias_N=lens)

    def whole(*inputs: Tensor, **common: Any) -> Tensor:
        return shared_prefix_decode(*inputs, lens, **common)

    refused("on_hopper alone", in_parts(whole, made.qkv_RND, 2))
    with pytest.raises(ValueError, match="scale 0"):
        attend_prefix(
            made.qkv_RND, made.rope.cos_PD, made.rope.sin_PD, made.it.k_BGSD, made.it.v_BGSD,
            made.it.table, made.it.rows, made.it.seq_lens, lens, scale=0.0, scratch=small,
            num_own_splits=1,
        )  # fmt: skip
    prefix = shared_prefix.AttendedPrefix(lens, 2)
    long = decode_config(1, 1, 256, is_long=True)
    refused("128 splits behind a prefix", rope_paged_decode, config=long, prefix=prefix)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "head_dim", "block_size", "group", "batch", "has_norm", "on_hopper"),
    pairwise(
        list(ALLOWED),
        [64, 80, 96, 128, 256],
        [8, 16, 32, 64],
        [1, 2, 3, 6, 7, 8],
        ["few", "some", "many", "long"],
        [False, True],
        [False, True],
    ),
)
def test_grid(
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    group: int,
    batch: str,
    has_norm: bool,
    on_hopper: bool,
) -> None:
    """Every head dim, block size, GQA ratio and dtype, small and large tiles, short and long
    prefixes, followed by either kernel: pairwise, any two of these values meet in a case."""
    own_lens, num_tokens, outsiders = {
        "few": ([1, 0, 17, 64, 300], 320, [2]),
        "some": ([7, 1, 129, 64] * 12, 1024, [0, 3, 40]),
        "many": ([7, 30, 1, 64, 0] * 52, 192, list(range(100, 140))),
        "long": ([3, 500, 90, 20, 1, 64, 1, 5], 4096 + 64, []),
    }[batch]
    made, lens = sharing(
        own_lens, num_tokens // block_size, outsiders=outsiders, group=group, head_dim=head_dim,
        block_size=block_size, dtype=dtype, has_norm=has_norm,
    )  # fmt: skip
    can_take = hopper_decode.can_take(DEVICE, dtype, 2 * group, 2, head_dim, block_size)
    first = check(made, lens, on_hopper=on_hopper and can_take)
    again = check(made, lens, on_hopper=on_hopper and can_take)
    assert torch.equal(first, again)


@pytest.mark.gpu
@on_hopper
@pytest.mark.memcheck
@pytest.mark.parametrize(("on_hopper", "num_parts"), [(False, 1), (True, 1), (True, 2)])
def test_small(on_hopper: bool, num_parts: int) -> None:
    """A few requests on tensor cores."""
    made, lens = sharing(
        [1, 0, 16, 100, 33], 9, outsiders=[3], group=6, head_dim=128, dtype=torch.bfloat16,
        has_norm=True,
    )  # fmt: skip
    check(made, lens, on_hopper=on_hopper, num_parts=num_parts)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("goes_on_hopper", [False, True])
def test_graph_serves_other_prefixes(goes_on_hopper: bool) -> None:
    """A graph captured where nobody shares anything serves any prefix, started before the product
    ahead of it is over."""
    made, lens = sharing(
        [30, 40, 70, 17] * 16, 40, outsiders=[5], group=6, head_dim=128, dtype=torch.bfloat16,
        has_norm=False,
    )  # fmt: skip

    def run() -> Tensor:
        def decode(*inputs: Tensor, **common: Any) -> Tensor:
            return shared_prefix_decode(*inputs, lens, on_hopper=goes_on_hopper, **common)

        return made.decoded_by(decode)

    expected = run()
    qkv, hidden, sent = made.qkv_RND.clone(), made.qkv_RND[:, 0].clone(), lens.clone()
    lens.zero_()
    _ = hidden @ hidden.T @ hidden  # cuBLAS cannot begin in a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden.copy_(hidden @ hidden.T @ hidden)
        made.qkv_RND.copy_(qkv)
        out = run()
    lens.copy_(sent)
    for _ in range(20):
        made.qkv_RND.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)
