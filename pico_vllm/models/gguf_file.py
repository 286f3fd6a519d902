"""The directory of a GGUF file, parsed within limits: metadata, then where each tensor lies.

Every count, length and offset is a Python int, so nothing wraps, and is held against the file's
size before it is used. Layout (version 2 and 3, little-endian): magic, version, tensor count, key
count, the keys, the tensor table, padding, tensors.
Source: the GGUF specification, github.com/ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from pico_vllm.errors import ModelLoadError
from pico_vllm.models.gguf_quants import BLOCKS
from pico_vllm.models.raw_file import RawFile

MAX_KEYS = 100_000
MAX_TENSORS = 100_000
MAX_NAME_BYTES = 65_535
MAX_STRING_BYTES = 16 << 20
MAX_TOTAL_STRING_BYTES = 64 << 20
MAX_ARRAY_ITEMS = 4_000_000
"""Over all arrays. The largest tokenizers need 1.5 million; an item takes about 60 bytes in
memory."""
MAX_ARRAY_DEPTH = 2

STORAGE_OF_TYPE = {
    0: "f32",
    1: "f16",
    2: "q4_0",
    3: "q4_1",
    8: "q8_0",
    12: "q4_k",
    14: "q6_k",
    30: "bf16",
}
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<B"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_MIN_KEY_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    shape: tuple[int, ...]
    """Outermost first, as torch has it; the file has it reversed."""
    storage: str
    offset: int
    """First byte, counted from the start of the file."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFDirectory:
    version: int
    metadata: dict[str, object]
    tensors: dict[str, GGUFTensor]


class _Cursor:
    """Reads forward through a window, and never past the end of the file."""

    _WINDOW = 1 << 20

    def __init__(self, file: RawFile) -> None:
        self.file = file
        self.position = 0
        self.array_items = 0
        self.string_bytes = 0
        self._window = b""
        self._start = 0

    def fail(self, problem: str) -> ModelLoadError:
        return ModelLoadError(f"{self.file.path}: byte {self.position}: {problem}", param="gguf")

    @property
    def remaining(self) -> int:
        return self.file.size - self.position

    def take(self, num_bytes: int) -> bytes:
        if num_bytes > self.remaining:
            raise self.fail(f"{num_bytes} bytes wanted, {self.remaining} left: truncated file")
        first = self.position - self._start
        if first + num_bytes > len(self._window):
            self._start, first = self.position, 0
            size = min(max(num_bytes, self._WINDOW), self.remaining)
            self._window = bytes(self.file.read(self.position, size))
        self.position += num_bytes
        return self._window[first : first + num_bytes]

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def string(self, limit: int = MAX_STRING_BYTES) -> str:
        length = self.u64()
        self.string_bytes += length
        if length > limit or self.string_bytes > MAX_TOTAL_STRING_BYTES:
            raise self.fail(
                f"string of {length} bytes: at most {limit}, and {MAX_TOTAL_STRING_BYTES} in all"
            )
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail("string is not UTF-8: damaged file") from None

    def value(self, kind: int, depth: int = 0) -> object:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(depth + 1)
        scalar = _SCALARS.get(kind)
        if scalar is None:
            raise self.fail(f"value type {kind} is not one of GGUF: damaged file")
        value: object = scalar.unpack(self.take(scalar.size))[0]
        if kind == _BOOL:
            if value not in (0, 1):
                raise self.fail(f"bool is {value}: must be 0 or 1")
            return value == 1
        return value

    def array(self, depth: int) -> list[object]:
        if depth > MAX_ARRAY_DEPTH:
            raise self.fail(f"arrays nested {depth} deep: at most {MAX_ARRAY_DEPTH}")
        kind, count = self.u32(), self.u64()
        self.array_items += count
        if self.array_items > MAX_ARRAY_ITEMS:
            raise self.fail(f"array of {count} items: at most {MAX_ARRAY_ITEMS} in all arrays")
        scalar = _SCALARS.get(kind)
        if scalar is None or kind == _BOOL:
            smallest = 1 if kind == _BOOL else 8
            if count * smallest > self.remaining:
                raise self.fail(f"array of {count} items: {self.remaining} bytes left")
            return [self.value(kind, depth) for _ in range(count)]
        packed = self.take(count * scalar.size)
        return [item for (item,) in scalar.iter_unpack(packed)]


