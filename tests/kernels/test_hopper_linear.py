"""Linear layers of 3 to 16 rows in Gluon: source on the CPU, code for sm_90, and on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled import resources_of
from pairwise import pairwise
from test_small_linear import FLAGS, Case, case, check
from torch import Tensor

from pico_vllm.kernels import hopper_linear as source
from pico_vllm.kernels.gluon import HAS_GLUON
from pico_vllm.kernels.hopper_linear import MAX_K, can_take, hopper_linear, tile_options
from pico_vllm.kernels.small_linear import LinearScratch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16]
LAYERS = {  # (N, K) of qkv, o, gate_up, down; gate_up with both halves
    "Qwen2.5-1.5B": ((2048, 1536), (1536, 1536), (17920, 1536), (1536, 8960)),
    "Qwen3-0.6B": ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)),
    "Llama-3.1-8B": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
}
needs_gluon = pytest.mark.skipif(not HAS_GLUON, reason="this Triton has no Gluon")
on_hopper = pytest.mark.skipif(
    not can_take(DEVICE, torch.bfloat16, 8, 64, 64, False), reason="needs a Hopper and Gluon"
)


def emulated() -> Any:
    from gluon_on_cpu import on_cpu  # needs Gluon

    return on_cpu(source)


def check_on_cpu(made: Case, run: Callable[..., Tensor] | None = None) -> None:
    """As check, and the kernel before is not over when this one starts; the residual is written in
    place."""
    from gluon_on_cpu import written_before

    made.x_MK, made.weight_NK = made.x_MK.cpu(), made.weight_NK.cpu()
    made.options = {
        name: x.cpu() if isinstance(x, Tensor) else x for name, x in made.options.items()
    }
    run = run or emulated().hopper_linear

    def launch(case: Case, scratch: LinearScratch, out: Tensor) -> None:
        options, inputs = dict(case.options), [case.x_MK]
        if options["residual_MN"] is not None:
            out.copy_(options["residual_MN"])
            options["residual_MN"] = out
            inputs.append(out)
        with written_before(*inputs):
            assert run(case.x_MK, case.weight_NK, **options, scratch=scratch, out=out) is out

    check(made, launch, CPU)


def launch_on_gpu(case: Case, scratch: LinearScratch, out: Tensor) -> None:
    hopper_linear(case.x_MK, case.weight_NK, **case.options, scratch=scratch, out=out)


@needs_gluon
@pytest.mark.parametrize(
    ("M", "shape", "flags", "dtype"),
    pairwise(
        [3, 8, 9, 16],
        # One round and less, rings that are filled again, splits of which the last takes fewer.
        [(64, 64), (100, 8), (72, 1000), (136, 1544), (40, 3080)],
        [(), FLAGS[:2], FLAGS[2:3], (FLAGS[0], FLAGS[3]), FLAGS[1:], FLAGS],
        DTYPES,
    ),
)
def test_source_on_cpu(
    M: int, shape: tuple[int, int], flags: tuple[str, ...], dtype: torch.dtype
) -> None:
    """Row counts around the padded ones, sizes that no tile divides, every set of parts: the
    kernel's source, each wait as late as it may be, equals the reference in fp32."""
    check_on_cpu(case(M, *shape, dtype, **dict.fromkeys(flags, True)))


@needs_gluon
@pytest.mark.parametrize("has_silu_mul", [False, True])
@pytest.mark.parametrize(("block_k", "num_splits", "num_stages"), [(64, 1, 2), (128, 2, 3)])
def test_other_tiles_on_cpu(
    has_silu_mul: bool, block_k: int, num_splits: int, num_stages: int
) -> None:
    """Short rings in long parts of K, as large models have them."""
    kernel = emulated()
    names = kernel.hopper_linear.__globals__
    made = case(6, 70, 1104, torch.bfloat16, has_norm=True, has_silu_mul=has_silu_mul)
    tile = tile_options(6, *made.weight_NK.shape, True, has_silu_mul)
    tile |= {"BLOCK_K": block_k, "NUM_SPLITS": num_splits, "NUM_STAGES": num_stages}
    names["tile_options"] = lambda *arguments: tile
    check_on_cpu(made, kernel.hopper_linear)


