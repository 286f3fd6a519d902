"""Paged decode attention: the Triton kernel against its plain twin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from paged import PagedCase, paged_case
from pairwise import pairwise
from torch import Tensor

from pico_vllm.config.model import RopeConfig
from pico_vllm.kernels.paged_decode import (
    DecodeConfig,
    DecodeScratch,
    are_long,
    decode_config,
    paged_decode,
    paged_decode_reference,
    rope_paged_decode,
)
from pico_vllm.layers.rope import Rope, apply_rope

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ALLOWED = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""About twice what rounding the result and the weights to the dtype costs."""


@dataclass
class OnDevice:
    case: PagedCase
    pool: Tensor
    """[B, G, L, 2, S, D]"""
    k_BGSD: Tensor
    v_BGSD: Tensor
    table: Tensor
    rows: Tensor
    seq_lens: Tensor
    scratch: DecodeScratch


def on_device(case: PagedCase, num_heads: int, device: torch.device = DEVICE) -> OnDevice:
    """The requests' table rows in reverse order, after a row of null blocks that nobody owns."""
    num_requests = len(case.seq_lens)
    table = np.where(case.block_table < 2**30, case.block_table, 2**31 - 1)
    table = np.concatenate((np.zeros_like(table[:1]), table[::-1]))
    base = case.k_BGSD._base
    assert base is not None
    pool = base.to(device)
    return OnDevice(
        case,
        pool,
        pool[:, :, 1, 0],
        pool[:, :, 1, 1],
        torch.from_numpy(table).to(device),
        torch.arange(num_requests, 0, -1, dtype=torch.int32, device=device),
        torch.from_numpy(case.seq_lens).to(device),
        DecodeScratch.allocate(
            max(num_requests, 8), num_heads, case.k_BGSD.shape[1], case.k_BGSD.shape[3], device
        ),
    )


def check(
    seq_lens: list[int],
    *,
    group: int = 3,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    is_long: bool = False,
    config: DecodeConfig | None = None,
) -> None:
    case = paged_case(
        seq_lens,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    )
    num_heads = group * num_kv_heads
    it = on_device(case, num_heads)
    generator = torch.Generator().manual_seed(1)
    q_RHD = torch.randn(len(seq_lens), num_heads, head_dim, generator=generator).to(dtype)
    scale = head_dim**-0.5
    expected = paged_decode_reference(
        q_RHD.float(),
        case.k_BGSD.float(),
        case.v_BGSD.float(),
        torch.from_numpy(case.block_table),
        torch.from_numpy(case.seq_lens),
        scale=scale,
    )
    for _ in range(2):  # the second launch meets the counters that the first one left
        out = paged_decode(
            q_RHD.to(DEVICE), it.k_BGSD, it.v_BGSD, it.table, it.rows, it.seq_lens,
            scale=scale, scratch=it.scratch, is_long=is_long, config=config,
        )  # fmt: skip
        torch.testing.assert_close(
            out.cpu().float(), expected, atol=ALLOWED[dtype], rtol=ALLOWED[dtype]
        )
    assert not it.scratch.counters.any()


@pytest.mark.memcheck
@pytest.mark.parametrize("seq_lens", [[1], [15, 16, 17, 0], [0], [100, 3, 64, 65, 1]])
def test_lengths_around_blocks_and_tiles(seq_lens: list[int]) -> None:
    """Every length gives what dense attention gives, and length 0 gives zeros."""
    check(seq_lens, num_kv_heads=1)  # a program for each of 16 splits of each head


@pytest.mark.parametrize(
    ("group", "head_dim", "block_size"),
    [(1, 80, 8), pytest.param(7, 96, 32, marks=pytest.mark.memcheck), (4, 128, 64)],
)
def test_shapes(group: int, head_dim: int, block_size: int) -> None:
    """GQA ratios, head dims that are no power of two, and block sizes change nothing."""
    check([33, 70], group=group, head_dim=head_dim, block_size=block_size)


@pytest.mark.parametrize("seq_lens", [[300], pytest.param([0, 129], marks=pytest.mark.memcheck)])
def test_splits_for_long_contexts(seq_lens: list[int]) -> None:
    """Splits that a second kernel adds up give the same."""
    check(seq_lens, num_kv_heads=1, is_long=True)


@pytest.mark.memcheck
def test_tiles_in_shared_memory() -> None:
    """What many requests get gives the same: tiles by asynchronous copies, with splits and
    without."""
    for num_splits in (1, 2):
        config = DecodeConfig(block_n=32, num_splits=num_splits, num_warps=4, num_stages=3)
        check([33, 0, 100, 1], head_dim=80, config=config)


@dataclass
class Fused:
    """A step's fused projection with all that the kernel needs, and what it must give."""

    it: OnDevice
    qkv_RND: Tensor
    rope: Rope
    scale: float
    norms: tuple[Tensor, Tensor] | None
    q_rot: Tensor
    k_rot: Tensor
    is_long: bool

    def run(self) -> Tensor:
        return self.decoded_by(rope_paged_decode, is_long=self.is_long)

    def decoded_by(self, decode: Callable[..., Tensor], **options: Any) -> Tensor:
        q_norm, k_norm = self.norms or (None, None)
        it = self.it
        return decode(
            self.qkv_RND, self.rope.cos_PD, self.rope.sin_PD, it.k_BGSD, it.v_BGSD, it.table,
            it.rows, it.seq_lens, scale=self.scale, scratch=it.scratch,
            q_norm_D=q_norm, k_norm_D=k_norm, eps=1e-6, **options,
        )  # fmt: skip


