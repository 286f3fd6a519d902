"""Decode attention of many requests in Gluon: source on the CPU, code for sm_90, and on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled import resources_of
from pairwise import pairwise
from test_paged_decode import Fused, check_fused, fused
from torch import Tensor

from pico_vllm.kernels import hopper_decode as source
from pico_vllm.kernels.gluon import HAS_GLUON
from pico_vllm.kernels.hopper_decode import (
    BLOCK_SIZES,
    HEAD_DIMS,
    MAX_SHARED_BYTES,
    HopperDecodeConfig,
    can_take,
    decode_config,
    hopper_rope_decode,
)
from pico_vllm.kernels.launch import NUM_MULTIPROCESSORS
from pico_vllm.kernels.paged_decode import DecodeScratch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16]
needs_gluon = pytest.mark.skipif(not HAS_GLUON, reason="this Triton has no Gluon")
on_hopper = pytest.mark.skipif(
    not can_take(DEVICE, torch.bfloat16, 12, 2, 128, 16), reason="needs a Hopper and Gluon"
)
Config = HopperDecodeConfig


def emulated() -> Callable[..., Tensor]:
    from gluon_on_cpu import on_cpu  # needs Gluon

    return on_cpu(source).hopper_rope_decode


def made_with(
    seq_lens: list[int],
    *,
    group: int = 6,
    head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    has_norm: bool = False,
    block_size: int = 16,
    device: torch.device = DEVICE,
) -> Fused:
    return fused(
        seq_lens, group=group, head_dim=head_dim, dtype=dtype, has_norm=has_norm,
        block_size=block_size, device=device,
    )  # fmt: skip


def with_room(made: Fused, config: Config | None) -> None:
    """A scratch for so many splits, which begins as NaN."""
    if config is None:
        return
    scratch, num_requests = made.it.scratch, len(made.qkv_RND)
    num_heads, head_dim = made.q_rot.shape[1:]
    num_rows = num_requests * config.num_splits * num_heads
    made.it.scratch = DecodeScratch(
        scratch.partials.new_full((num_rows * head_dim,), float("nan")),
        scratch.stats.new_full((num_rows * 2,), float("nan")),
        scratch.counters,
    )


def check(
    made: Fused, config: Config | None, decode: Callable[..., Tensor] = hopper_rope_decode
) -> Tensor:
    with_room(made, config)
    out = check_fused(made, lambda: made.decoded_by(decode, config=config))
    assert not made.it.scratch.counters.any()
    return out


def in_parts(decode: Callable[..., Tensor], qkv_RND: Tensor, num_parts: int) -> Any:
    """decode, of parts that with a bias add up to this projection, all of them large."""
    generator = torch.Generator().manual_seed(3)
    bias_ND = torch.randn(qkv_RND.shape[1:], generator=generator).to(qkv_RND)
    rest = qkv_RND.float() - bias_ND.float()
    parts = []
    for left in range(num_parts, 1, -1):
        share = torch.randn(rest.shape, generator=generator).to(rest) if left > 2 else rest
        parts.append(share.to(qkv_RND))
        rest = rest - parts[-1].float()
    parts_SRND = torch.stack([*parts, rest.to(qkv_RND)])

    def run(qkv: Tensor, *arguments: Tensor, **options: Any) -> Tensor:
        return decode(parts_SRND, *arguments, bias_N=bias_ND.flatten(), **options)

    run.parts_SRND = parts_SRND  # type: ignore[attr-defined]
    return run


def check_on_cpu(made: Fused, config: Config | None, decode: Any = None) -> None:
    """As check, and the kernel before is not over when this one starts."""
    from gluon_on_cpu import written_before

    with written_before(made.qkv_RND):
        check(made, config, decode or emulated())


@needs_gluon
@pytest.mark.parametrize("seq_lens", [[0, 1, 2, 15], [16, 17, 31, 32, 33], [160, 0, 65]])
@pytest.mark.parametrize(
    "config",
    [
        None,
        Config(num_splits=1, num_blocks=1, num_stages=2, min_rounds=1),
        # More splits than there are rounds, and splits that refill their ring.
        Config(num_splits=4, num_blocks=2, num_stages=2, min_rounds=1),
        Config(num_splits=2, num_blocks=1, num_stages=3, min_rounds=3),
    ],
)
def test_source_on_cpu(seq_lens: list[int], config: Config | None) -> None:
    """Lengths around blocks, rounds and splits, among NaN where nothing was stored: the kernel's
    source, each copy as late as it may be, equals the reference in fp32."""
    check_on_cpu(made_with(seq_lens, device=CPU), config)


@needs_gluon
@pytest.mark.parametrize(
    ("group", "head_dim", "block_size", "dtype", "has_norm"),
    pairwise([1, 2, 6, 9, 16], HEAD_DIMS, BLOCK_SIZES, DTYPES, [False, True]),
)
def test_shapes_on_cpu(
    group: int, head_dim: int, block_size: int, dtype: torch.dtype, has_norm: bool
) -> None:
    """GQA ratios, head dims, block sizes, dtypes and QK-norm: pairwise, any two of these values
    meet in a case."""
    made = made_with(
        [1, block_size + 1, 130], group=group, head_dim=head_dim, dtype=dtype, has_norm=has_norm,
        block_size=block_size, device=CPU,
    )  # fmt: skip
    check_on_cpu(made, Config(num_splits=2, num_blocks=2, num_stages=2, min_rounds=1))


@needs_gluon
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("num_parts", [2, 4])
def test_parts_on_cpu(num_parts: int, has_norm: bool) -> None:
    """A projection in parts, and a bias, give what their sum gives."""
    from gluon_on_cpu import written_before

    made = made_with([33, 1, 16], has_norm=has_norm, device=CPU)
    decode = in_parts(emulated(), made.qkv_RND, num_parts)
    with written_before(decode.parts_SRND):
        check(made, None, decode)


@needs_gluon
@pytest.mark.parametrize("left_out", ["gdc_wait", "_put_new_token"])
def test_the_emulation_finds_what_is_left_out(left_out: str) -> None:
    """Without one of these the checks above fail."""
    decode = emulated()
    decode.__globals__[left_out] = lambda *arguments: None
    with pytest.raises(AssertionError):
        check_on_cpu(made_with([40, 7], device=CPU), None, decode)


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from pico_vllm.kernels.hopper_decode import (
    MAX_PREFIX_SPLITS, MAX_SPLITS_IN_PLACE, PREFIX_STEP, _hopper_decode_kernel as kernel,
    decode_config,
)

dtype, (R, D, S, group, num_parts, has_norm, has_prefix) = sys.argv[1], map(int, sys.argv[2:])
config = decode_config(R, 2, S, D)
tile = [2 * S, D]
layout = gl.NVMMASharedLayout.get_default_for(tile, gl.bfloat16)
types = {f"{x}_ptr": f"*{dtype}" for x in ("qkv", "k", "v", "out", "q_norm", "k_norm", "bias")}
types |= {f"{x}_ptr": "*fp32" for x in ("partial", "stats", "cos", "sin")}
types |= {f"{x}_ptr": "*i32" for x in ("table", "rows", "seq_lens", "prefix_lens", "counter")}
types |= {f"{x}_stride": "i32" for x in ("part", "block", "head", "table")}
aligned = list(types)
types |= {"num_splits": "i32", "num_prefix_splits": "i32", "min_rounds": "i32"}
types |= {"kv_desc": f"tensordesc<{dtype}{tile},{layout!r}>", "scale_log2": "fp32", "eps": "fp32"}
names = [p.name for p in kernel.params]
source = GluonASTSource(
    fn=kernel,
    signature={name: types.get(name, "constexpr") for name in names},
    constexprs=dict(
        NUM_KV_HEADS=2, GROUP=group, D=D, S=S, NUM_BLOCKS=config.num_blocks,
        NUM_STAGES=config.num_stages, HAS_NORM=bool(has_norm), USE_PDL=True,
        NUM_PARTS=num_parts, HAS_BIAS=num_parts > 1,
        MAX_SPLITS=MAX_SPLITS_IN_PLACE + has_prefix * MAX_PREFIX_SPLITS,
        HAS_PREFIX=bool(has_prefix), PREFIX_STEP=PREFIX_STEP,
    ),
    attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
)
options = {"num_warps": 1, "launch_pdl": True}
code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
"""


