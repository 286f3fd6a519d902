"""Gate and up with SiLU in Gluon: its source on the CPU, its code for sm_90, and the GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled import resources_of
from pairwise import pairwise
from torch import Tensor

from pico_vllm.kernels import hopper_gate_up as source
from pico_vllm.kernels import hopper_gate_up_few
from pico_vllm.kernels.gluon import HAS_GLUON
from pico_vllm.kernels.hopper_gate_up import (
    can_take,
    hopper_gate_up,
    hopper_gate_up_reference,
    is_faster,
    tile_options,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
ALLOWED = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""About twice what rounding the result to the dtype costs."""
needs_gluon = pytest.mark.skipif(not HAS_GLUON, reason="this Triton has no Gluon")
on_hopper = pytest.mark.skipif(
    not can_take(DEVICE, torch.bfloat16, 64, 64), reason="needs a Hopper and Gluon"
)


def made(
    T: int, F: int, E: int, dtype: torch.dtype = torch.bfloat16, device: torch.device = DEVICE
) -> tuple[Tensor, Tensor]:
    """x is cut from a wider tensor."""
    generator = torch.Generator().manual_seed(1)
    x_TE = torch.randn(T, E + 8, generator=generator)[:, :E]
    weight_NE = torch.randn(2 * F, E, generator=generator) * E**-0.5
    wide = x_TE.new_full((T, E + 8), float("nan"), dtype=dtype, device=device)
    wide[:, :E] = x_TE
    return wide[:, :E], weight_NE.to(device, dtype)


def check(x_TE: Tensor, weight_NE: Tensor, run: Callable[..., Tensor] = hopper_gate_up) -> Tensor:
    T, F = len(x_TE), len(weight_NE) // 2
    wide = x_TE.new_full((T + 1, F + 8), float("nan"))
    out = wide[:T, :F]
    assert run(x_TE, weight_NE, out=out) is out
    expected = hopper_gate_up_reference(x_TE.float(), weight_NE.float())
    allowed = ALLOWED[x_TE.dtype]
    torch.testing.assert_close(out.float(), expected, atol=allowed, rtol=allowed)
    assert wide[:, F:].isnan().all() and wide[T].isnan().all()
    return out


def emulated(groups: int, num_stages: int = 3, num_programs: int = 3) -> Callable[..., Tensor]:
    """Few programs, which take tile after tile."""
    from gluon_on_cpu import on_cpu, written_before  # needs Gluon

    kernel = on_cpu(source, on_cpu(hopper_gate_up_few))
    names = kernel.hopper_gate_up.__globals__
    tile = {"GROUPS": groups, "STAGES": num_stages}
    names["tile_options"] = lambda *arguments: tile
    names["NUM_MULTIPROCESSORS"] = num_programs

    def run(x_TE: Tensor, weight_NE: Tensor, out: Tensor) -> Tensor:
        with written_before(x_TE):
            return kernel.hopper_gate_up(x_TE, weight_NE, out=out)

    run.names = names  # type: ignore[attr-defined]
    return run


@needs_gluon
@pytest.mark.parametrize(
    ("groups", "sizes", "num_stages", "dtype"),
    pairwise(
        [2, 3],
        # Less than a tile and a round, edges in all three, rings longer than a tile, many tiles.
        [(3, 8, 8), (130, 104, 200), (300, 200, 520), (600, 72, 72)],
        [2, 4],
        list(ALLOWED),
    ),
)
def test_source_on_cpu(
    groups: int, sizes: tuple[int, int, int], num_stages: int, dtype: torch.dtype
) -> None:
    """Sizes that no tile divides, short and long rings: the kernel's source, each wait as late as
    it may be, equals the reference in fp32 and writes nothing else."""
    x_TE, weight_NE = made(*sizes, dtype, CPU)
    check(x_TE, weight_NE, emulated(groups, num_stages))


