"""JSON files of a checkpoint, parsed within limits: size, number of values, no duplicate keys."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from pico_vllm.errors import ModelLoadError
from pico_vllm.models.raw_file import RawFile

MAX_JSON_VALUES = 1_000_000
"""A parsed value takes about 100 bytes, so this bounds what a small hostile file can blow up to."""


def parse_json_object(text: bytes | bytearray, where: str) -> dict[str, object]:
    """Parse one object.

    Raises:
        ModelLoadError: not UTF-8, not JSON, not an object, a duplicate key, nested too deep, too
            many values. NaN and Infinity come through as floats: whoever reads a number checks it.
    """
    values = sum(text.count(mark) for mark in (b",", b"[", b"{"))
    if values > MAX_JSON_VALUES:
        raise ModelLoadError(f"{where} holds {values} values, at most {MAX_JSON_VALUES} are read")
    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=_object_without_duplicates)
    except (ValueError, RecursionError) as error:
        # JSONDecodeError and UnicodeDecodeError are ValueErrors; some carry the whole text.
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)[:200]
        raise ModelLoadError(f"{where} is not valid JSON: {reason}. Download it again") from None
    if not isinstance(parsed, dict):
        raise ModelLoadError(f"{where} must hold a JSON object, not {type(parsed).__name__}")
    return parsed


def _object_without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"key {counts.most_common(1)[0][0][:80]!r} appears twice")
    return result


def read_json_object(path: Path, *, max_bytes: int = 16 << 20) -> dict[str, object]:
    """Read and parse a file of at most `max_bytes`."""
    file = RawFile(path)
    try:
        if file.size > max_bytes:
            raise ModelLoadError(f"{path} has {file.size} bytes, at most {max_bytes} are read")
        return parse_json_object(file.read(0, file.size), str(path))
    finally:
        file.close()
