"""The MLP's gate: the Triton kernel against its plain twin in fp32."""

from __future__ import annotations

import pytest
import torch

from pico_vllm.kernels.silu_mul import silu_mul, silu_mul_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROUNDING = {torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}
"""Relative error of rounding once; of fp32, of an exponential."""
# Triton's interpreter cuts bits off where a GPU rounds to bf16.
EXACT = [torch.float32, torch.float16]


def check(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    """Rows cut from wider ones, into rows of a wider tensor full of NaN."""
    gate_up = (3 * torch.randn(num_tokens, 2 * size + 8)).to(DEVICE, dtype)[:, 8:]
    wide = torch.full((num_tokens, size + 8), float("nan"), dtype=dtype, device=DEVICE)
    out = wide[:, 8:]
    assert silu_mul(gate_up, out=out) is out
    expected = silu_mul_reference(gate_up.cpu().float())
    torch.testing.assert_close(out.cpu().float(), expected, atol=1e-6, rtol=1.01 * ROUNDING[dtype])
    assert wide[:, :8].isnan().all()
    assert torch.equal(silu_mul(gate_up), out)


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize(
    ("num_tokens", "size"), [(1, 1536), pytest.param(5, 1030, marks=pytest.mark.memcheck), (0, 64)]
)
def test_same_as_the_twin(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    """Sizes that fill a program or not give the gated product."""
    check(num_tokens, size, dtype)


@pytest.mark.filterwarnings("ignore:overflow")  # of NumPy, under the interpreter
def test_large_gates() -> None:
    """Far out the gate is x or 0, and never NaN."""
    gate_up = torch.tensor([[1e4, -1e4, 1.0, 1.0]], device=DEVICE)
    assert silu_mul(gate_up).tolist() == [[1e4, 0.0]]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("size", [768, 3072, 4864, 8960, 14336, 28672])
@pytest.mark.parametrize("num_tokens", [1, 2, 33, 1000])
def test_grid(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    """Every size in use."""
    check(num_tokens, size, dtype)


def test_arguments_that_are_refused() -> None:
    """Each error names what it met."""
    gate_up = torch.zeros(3, 8, device=DEVICE)
    cases = [
        ((gate_up[:, :7],), "gate_up is 7 wide"),
        ((gate_up.mT.contiguous().mT,), r"strides \(1, 3\)"),
        ((gate_up, gate_up), r"out is \[3, 8\] torch.float32"),
        ((gate_up, gate_up[:, :4].half()), "torch.float16"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            silu_mul(*arguments)
