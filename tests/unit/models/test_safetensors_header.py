"""Hostile and damaged safetensors headers."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from pico_vllm.errors import ModelLoadError
from pico_vllm.models.raw_file import RawFile
from pico_vllm.models.safetensors_header import Entry, read_header


def entry(begin: int = 0, end: int = 8, **changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [begin, end]} | changes


def write(path: Path, header: object, data_bytes: int = 8) -> RawFile:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data_bytes))
    return RawFile(path)


def test_sound_header(tmp_path: Path) -> None:
    """Offsets count from the start of the file, whatever the order of the names."""
    header = {
        "__metadata__": {"format": "pt"},
        "b": entry(8, 12, dtype="BF16", shape=[1, 2]),
        "a": entry(0, 8),
    }
    file = write(tmp_path / "x", header, 12)
    start = file.size - 12
    assert read_header(file) == {
        "a": Entry((2,), "f32", start, 8),
        "b": Entry((1, 2), "bf16", start + 8, 4),
    }


@pytest.mark.parametrize(
    ("header", "data_bytes", "match"),
    [
        ({"a": entry(), "b": entry(4, 12)}, 12, "overlap"),
        ({"a": entry(), "b": entry(12, 20)}, 20, "gap"),
        ({"a": entry(8, 16)}, 16, "gap"),
        ({"a": entry(0, 4)}, 4, "needs 8 bytes"),
        ({"a": entry(8, 0)}, 8, "needs 8 bytes"),
        ({"a": entry(-8, 0)}, 8, "data_offsets"),
        ({"a": entry(0, 2**70)}, 8, "data_offsets"),
        ({"a": entry(data_offsets=[0])}, 8, "data_offsets"),
        ({"a": entry(data_offsets=[0.0, 8.0])}, 8, "data_offsets"),
        ({"a": entry(shape=[0])}, 0, "shape"),
        ({"a": entry(shape=[-2])}, 8, "shape"),
        ({"a": entry(shape=[True, 2])}, 8, "shape"),
        ({"a": entry(shape=[2**40, 2**40])}, 8, "needs"),
        ({"a": entry(shape=[1] * 9)}, 8, "shape"),
        ({"a": entry(shape="2")}, 8, "shape"),
        ({"a": entry(dtype="F8_E4M3")}, 8, "F8_E4M3.*unquantised"),
        ({"a": entry(dtype="I64")}, 8, "I64"),
        ({"a": entry(dtype="BOOL")}, 8, "BOOL"),
        ({"a": entry(dtype=None)}, 8, "dtype"),
        ({"a": entry(more=1)}, 8, "nothing else"),
        ({"a": []}, 8, "nothing else"),
        ([], 8, "JSON object"),
        (b"", 8, "not valid JSON"),
        (b"{", 8, "not valid JSON"),
        (b'{"a": \xff}', 8, "not valid JSON"),
        (b'{"a": 1, "a": 2}', 8, "'a' appears twice"),
        (b'{"a":' * 50_000, 8, "nested too deep"),
        (b'{"a":' + b"[" * 400_000, 8, "nested too deep"),
        (b'{"a":' + b"9" * 5000 + b"}", 8, "not valid JSON"),
        (b'{"a":[' + b"1," * 1_100_000 + b"1]}", 8, "at most 1000000"),
    ],
    ids=lambda value: str(value)[:30] if not isinstance(value, bytes) else "raw",
)
def test_bad_header(tmp_path: Path, header: object, data_bytes: int, match: str) -> None:
    """Every way in which a header can lie is refused before a tensor is read."""
    file = write(tmp_path / "x", header, data_bytes)
    with pytest.raises(ModelLoadError, match=match) as caught:
        read_header(file)
    assert len(caught.value.message) < 600


@pytest.mark.parametrize("length", [100, 2**27, 2**63, 2**64 - 1])
def test_header_longer_than_the_file(tmp_path: Path, length: int) -> None:
    """The header's length is held against the file and against 100 MB before it is read."""
    path = tmp_path / "x"
    path.write_bytes(struct.pack("<Q", length) + b"{}" + bytes(20))
    with pytest.raises(ModelLoadError, match=f"header of {length} bytes does not fit"):
        read_header(RawFile(path))


@pytest.mark.parametrize("data", [b"", b"1234567", b"123456789"])
def test_short_file(tmp_path: Path, data: bytes) -> None:
    """Less than a length and an empty object is no safetensors file."""
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(ModelLoadError, match="too short"):
        read_header(RawFile(tmp_path / "x"))


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    """A directory, an absent path and a path with a NUL are errors with the path, not
    tracebacks.
    """
    for path in (tmp_path, tmp_path / "absent", Path("a\0b"), Path("/dev/null")):
        with pytest.raises(ModelLoadError):
            RawFile(path)