def fused(
    seq_lens: list[int],
    *,
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    has_norm: bool,
    block_size: int = 16,
    is_long: bool = False,
    device: torch.device = DEVICE,
    num_shared: int = 0,
    outsiders: Sequence[int] = (),
) -> Fused:
    """All begin with the same num_shared blocks, but for outsiders, which repeat the first one."""
    G, H = 2, 2 * group
    case = paged_case(
        seq_lens, num_kv_heads=G, head_dim=head_dim, block_size=block_size, dtype=dtype,
        num_shared=num_shared,
    )  # fmt: skip
    for r in outsiders:
        case.block_table[r, :num_shared] = case.block_table[r, 0]
    it = on_device(case, H, device)
    generator = torch.Generator().manual_seed(2)
    qkv = torch.randn(len(seq_lens), H + 2 * G, head_dim, generator=generator).to(dtype)
    rope = Rope(RopeConfig(theta=10000.0), head_dim, 5000, device)
    norms = None
    qk = qkv[:, : H + G].float()
    if has_norm:
        q_norm, k_norm = (
            (1 + 0.1 * torch.randn(head_dim, generator=generator)).to(dtype) for _ in range(2)
        )
        norms = (q_norm.to(device), k_norm.to(device))
        weights = torch.cat((q_norm.expand(H, -1), k_norm.expand(G, -1))).float()
        qk = qk * torch.rsqrt(qk.pow(2).mean(-1, keepdim=True) + 1e-6) * weights
        qk = qk.to(dtype).float()
    positions = torch.from_numpy(np.maximum(case.seq_lens - 1, 0)).to(device)
    cos, sin = (x.cpu() for x in rope.gather(positions, torch.float32))
    rotated = apply_rope(qk, cos, sin).to(dtype)
    return Fused(
        it, qkv.to(device), rope, head_dim**-0.5, norms, rotated[:, :H], rotated[:, H:], is_long
    )


