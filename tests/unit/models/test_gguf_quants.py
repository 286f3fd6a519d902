"""Block formats against gguf's own dequantisation, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from pico_vllm.errors import ModelLoadError
from pico_vllm.models.gguf_quants import BLOCKS, CODE_FORMATS, decode, dequantise

QUANTISED = ["q4_0", "q4_1", "q8_0", "q4_k", "q6_k"]
# Where the float16 scales of a block lie.
SCALE_BYTES = {"q4_0": [0], "q4_1": [0, 2], "q8_0": [0], "q4_k": [0, 2], "q6_k": [208]}


def random_blocks(storage: str, *, rows: int = 7, blocks: int = 3, seed: int = 0) -> np.ndarray:
    """Every bit random but the scales, which are random normal numbers of either sign."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, blocks, BLOCKS[storage][1]), dtype=np.uint8)
    for first in SCALE_BYTES[storage]:
        scale = rng.normal(size=(rows, blocks, 1)).astype(np.float16)
        raw[..., first : first + 2] = scale.view(np.uint8)
    return raw.reshape(rows, -1)


def reference(storage: str, raw: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[storage.upper()])


@pytest.mark.parametrize("storage", QUANTISED)
def test_dequantise_equals_gguf(storage: str) -> None:
    """Random blocks give exactly the float32 numbers of the gguf package."""
    for seed in range(5):
        raw = random_blocks(storage, seed=seed)
        assert np.array_equal(dequantise(storage, raw), reference(storage, raw))


@pytest.mark.parametrize("storage", ["q4_0", "q4_1", "q8_0"])
def test_dequantise_what_gguf_quantised(storage: str) -> None:
    """Weights quantised by gguf come back as close as the format allows."""
    weight = np.random.default_rng(1).normal(size=(6, 96)).astype(np.float32)
    raw = gguf.quants.quantize(weight, gguf.GGMLQuantizationType[storage.upper()])
    error = np.abs(dequantise(storage, raw) - weight).max()
    assert error < (0.02 if storage == "q8_0" else 0.35)


@pytest.mark.parametrize("storage", CODE_FORMATS)
def test_codes_scales_and_zeros_rebuild_the_weight(storage: str) -> None:
    """scale * code + zero is the weight, with 32 columns a scale and codes in range."""
    raw = random_blocks(storage)
    codes = decode(storage, raw)
    columns = codes.codes.shape[1]
    assert codes.codes.dtype == (np.int8 if storage == "q8_0" else np.uint8)
    assert storage == "q8_0" or (codes.codes.min() == 0 and codes.codes.max() == 15)
    assert codes.scale.shape == (7, columns // 32) and codes.scale.dtype == np.float32
    zero = np.zeros_like(codes.scale) if codes.zero is None else codes.zero
    rebuilt = codes.scale.repeat(32, axis=1) * codes.codes + zero.repeat(32, axis=1)
    assert np.array_equal(rebuilt, reference(storage, raw))
    assert (codes.zero is None) is (storage == "q8_0")


@pytest.mark.parametrize("storage", QUANTISED)
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_scale_that_is_not_finite_is_refused(storage: str, bad: float) -> None:
    """A damaged scale is an error on loading, not NaN logits later."""
    raw = random_blocks(storage)
    first = SCALE_BYTES[storage][-1] + BLOCKS[storage][1]
    raw[2, first : first + 2] = np.array([bad], np.float16).view(np.uint8)
    with pytest.raises(ModelLoadError, match="not finite"):
        dequantise(storage, raw)
