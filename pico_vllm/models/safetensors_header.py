"""The header of a safetensors file, checked in full before a byte of a tensor is read.

Layout: 8 bytes little-endian length N, N bytes of JSON, then the tensors without gaps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pico_vllm.errors import ModelLoadError, show
from pico_vllm.models.raw_file import RawFile
from pico_vllm.models.strict_json import parse_json_object

MAX_HEADER_BYTES = 100_000_000
STORAGE_OF_DTYPE = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2}


@dataclass(frozen=True, slots=True)
class Entry:
    shape: tuple[int, ...]
    storage: str
    offset: int
    """First byte, counted from the start of the file."""
    num_bytes: int


def read_header(file: RawFile) -> dict[str, Entry]:
    """Entries by tensor name.

    Raises:
        ModelLoadError: damaged or truncated file, or a dtype other than F32, F16, BF16.
    """
    path = file.path
    if file.size < 10:
        raise ModelLoadError(f"{path} has {file.size} bytes: too short for a safetensors file")
    length = int.from_bytes(file.read(0, 8), "little")
    if length > min(MAX_HEADER_BYTES, file.size - 8):
        raise ModelLoadError(
            f"{path}: header of {length} bytes does not fit: the file has {file.size} bytes and "
            f"headers may have {MAX_HEADER_BYTES}. Truncated, or not a safetensors file"
        )
    header = parse_json_object(file.read(8, length), f"{path}: header")
    header.pop("__metadata__", None)
    start = 8 + length
    entries = {name: _entry(path, name, value, start) for name, value in header.items()}
    end = start
    for name, entry in sorted(entries.items(), key=lambda item: item[1].offset):
        if entry.offset != end:
            raise ModelLoadError(
                f"{path}: tensor {name!r} starts at byte {entry.offset}, expected {end}: "
                "tensors overlap or leave a gap"
            )
        end += entry.num_bytes
    if end != file.size:
        raise ModelLoadError(
            f"{path} has {file.size} bytes, its header describes {end}: the file is truncated or "
            "damaged; download it again"
        )
    return entries


def _entry(path: object, name: str, value: object, start: int) -> Entry:
    where = f"{path}: tensor {name[:200]!r}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise ModelLoadError(f"{where} must have dtype, shape and data_offsets and nothing else")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in STORAGE_OF_DTYPE:
        raise ModelLoadError(
            f"{where} has dtype {show(dtype)}: only {', '.join(STORAGE_OF_DTYPE)} are "
            "supported; use the unquantised checkpoint",
            param="dtype",
        )
    is_shape = isinstance(shape, list) and len(shape) <= 8
    if not is_shape or not all(type(size) is int and 0 < size < 2**63 for size in shape):
        raise ModelLoadError(f"{where} has shape {show(shape)}: must be positive integers")
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(type(offset) is int and 0 <= offset < 2**63 for offset in offsets)
    ):
        raise ModelLoadError(f"{where} has data_offsets {show(offsets)}: must be two integers")
    storage = STORAGE_OF_DTYPE[dtype]
    num_bytes = math.prod(shape) * ITEM_BYTES[storage]
    if offsets[1] - offsets[0] != num_bytes:
        raise ModelLoadError(
            f"{where} of {dtype} {shape} needs {num_bytes} bytes, data_offsets hold "
            f"{offsets[1] - offsets[0]}"
        )
    return Entry(tuple(shape), storage, start + offsets[0], num_bytes)