def check_fused(made: Fused, run: Callable[[], Tensor] | None = None) -> Tensor:
    case, qkv = made.it.case, made.qkv_RND.cpu()
    H, G = made.q_rot.shape[1], made.k_rot.shape[1]
    dtype, block_size = qkv.dtype, case.k_BGSD.shape[2]
    pool = case.k_BGSD._base
    assert pool is not None
    expected_pool = pool.clone()
    for r, seq_len in enumerate(case.seq_lens.tolist()):
        if seq_len:
            block = int(case.block_table[r, (seq_len - 1) // block_size])
            at = (block, slice(None), 1, slice(None), (seq_len - 1) % block_size)
            expected_pool[at] = torch.stack((made.k_rot[r], qkv[r, H + G :]), dim=1)
    expected = paged_decode_reference(
        made.q_rot.float(), expected_pool[:, :, 1, 0].float(), expected_pool[:, :, 1, 1].float(),
        torch.from_numpy(case.block_table), torch.from_numpy(case.seq_lens), scale=made.scale,
    )  # fmt: skip
    out = (run or made.run)().cpu()
    allowed = 2 * ALLOWED[dtype]
    torch.testing.assert_close(out.float(), expected, atol=allowed, rtol=allowed)
    torch.testing.assert_close(
        made.it.pool.cpu(), expected_pool, atol=ALLOWED[dtype], rtol=ALLOWED[dtype], equal_nan=True
    )
    # Rounding of K apart, nothing but the new tokens' slots changed.
    changed = made.it.pool.cpu().view(torch.uint8) != pool.view(torch.uint8)
    allowed_change = expected_pool.view(torch.uint8) != pool.view(torch.uint8)
    slots = [changed, allowed_change]
    slots = [x.view(*pool.shape[:5], -1).any(-1) for x in slots]
    assert torch.equal(slots[0] & ~slots[1], torch.zeros_like(slots[0]))
    return out


@pytest.mark.parametrize("has_norm", [pytest.param(False, marks=pytest.mark.memcheck), True])
def test_fused_rope_store_and_attention(has_norm: bool) -> None:
    """The fused kernel rotates, stores the new KV in its slot alone, and attends over it too."""
    made = fused([1, 16, 17, 0, 70], group=3, head_dim=64, dtype=torch.float32, has_norm=has_norm)
    check_fused(made)


def test_into_memory_that_is_there() -> None:
    """What is given to be written to gets the answer, and nothing around it."""
    made = fused([5, 33], group=3, head_dim=64, dtype=torch.float32, has_norm=False)
    it = made.it
    around = torch.full((4, *made.q_rot.shape[1:]), float("nan"), device=DEVICE)
    out = around[1:-1]

    def run(out: Tensor | None) -> Tensor:
        return paged_decode(
            made.q_rot.to(DEVICE), it.k_BGSD, it.v_BGSD, it.table, it.rows, it.seq_lens,
            scale=made.scale, scratch=it.scratch, out=out,
        )  # fmt: skip

    assert run(out) is out
    assert torch.equal(out, run(None)) and around[[0, -1]].isnan().all()
    for wrong in (out[:-1], out.double(), torch.empty_like(out).transpose(0, 1)):
        with pytest.raises(ValueError, match=r"out is .* it must be .* contiguous"):
            run(wrong)


@pytest.mark.memcheck
def test_fused_odd_head_dim_half() -> None:
    """A head dim that is no power of two rotates by its own half."""
    check_fused(fused([40, 2], group=2, head_dim=80, dtype=torch.float32, has_norm=True))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "head_dim", "block_size", "group", "work", "kind"),
    pairwise(
        list(ALLOWED),
        [64, 80, 96, 128, 256],
        [8, 16, 32, 64],
        range(1, 9),
        ["16 splits", "128 splits", "no splits", "4 splits"],
        ["attention", "fused", "fused with norm"],
    ),
)
def test_grid(
    dtype: torch.dtype, head_dim: int, block_size: int, group: int, work: str, kind: str
) -> None:
    """Every head dim, block size, GQA ratio and dtype, attention alone and fused, with one split
    and with many: pairwise, any two of these values meet in a case."""
    S = block_size
    batches = {
        "16 splits": ([1, 0, S - 1, S, S + 1, 1500], [5000]),
        "128 splits": ([5000],),
        "no splits": ([7, 300, 129, 64, 0] * 32,),
        "4 splits": ([3000, 7, 64, 0] * 10,),
    }
    shape = {"group": group, "head_dim": head_dim, "block_size": S, "dtype": dtype}
    for seq_lens in batches[work]:
        settings = shape | {"is_long": work in ("128 splits", "4 splits")}
        if kind == "attention":
            check(seq_lens, **settings)
        else:
            check_fused(fused(seq_lens, has_norm=kind == "fused with norm", **settings))


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31() -> None:
    """A pool of more than 2^31 elements is addressed to its end."""
    num_blocks, shape = 70_000, (2, 8, 2, 16, 64)
    pool = torch.empty((num_blocks, *shape), dtype=torch.bfloat16, device=DEVICE)
    assert pool.numel() > 2**31
    pool[-3:].normal_()
    k_BGSD, v_BGSD = pool[:, :, 7, 0], pool[:, :, 7, 1]
    table = torch.tensor([[num_blocks - 1, num_blocks - 3]], dtype=torch.int32, device=DEVICE)
    seq_lens = torch.tensor([30], dtype=torch.int32, device=DEVICE)
    q_RHD = torch.randn(1, 4, 64, device=DEVICE).bfloat16()
    out = paged_decode(
        q_RHD, k_BGSD, v_BGSD, table, torch.zeros_like(seq_lens), seq_lens, scale=0.125,
        scratch=DecodeScratch.allocate(1, 4, 2, 64, DEVICE),
    )  # fmt: skip
    expected = paged_decode_reference(
        q_RHD.float(), k_BGSD[-3:].float(), v_BGSD[-3:].float(),
        table - (num_blocks - 3), seq_lens, scale=0.125,
    )  # fmt: skip
    torch.testing.assert_close(out.float(), expected, atol=1.6e-2, rtol=1.6e-2)


def test_number_of_splits_depends_on_the_batch_alone() -> None:
    """Few requests are cut into many splits, many into one."""
    for is_long, expected in ((True, [128, 64, 16, 8, 4, 2, 1]), (False, [16, 16, 16, 4, 2, 1, 1])):
        configs = [decode_config(n, 2, 256, is_long=is_long) for n in (1, 2, 8, 32, 64, 128, 300)]
        assert [config.num_splits for config in configs] == expected


@pytest.mark.parametrize(
    ("context_lens", "expected"),
    [
        ([], False),
        ([2047], False),
        ([3, 2048], True),
        ([2047] * 31, False),
        ([400] * 32, True),
        ([399] * 32, False),
        ([100] * 100 + [2048], True),
    ],
)
def test_contexts_are_long_alone_or_on_average(context_lens: list[int], expected: bool) -> None:
    """One long context counts, and many of some length."""
    assert are_long(np.array(context_lens, np.int32)) == expected


def test_bad_shapes_are_refused() -> None:
    """Heads that do not share KV heads evenly, and mixed dtypes, are named."""
    it = on_device(paged_case([5], num_kv_heads=2), 6)
    arguments = (it.table, it.rows, it.seq_lens)
    q = torch.zeros(1, 7, 64, device=DEVICE)
    with pytest.raises(ValueError, match="7 query heads"):
        paged_decode(q, it.k_BGSD, it.v_BGSD, *arguments, scale=1.0, scratch=it.scratch)
    with pytest.raises(ValueError, match="dtypes differ"):
        paged_decode(
            q[:, :6].half().contiguous(), it.k_BGSD, it.v_BGSD, *arguments,
            scale=1.0, scratch=it.scratch,
        )  # fmt: skip
