"""Products of more rows than our own kernel takes."""

from __future__ import annotations

import pytest
import torch

from pico_vllm.layers.linear import DenseWeight, Linear, Residual
from pico_vllm.layers.norm import RMSNorm
from pico_vllm.layers.triton_linear import TritonLayers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    ("size", "num_rows", "is_cut"), [(1024, 65, True), (1000, 65, False), (1024, 257, False)]
)
def test_the_sum_comes_normalised_where_k_is_cut(size: int, num_rows: int, is_cut: bool) -> None:
    """Cut along K or not, residual plus product is that of a plain layer, and so is the product
    after its norm."""
    generator = torch.Generator().manual_seed(size)
    x, weight, residual, after = (
        torch.randn(*shape, generator=generator).to(DEVICE)
        for shape in ((num_rows, size), (48, size), (num_rows, 48), (16, 48))
    )
    norm = RMSNorm(torch.rand(48, generator=generator).to(DEVICE), 1e-5)
    plain, plain_after = (Linear(DenseWeight(each)) for each in (weight, after))
    layers = TritonLayers(DEVICE)
    ours, ours_after = (layers.linear(DenseWeight(each), None) for each in (weight, after))

    expected = plain.added(x, Residual(residual), norm)
    got = ours.added(x, Residual(residual.clone()), norm)
    assert (got.normed_TE is not None) is is_cut
    torch.testing.assert_close(got.x_TE, expected.x_TE, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(
        ours_after.normed(norm, got), plain_after.normed(norm, expected), rtol=1e-5, atol=1e-5
    )
    alone = ours.added(x, Residual(residual.clone()))
    assert alone.normed_TE is None
    torch.testing.assert_close(alone.x_TE, expected.x_TE, rtol=1e-5, atol=1e-4)
