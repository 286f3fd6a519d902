"""Products in parts in Gluon: the kernel's source on the CPU, its code for sm_90, and the GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compiled import resources_of
from pairwise import pairwise
from torch import Tensor

from pico_vllm.kernels import hopper_split_k as source
from pico_vllm.kernels.gluon import HAS_GLUON
from pico_vllm.kernels.hopper_split_k import (
    MAX_ROWS,
    SplitKConfig,
    can_take,
    hopper_split_k,
    hopper_split_k_reference,
    is_faster,
    split_k_config,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
ALLOWED = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Rounding to the dtype, once."""
needs_gluon = pytest.mark.skipif(not HAS_GLUON, reason="this Triton has no Gluon")
on_hopper = pytest.mark.skipif(
    not can_take(DEVICE, torch.bfloat16, 64, 64), reason="needs a Hopper and Gluon"
)
Config = SplitKConfig


def made(
    M: int, N: int, K: int, dtype: torch.dtype = torch.bfloat16, device: torch.device = DEVICE
) -> tuple[Tensor, Tensor]:
    """Both are cut from wider tensors, whose other places are NaN."""
    generator = torch.Generator().manual_seed(1)
    x_MK = torch.randn(M, K, generator=generator)
    weight_NK = torch.randn(N, K, generator=generator) * K**-0.5
    wide = [x.new_full((len(x), K + 8), float("nan")) for x in (x_MK, weight_NK)]
    wide[0][:, :K], wide[1][:, :K] = x_MK, weight_NK
    x_MK, weight_NK = (x.to(device, dtype)[:, :K] for x in wide)
    return x_MK, weight_NK


def check(
    x_MK: Tensor,
    weight_NK: Tensor,
    config: Config | None,
    run: Callable[..., Tensor] = hopper_split_k,
) -> Tensor:
    parts_SMN = run(x_MK, weight_NK, config=config)
    (M, K), N = x_MK.shape, len(weight_NK)
    num_splits = (config or split_k_config(M, N, K, 2)).num_splits
    expected = hopper_split_k_reference(x_MK.float(), weight_NK.float(), num_splits)
    assert parts_SMN.dtype == x_MK.dtype and parts_SMN.is_contiguous()
    allowed = ALLOWED[x_MK.dtype]
    torch.testing.assert_close(parts_SMN.float(), expected, atol=allowed, rtol=allowed)
    whole = x_MK.float() @ weight_NK.float().T
    torch.testing.assert_close(
        parts_SMN.float().sum(0), whole, atol=2 * num_splits * allowed, rtol=0
    )
    return parts_SMN


def emulated(max_stages: int = 9) -> Callable[..., Tensor]:
    """max_stages: for tiles of 64 by 128."""
    from gluon_on_cpu import on_cpu, written_before  # needs Gluon

    kernel = on_cpu(source)
    names = kernel.hopper_split_k.__globals__
    names["MAX_SHARED_BYTES"] = 256 + max_stages * ((64 + 128) * 128 + 8)

    def run(x_MK: Tensor, weight_NK: Tensor, config: Config | None) -> Tensor:
        with written_before(x_MK):
            return kernel.hopper_split_k(x_MK, weight_NK, config=config)

    run.names = names  # type: ignore[attr-defined]
    return run


@needs_gluon
@pytest.mark.parametrize(
    ("sizes", "block_m", "block_n", "num_splits", "max_stages", "dtype"),
    pairwise(
        # Less than a tile and a round, edges in all three, splits that are not alike.
        [(3, 8, 8), (130, 200, 136), (65, 136, 520), (70, 72, 712)],
        [64, 128],
        [64, 128],
        [1, 2, 5],
        [2, 3, 9],
        list(ALLOWED),
    ),
)
def test_source_on_cpu(
    sizes: tuple[int, int, int],
    block_m: int,
    block_n: int,
    num_splits: int,
    max_stages: int,
    dtype: torch.dtype,
) -> None:
    """Sizes that no tile divides, rings that are filled again and ones that are not: the kernel's
    source, each wait as late as it may be, equals the reference in fp32."""
    x_MK, weight_NK = made(*sizes, dtype, CPU)
    check(x_MK, weight_NK, Config(block_m, block_n, num_splits), emulated(max_stages))


