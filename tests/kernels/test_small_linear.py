"""Linear layers of a few rows: both Triton kernels against plain PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from pairwise import pairwise
from torch import Tensor

from pico_vllm.kernels import small_linear as module
from pico_vllm.kernels.small_linear import LinearScratch, small_linear, small_linear_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LEAST_ALLOWED = {torch.float32: 8e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Of the largest value, where the PyTorch op happens to hit: the rounding of one result; in fp32 a
sum of up to 8960 products one after another, which in silu(gate) * up counts twice."""


@dataclass
class Case:
    x_MK: Tensor
    weight_NK: Tensor
    options: dict[str, Any]

    def as_fp32(self) -> Case:
        options = {
            name: value.float() if isinstance(value, Tensor) else value
            for name, value in self.options.items()
        }
        return Case(self.x_MK.float(), self.weight_NK.float(), options)

    def reference(self) -> Tensor:
        return small_linear_reference(self.x_MK, self.weight_NK, **self.options)

    def run(self, scratch: LinearScratch, out: Tensor) -> None:
        small_linear(self.x_MK, self.weight_NK, **self.options, scratch=scratch, out=out)


def case(
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    *,
    has_norm: bool = False,
    has_bias: bool = False,
    has_residual: bool = False,
    has_silu_mul: bool = False,
    scale: float = 1.0,
) -> Case:
    generator = torch.Generator().manual_seed(M + 7 * N + 11 * K)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    num_rows = 2 * N if has_silu_mul else N
    options = {
        "bias_N": random(num_rows).to(DEVICE, dtype) if has_bias else None,
        "norm_K": (1 + 0.1 * random(K)).to(DEVICE, dtype) if has_norm else None,
        "eps": 1e-6,
        "residual_MN": random(M, N).to(DEVICE, dtype) if has_residual else None,
        "has_silu_mul": has_silu_mul,
    }
    x_MK = (scale * random(M, K)).to(DEVICE, dtype)
    return Case(x_MK, (random(num_rows, K) * K**-0.5).to(DEVICE, dtype), options)


def check(
    made: Case,
    run: Callable[[Case, LinearScratch, Tensor], None] = Case.run,
    device: torch.device = DEVICE,
) -> None:
    """Within twice the error of the PyTorch operations, each output written, each launch the same
    bits."""
    exact = made.as_fp32().reference()
    plain = made.reference().float()
    scratch = LinearScratch.allocate(device)
    scratch.partials.fill_(float("nan"))
    bits = []
    for _ in range(2):  # the second launch meets the counters that the first one left
        out = torch.full_like(exact, float("nan"), dtype=made.x_MK.dtype)
        run(made, scratch, out)
        bits.append(out)
    largest = exact.abs().max()
    allowed = max(2 * (plain - exact).abs().max(), LEAST_ALLOWED[made.x_MK.dtype] * largest)
    assert (bits[0].float() - exact).abs().max() <= allowed
    assert torch.equal(*bits)
    assert not scratch.counters.any()


FLAGS = ("has_norm", "has_bias", "has_residual", "has_silu_mul")


@pytest.mark.memcheck
@pytest.mark.parametrize("M", [1, 5])
@pytest.mark.parametrize(
    ("flags", "N", "K"),
    [
        ((), 33, 64),
        (("has_norm", "has_bias"), 96, 65),
        (("has_residual",), 48, 1100),
        (("has_norm", "has_silu_mul"), 37, 48),
    ],
)
def test_flags_and_odd_sizes(M: int, flags: tuple[str, ...], N: int, K: int) -> None:
    """Every fused part, for sizes that no tile divides, in fp32."""
    check(case(M, N, K, torch.float32, **dict.fromkeys(flags, True)))


@pytest.mark.memcheck
def test_all_parts_over_many_splits() -> None:
    """Norm, bias, SiLU and residual wait until the splits of K are added up."""
    check(case(3, 10, 2500, torch.float32, **dict.fromkeys(FLAGS, True)))


def test_large_activations_in_fp16() -> None:
    """fp16 rows whose product with the norm's weight exceeds fp16 are normalised all the same."""
    for M in (1, 2):
        made = case(M, 16, 64, torch.float16, has_norm=True, scale=8000.0)
        norm_K = made.options["norm_K"]
        norm_K *= 4.0
        made.x_MK[:, 3] = 60000.0
        check(made)


