"""RoPE with the store of new KV: the Triton kernel against its plain twin."""

from __future__ import annotations

import pytest
import torch
from paged import LAYER, empty_layer
from pairwise import pairwise

from pico_vllm.config.model import RopeConfig
from pico_vllm.kernels.rope_store_kv import rope_store_kv, rope_store_kv_reference
from pico_vllm.layers.rope import Rope, apply_rope

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ALLOWED = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Relative: one rounding to the dtype, and one more where a normalised value rounds otherwise."""
NUM_POSITIONS = 300


def check(
    num_tokens: int,
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    has_norm: bool = False,
    num_parts: int = 0,
    has_bias: bool = False,
) -> None:
    """num_parts: 0 for a projection in one piece. Every third token is padding. Values are equal as
    bits, but for sums, as are all unused slots."""
    H, G = num_heads, num_kv_heads
    num_blocks = 2 + 2 * num_tokens // block_size
    slots = torch.randperm((num_blocks - 1) * block_size)[:num_tokens] + block_size
    slots[1::3] = -1
    positions = torch.randint(NUM_POSITIONS, (num_tokens,))
    # Wider than it is used: not contiguous.
    fused = torch.randn(max(num_parts, 1), num_tokens, H + 2 * G + 1, head_dim).to(dtype)
    qkv = fused[:, :, 1:] if num_parts else fused[0, :, 1:]
    given: dict[str, torch.Tensor | float] = {}
    if has_norm:
        weights = (1 + 0.1 * torch.randn(2, head_dim)).to(dtype)
        given = {"q_norm": weights[0], "k_norm": weights[1], "eps": 1e-6}
    if has_bias:
        given["bias_N"] = torch.randn((H + 2 * G) * head_dim).to(dtype)
    rope = Rope(RopeConfig(theta=10000.0), head_dim, NUM_POSITIONS)
    k_BGSD, _ = empty_layer(num_blocks, G, block_size, head_dim, dtype)
    expected_pool = k_BGSD._base
    assert expected_pool is not None
    pool = expected_pool.to(DEVICE, copy=True)
    expected = rope_store_kv_reference(
        qkv, rope.cos_PD, rope.sin_PD, positions, slots,
        expected_pool[:, :, LAYER, 0], expected_pool[:, :, LAYER, 1], **given,
    )  # fmt: skip
    num_out = H + (2 * G if num_parts else G)
    out = torch.full((num_tokens, num_out, head_dim), float("nan"), dtype=dtype, device=DEVICE)
    on_device = {
        name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in given.items()
    }
    on_device_qkv = fused.to(DEVICE)[:, :, 1:] if num_parts else fused.to(DEVICE)[0, :, 1:]
    returned = rope_store_kv(
        on_device_qkv, rope.cos_PD.to(DEVICE), rope.sin_PD.to(DEVICE),
        positions.to(DEVICE), slots.to(DEVICE), pool[:, :, LAYER, 0], pool[:, :, LAYER, 1],
        out=out, **on_device,
    )  # fmt: skip
    assert returned is out
    close = {"atol": ALLOWED[dtype], "rtol": ALLOWED[dtype], "equal_nan": True}
    torch.testing.assert_close(out.cpu(), expected, **close)
    stored = pool.cpu()
    torch.testing.assert_close(stored, expected_pool, **close)
    # Values are copied and all else is left: but for rotated keys, the same bits. Sums of parts may
    # be rounded the other way.
    if num_parts > 1 or has_bias:
        for each in (stored, expected_pool):
            each[:, :, LAYER, 1].nan_to_num_(nan=1.0).fill_(0)
    for each in (stored, expected_pool):
        each[:, :, LAYER, 0].nan_to_num_(nan=1.0).fill_(0)
    assert torch.equal(stored.view(torch.uint8), expected_pool.view(torch.uint8))


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size", "dtype"),
    [
        (12, 2, 128, 16, torch.bfloat16),
        pytest.param(3, 3, 80, 8, torch.float32, marks=pytest.mark.memcheck),
        pytest.param(20, 5, 8, 64, torch.float16, marks=pytest.mark.memcheck),
    ],
)
def test_same_as_the_twin(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    has_norm: bool,
) -> None:
    """Queries, keys, values and every unused slot are those of the twin, padding or not."""
    check(
        20,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        has_norm=has_norm,
    )


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(
    ("num_parts", "has_bias", "num_heads", "num_kv_heads", "head_dim", "dtype"),
    [
        (1, True, 3, 3, 80, torch.float32),
        pytest.param(4, True, 12, 2, 128, torch.bfloat16, marks=pytest.mark.memcheck),
        (3, False, 20, 5, 8, torch.float16),
    ],
)
def test_a_projection_in_parts(
    num_parts: int,
    has_bias: bool,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    has_norm: bool,
) -> None:
    """Parts and bias are added up, values go to the output too, padding or not."""
    check(
        20,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        has_norm=has_norm,
        num_parts=num_parts,
        has_bias=has_bias,
    )


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_few_tokens(num_tokens: int) -> None:
    """One token and none are steps like any other."""
    check(num_tokens)


def test_the_twin_rotates_as_the_layer_does() -> None:
    """The twin gives what layers/rope.py gives."""
    qkv = torch.randn(7, 4, 32)
    rope = Rope(RopeConfig(theta=10000.0), 32, 50)
    positions = torch.randint(50, (7,))
    k_BGSD, v_BGSD = empty_layer(3, 1, 16, 32, torch.float32)
    slots = torch.arange(16, 23)
    found = rope_store_kv_reference(qkv, rope.cos_PD, rope.sin_PD, positions, slots, k_BGSD, v_BGSD)
    rotated = apply_rope(qkv[:, :3], *rope.gather(positions, torch.float32))
    torch.testing.assert_close(found, rotated)
    torch.testing.assert_close(k_BGSD[1, 0, :7], rotated[:, 2])
    assert torch.equal(v_BGSD[1, 0, :7], qkv[:, 3])


def test_arguments_that_are_refused() -> None:
    """Each error names what it met."""
    pool = torch.zeros(3, 2, 1, 2, 4, 8, device=DEVICE)
    k, v = pool[:, :, 0, 0], pool[:, :, 0, 1]
    qkv = torch.zeros(5, 6, 8, device=DEVICE)
    table = torch.zeros(9, 8, device=DEVICE)
    ids = torch.zeros(5, dtype=torch.int64, device=DEVICE)
    weight = torch.ones(8, device=DEVICE)
    cases = [
        ((qkv[..., :7], table, table, ids, ids, k, v), {}, "head_dim 7 is odd"),
        ((qkv[:, :4], table, table, ids, ids, k, v), {}, r"qkv is \[5, 4, 8\]"),
        ((qkv, table, table, ids[:3], ids, k, v), {}, r"positions are \[3\] for 5 tokens"),
        ((qkv, table, table, ids, ids.int(), k, v), {}, "torch.int32; 5 tokens need"),
        ((qkv, table.half(), table, ids, ids, k, v), {}, r"\[9, 8\] torch.float16"),
        ((qkv, table, table[::2], ids, ids, k, v), {}, "need equal strides"),
        ((qkv, table, table, ids, ids, k, v), {"q_norm": weight}, "together or not at all"),
        (
            (qkv, table, table, ids, ids, k, v),
            {"q_norm": weight, "k_norm": weight[:4]},
            r"weights are \[4\]",
        ),
        ((qkv, table, table, ids, ids, k, v), {"out": qkv}, r"out is \[5, 6, 8\]"),
        ((qkv, table, table, ids, ids, k, v), {"bias_N": weight}, r"bias of \[8\]: 48"),
        ((qkv[None], table, table, ids, ids, k, v), {"bias_N": weight}, r"bias of \[8\]: 48"),
    ]
    for arguments, keywords, message in cases:
        with pytest.raises(ValueError, match=message):
            rope_store_kv(*arguments, **keywords)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "head_dim", "block_size", "group", "num_kv_heads", "has_norm", "num_parts"),
    pairwise(
        list(ALLOWED), [64, 80, 96, 128, 256], [8, 16, 32, 64], range(1, 9), [1, 8], [False, True],
        [0, 1, 2, 3, 4],
    ),
)  # fmt: skip
def test_grid(
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    group: int,
    num_kv_heads: int,
    has_norm: bool,
    num_parts: int,
) -> None:
    """Every head dim, block size, GQA ratio and dtype, with QK-norm and without, in one piece and
    in parts with a bias: pairwise, any two of these values meet in a case."""
    check(
        70,
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        has_norm=has_norm,
        num_parts=num_parts,
        has_bias=num_parts > 0,
    )


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31() -> None:
    """A pool of more than 2^31 elements is written at its end and nowhere else."""
    num_blocks, shape = 70_000, (2, 8, 2, 16, 64)
    pool = torch.zeros((num_blocks, *shape), dtype=torch.bfloat16, device=DEVICE)
    assert pool.numel() > 2**31
    rope = Rope(RopeConfig(theta=10000.0), 64, 10, DEVICE)
    qkv = torch.ones(2, 8, 64, dtype=torch.bfloat16, device=DEVICE)
    slots = torch.tensor([num_blocks * 16 - 1, -1], device=DEVICE)
    # At position 0 nothing turns.
    rope_store_kv(
        qkv, rope.cos_PD, rope.sin_PD, torch.zeros_like(slots), slots,
        pool[:, :, 7, 0], pool[:, :, 7, 1],
    )  # fmt: skip
    assert (pool[-1, :, 7, :, 15] == 1).all()
    assert pool.count_nonzero() == 2 * 2 * 64
