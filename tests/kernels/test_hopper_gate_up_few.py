"""Gate and up of few rows in Gluon: its source on the CPU, its code for sm_90, and the GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compiled import resources_of
from pairwise import pairwise
from test_hopper_gate_up import ALLOWED, CPU, check, made, needs_gluon, on_hopper
from torch import Tensor

from pico_vllm.kernels import hopper_gate_up_few as source
from pico_vllm.kernels.hopper_gate_up import hopper_gate_up, hopper_gate_up_reference
from pico_vllm.kernels.hopper_gate_up_few import (
    BLOCK_K,
    CONFIGS,
    FewConfig,
    few_config,
    few_gate_up,
)
from pico_vllm.kernels.launch import NUM_MULTIPROCESSORS


def with_config(config: FewConfig, run: Callable[..., None] = few_gate_up) -> Callable[..., Tensor]:
    def gate_up(x_TE: Tensor, weight_NE: Tensor, out: Tensor) -> Tensor:
        run(x_TE, weight_NE, out, config)
        return out

    return gate_up


def emulated(config: FewConfig, num_stages: int = 4) -> Callable[..., Tensor]:
    """With a ring of that many stages."""
    from gluon_on_cpu import on_cpu, written_before  # needs Gluon

    kernel = on_cpu(source)
    names = kernel.few_gate_up.__globals__
    names["MAX_SHARED_BYTES"] = names["OTHER_BYTES"] + num_stages * config.num_rows * BLOCK_K * 2

    def run(x_TE: Tensor, weight_NE: Tensor, out: Tensor) -> Tensor:
        with written_before(x_TE):
            return with_config(config, kernel.few_gate_up)(x_TE, weight_NE, out)

    run.names = names  # type: ignore[attr-defined]
    return run


@needs_gluon
@pytest.mark.parametrize(
    ("config", "sizes", "num_stages", "dtype"),
    pairwise(
        CONFIGS,
        # Less than a tile and a round, edges in all three, rings longer than a tile, many rounds.
        [(3, 8, 8), (130, 144, 200), (70, 280, 72), (129, 136, 520)],
        [2, 4],
        list(ALLOWED),
    ),
)
def test_source_on_cpu(
    config: FewConfig, sizes: tuple[int, int, int], num_stages: int, dtype: torch.dtype
) -> None:
    """Sizes that no tile divides, short and long rings: the kernel's source, each wait as late as
    it may be, equals the reference in fp32 and writes nothing else."""
    check(*made(*sizes, dtype, CPU), emulated(config, num_stages))


@needs_gluon
@pytest.mark.parametrize(
    "left_out", ["gdc_wait", "fence_async_shared", "warpgroup_mma_wait", "wait_until_sent"]
)
def test_the_emulation_finds_what_is_left_out(left_out: str) -> None:
    """Without one of the waits or fences the checks above fail."""
    run = emulated(FewConfig(64, 128, 16))
    names = run.names  # type: ignore[attr-defined]
    wait = names["warpgroup_mma_wait"]
    names[left_out] = lambda num_outstanding=0, deps=None: (
        deps and wait(num_outstanding and 99, deps)
    )
    with pytest.raises(AssertionError):
        check(*made(100, 144, 520, device=CPU), run)


def test_configs() -> None:
    """One tile a multiprocessor at most, and none that could take a smaller one."""
    assert few_config(256, 8960) == FewConfig(128, 256, 16)
    assert few_config(128, 8960) == FewConfig(128, 128, 16)
    assert few_config(129, 8960) is few_config(168, 8960) is None
    assert few_config(169, 8960) == few_config(256, 8960)
    assert few_config(25, 8960) == FewConfig(64, 128, 16)
    assert few_config(128, 3072) == few_config(64, 3072) == FewConfig(64, 128, 0)
    assert few_config(256, 3072) == FewConfig(128, 128, 0)
    assert few_config(257, 8960) is few_config(256, 14336) is few_config(64, 1536) is None
    for T in (1, 64, 65, 128, 129, 256):
        for F in range(8, 20_000, 8):
            config = few_config(T, F)
            if config is not None:
                num_tiles = config.num_tiles(T, F)
                assert NUM_MULTIPROCESSORS / 3 <= num_tiles <= NUM_MULTIPROCESSORS
                smaller = CONFIGS[: CONFIGS.index(config)]
                assert all(c.num_tiles(T, F) > NUM_MULTIPROCESSORS for c in smaller)


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from pico_vllm.kernels import hopper_gate_up_few as source

dtype, tokens, main, rest = sys.argv[1], *map(int, sys.argv[2:5])
kernel = source._hopper_gate_up_few_kernel
shapes = {
    "x_desc": [tokens, 64], "main_desc": [main // 16, 2, 8, 64], "out_desc": [tokens, main // 2]
}
constants = {}
if rest:
    shapes["rest_desc"] = [rest // 16, 2, 8, 64]
else:
    constants["rest_desc"] = None
types = {
    name: f"tensordesc<{dtype}{shape},"
    f"{gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16)!r}>"
    for name, shape in shapes.items()
}
types |= {"out_ptr": f"*{dtype}", "out_stride": "i32", "T": "i32", "F": "i32"}
stages = (source.MAX_SHARED_BYTES - source.OTHER_BYTES) // ((tokens + main + rest) * 128)
names = [p.name for p in kernel.params]
source = GluonASTSource(
    fn=kernel,
    signature={name: types.get(name, "constexpr") for name in names},
    constexprs=constants | dict(ROUNDS=24, STAGES=stages, USE_PDL=True),
    attrs={(names.index("out_ptr"),): [["tt.divisibility", 16]]},
)
options = {"num_warps": tokens // 16, "launch_pdl": True}
code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
"""


