"""The product of `--batch-invariant`: against its plain twin, and rows against themselves."""

from __future__ import annotations

import pytest
import torch

from pico_vllm.kernels.invariant_linear import invariant_linear, invariant_linear_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROUNDING = {torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}
"""Relative error of rounding once; of fp32, of another order of sums."""


def operands(M: int, N: int, K: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Rows of x and residual cut from wider ones."""
    x, weight = torch.randn(M, K + 8)[:, 8:], torch.randn(N, K) * K**-0.5
    bias, residual = torch.randn(N), torch.randn(M, N + 8)[:, :N]
    return tuple(each.to(DEVICE, dtype) for each in (x, weight, bias, residual))


def check(M: int, N: int, K: int, dtype: torch.dtype, *, around: str) -> None:
    x, weight, bias, residual = operands(M, N, K, dtype)
    args = (bias if "bias" in around else None, residual if "residual" in around else None)
    y = invariant_linear(x, weight, *args)
    plain = [None if each is None else each.cpu().float() for each in args]
    expected = invariant_linear_reference(x.cpu().float(), weight.cpu().float(), *plain)
    assert y.dtype == dtype
    torch.testing.assert_close(y.cpu().float(), expected, atol=2e-5, rtol=1.01 * ROUNDING[dtype])


# Triton's interpreter cuts bits off where a GPU rounds to bf16.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("M", "N", "K", "around"),
    [
        (1, 40, 72, ""),
        pytest.param(3, 33, 136, "bias", marks=pytest.mark.memcheck),
        pytest.param(70, 20, 24, "residual", marks=pytest.mark.memcheck),
        (65, 129, 64, "bias residual"),
    ],
)
def test_same_as_the_twin(M: int, N: int, K: int, around: str, dtype: torch.dtype) -> None:
    """Few rows and many, sizes that fill no tile, with what surrounds a product."""
    check(M, N, K, dtype, around=around)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize(("N", "K"), [(2048, 1536), (1536, 8960), (333, 1000), (4864, 896)])
def test_a_row_has_the_same_bits_in_any_batch(N: int, K: int, dtype: torch.dtype) -> None:
    """Alone, among few and among many, at any place; at most twice as far from fp64 as torch's
    product."""
    x, weight, bias, _ = operands(700, N, K, dtype)
    whole = invariant_linear(x, weight, bias)
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    theirs = torch.nn.functional.linear(x, weight, bias)
    error, allowed = ((y.double() - exact).abs().max() for y in (whole, theirs))
    assert error <= 2 * allowed
    for rows in (slice(0, 1), slice(699, 700), slice(5, 21), slice(3, 67), slice(64, 129)):
        assert torch.equal(invariant_linear(x[rows], weight, bias), whole[rows]), rows


def test_arguments_that_are_refused() -> None:
    """Each error names what it met."""
    x, weight, bias, residual = operands(3, 8, 16, torch.float32)
    for args, message in (
        ((x, weight[:, :8]), r"weight \[8, 8\]"),
        ((x.mT.contiguous().mT, weight), r"strides \(1, 3\)"),
        ((x, weight, bias[:7]), r"bias is \[7\]"),
        ((x, weight, bias, residual[:2]), r"residual is \[2, 8\]"),
        ((x, weight, bias.half()), "another operand torch.float16"),
    ):
        with pytest.raises(ValueError, match=message):
            invariant_linear(*args)