def test_output_in_place_of_the_residual() -> None:
    """The output may be the residual's own tensor."""
    for M in (1, 4):
        made = case(M, 40, 64, torch.float32, has_residual=True)
        expected = made.reference()
        residual = made.options["residual_MN"]
        out = small_linear(
            made.x_MK, made.weight_NK, residual_MN=residual, out=residual,
            scratch=LinearScratch.allocate(DEVICE),
        )  # fmt: skip
        assert out is residual
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_bad_arguments_are_refused() -> None:
    """Row counts, shapes, dtypes and strides that do not fit are named."""
    x, weight = torch.zeros(2, 8, device=DEVICE), torch.zeros(6, 8, device=DEVICE)
    scratch = LinearScratch.allocate(DEVICE)
    with pytest.raises(ValueError, match="65 rows"):
        small_linear(x.new_zeros(65, 8), weight)
    with pytest.raises(ValueError, match="5 rows of 1024 features"):
        small_linear(x.new_zeros(5, 1024), weight.new_zeros(6, 1024))
    with pytest.raises(ValueError, match=r"x is \(2, 7\)"):
        small_linear(x[:, :7], weight, scratch=scratch)
    with pytest.raises(ValueError, match="dtypes differ"):
        small_linear(x.half(), weight, scratch=scratch)
    with pytest.raises(ValueError, match="weight has strides"):
        small_linear(x, weight.new_zeros(8, 6).T, scratch=scratch)
    with pytest.raises(ValueError, match="5 weight rows"):
        small_linear(x, weight[:5], has_silu_mul=True, scratch=scratch)


def test_splits_fit_the_scratch() -> None:
    """No shape asks for more partial sums or counters than a scratch has."""
    sizes = [16, 96, 576, 1000, 1536, 2048, 4096, 8192, 8960, 14336, 17920, 151936]
    for M, N, K, itemsize, has_norm in itertools.product(
        (2, 8, 16, 17, 33, 64), sizes, sizes, (2, 4), (False, True)
    ):
        tile = module.skinny_options(M, N, K, itemsize, has_norm)
        if tile["NUM_SPLITS"] > 1:
            num_tiles = -(-N // tile["BLOCK_N"])
            assert num_tiles <= LinearScratch.MAX_SPLIT_TILES
            size = (tile["BLOCK_N"] + 1) * tile["BLOCK_M"]
            assert num_tiles * tile["NUM_SPLITS"] * size <= LinearScratch.MAX_PARTIALS


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "flags", "shape", "row_counts"),
    pairwise(
        list(LEAST_ALLOWED),
        [(), FLAGS[:2], FLAGS[2:3], (FLAGS[0], FLAGS[3]), FLAGS],
        [(2048, 1536), (1536, 8960), (1000, 1000), (96, 64), (151, 77), (4096, 4096)],
        # Those that share a compiled kernel, at least where they take the same way.
        [(1,), (2,), (3, 4), (5, 8, 16), (17, 32), (33, 64)],
    ),
)
def test_grid(
    dtype: torch.dtype,
    flags: tuple[str, ...],
    shape: tuple[int, int],
    row_counts: tuple[int, ...],
) -> None:
    """Every dtype, row count and set of parts, for real and for odd shapes: pairwise, any two of
    these values meet in a case."""
    for M in row_counts:
        check(case(M, *shape, dtype, **dict.fromkeys(flags, True)))


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 8])
def test_offsets_beyond_two_to_the_31(M: int) -> None:
    """A weight of more than 2^31 elements is read to its end."""
    weight = torch.empty((70_000, 32_768), dtype=torch.bfloat16, device=DEVICE)
    assert weight.numel() > 2**31
    weight.normal_(std=32_768**-0.5)
    x_MK = torch.randn((M, 32_768), device=DEVICE).bfloat16()
    out = small_linear(x_MK, weight, scratch=LinearScratch.allocate(DEVICE))
    expected = x_MK.float() @ weight[-100:].float().T
    torch.testing.assert_close(out[:, -100:].float(), expected, atol=2e-2, rtol=2e-2)