@needs_gluon
@pytest.mark.parametrize(
    ("dtype", "config"),
    [
        ("bf16", FewConfig(128, 256, 16)),
        ("fp16", FewConfig(64, 128, 0)),
        pytest.param("bf16", FewConfig(64, 256, 16), marks=pytest.mark.slow),
        pytest.param("bf16", FewConfig(128, 128, 16), marks=pytest.mark.slow),
    ],
)
def test_compiles_for_hopper(dtype: str, config: FewConfig, tmp_path: Path) -> None:
    """It becomes code for sm_90 that spills no registers and fits a multiprocessor."""
    sizes = config.tokens, config.main_rows, config.rest_rows
    shared, usage = resources_of(COMPILE, dtype, *sizes, folder=tmp_path)
    assert shared <= source.MAX_SHARED_BYTES
    assert " STACK:0 " in usage and " LOCAL:0 " in usage


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    ("shape", "dtype", "config"),
    pairwise(
        [(8960, 1536), (3072, 1024), (14336, 4096), (1000, 1000), (8, 8)], list(ALLOWED), CONFIGS
    ),
)
def test_grid(shape: tuple[int, int], dtype: torch.dtype, config: FewConfig) -> None:
    """All tiles and dtypes, real and odd shapes, rows around tiles."""
    for T in (1, 33, 64, 65, 128, 129, 256):
        check(*made(T, *shape, dtype), with_config(config))


@pytest.mark.gpu
@on_hopper
@pytest.mark.memcheck
@pytest.mark.parametrize("config", [FewConfig(64, 128, 16), FewConfig(128, 256, 0)])
@pytest.mark.parametrize(("T", "F", "E"), [(70, 144, 72), (200, 40, 328)])
def test_small(config: FewConfig, T: int, F: int, E: int) -> None:
    """Sizes that no tile divides, of tensors that end where their memory does."""
    x_TE, weight_NE = made(T, F, E)
    out = x_TE.new_empty(T, F)
    few_gate_up(x_TE.contiguous(), weight_NE, out, config)
    expected = hopper_gate_up_reference(x_TE.float(), weight_NE.float())
    torch.testing.assert_close(out.float(), expected, atol=1.6e-2, rtol=1.6e-2)


@pytest.mark.gpu
@on_hopper
def test_bits_are_those_of_many_rows() -> None:
    """A row gives the same bits in every tile, whatever its neighbours are, NaN too."""
    x_TE, weight_NE = made(1000, 8960, 1536)
    expected = hopper_gate_up(x_TE, weight_NE)
    x_TE[200:] = float("nan")
    for config in CONFIGS:
        out = x_TE.new_empty(256, 8960)
        few_gate_up(x_TE[:256], weight_NE, out, config)
        assert torch.equal(out[:200], expected[:200])
        assert out[200:].isnan().all()