@needs_gluon
@pytest.mark.parametrize(
    (
        "dtype",
        "num_requests",
        "head_dim",
        "block_size",
        "group",
        "num_parts",
        "has_norm",
        "has_prefix",
    ),
    [
        ("bf16", 256, 128, 16, 6, 4, 0, 0),
        pytest.param("bf16", 64, 128, 16, 6, 1, 0, 0, marks=pytest.mark.slow),
        pytest.param("bf16", 256, 128, 16, 6, 1, 0, 1, marks=pytest.mark.slow),
        pytest.param("bf16", 256, 128, 16, 2, 4, 1, 0, marks=pytest.mark.slow),
        pytest.param("fp16", 16, 64, 32, 16, 1, 1, 1, marks=pytest.mark.slow),
        pytest.param("bf16", 16, 128, 64, 9, 2, 0, 0, marks=pytest.mark.slow),
    ],
)
def test_compiles_for_hopper(
    dtype: str,
    num_requests: int,
    head_dim: int,
    block_size: int,
    group: int,
    num_parts: int,
    has_norm: int,
    has_prefix: int,
    tmp_path: Path,
) -> None:
    """It becomes code for sm_90 that spills no registers, and of which as many programs fit a
    multiprocessor as the launch gives each."""
    numbers = (num_requests, head_dim, block_size, group, num_parts, has_norm, has_prefix)
    shared, usage = resources_of(COMPILE, dtype, *numbers, folder=tmp_path)
    config = decode_config(num_requests, 2, block_size, head_dim)
    num_programs = -(-num_requests * 2 * config.num_splits // NUM_MULTIPROCESSORS)
    assert num_programs * (shared + 1024) <= MAX_SHARED_BYTES + 1024  # a program's own kilobyte
    assert " STACK:0 " in usage and " LOCAL:0 " in usage


def test_what_is_refused() -> None:
    """Only a Hopper, and blocks and heads that the tensor cores' instruction takes."""
    assert not can_take(CPU, torch.bfloat16, 12, 2, 128, 16)
    if can_take(DEVICE, torch.bfloat16, 12, 2, 128, 16):
        for dtype, *shape in (
            (torch.float32, 12, 2, 128, 16), (torch.bfloat16, 12, 5, 128, 16),
            (torch.bfloat16, 34, 2, 128, 16), (torch.bfloat16, 12, 2, 96, 16),
            (torch.bfloat16, 12, 2, 128, 8),
        ):  # fmt: skip
            assert not can_take(DEVICE, dtype, *shape)


def test_arguments_that_are_refused() -> None:
    """Each error names what it met."""
    made = made_with([20, 3], device=CPU)
    it = made.it
    qkv, k, v = made.qkv_RND, it.k_BGSD, it.v_BGSD
    large = Config(num_splits=64, num_blocks=1, num_stages=2, min_rounds=1)
    many = Config(num_splits=16, num_blocks=1, num_stages=2, min_rounds=1)
    one = DecodeScratch.allocate(1, 12, 2, 64, CPU)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ((qkv.float(), k, v), {}, "qkv is torch.float32 with head_dim 64"),
        ((qkv[:, :, :32], k, v), {}, "head_dim 32, blocks have 16"),
        ((qkv, k[:, :, :8], v[:, :, :8]), {}, "blocks have 8 slots"),
        ((qkv[:, :15], k, v), {}, "11 query heads are not 1 to 16 for each of 2"),
        ((qkv[:, :4], k, v), {}, "0 query heads"),
        ((qkv[:, ::2], k, v), {}, "qkv has strides"),
        ((qkv, k.half(), v), {}, "k is torch.float16 and v torch.bfloat16"),
        ((qkv, v, k), {}, "V must lie right behind K"),
        ((qkv, k, v), {"scale": 0.0}, "scale 0.0 must be above 0"),
        ((qkv, k, v), {"bias_N": qkv[0, 0]}, r"bias is \(64,\).*\(1024,\)"),
        ((qkv, k, v), {"bias_N": torch.zeros(1024)}, "torch.float32"),
        ((qkv, k, v), {"config": large}, "64 splits are more than 16"),
        ((qkv, k, v), {"config": many, "scratch": one}, "2 requests need 24576"),
    ]
    for (first, *pool), options, message in cases:
        with pytest.raises(ValueError, match=message):
            hopper_rope_decode(
                first, made.rope.cos_PD, made.rope.sin_PD, *pool, it.table, it.rows, it.seq_lens,
                **({"scale": 1.0, "scratch": it.scratch} | options),
            )  # fmt: skip


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    ("dtype", "head_dim", "block_size", "group", "has_norm", "batch"),
    pairwise(
        DTYPES,
        HEAD_DIMS,
        BLOCK_SIZES,
        [1, 2, 3, 6, 8, 16],
        [False, True],
        ["edges", "many", "long"],
    ),
)
def test_grid(
    dtype: torch.dtype, head_dim: int, block_size: int, group: int, has_norm: bool, batch: str
) -> None:
    """Every head dim, block size, GQA ratio and dtype, few and many splits: pairwise, any two of
    these values meet in a case."""
    S = block_size
    seq_lens = {
        "edges": [1, 0, S - 1, S, S + 1, 1500, 2 * S, 33],
        "many": [7, 300, 129, 64, 0] * 32,
        "long": [5000, 1, 2048],
    }[batch]
    made = made_with(
        seq_lens, group=group, head_dim=head_dim, dtype=dtype, has_norm=has_norm,
        block_size=block_size,
    )  # fmt: skip
    check(made, None)


