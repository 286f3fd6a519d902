"""RMSNorm against transformers."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from pico_vllm.layers.norm import RMSNorm

EPS = 1e-5


def both(shape: tuple[int, ...], dtype: torch.dtype, scale: float = 3.0):
    torch.manual_seed(0)
    theirs = LlamaRMSNorm(shape[-1], EPS).to(dtype)
    theirs.weight.data = (1 + 0.3 * torch.randn(shape[-1])).to(dtype)
    x = (scale * torch.randn(shape) + 0.5).to(dtype)
    return theirs, RMSNorm(theirs.weight.data, EPS), x


def exact(theirs: LlamaRMSNorm, x: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * theirs.weight.double()


@pytest.mark.parametrize("shape", [(1, 576), (16, 576), (33, 576), (5, 9, 64), (3, 7), (1, 1)])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_fp32_equals_transformers(shape: tuple[int, ...], scale: float) -> None:
    """fp32 agrees within 1e-6 relative."""
    theirs, ours, x = both(shape, torch.float32, scale)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(1, 576), (8, 576), (16, 576), (33, 576), (5, 9, 64), (3, 7)])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_bf16_is_no_worse_than_transformers(shape: tuple[int, ...], scale: float) -> None:
    """The largest relative error in bf16 is at most that of transformers."""
    theirs, ours, x = both(shape, torch.bfloat16, scale)
    expected = exact(theirs, x)
    our_error = ((ours(x).double() - expected) / expected).abs().max()
    their_error = ((theirs(x).double() - expected) / expected).abs().max()
    assert our_error <= their_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_input(dtype: torch.dtype) -> None:
    """Heads cut from a fused projection give the same bits as a copy of them."""
    _, ours, _ = both((64,), dtype)
    heads = torch.randn(4, 15, 64).to(dtype)[:, :9]
    assert torch.equal(ours(heads), ours(heads.contiguous()))
