"""RMSNorm: the Triton kernel against its plain twin in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pico_vllm.kernels.rms_norm import (
    add_rms_norm,
    add_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROUNDING = {torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}
"""Relative error of rounding once; of fp32, of a sum of thousands."""
# Triton's interpreter cuts bits off where a GPU rounds to bf16.
EXACT = [torch.float32, torch.float16]
EPS = 1e-6


def assert_close(out: Tensor, expected: Tensor) -> None:
    """Within the one rounding that torch.rms_norm has too."""
    allowed = 1.01 * ROUNDING[out.dtype]
    torch.testing.assert_close(out.cpu().float(), expected, atol=1e-6, rtol=allowed)


def check(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Rows cut from wider ones, into rows of a wider tensor full of NaN."""
    x = (3 * torch.randn(*shape[:-1], shape[-1] + 16)).to(DEVICE, dtype)[..., 16:]
    weight = (1 + 0.1 * torch.randn(shape[-1])).to(DEVICE, dtype)
    wide = torch.full_like(x, float("nan")).repeat_interleave(2, -2)
    out = wide[..., ::2, :]
    assert rms_norm(x, weight, EPS, out=out) is out
    expected = rms_norm_reference(x.cpu().float(), weight.cpu().float(), EPS)
    assert_close(out, expected)
    assert wide[..., 1::2, :].isnan().all()
    assert torch.equal(rms_norm(x, weight, EPS), out)


def check_add(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    x, residual = (torch.randn(num_tokens, 2 * size).to(DEVICE, dtype)[:, size:] for _ in range(2))
    weight = (1 + 0.1 * torch.randn(size)).to(DEVICE, dtype)
    total, normed = add_rms_norm(x, residual, weight, EPS)
    expected, _ = add_rms_norm_reference(x, residual, weight, EPS)
    assert torch.equal(total, expected)
    assert_close(normed, rms_norm_reference(total.cpu().float(), weight.cpu().float(), EPS))


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize(
    "shape", [(3, 1536), (1, 576), pytest.param((7, 5, 80), marks=pytest.mark.memcheck)]
)
def test_rows_and_heads(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Rows that are no power of two, and heads, are right whatever their strides."""
    check(shape, dtype)


@pytest.mark.memcheck
@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("num_parts", [3, 8])
def test_add_parts(num_parts: int, dtype: torch.dtype) -> None:
    """Parts of x are added up in fp32 and rounded once."""
    parts_STE = torch.randn(num_parts, 5, 200).to(DEVICE, dtype)
    residual, weight = (torch.randn(*shape).to(DEVICE, dtype) for shape in ((5, 200), (200,)))
    total, normed = add_rms_norm(parts_STE, residual, weight, EPS)
    expected = residual.cpu().double() + parts_STE.cpu().double().sum(0)
    assert_close(total, expected.float())
    assert_close(normed, rms_norm_reference(total.cpu().float(), weight.cpu().float(), EPS))


@pytest.mark.memcheck
@pytest.mark.parametrize("dtype", EXACT)
def test_add(dtype: torch.dtype) -> None:
    """The sum is that of PyTorch as bits, and the norm is the sum's."""
    check_add(5, 896, dtype)


def test_tokens_none_and_zeros() -> None:
    """No token is a step like any other, and a row of zeros stays one."""
    weight = torch.ones(64, device=DEVICE)
    assert rms_norm(weight.new_empty(0, 64), weight, EPS).shape == (0, 64)
    assert not rms_norm(torch.zeros(2, 64, device=DEVICE), weight, EPS).any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("size", [64, 80, 128, 256, 576, 896, 1024, 1536, 4096, 5120, 8192, 32768])
@pytest.mark.parametrize("num_tokens", [1, 2, 33, 1000])
def test_grid(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    """Every size in use, alone, as heads and added to a residual."""
    check((num_tokens, size), dtype)
    check_add(num_tokens, size, dtype)
    if size <= 256:
        check((num_tokens, 12, size), dtype)


def test_arguments_that_are_refused() -> None:
    """Each error names what it met."""
    x, weight = torch.zeros(3, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    long = torch.zeros(1, 32769, device=DEVICE)
    cases = [
        (rms_norm, (x, weight[:4], EPS), r"rows of 8 and strides \(8, 1\), weight \[4\]"),
        (rms_norm, (x.mT.contiguous().mT, weight, EPS), r"strides \(1, 3\)"),
        (rms_norm, (long, long[0], EPS), "32769 elements are longer than 32768"),
        (rms_norm, (x[0], weight, EPS), "x has 1 dimensions"),
        (rms_norm, (x, weight, EPS, x.half()), r"out is \[3, 8\] torch.float16"),
        (add_rms_norm, (x, x[:2], weight, EPS), r"residual \[2, 8\]"),
        (add_rms_norm, (x, x.mT.contiguous().mT, weight, EPS), r"strides \(1, 3\)"),
    ]
    for door, arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            door(*arguments)