def read_directory(file: RawFile) -> GGUFDirectory:
    """Parse and check everything before the tensors.

    Raises:
        ModelLoadError: not GGUF, version 1 or big-endian, anything out of bounds, a tensor type
            that is not supported, tensors that overlap or end past the file.
    """
    cursor = _Cursor(file)
    if file.size < 24 or cursor.take(4) != b"GGUF":
        raise ModelLoadError(f"{file.path} is not a GGUF file: it does not begin with GGUF")
    version = cursor.u32()
    if version & 0xFFFF == 0:
        raise cursor.fail("big-endian file: convert it to little-endian with gguf-convert-endian")
    if version not in (2, 3):
        raise cursor.fail(f"GGUF version {version}: only 2 and 3 are supported; convert it anew")
    num_tensors, num_keys = cursor.u64(), cursor.u64()
    if num_keys > min(MAX_KEYS, cursor.remaining // _MIN_KEY_BYTES):
        raise cursor.fail(f"{num_keys} keys: more than {MAX_KEYS} or than the file can hold")
    if num_tensors > min(MAX_TENSORS, cursor.remaining // _MIN_TENSOR_BYTES):
        raise cursor.fail(f"{num_tensors} tensors: more than {MAX_TENSORS} or than fit the file")
    metadata: dict[str, object] = {}
    for _ in range(num_keys):
        key = cursor.string(MAX_NAME_BYTES)
        if key in metadata:
            raise cursor.fail(f"key {key[:80]!r} appears twice")
        metadata[key] = cursor.value(cursor.u32())
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= 65536 or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {alignment!r:.40}: must be a power of two >= 8")
    tensors: dict[str, GGUFTensor] = {}
    for _ in range(num_tensors):
        name, tensor = _read_tensor(cursor, alignment)
        if name in tensors:
            raise cursor.fail(f"tensor {name[:80]!r} appears twice")
        tensors[name] = tensor
    start = cursor.position + -cursor.position % alignment
    placed = {
        name: GGUFTensor(tensor.shape, tensor.storage, start + tensor.offset, tensor.num_bytes)
        for name, tensor in tensors.items()
    }
    _check_places(file, placed, start, alignment)
    return GGUFDirectory(version, metadata, placed)


def _read_tensor(cursor: _Cursor, alignment: int) -> tuple[str, GGUFTensor]:
    name = cursor.string(MAX_NAME_BYTES)
    num_dims = cursor.u32()
    if not 1 <= num_dims <= 4:
        raise cursor.fail(f"tensor {name[:80]!r} has {num_dims} dimensions: must be 1 to 4")
    dims = [cursor.u64() for _ in range(num_dims)]
    if 0 in dims:
        raise cursor.fail(f"tensor {name[:80]!r} has dimensions {dims}: all must be above 0")
    kind, offset = cursor.u32(), cursor.u64()
    storage = STORAGE_OF_TYPE.get(kind)
    if storage is None:
        supported = ", ".join(sorted(name.upper() for name in STORAGE_OF_TYPE.values()))
        raise cursor.fail(
            f"tensor {name[:80]!r} has type {_type_name(kind)}: supported are {supported}. "
            "Use a Q4_0, Q4_1, Q8_0 or F16 file of the model"
        )
    block_columns, block_bytes = BLOCKS[storage]
    if block_columns > 1 and num_dims == 1:
        raise cursor.fail(f"tensor {name[:80]!r}: a vector of {storage} blocks is not supported")
    if dims[0] % block_columns:
        raise cursor.fail(f"tensor {name[:80]!r}: rows of {dims[0]} are not whole {storage} blocks")
    if offset % alignment:
        raise cursor.fail(f"tensor {name[:80]!r}: offset {offset} is not a multiple of {alignment}")
    num_bytes = math.prod(dims) // block_columns * block_bytes
    return name, GGUFTensor(tuple(reversed(dims)), storage, offset, num_bytes)


_OTHER_TYPES = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 13: "Q5_K", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
"""Of the GGUF format, for the message that refuses them."""


def _type_name(kind: int) -> str:
    return _OTHER_TYPES.get(kind, str(kind))


def _check_places(
    file: RawFile, tensors: dict[str, GGUFTensor], start: int, alignment: int
) -> None:
    end = start
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.offset < end:
            raise ModelLoadError(
                f"{file.path}: tensor {name[:80]!r} overlaps another", param="gguf"
            )
        end = tensor.offset + tensor.num_bytes
        if end > file.size:
            raise ModelLoadError(
                f"{file.path} has {file.size} bytes, tensor {name[:80]!r} ends at byte {end}: "
                "the file is truncated; download it again",
                param="gguf",
            )
    # Writers may pad the last tensor, never more.
    if tensors and file.size > end + -end % alignment:
        raise ModelLoadError(
            f"{file.path} has {file.size} bytes, its tensors end at byte {end}: damaged file",
            param="gguf",
        )
