"""Which kernel takes a product, and products of more rows than our own kernels take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pico_vllm.kernels import hopper_gate_up, hopper_linear, hopper_split_k
from pico_vllm.kernels.small_linear import small_linear_reference
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


def test_products_that_hopper_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """All products of a layer go to hopper_linear with all their parts, but only where it can take
    them."""
    taken = []

    def hopper(x_MK: Tensor, weight_NK: Tensor, **around: Any) -> Tensor:
        assert around.pop("scratch") is not None
        taken.append(
            (tuple(weight_NK.shape), {name for name, x in around.items() if x is not None})
        )
        return small_linear_reference(x_MK, weight_NK, **around)

    monkeypatch.setattr(hopper_linear, "hopper_linear", hopper)
    monkeypatch.setattr(
        hopper_linear, "can_take", lambda device, dtype, M, N, K, has_silu_mul: M == 6
    )
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    norm = RMSNorm(random(64), 1e-5)
    layers = TritonLayers(DEVICE)
    weights = [DenseWeight(random(n, 64)) for n in (48, 64, 80)]
    bias = random(48)
    for num_rows in (3, 6):
        x = random(num_rows, 64)
        results = [
            (
                qkv.normed(norm, Residual(x)),
                o.added(x, Residual(x.clone())).x_TE,
                gate_up.normed_silu_mul(norm, Residual(x)),
            )
            for make in (layers.linear, Linear)
            for qkv, o, gate_up in [
                (make(weights[0], bias), make(weights[1], None), make(weights[2], None))
            ]
        ]
        for ours, plain in zip(*results, strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
        if num_rows == 3:
            assert not taken
    around = {"has_silu_mul", "eps", "norm_K"}
    assert taken == [
        ((48, 64), around | {"bias_N"}),
        ((64, 64), {"has_silu_mul", "residual_MN"}),
        ((80, 64), around),
    ]


def test_products_that_are_left_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where hopper_split_k takes a product and is faster, its parts go to the norm or to whoever
    asks for parts; their sum and the bias are what a plain layer gives, and others get it whole."""
    taken, most_parts = [], set()

    def split(x_MK: Tensor, weight_NK: Tensor, *, max_splits: int) -> Tensor:
        taken.append(tuple(weight_NK.shape))
        most_parts.add((len(x_MK), max_splits))
        return hopper_split_k.hopper_split_k_reference(x_MK, weight_NK, max_splits)

    monkeypatch.setattr(hopper_split_k, "hopper_split_k", split)
    monkeypatch.setattr(hopper_split_k, "can_take", lambda device, dtype, N, K: N != 80)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    norm, layers = RMSNorm(random(192), 1e-5), TritonLayers(DEVICE)
    bias = random(48)
    weights = [DenseWeight(random(n, 192)) for n in (48, 192, 80)]
    for num_rows, expected_shapes in (
        (70, [(48, 192), (192, 192)]), (30, [(48, 192), (192, 192)]), (8, []),
    ):  # fmt: skip
        taken.clear()
        x = random(num_rows, 192)
        for weight, bias_N in zip(weights, (bias, None, None), strict=True):
            ours, plain = layers.linear(weight, bias_N), Linear(weight, bias_N)
            parts = ours.normed_in_parts(norm, Residual(x))
            whole = parts.parts_SMN.sum(0) + (0.0 if parts.bias_N is None else parts.bias_N)
            expected = plain.normed(norm, Residual(x))
            torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(
                ours.normed(norm, Residual(x)), expected, rtol=1e-4, atol=1e-4
            )
        assert taken == expected_shapes
        taken.clear()
        ours = layers.linear(weights[1], None)
        got = ours.added(x, Residual(x.clone()), norm)
        expected = x + x @ weights[1].weight_NK.T
        torch.testing.assert_close(got.x_TE, expected, rtol=1e-4, atol=1e-4)
        assert taken == expected_shapes[1:]
        ours.added(x, Residual(x.clone()))
        assert taken == expected_shapes[1:], "nobody behind adds it up"
    # Attention adds up four from 65 rows on, the norm three.
    assert most_parts == {(70, 4), (70, 3), (30, 3)}
    most_parts.clear()
    for num_rows in (64, 65):
        layers.linear(weights[0], bias).normed_in_parts(norm, Residual(random(num_rows, 192)))
    assert most_parts == {(64, 3), (65, 4)}


def test_long_rows_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm adds up eight parts of long rows, and attention none."""
    taken = []

    def split(x_MK: Tensor, weight_NK: Tensor, *, max_splits: int) -> Tensor:
        taken.append((len(x_MK), max_splits))
        return hopper_split_k.hopper_split_k_reference(x_MK, weight_NK, max_splits)

    monkeypatch.setattr(hopper_split_k, "hopper_split_k", split)
    monkeypatch.setattr(hopper_split_k, "can_take", lambda device, dtype, N, K: True)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    weight_NK = random(48, 4096)
    ours = TritonLayers(DEVICE).linear(DenseWeight(weight_NK), None)
    for num_rows in (64, 65):
        x, residual = random(num_rows, 4096), random(num_rows, 48)
        expected = residual + x @ weight_NK.T
        got = ours.added(x, Residual(residual), RMSNorm(random(48), 1e-5))
        torch.testing.assert_close(got.x_TE, expected, rtol=1e-3, atol=1e-3)
        parts = ours.normed_in_parts(RMSNorm(random(4096), 1e-5), Residual(x))
        assert len(parts.parts_SMN) == 1
    assert taken == [(64, 8)]


@pytest.mark.parametrize("has_bias", [False, True])
def test_gate_and_up_that_hopper_takes(has_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel where it is faster, and only for weights without a bias."""
    taken = []

    def gate_up(x_TE: Tensor, weight_NE: Tensor) -> Tensor:
        taken.append(len(x_TE))
        return hopper_gate_up.hopper_gate_up_reference(x_TE, weight_NE)

    monkeypatch.setattr(hopper_gate_up, "hopper_gate_up", gate_up)
    monkeypatch.setattr(hopper_gate_up, "can_take", lambda device, dtype, F, E: True)
    monkeypatch.setattr(hopper_gate_up, "is_faster", lambda T, F: T != 70)
    generator = torch.Generator().manual_seed(0)
    weight = DenseWeight(torch.randn(64, 48, generator=generator).to(DEVICE))
    bias_N = torch.randn(64, generator=generator).to(DEVICE) if has_bias else None
    norm = RMSNorm(torch.ones(48, device=DEVICE), 1e-5)
    for num_rows in (24, 25, 70, 71):
        x = torch.randn(num_rows, 48, generator=generator).to(DEVICE)
        ours, plain = (
            linear.normed_silu_mul(norm, Residual(x))
            for linear in (TritonLayers(DEVICE).linear(weight, bias_N), Linear(weight, bias_N))
        )
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
    assert taken == ([] if has_bias else [25, 71])