@needs_gluon
@pytest.mark.parametrize("left_out", ["gdc_wait", "fence_async_shared", "warpgroup_mma_wait"])
def test_the_emulation_finds_what_is_left_out(left_out: str) -> None:
    """Without one of the waits or fences the checks above fail."""
    run = emulated(2)
    names = run.names  # type: ignore[attr-defined]
    wait = names["warpgroup_mma_wait"]
    names[left_out] = lambda num_outstanding=0, deps=None: (
        deps and wait(num_outstanding and 99, deps)
    )
    with pytest.raises(AssertionError):
        check(*made(70, 104, 520, device=CPU), Config(64, 128, 1), run)


def test_how_products_are_cut() -> None:
    """Into at most one program a multiprocessor, never more splits than asked for, none empty."""
    for M in (1, 65, 128, 192, MAX_ROWS):
        for N in (8, 1024, 1536, 2048, 6144):
            for most, K in itertools.product((1, 2, 3, 4, 8), (8, 128, 1536, 2056, 8960)):
                config = split_k_config(M, N, K, most)
                num_tiles = -(-M // config.block_m) * -(-N // config.block_n)
                assert 1 <= config.num_splits <= most
                assert config.num_splits == 1 or config.num_splits * num_tiles <= 132
                rounds = -(-K // 64)
                split_rounds = -(-rounds // config.num_splits)
                assert -(-rounds // split_rounds) == config.num_splits
    assert split_k_config(256, 1536, 1536, 3).num_splits == 2
    assert split_k_config(128, 1536, 1536, 3).num_splits == 3
    assert split_k_config(64, 2048, 1536, 2) == Config(64, 64, 2)
    assert split_k_config(64, 1536, 8960, 8) == Config(64, 128, 8)
    assert split_k_config(64, 1024, 2048, 3) == Config(64, 64, 3), "not long yet"
    assert is_faster(65, 1024, 2048) and not is_faster(65, 1024, 2056)
    assert not is_faster(64, 1024, 2056), "seven parts are left"
    assert not is_faster(40, 16, 64), "one part is left"
    assert is_faster(256, 2048, 1536) and not is_faster(257, 2048, 1536)
    assert not is_faster(256, 6144, 1536), "nothing is left to cut"
    assert is_faster(64, 1536, 8960) and not is_faster(65, 1536, 8960), "too long for many rows"
    assert not is_faster(64, 4096, 14336), "too few parts"


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from pico_vllm.kernels.hopper_split_k import BLOCK_K, _hopper_split_k_kernel as kernel

dtype, (BLOCK_M, BLOCK_N, rounds, stages) = sys.argv[1], map(int, sys.argv[2:])
shapes = {
    "x_desc": [BLOCK_M, BLOCK_K], "weight_desc": [BLOCK_N, BLOCK_K],
    "out_desc": [1, BLOCK_M, BLOCK_N],
}
types = {
    name: f"tensordesc<{dtype}{shape},"
    f"{gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16)!r}>"
    for name, shape in shapes.items()
}
source = GluonASTSource(
    fn=kernel,
    signature={p.name: types.get(p.name, "constexpr") for p in kernel.params},
    constexprs=dict(ALL_ROUNDS=24, SPLIT_ROUNDS=rounds, STAGES=stages, USE_PDL=True),
    attrs={},
)
options = {"num_warps": BLOCK_M // 16, "launch_pdl": True}
code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
"""


@needs_gluon
@pytest.mark.parametrize(
    ("dtype", "tile"),
    [
        ("bf16", (64, 128, 12, 9)),
        pytest.param("fp16", (64, 128, 6, 6), marks=pytest.mark.slow),
        pytest.param("bf16", (128, 128, 6, 6), marks=pytest.mark.slow),
    ],
)
def test_compiles_for_hopper(dtype: str, tile: tuple[int, ...], tmp_path: Path) -> None:
    """It becomes code for sm_90 that spills no registers and fits a multiprocessor."""
    shared, usage = resources_of(COMPILE, dtype, *tile, folder=tmp_path)
    assert shared <= source.MAX_SHARED_BYTES
    assert " STACK:0 " in usage and " LOCAL:0 " in usage


def test_what_is_refused() -> None:
    """Only a Hopper, 16 bits, and sizes that the copy engine takes."""
    assert not can_take(CPU, torch.bfloat16, 2048, 1536)
    if can_take(DEVICE, torch.bfloat16, 2048, 1536):
        assert not can_take(DEVICE, torch.float32, 2048, 1536)
        assert not can_take(DEVICE, torch.bfloat16, 2044, 1536)
        assert not can_take(DEVICE, torch.bfloat16, 2048, 1540)


def test_arguments_that_are_refused() -> None:
    """Each error names what it met."""
    x, weight = torch.zeros(9, 64).bfloat16(), torch.zeros(32, 64).bfloat16()
    shifted = torch.zeros(9 * 64 + 1).bfloat16()[1:].view(9, 64)
    cases: list[tuple[tuple[Tensor, Tensor], str]] = [
        ((x.float(), weight.float()), r"x is torch.float32 \(9, 64\)"),
        ((x[:0], weight), r"\(0, 64\).*a row at least"),
        ((x[:, :60], weight), r"\(9, 60\).*multiples of 8"),
        ((x, weight[:20]), "20 rows"),
        ((x, weight[:, :56]), r"the weight is \(32, 56\)"),
        ((x, weight.half()), "torch.float16, not .* torch.bfloat16"),
        ((shifted, weight), "x has strides .* from address"),
        ((x.T.contiguous().T, weight), "x has strides"),
        ((x, weight.T.contiguous().T), "the weight has strides"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            hopper_split_k(*arguments)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    ("shape", "dtype", "config"),
    pairwise(
        [(2048, 1536), (1536, 1536), (1024, 2048), (1000, 1000), (8, 8)],
        list(ALLOWED),
        [None, Config(64, 128, 3), Config(128, 128, 4), Config(64, 64, 1)],
    ),
)
def test_grid(shape: tuple[int, int], dtype: torch.dtype, config: Config | None) -> None:
    """Tiles and dtypes, real and odd shapes, rows around tiles, few and many."""
    for M in (1, 64, 65, 128, 129, 256, 700):
        if config is None or config.num_splits <= -(-shape[1] // 64):
            check(*made(M, *shape, dtype), config)


@pytest.mark.gpu
@on_hopper
@pytest.mark.memcheck
@pytest.mark.parametrize(("M", "N", "K"), [(70, 104, 72), (65, 40, 328)])
def test_small(M: int, N: int, K: int) -> None:
    """Sizes that no tile divides, of tensors that end where their memory does."""
    x_MK, weight_NK = (x.contiguous() for x in made(M, N, K))
    check(x_MK, weight_NK, Config(64, 128, 2))


@pytest.mark.gpu
@on_hopper
def test_bits_depend_on_the_row_alone() -> None:
    """A row gives the same bits whatever its neighbours are, NaN too, and in each run."""
    x_MK, weight_NK = made(200, 1536, 1536)
    parts_SMN = hopper_split_k(x_MK, weight_NK)
    for _ in range(20):
        assert torch.equal(hopper_split_k(x_MK, weight_NK), parts_SMN)
    x_MK[1:] = float("nan")
    assert torch.equal(hopper_split_k(x_MK, weight_NK)[:, 0], parts_SMN[:, 0])


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("M", [96, 256])
def test_chain_in_a_graph(M: int) -> None:
    """Products that depend on each other, each started before the one before is over, give the
    bits that they give one by one."""
    x_MK, weight_NK = (x.contiguous() for x in made(M, 1536, 1536))

    def run(after_each: Callable[[], None]) -> Tensor:
        parts_SMN = hopper_split_k(x_MK, weight_NK)
        for _ in range(6):
            after_each()
            parts_SMN = hopper_split_k(parts_SMN[0], weight_NK)
        return parts_SMN

    expected = run(torch.cuda.synchronize)
    assert expected.isfinite().all() and expected.any()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(lambda: None)
    for _ in range(50):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)
