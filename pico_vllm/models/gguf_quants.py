"""Block formats of GGUF, decoded with numpy.

Shapes: `raw` is uint8 [N, row bytes] as the file holds it, results have N rows of K columns. Blocks
run along a row. N rows, K columns, B blocks of 32 a row (K = 32 B).
Source: the layouts in ggml's ggml-common.h.
"""

from __future__ import annotations

import numpy as np

from pico_vllm.errors import ModelLoadError
from pico_vllm.models.weights import Codes

# storage: (columns a block, bytes a block)
BLOCKS = {
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "q8_0": (32, 34),
    "q4_k": (256, 144),
    "q6_k": (256, 210),
}
CODE_FORMATS = ("q8_0", "q4_0", "q4_1", "q4_k")


def row_bytes(storage: str, columns: int) -> int:
    block_columns, block_bytes = BLOCKS[storage]
    return columns // block_columns * block_bytes


def decode(storage: str, raw: np.ndarray) -> Codes:
    """Codes with their scales and zeros. `scale * code + zero` is exactly what ggml computes.

    Raises:
        ModelLoadError: a scale is not finite: the file is damaged.
    """
    blocks = raw.reshape(len(raw), -1, BLOCKS[storage][1])
    with np.errstate(over="ignore", invalid="ignore"):
        codes = _DECODERS[storage](blocks)
    if not np.isfinite(codes.scale).all() or (
        codes.zero is not None and not np.isfinite(codes.zero).all()
    ):
        raise ModelLoadError(f"a {storage} block has a scale that is not finite: damaged file")
    return codes


def dequantise(storage: str, raw: np.ndarray) -> np.ndarray:
    """Float32 [N, K]."""
    if storage == "q6_k":
        return _dequantise_q6_k(raw)
    codes = decode(storage, raw)
    num_rows, columns = codes.codes.shape
    weight = codes.codes.astype(np.float32).reshape(num_rows, columns // 32, 32)
    weight *= codes.scale[..., None]
    if codes.zero is not None:
        weight += codes.zero[..., None]
    return weight.reshape(num_rows, columns)


def _half(blocks: np.ndarray, first: int) -> np.ndarray:
    """The float16 at byte `first` of each block, as float32 [N, blocks]."""
    pair = np.ascontiguousarray(blocks[..., first : first + 2])
    return pair.view("<f2")[..., 0].astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """[..., n] bytes to [..., 2n] codes: all low halves, then all high halves."""
    count = packed.shape[-1]
    codes = np.empty((*packed.shape[:-1], 2 * count), np.uint8)
    np.bitwise_and(packed, 15, out=codes[..., :count])
    np.right_shift(packed, 4, out=codes[..., count:])
    return codes


def _q4_0(blocks: np.ndarray) -> Codes:
    """2 bytes scale d, 16 bytes of codes: w = d * (code - 8)."""
    scale = _half(blocks, 0)
    return Codes(_nibbles(blocks[..., 2:]).reshape(len(blocks), -1), scale, -8 * scale)


def _q4_1(blocks: np.ndarray) -> Codes:
    """2 bytes scale d, 2 bytes minimum m, 16 bytes of codes: w = d * code + m."""
    codes = _nibbles(blocks[..., 4:]).reshape(len(blocks), -1)
    return Codes(codes, _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: np.ndarray) -> Codes:
    """2 bytes scale d, 32 signed bytes: w = d * code."""
    codes = np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
    return Codes(codes.reshape(len(blocks), -1), _half(blocks, 0), None)


def _q4_k(blocks: np.ndarray) -> Codes:
    """256 columns: d, dmin, 8 pairs of 6-bit (sc, m) in 12 bytes, 4 runs of 32 bytes of codes.

    w = d * sc * code - dmin * m. The first four pairs lie in the low 6 bits of bytes 0-3 and 4-7;
    the last four have their low 4 bits in bytes 8-11 and their high 2 bits on top of bytes 0-3 and
    4-7.
    """
    first, second, third = (blocks[..., start : start + 4] for start in (4, 8, 12))
    sc = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=-1)
    m = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=-1)
    scale = _half(blocks, 0)[..., None] * sc.astype(np.float32)
    zero = -(_half(blocks, 2)[..., None] * m.astype(np.float32))
    num_rows = len(blocks)
    runs = blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32)
    return Codes(
        _nibbles(runs).reshape(num_rows, -1),
        scale.reshape(num_rows, -1),
        zero.reshape(num_rows, -1),
    )


_DECODERS = {"q4_0": _q4_0, "q4_1": _q4_1, "q8_0": _q8_0, "q4_k": _q4_k}


def _dequantise_q6_k(raw: np.ndarray) -> np.ndarray:
    """256 columns: 128 bytes of low 4 bits, 64 of high 2 bits, 16 signed scales, d.

    w = d * scale * (code - 32), a scale for 16 columns. Each half of 128 columns has its own 64 +
    32 bytes: 32 low halves, 32 low halves, 32 high halves, 32 high halves, with bit pairs 0-1, 2-3,
    4-5, 6-7 of the same 32 bytes on top.
    """
    blocks = raw.reshape(len(raw), -1, BLOCKS["q6_k"][1])
    halves = (*blocks.shape[:-1], 2)
    codes = _nibbles(blocks[..., :128].reshape(*halves, 64)).reshape(*halves, 4, 32)
    high = blocks[..., 128:192].reshape(*halves, 32)
    for quarter in range(4):
        codes[..., quarter, :] |= (high >> (2 * quarter) & 3) << 4
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        scales *= _half(blocks, 208)[..., None]
    if not np.isfinite(scales).all():
        raise ModelLoadError("a q6_k block has a scale that is not finite: damaged file")
    weight = codes.astype(np.float32).reshape(*blocks.shape[:-1], 16, 16)
    weight -= 32
    weight *= scales[..., None]
    return weight.reshape(len(raw), -1)