@needs_gluon
@pytest.mark.parametrize(
    "left_out", ["gdc_wait", "fence_async_shared", "warpgroup_mma_wait", "wait_until_sent"]
)
def test_the_emulation_finds_what_is_left_out(left_out: str) -> None:
    """Without one of the waits or fences the checks above fail."""
    run = emulated(2)
    names = run.names  # type: ignore[attr-defined]
    wait = names["warpgroup_mma_wait"]
    names[left_out] = lambda num_outstanding=0, deps=None: (
        deps and wait(num_outstanding and 99, deps)
    )
    with pytest.raises(AssertionError):
        check(*made(200, 104, 520, device=CPU), run)


def test_tiles() -> None:
    """For any size there is a tile whose ring fits shared memory."""
    for T in (1, 32, 33, 64, 65, 128, 129, 256, 300, 512, 4096, 8192, 100_000):
        for F in (8, 3072, 8960, 14336):
            tile = tile_options(T, F)
            stage_bytes = (source.TOKENS + 64 * tile["GROUPS"]) * 128
            assert tile["STAGES"] >= 4
            assert tile["STAGES"] * (stage_bytes + 16) + 8 <= source.MAX_SHARED_BYTES


def test_where_it_is_faster() -> None:
    """With many tokens always; with few, where tiles are about as many as multiprocessors."""
    for T in (1, 65, 128, 169, 256, 257, 1023, 1024, 8192):
        assert is_faster(T, 8960) is is_faster(T, 3072) is (T <= 256 or T >= 1024), T
        assert is_faster(T, 14336) is (T <= 128 or T >= 1024), T
        assert is_faster(T, 1536) is (64 < T <= 256 or T >= 1024), T
    assert is_faster(129, 3072) and not is_faster(129, 8960) and not is_faster(168, 8960)


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from pico_vllm.kernels.hopper_gate_up import (
    BLOCK_K, GROUP_ROWS, MAX_SHARED_BYTES, TOKENS, _hopper_gate_up_kernel as kernel
)

