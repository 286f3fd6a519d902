"""The gated MLP and the embedding."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from pico_vllm.layers.embedding import Embedding
from pico_vllm.layers.linear import DenseWeight, Int8Weight, Linear, Residual, silu_mul
from pico_vllm.layers.mlp import MLP


@pytest.mark.parametrize("num_tokens", [1, 7])
def test_silu_mul(num_tokens: int) -> None:
    """silu of the first half times the second, and the input keeps its values."""
    gate_up = torch.randn(num_tokens, 34)
    before = gate_up.clone()
    expected = functional.silu(gate_up[:, :17]) * gate_up[:, 17:]
    assert torch.equal(silu_mul(gate_up), expected)
    assert torch.equal(gate_up, before)


def test_mlp() -> None:
    """x + down(silu(gate(norm(x))) * up(norm(x))) with biases."""
    gate, up, down = torch.randn(6, 4), torch.randn(6, 4), torch.randn(4, 6)
    bias = torch.randn(12)
    mlp = MLP(
        lambda x: 2 * x,
        Linear(DenseWeight(torch.cat((gate, up))), bias),
        Linear(DenseWeight(down), bias[:4]),
    )
    x = torch.randn(3, 4)
    normed = 2 * x
    hidden = functional.silu(normed @ gate.T + bias[:6]) * (normed @ up.T + bias[6:])
    torch.testing.assert_close(mlp.forward(Residual(x)).x_TE, x + hidden @ down.T + bias[:4])


def test_embedding_shares_the_weight() -> None:
    """Rows come in the asked dtype, from dense and 8-bit weights that a head can use as well."""
    table = torch.randn(64, 64)
    ids = torch.tensor([31, 0, 63])
    assert torch.equal(Embedding(DenseWeight(table), torch.float32)(ids), table[ids])
    eight = Int8Weight.pack(table)
    rows = Embedding(eight, torch.bfloat16)(ids)
    assert rows.dtype == torch.bfloat16
    torch.testing.assert_close(rows.float(), eight.dequantize()[ids], rtol=2**-8, atol=0)