@pytest.mark.gpu
@on_hopper
@pytest.mark.memcheck
@pytest.mark.parametrize("num_splits", [1, 4])
def test_small(num_splits: int) -> None:
    """A few requests, with splits and without."""
    config = Config(num_splits, num_blocks=2, num_stages=2, min_rounds=1)
    check(made_with([1, 0, 16, 100, 33], head_dim=128, has_norm=True), config)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("num_parts", [2, 3, 4])
def test_parts(num_parts: int, head_dim: int) -> None:
    """A projection in parts, and a bias, give what their sum gives."""
    made = made_with([7, 300, 129, 64, 0] * 32, head_dim=head_dim, has_norm=num_parts == 3)
    check(made, None, in_parts(hopper_rope_decode, made.qkv_RND, num_parts))


@pytest.mark.gpu
@on_hopper
def test_bits_depend_on_the_number_of_requests_alone() -> None:
    """Other requests change no bit, nor does another run: splits are added in their order."""
    config = Config(num_splits=8, num_blocks=2, num_stages=3, min_rounds=2)
    made = made_with([1000, 3, 517, 64], head_dim=128)
    out = check(made, config)
    for _ in range(50):
        assert torch.equal(made.decoded_by(hopper_rope_decode, config=config).cpu(), out)
    made.it.seq_lens[1:3] = 0
    alone = made.decoded_by(hopper_rope_decode, config=config).cpu()
    assert torch.equal(alone[[0, 3]], out[[0, 3]]) and not alone[1:3].any()