@needs_gluon
@pytest.mark.parametrize(
    "left_out",
    ["gdc_wait", "fence_async_shared", "warpgroup_mma_wait"],  # of the last all but the final one
)
def test_the_emulation_finds_what_is_left_out(left_out: str) -> None:
    """Without one of the waits or fences the checks above fail."""
    kernel = emulated()
    names = kernel.hopper_linear.__globals__
    wait = names["warpgroup_mma_wait"]
    names[left_out] = lambda num_outstanding=0, deps=None: (
        deps and wait(num_outstanding and 99, deps)
    )
    made = case(5, 64, 1544, torch.bfloat16, has_norm=True, has_residual=True, has_silu_mul=True)
    tile = tile_options(5, *made.weight_NK.shape, True, True) | {"NUM_STAGES": 2, "NUM_SPLITS": 1}
    names["tile_options"] = lambda *arguments: tile
    with pytest.raises(AssertionError):
        check_on_cpu(made, kernel.hopper_linear)


@pytest.mark.parametrize("model", LAYERS)
def test_tiles(model: str) -> None:
    """Every product of the models that we serve keeps two programs a multiprocessor, its splits
    fit the scratch, and none is empty."""
    for i, (N, K) in enumerate(LAYERS[model]):
        has_norm, has_silu_mul = i in (0, 2), i == 2
        for M in (8, 16):
            tile = tile_options(M, N, K, has_norm, has_silu_mul)
            num_programs = -(-N // (128 if has_silu_mul else 64)) * tile["NUM_SPLITS"]
            assert num_programs >= 48
            if tile["NUM_SPLITS"] > 1:
                check_scratch(N, has_silu_mul, tile)
    assert tile_options(8, 2048, 1536, True, False)["NUM_SPLITS"] == 3
    assert tile_options(16, 1536, 1536, False, False)["NUM_SPLITS"] == 2


def check_scratch(N: int, has_silu_mul: bool, tile: dict[str, int]) -> None:
    num_tiles = -(-N // (128 if has_silu_mul else 64))
    size = ((1 + has_silu_mul) * 64 + 1) * tile["ROWS"]
    assert num_tiles <= LinearScratch.MAX_SPLIT_TILES
    assert num_tiles * tile["NUM_SPLITS"] * size <= LinearScratch.MAX_PARTIALS


def test_tiles_of_any_size() -> None:
    """Rings have two stages or one round, splits are not empty and fit the scratch, and shared
    memory holds it all."""
    sizes = [8, 64, 120, 136, 576, 1000, 1536, 4104, 8192, 14336, MAX_K]
    for M in (5, 16):
        for N in [*sizes, 17920, 151936]:
            for K in sizes:
                for has_norm, has_silu_mul in ((False, False), (True, False), (True, True)):
                    tile = tile_options(M, N, K, has_norm, has_silu_mul)
                    all_rounds = -(-K // tile["BLOCK_K"])
                    num_rounds = -(-all_rounds // tile["NUM_SPLITS"])
                    assert 1 <= tile["NUM_STAGES"] <= num_rounds
                    assert tile["NUM_STAGES"] > 1 or num_rounds == 1
                    assert num_rounds * (tile["NUM_SPLITS"] - 1) < all_rounds
                    if tile["NUM_SPLITS"] > 1:
                        check_scratch(N, has_silu_mul, tile)
                    rows = (1 + has_silu_mul) * 64 + tile["ROWS"]
                    ring = tile["NUM_STAGES"] * (rows * tile["BLOCK_K"] * 2 + 8)
                    norm = has_norm * num_rounds * tile["BLOCK_K"] * 2
                    assert ring + norm <= source.MAX_SHARED_BYTES - 256


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from pico_vllm.kernels.hopper_linear import _hopper_linear_kernel as kernel, tile_options

dtype, (M, N, K, has_norm, has_bias, has_residual, has_silu) = sys.argv[1], map(int, sys.argv[2:])
tile = tile_options(M, N, K, bool(has_norm), bool(has_silu))

def tiles_of(num_rows):
    shape = [num_rows, tile["BLOCK_K"]]
    layout = gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16)
    return f"tensordesc<{dtype}{shape},{layout!r}>"

pointers = ("norm_ptr", "bias_ptr", "residual_ptr", "out_ptr")
types = {name: f"*{dtype}" for name in pointers}
types |= {"weight_desc": tiles_of(tile["BLOCK_N"]), "x_desc": tiles_of(tile["ROWS"])}
types |= {"partial_ptr": "*fp32", "counter_ptr": "*i32", "eps": "fp32", "M": "i32"}
names = [p.name for p in kernel.params]
source = GluonASTSource(
    fn=kernel,
    signature={name: types.get(name, "constexpr") for name in names},
    constexprs=dict(
        NUM_OUT=N // (1 + has_silu), K=K, **tile, HAS_NORM=bool(has_norm), HAS_SILU=bool(has_silu),
        HAS_BIAS=bool(has_bias), HAS_RESIDUAL=bool(has_residual), USE_PDL=True,
    ),
    attrs={(names.index(name),): [["tt.divisibility", 16]] for name in pointers},
)
options = {"num_warps": 4, "launch_pdl": True}
code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
"""


@needs_gluon
@pytest.mark.parametrize(
    ("dtype", "M", "N", "K", "flags"),
    [
        ("bf16", 16, 17920, 1536, "1001"),
        ("bf16", 8, 1536, 8960, "0010"),
        pytest.param("fp16", 16, 2048, 1536, "1100", marks=pytest.mark.slow),
        pytest.param("bf16", 16, 28672, 4096, "1001", marks=pytest.mark.slow),
        pytest.param("fp16", 8, 1000, 1000, "1111", marks=pytest.mark.slow),
    ],
)
def test_compiles_for_hopper(
    dtype: str, M: int, N: int, K: int, flags: str, tmp_path: Path
) -> None:
    """It becomes code for sm_90 that spills no registers and leaves room for a second program."""
    shared, usage = resources_of(COMPILE, dtype, M, N, K, *flags, folder=tmp_path)
    assert shared <= source.MAX_SHARED_BYTES
    assert " STACK:0 " in usage and " LOCAL:0 " in usage


def test_what_is_refused() -> None:
    """Only a Hopper, 3 to 16 rows of 16 bits, and rows of weights that the copy engine takes."""
    assert not can_take(CPU, torch.bfloat16, 8, 1536, 1536, False)
    if can_take(DEVICE, torch.bfloat16, 8, 1536, 1536, False):
        for dtype, M, N, K, has_silu_mul in (
            (torch.float32, 8, 64, 64, False), (torch.bfloat16, 2, 64, 64, False),
            (torch.bfloat16, 17, 64, 64, False), (torch.bfloat16, 8, 64, 60, False),
            (torch.bfloat16, 8, 64, MAX_K + 8, False), (torch.bfloat16, 8, 65, 64, True),
        ):  # fmt: skip
            assert not can_take(DEVICE, dtype, M, N, K, has_silu_mul)


def test_arguments_that_are_refused() -> None:
    """Each error names what it met."""
    x, weight = torch.zeros(8, 64).bfloat16(), torch.zeros(6, 64).bfloat16()
    long = torch.zeros(6, 4096).bfloat16()
    shifted = torch.zeros(8 * 64 + 1).bfloat16()[1:].view(8, 64)
    cases = [
        ((x[:2], weight), {}, r"\(2, 64\).* 3 to 16 rows"),
        ((x.new_zeros(17, 64), weight), {}, r"\(17, 64\)"),
        ((x.float(), weight), {}, "x is torch.float32"),
        ((x[:, :60], weight[:, :60]), {}, r"\(6, 60\).*multiple of 8"),
        ((x, weight[:5]), {"has_silu_mul": True}, r"\(5, 64\).*even number"),
        ((x[:, :56], weight), {}, r"x is \(8, 56\)"),
        ((x, weight.half()), {}, "dtypes differ"),
        ((x, weight), {"bias_N": x[0]}, r"bias is \(64,\)"),
        ((x, weight), {"norm_K": x[0, :8]}, r"norm is \(8,\)"),
        ((x, weight), {"residual_MN": x}, r"residual is \(8, 64\)"),
        ((x, weight.T.contiguous().T), {}, "weight has strides"),
        ((x, weight), {"out": x}, r"out is .*\(8, 64\)"),
        ((x.new_zeros(8, 4096), long), {}, "4096 features of 6 weight rows are split"),
    ]
    if HAS_GLUON:
        cases.append(((shifted, weight), {}, "x begins at address"))
    for arguments, keywords, message in cases:
        with pytest.raises(ValueError, match=message):
            hopper_linear(*arguments, **keywords)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    ("dtype", "flags", "shape", "row_counts"),
    pairwise(
        DTYPES,
        [(), FLAGS[:2], FLAGS[2:3], (FLAGS[0], FLAGS[3]), FLAGS],
        [(2048, 1536), (8960, 1536), (1536, 8960), (1000, 1000), (100, 8), (4096, 4096),
         (4352, 4096), (151, 2056)],
        # Those that share a compiled kernel.
        [(5, 6, 7, 8), (9, 12, 16)],
    ),
)  # fmt: skip
def test_grid(
    dtype: torch.dtype,
    flags: tuple[str, ...],
    shape: tuple[int, int],
    row_counts: tuple[int, ...],
) -> None:
    """Every row count, dtype and set of parts, for real and for odd shapes: pairwise, any two of
    these values meet in a case."""
    for M in row_counts:
        check(case(M, *shape, dtype, **dict.fromkeys(flags, True)), launch_on_gpu)


@pytest.mark.gpu
@on_hopper
@pytest.mark.memcheck
@pytest.mark.parametrize(("M", "N", "K"), [(3, 33, 72), (9, 70, 1544)])
def test_small(M: int, N: int, K: int) -> None:
    """Sizes that no tile divides, of tensors that end where their memory does."""
    check(case(M, N, K, torch.bfloat16, **dict.fromkeys(FLAGS, True)), launch_on_gpu)


@pytest.mark.gpu
@on_hopper
def test_large_activations_in_fp16() -> None:
    """Rows whose product with the norm's weight exceeds fp16 are normalised all the same."""
    made = case(6, 16, 64, torch.float16, has_norm=True, scale=8000.0)
    norm_K = made.options["norm_K"]
    norm_K *= 4.0
    made.x_MK[:, 3] = 60000.0
    check(made, launch_on_gpu)


@pytest.mark.gpu
@on_hopper
def test_other_rows_change_no_bit() -> None:
    """A row gives the same bits whatever its neighbours are, NaN too."""
    made = case(8, 2048, 1536, torch.bfloat16, has_norm=True)
    scratch = LinearScratch.allocate(DEVICE)
    out = hopper_linear(made.x_MK, made.weight_NK, **made.options, scratch=scratch)
    made.x_MK[1:] = float("nan")
    again = hopper_linear(made.x_MK, made.weight_NK, **made.options, scratch=scratch)
    assert torch.equal(again[0], out[0])


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("M", [8, 16])
@pytest.mark.parametrize("model", LAYERS)
def test_chain_in_a_graph(model: str, M: int) -> None:
    """Products that depend on each other, each started before the one before is over, give the
    bits that they give one by one."""
    generator = torch.Generator(DEVICE).manual_seed(M)
    qkv, o, gate_up, down = (
        torch.randn(shape, device=DEVICE, generator=generator).mul_(shape[1] ** -0.5).bfloat16()
        for shape in LAYERS[model]
    )
    hidden, num_heads_dim = qkv.shape[1], o.shape[1]
    norm = (1 + 0.1 * torch.randn(hidden, device=DEVICE, generator=generator)).bfloat16()
    x = torch.randn((M, hidden), device=DEVICE, generator=generator).bfloat16()
    scratch = LinearScratch.allocate(DEVICE)
    buffers = [x.new_empty(M, n) for n in (len(qkv), len(gate_up) // 2, hidden)]

    def run(num_layers: int, after_each: Callable[[], None]) -> None:
        fused, act, residual = buffers
        residual.copy_(x)
        for _ in range(num_layers):
            normed = {"norm_K": norm, "eps": 1e-6, "scratch": scratch}
            hopper_linear(residual, qkv, **normed, out=fused)
            after_each()
            # A copy in the place of attention.
            heads = fused.repeat(1, 2)[:, :num_heads_dim].contiguous()
            after_each()
            added = {"residual_MN": residual, "out": residual, "scratch": scratch}
            hopper_linear(heads, o, **added)
            after_each()
            hopper_linear(residual, gate_up, **normed, has_silu_mul=True, out=act)
            after_each()
            hopper_linear(act, down, **added)
            after_each()

    run(4, torch.cuda.synchronize)
    expected = buffers[2].clone()
    assert expected.isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(4, lambda: None)
    for _ in range(50):
        for buffer in buffers:
            buffer.fill_(float("nan"))
        graph.replay()
        assert torch.equal(buffers[2], expected)
    assert not scratch.counters.any()