dtype, groups = sys.argv[1], int(sys.argv[2])
shapes = {
    "x_desc": [TOKENS, BLOCK_K], "weight_desc": [GROUP_ROWS // 16, 2, 8, BLOCK_K],
    "out_desc": [TOKENS // 2, GROUP_ROWS // 2],
}
types = {
    name: f"tensordesc<{dtype}{shape},"
    f"{gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16)!r}>"
    for name, shape in shapes.items()
}
types |= dict.fromkeys(("num_token_tiles", "num_output_tiles", "num_programs"), "i32")
stages = (MAX_SHARED_BYTES - 256) // ((TOKENS + groups * GROUP_ROWS) * BLOCK_K * 2 + 16)
source = GluonASTSource(
    fn=kernel,
    signature={p.name: types.get(p.name, "constexpr") for p in kernel.params},
    constexprs=dict(
        ROUNDS=24, TOKENS=TOKENS, GROUPS=groups, STAGES=stages, TILES_ABREAST=8, USE_PDL=True,
    ),
    attrs={},
)
options = {"num_warps": 4, "launch_pdl": True}
code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
"""


@needs_gluon
@pytest.mark.parametrize(
    ("dtype", "groups"), [("bf16", 3), pytest.param("fp16", 2, marks=pytest.mark.slow)]
)
def test_compiles_for_hopper(dtype: str, groups: int, tmp_path: Path) -> None:
    """It becomes code for sm_90 that spills no registers and fits a multiprocessor."""
    shared, usage = resources_of(COMPILE, dtype, groups, folder=tmp_path)
    assert shared <= source.MAX_SHARED_BYTES
    assert " STACK:0 " in usage and " LOCAL:0 " in usage


def test_what_is_refused() -> None:
    """Only a Hopper, 16 bits, and sizes that the copy engine takes."""
    assert not can_take(CPU, torch.bfloat16, 8960, 1536)
    if can_take(DEVICE, torch.bfloat16, 8960, 1536):
        assert not can_take(DEVICE, torch.float32, 8960, 1536)
        assert not can_take(DEVICE, torch.bfloat16, 8964, 1536)
        assert not can_take(DEVICE, torch.bfloat16, 8960, 1540)


def test_arguments_that_are_refused() -> None:
    """Each error names what it met."""
    x, weight = torch.zeros(9, 64).bfloat16(), torch.zeros(32, 64).bfloat16()
    shifted = torch.zeros(9 * 64 + 1).bfloat16()[1:].view(9, 64)
    cases: list[tuple[tuple[Tensor, Tensor], dict[str, Any], str]] = [
        ((x.float(), weight.float()), {}, r"x is torch.float32 \(9, 64\)"),
        ((x[:, :60], weight), {}, r"\(9, 60\).*multiples of 8"),
        ((x, weight[:24]), {}, "24 rows"),
        ((x, weight[:, :56]), {}, r"the weight is \(32, 56\)"),
        ((x, weight.half()), {}, r"torch.float16 .*contiguous \(32, 64\) torch.bfloat16"),
        ((x, weight), {"out": x}, r"out is \(9, 64\)"),
        ((shifted, weight), {}, "x has strides .* from address"),
        ((x.T.contiguous().T, weight), {}, "x has strides"),
        ((x, weight), {"out": x[:, :32:2]}, "out has strides"),
    ]
    for arguments, keywords, message in cases:
        with pytest.raises(ValueError, match=message):
            hopper_gate_up(*arguments, **keywords)


def test_no_tokens() -> None:
    """A step of nothing is nothing."""
    x, weight = torch.zeros(0, 64).bfloat16(), torch.zeros(32, 64).bfloat16()
    assert hopper_gate_up(x, weight).shape == (0, 16)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    ("shape", "dtype", "groups"),
    pairwise(
        [(8960, 1536), (3072, 1024), (14336, 4096), (1000, 1000), (8, 8)],
        list(ALLOWED),
        [2, 3],
    ),
)
def test_grid(
    shape: tuple[int, int], dtype: torch.dtype, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both tiles and dtypes, real and odd shapes, rows around tiles, few and many."""
    options = {"GROUPS": groups, "STAGES": 4}
    monkeypatch.setattr(source, "few_config", lambda T, F: None)
    monkeypatch.setattr(source, "tile_options", lambda *arguments: options)
    for T in (1, 65, 128, 129, 256, 700, 2049):
        check(*made(T, *shape, dtype))


@pytest.mark.gpu
@on_hopper
@pytest.mark.memcheck
@pytest.mark.parametrize(("T", "F", "E"), [(70, 104, 72), (300, 40, 328)])
def test_small(T: int, F: int, E: int) -> None:
    """Sizes that no tile divides, of tensors that end where their memory does."""
    x_TE, weight_NE = made(T, F, E)
    out = hopper_gate_up(x_TE.contiguous(), weight_NE)
    expected = hopper_gate_up_reference(x_TE.float(), weight_NE.float())
    torch.testing.assert_close(out.float(), expected, atol=1.6e-2, rtol=1.6e-2)


@pytest.mark.gpu
@on_hopper
def test_bits_depend_on_the_row_alone() -> None:
    """A row gives the same bits whatever its neighbours are, NaN too, and however many."""
    x_TE, weight_NE = made(1000, 8960, 1536)
    out = hopper_gate_up(x_TE, weight_NE)
    for num_rows in (100, 256, 1000):
        assert torch.equal(hopper_gate_up(x_TE[:num_rows], weight_NE), out[:num_rows])
    x_TE[1:] = float("nan")
    assert torch.equal(hopper_gate_up(x_TE, weight_NE)[0], out[0])


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("T", [128, 256, 600])
def test_chain_in_a_graph(T: int) -> None:
    """Products that depend on each other, each started before the one before is over, give the
    bits that they give one by one."""
    x_TE, weight_NE = made(T, 1536, 1536)
    buffers = [x_TE.new_empty(T, 1536) for _ in range(2)]

    def run(after_each: Callable[[], None]) -> None:
        buffers[0].copy_(x_TE)
        for i in range(6):
            hopper_gate_up(buffers[i % 2], weight_NE, out=buffers[1 - i % 2])
            after_each()

    run(torch.cuda.synchronize)
    expected = buffers[0].clone()
    assert expected.isfinite().all() and expected.any()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(lambda: None)
    for _ in range(50):
        for buffer in buffers:
            buffer.fill_(float("nan"))
        graph.replay()
        assert torch.equal(buffers[0], expected)