@pytest.mark.gpu
@on_hopper
def test_pool_beyond_two_to_the_31() -> None:
    """A pool of more than 2^31 elements is addressed to its end."""
    num_blocks, shape = 70_000, (2, 8, 2, 16, 64)
    made = made_with([30, 17], group=2)
    pool = torch.empty((num_blocks, *shape), dtype=torch.bfloat16, device=DEVICE)
    assert pool.numel() > 2**31
    it = made.it
    num_used = len(it.pool)
    at = (slice(num_blocks - num_used, None), slice(None), 7)
    pool[at] = it.pool[:, :, 1]
    out = check(made, None)
    it.k_BGSD, it.v_BGSD = pool[:, :, 7, 0], pool[:, :, 7, 1]
    it.table += num_blocks - num_used
    assert torch.equal(made.decoded_by(hopper_rope_decode).cpu(), out)
    torch.testing.assert_close(pool[at], it.pool[:, :, 1], equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
def test_long_contexts_are_cut_and_fit_the_scratch(num_kv_heads: int) -> None:
    """Few requests make 480 programs or more, and what splits leave has a place for any number."""
    scratch = DecodeScratch.allocate(256, 2 * num_kv_heads, num_kv_heads, 64, CPU)
    for num_requests in range(1, 257):
        config = decode_config(num_requests, num_kv_heads, 16, 64, is_long=True)
        num_programs = num_requests * num_kv_heads * config.num_splits
        assert num_programs >= min(480, 16 * num_requests * num_kv_heads)
        assert num_programs < 960 or config.num_splits == 1
        assert 2 * num_programs * 64 <= scratch.partials.numel()


@pytest.mark.gpu
@on_hopper
def test_graph_serves_other_lengths() -> None:
    """A graph captured with one step's lengths gives another's results, each layer's attention
    started before the product ahead of it is over."""
    made = made_with([300, 40, 700, 17] * 16, head_dim=128)
    it, captured = made.it, made.it.seq_lens.clone()
    config = decode_config(64, 2, 16, 128)
    with_room(made, config)
    qkv, hidden = made.qkv_RND.clone(), made.qkv_RND[:, 0].clone()
    it.seq_lens.fill_(5)
    graph = torch.cuda.CUDAGraph()
    made.decoded_by(hopper_rope_decode, config=config)
    _ = hidden @ hidden.T @ hidden  # cuBLAS cannot begin in a capture
    with torch.cuda.graph(graph):
        hidden.copy_(hidden @ hidden.T @ hidden)
        made.qkv_RND.copy_(qkv)
        out = made.decoded_by(hopper_rope_decode, config=config)
    it.seq_lens.copy_(captured)
    # After the short ones, which stored their tokens amid the long ones' KV.
    expected = made.decoded_by(hopper_rope_decode, config=config)
    for _ in range(20):
        made.qkv_RND.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)
