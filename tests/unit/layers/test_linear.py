"""Every weight format against the values that it holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pico_vllm.layers import linear as linear_module
from pico_vllm.layers.huge_pages import PAGE_BYTES, SLAB_BYTES, HugePages
from pico_vllm.layers.linear import DenseWeight, Int4Weight, Int8Weight, Linear, OneDnnWeight

SHAPES = [(16, 32), (64, 64), (80, 96), (208, 576), (960, 576)]
ROWS = [0, 1, 3, Int8Weight.GEMM_FROM_M, Int4Weight.GEMM_FROM_M - 1, Int4Weight.GEMM_FROM_M, 100]
needs_onednn = pytest.mark.skipif(not OneDnnWeight.is_available(), reason="no oneDNN with bf16")


def random_codes(shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scale and zero as a Q4_1 file has them: scale exact in bf16, w around 0."""
    generator = np.random.default_rng(0)
    codes = generator.integers(0, 16, shape, dtype=np.uint8)
    scale = generator.integers(1, 128, (shape[0], shape[1] // 32)) / np.float32(512)
    return codes, scale.astype(np.float32), (-scale * generator.uniform(6, 9, scale.shape))


def values(codes: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> torch.Tensor:
    spread = [np.repeat(part, 32, axis=1) for part in (scale, zero)]
    return torch.from_numpy(spread[0] * codes + spread[1]).float()


def assert_multiplies(weight, num_rows: int, bias: torch.Tensor | None = None) -> None:
    """x @ W.T of the held values; the error is bf16 rounding of x @ W.T, its parts and its sum."""
    x = torch.randn(num_rows, weight.shape[1]).bfloat16()
    held = weight.dequantize()
    assert held.dtype == torch.float32 and tuple(held.shape) == weight.shape
    expected = x.float() @ held.T
    if bias is not None:
        expected = expected + bias.float()
    y = Linear(weight, bias)(x)
    assert y.dtype == torch.bfloat16
    size = (x.float().abs() @ held.abs().T) * 2**-9 / weight.shape[1] ** 0.5
    torch.testing.assert_close(
        y.float(), expected, rtol=2**-7, atol=8 * size.max().item() if num_rows else 0
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_int4_holds_scale_times_code_plus_zero(shape: tuple[int, int]) -> None:
    """Packed values equal scale * code + zero up to the bf16 rounding of value and middle."""
    parts = random_codes(shape)
    held = Int4Weight.pack(*parts).dequantize()
    expected = values(*parts)
    torch.testing.assert_close(held, expected, rtol=2**-8, atol=2**-8 * 0.25 * 8)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", ROWS)
def test_int4_multiplies(num_rows: int, shape: tuple[int, int]) -> None:
    """Few rows and many, which take different ways, both multiply by the held values."""
    assert_multiplies(Int4Weight.pack(*random_codes(shape)), num_rows)


def test_int4_many_rows_equal_few() -> None:
    """The same row gives the same within bf16 rounding whichever way it goes."""
    weight = Int4Weight.pack(*random_codes((208, 576)))
    x = torch.randn(Int4Weight.GEMM_FROM_M, 576).bfloat16()
    many, few = weight(x).float(), torch.cat([weight(row[None]) for row in x]).float()
    torch.testing.assert_close(many, few, rtol=2**-7, atol=2**-8 * few.abs().max().item())


@pytest.mark.parametrize("shape", [(64, 32), (192, 96), (128, 576)])
@pytest.mark.parametrize("num_rows", ROWS)
def test_int8_multiplies(num_rows: int, shape: tuple[int, int]) -> None:
    """8-bit weights multiply by the held values, few rows and many."""
    assert_multiplies(Int8Weight.pack(torch.randn(shape)), num_rows)


def test_int8_error() -> None:
    """Each value is within half a step of its row's scale, a row of zeros included."""
    table = torch.randn(64, 64) * torch.logspace(-3, 3, 64)[:, None]
    table[7] = 0
    before = table.clone()
    weight = Int8Weight.pack(table)
    step = weight.scale_N.float()[:, None]
    # bf16 may round the scale down: the largest value then falls a little short.
    largest = table.abs().amax(1, keepdim=True)
    error = (weight.dequantize() - table).abs()
    assert (error <= torch.maximum(step / 2 * 1.001, largest * 2**-8)).all()
    assert torch.equal(table, before)


def test_int8_rows() -> None:
    """Rows by id are the held values in bf16."""
    weight = Int8Weight.pack(torch.randn(192, 96))
    ids = torch.tensor([5, 31, 5, 0, 32, 63, 64, 127, 160, 191])
    assert torch.equal(weight.rows(ids), weight.dequantize()[ids].bfloat16())


@needs_onednn
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (17, 33), (960, 576)])
@pytest.mark.parametrize("num_rows", [0, 1, 8, 100])
def test_onednn_multiplies(num_rows: int, shape: tuple[int, int]) -> None:
    """Odd sizes too; the held values are the packed ones, bit for bit."""
    table = torch.randn(shape).bfloat16()
    weight = OneDnnWeight.pack(table)
    assert torch.equal(weight.dequantize(), table.float())
    assert_multiplies(weight, num_rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense(dtype: torch.dtype) -> None:
    """A packed dense weight is a copy with the same values, rows and products."""
    table = torch.randn(17, 33).to(dtype)
    weight = DenseWeight.pack(table)
    x, ids = torch.randn(3, 33).to(dtype), torch.tensor([16, 2])
    assert torch.equal(weight(x), torch.nn.functional.linear(x, table))
    assert torch.equal(weight.rows(ids), table[ids])
    assert weight.weight_NK.data_ptr() != table.data_ptr()
    assert torch.equal(weight.dequantize(), table.float())


@pytest.mark.parametrize("num_rows", [1, 100])
@pytest.mark.parametrize("kind", ["dense", "int4", "int8", "onednn"])
def test_bias(kind: str, num_rows: int) -> None:
    """Every format adds the bias, in both of its ways."""
    if kind == "onednn" and not OneDnnWeight.is_available():
        pytest.skip("no oneDNN with bf16")
    table = torch.randn(64, 96)
    weight = {
        "dense": lambda: DenseWeight(table.bfloat16()),
        "int4": lambda: Int4Weight.pack(*random_codes((64, 96))),
        "int8": lambda: Int8Weight.pack(table),
        "onednn": lambda: OneDnnWeight.pack(table.bfloat16()),
    }[kind]()
    assert_multiplies(weight, num_rows, 10 * torch.randn(64).bfloat16())


@pytest.mark.parametrize("kind", [Int4Weight, Int8Weight])
def test_strided_input(kind: type) -> None:
    """Columns cut from a wider tensor give the same bits as a copy of them."""
    packed = {Int4Weight: lambda: Int4Weight.pack(*random_codes((64, 96)))}
    weight = packed.get(kind, lambda: Int8Weight.pack(torch.randn(64, 96)))()
    wide = torch.randn(5, 192).bfloat16()
    assert torch.equal(weight(wide[:, :96]), weight(wide[:, :96].contiguous()))


@pytest.mark.parametrize(("kind", "num_rows"), [(Int4Weight, 16), (Int8Weight, 64)])
def test_fits(kind: type, num_rows: int) -> None:
    """Only whole groups of 32 inputs and 16 outputs are taken, in 8 bits 64 outputs."""
    assert kind.fits((num_rows, 32)) and kind.fits((4096 + num_rows, 576))
    assert not kind.fits((num_rows // 2, 32)) and not kind.fits((num_rows + 1, 32))
    assert not kind.fits((num_rows, 48))


def test_chunked_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing and unpacking in many small chunks gives the same weights and products as in one."""
    parts, table = random_codes((208, 96)), torch.randn(192, 96)
    x = torch.randn(100, 96).bfloat16()
    whole = (Int4Weight.pack(*parts), Int8Weight.pack(table))
    products = [weight(x) for weight in whole]

    def one_by_one(num_rows: int, bytes_per_row: int, multiple: int = 1, **_: int):
        return (slice(start, start + multiple) for start in range(0, num_rows, multiple))

    monkeypatch.setattr(linear_module, "_row_chunks", one_by_one)
    chunked = (Int4Weight.pack(*parts), Int8Weight.pack(table))
    assert torch.equal(whole[0].packed, chunked[0].packed)
    assert torch.equal(whole[0].scale_and_middle, chunked[0].scale_and_middle)
    assert torch.equal(whole[1].packed, chunked[1].packed)
    assert torch.equal(whole[1].scale_N, chunked[1].scale_N)
    for product, weight in zip(products, chunked, strict=True):
        torch.testing.assert_close(weight(x), product, rtol=2**-7, atol=2**-6)


def test_num_bytes() -> None:
    """4-bit codes and pairs cost 5 bits a weight, 8-bit codes 9 or 10 and a scale a row."""
    assert Int4Weight.pack(*random_codes((64, 96))).num_bytes == 64 * 96 * 5 // 8
    assert Int8Weight.pack(torch.randn(64, 96)).num_bytes == 64 * 96 * 10 // 8 + 2 * 64
    assert Int8Weight.pack(torch.randn(64, 128)).num_bytes == 64 * 128 * 9 // 8 + 2 * 64
    bias = torch.zeros(64)
    assert Linear(DenseWeight(torch.zeros(64, 96)), bias).num_bytes == 4 * (64 * 96 + 64)


def test_huge_pages() -> None:
    """Tensors from one slab do not overlap, big ones start on a page, empty ones are allowed."""
    memory = HugePages()
    small = [memory.empty((7, 3), torch.bfloat16).fill_(i) for i in range(100)]
    big = memory.empty((SLAB_BYTES + 5,), torch.uint8)
    after = memory.empty((2, 2), torch.float32).zero_()
    assert big.data_ptr() % PAGE_BYTES == 0 and len(big) == SLAB_BYTES + 5
    big.fill_(255)
    assert memory.empty((0, 5), torch.int8).shape == (0, 5)
    assert all((tensor == i).all() for i, tensor in enumerate(small))
    assert (after == 0).all()
    assert torch.equal(memory.copy(torch.arange(5)), torch.arange(5))
