"""Where weights come from: one interface over safetensors, GGUF and random numbers.

A source offers tensors under their Hugging Face names and writes them into memory that the caller
owns: the destination decides dtype and device, and no second copy of a large tensor ever exists.
"""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from pico_vllm.errors import ModelLoadError, show, show_name
from pico_vllm.models.device_reader import DeviceReader, has_own_memory
from pico_vllm.models.raw_file import CHUNK_BYTES, RawFile, bytes_of, copy_rows
from pico_vllm.models.safetensors_header import Entry, read_header
from pico_vllm.models.strict_json import read_json_object

logger = logging.getLogger(__name__)

TORCH_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
"""Plain storage types. The others are blocks of codes: q8_0, q4_0, q4_1, q4_k, q6_k."""

# A plain file name: an index must not make us open files elsewhere.
_SHARD_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,200}\.safetensors", re.ASCII)

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class TensorInfo:
    shape: tuple[int, ...]
    storage: str
    """One of f32, f16, bf16, q8_0, q4_0, q4_1, q4_k, q6_k."""


@dataclass(frozen=True)
class Codes:
    """Rows of a block-quantised matrix, N rows of K columns in blocks of 32: w = scale * code +
    zero."""

    codes: np.ndarray
    """[N, K]: uint8 from 0 to 15, or int8 for q8_0."""
    scale: np.ndarray
    """[N, K / 32] float32."""
    zero: np.ndarray | None
    """[N, K / 32] float32; None for q8_0, where it is 0."""


class WeightSource(Protocol):
    """Tensors by Hugging Face parameter name, `[out, in]` for matrices."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read_into(self, name: str, out: torch.Tensor, rows: slice | None = None) -> None:
        """Fill `out` with the tensor, or with these rows of it, converted to the dtype of `out`.
        On a GPU it is filled in the order of the current stream.

        Raises:
            ModelLoadError: no such tensor, another shape, or the file cannot be read.
        """
        ...

    def read_codes(self, name: str, rows: slice | None = None) -> Codes:
        """Codes of a tensor stored as q8_0, q4_0, q4_1 or q4_k, without dequantising it.

        Raises:
            ModelLoadError: no such tensor, or another storage type.
        """
        ...

    def close(self) -> None: ...


def require(source: WeightSource, name: str) -> TensorInfo:
    info = source.tensors.get(name)
    if info is None:
        shown = show_name(name, 200)
        raise ModelLoadError(f"the checkpoint has no tensor {shown}", param=shown)
    return info


def row_range(name: str, info: TensorInfo, rows: slice | None) -> tuple[int, int]:
    """First and last + 1 of the rows asked for; all of them without a slice."""
    start, stop, step = (rows or slice(None)).indices(info.shape[0] if info.shape else 1)
    assert step == 1 and start <= stop, (name, rows)
    return start, stop


def check_out(name: str, info: TensorInfo, rows: slice | None, out: torch.Tensor) -> int:
    """Check that `out` takes the rows, return the first one."""
    start, stop = row_range(name, info, rows)
    expected = (stop - start, *info.shape[1:]) if info.shape else ()
    if tuple(out.shape) != expected:
        raise ModelLoadError(
            f"{show_name(name, 200)} has shape {list(expected)} in the checkpoint, the model needs "
            f"{list(out.shape)}: config.json does not belong to these weights",
            param=name,
        )
    return start


class SafetensorsSource:
    """`model.safetensors`, or the shards that `model.safetensors.index.json` names.

    Every header is checked on opening: a truncated or missing shard is met before any memory is
    taken.
    """

    def __init__(self, directory: Path | str) -> None:
        self._files: list[RawFile] = []
        self._reader: DeviceReader | None = None
        self._entries: dict[str, tuple[RawFile, Entry]] = {}
        try:
            self._open(Path(directory))
        except BaseException:
            self.close()
            raise
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(entry.shape, entry.storage)
            for name, (_, entry) in self._entries.items()
        }

    def _open(self, directory: Path) -> None:
        single = directory / "model.safetensors"
        index = directory / "model.safetensors.index.json"
        if single.exists():
            self._add(single)
        elif index.exists():
            shard_of = _read_index(index)
            for shard in sorted(set(shard_of.values())):
                if not (directory / shard).exists():
                    raise ModelLoadError(
                        f"{index} names {shard}, which is missing: download the complete model"
                    )
                self._add(directory / shard)
            _check_index(index, shard_of, self._entries)
        else:
            raise ModelLoadError(_no_weights(directory), param="model")

    def _add(self, path: Path) -> None:
        file = RawFile(path)
        self._files.append(file)
        for name, entry in read_header(file).items():
            if name in self._entries:
                other = self._entries[name][0].path
                raise ModelLoadError(f"tensor {name[:200]!r} is both in {other} and in {path}")
            self._entries[name] = (file, entry)

    def read_into(self, name: str, out: torch.Tensor, rows: slice | None = None) -> None:
        info = require(self, name)
        start = check_out(name, info, rows, out)
        file, entry = self._entries[name]
        dtype = TORCH_DTYPES[entry.storage]
        target = out.detach()
        if not info.shape:
            target = target.reshape(1)
        row_bytes = entry.num_bytes // (info.shape[0] if info.shape else 1)

        if has_own_memory(target.device):
            self._reader = self._reader or DeviceReader(target.device)
            self._reader.read_into(file, entry.offset + start * row_bytes, target, dtype)
            return
        if target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous():
            file.read_into(entry.offset + start * row_bytes, bytes_of(target))
            return

        def read_rows(first: int, last: int) -> torch.Tensor:
            stage = torch.empty((last - first, *target.shape[1:]), dtype=dtype)
            file.read_into(entry.offset + first * row_bytes, bytes_of(stage))
            return stage

        copy_rows(read_rows, target, start, row_bytes)

    def read_codes(self, name: str, rows: slice | None = None) -> Codes:
        raise no_codes(name, require(self, name))

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        for file in self._files:
            file.close()


def no_codes(name: str, info: TensorInfo) -> ModelLoadError:
    return ModelLoadError(
        f"{name} is stored as {info.storage}: only q8_0, q4_0, q4_1 and q4_k can be used as codes; "
        "load it dequantised",
        param=name,
    )


def _read_index(path: Path) -> dict[str, str]:
    shard_of = read_json_object(path, max_bytes=100_000_000).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise ModelLoadError(f"{path}: weight_map must be an object that names the shards")
    for shard in shard_of.values():
        if not isinstance(shard, str) or not _SHARD_NAME.fullmatch(shard):
            raise ModelLoadError(
                f"{path}: {show(shard)} must be the name of a .safetensors file beside it"
            )
    return shard_of


def _check_index(
    path: Path, shard_of: Mapping[str, str], entries: Mapping[str, tuple[RawFile, Entry]]
) -> None:
    found = {name: file.path.name for name, (file, _) in entries.items()}
    if found != dict(shard_of):
        missing = [name for name in shard_of if found.get(name) != shard_of[name]]
        unexpected = [name for name in found if name not in shard_of]
        raise ModelLoadError(
            f"{path} and its shards disagree. {_list_names('Missing', missing)}"
            f"{_list_names('Unexpected', unexpected)}Download the complete model"
        )


def _no_weights(directory: Path) -> str:
    if not directory.is_dir():
        return f"{directory} is not a directory"
    try:
        names = sorted(path.name for path in directory.iterdir())
    except OSError as error:
        return f"cannot list {directory}: {error.strerror}"
    if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        return (
            f"{directory} holds only pickle weights (.bin, .pt, .pth), which are never loaded as "
            "they can run code: convert the model to safetensors, for example with "
            "transformers' save_pretrained(safe_serialization=True)"
        )
    return (
        f"{directory} holds neither model.safetensors nor model.safetensors.index.json. It holds "
        f"{', '.join(map(show_name, names[:10])) or 'nothing'}: download the complete model"
    )


class DummySource:
    """Seeded random weights for measuring without a checkpoint; norm weights are ones.

    Values repeat with a prime period that each tensor enters elsewhere: drawing 3 GB of fresh
    normal numbers takes minutes, copying them seconds, and no two rows are alike for any even row
    length.
    """

    _PERIOD = 1_000_003

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], std: float, seed: int) -> None:
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(tuple(shape), "f32") for name, shape in shapes.items()
        }
        generator = torch.Generator().manual_seed(seed)
        self._noise = torch.randn(self._PERIOD, generator=generator) * std
        self._copies: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def read_into(self, name: str, out: torch.Tensor, rows: slice | None = None) -> None:
        info = require(self, name)
        start = check_out(name, info, rows, out)
        target = out.detach()
        if name.endswith("norm.weight"):
            target.fill_(1.0)
            return
        if not target.is_contiguous():
            dense = torch.empty_like(target, memory_format=torch.contiguous_format)
            self.read_into(name, dense, rows)
            target.copy_(dense)
            return
        key = (target.dtype, target.device)
        if key not in self._copies:
            self._copies[key] = self._noise.to(device=key[1], dtype=key[0])
        noise = self._copies[key]
        flat = target.view(-1)
        row_size = flat.numel() // max(1, len(out) if info.shape else 1)
        position = zlib.crc32(name.encode()) + start * row_size
        done = 0
        while done < flat.numel():
            first = (position + done) % self._PERIOD
            count = min(self._PERIOD - first, flat.numel() - done)
            flat[done : done + count] = noise[first : first + count]
            done += count

    def read_codes(self, name: str, rows: slice | None = None) -> Codes:
        raise no_codes(name, require(self, name))

    def close(self) -> None:
        self._copies.clear()


def check_names(
    expected: Mapping[str, tuple[int, ...]], source: WeightSource, *, tied: bool
) -> None:
    """Check that the source holds exactly the parameters of the model, in the same shapes.

    With `tied` the head is the embedding: a head in the file is allowed and not loaded; where it
    differs from the embedding that is logged, since whoever wrote the flag wanted the embedding.

    Raises:
        ModelLoadError: up to 10 missing and 10 unexpected names, the wrong shapes, or an untied
            model without a head, with the remedy.
    """
    wanted = {name: tuple(shape) for name, shape in expected.items() if not (tied and name == HEAD)}
    found = {
        name: info.shape
        for name, info in source.tensors.items()
        # Buffers that old checkpoints carry; the frequencies follow from config.json.
        if not name.endswith("rotary_emb.inv_freq") and not (tied and name == HEAD)
    }
    missing, unexpected = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing == [HEAD] and not unexpected:
        raise ModelLoadError(
            f"config.json says tie_word_embeddings=false, but the checkpoint has no {HEAD}: set "
            "tie_word_embeddings to true if the head shares the embedding, else download the "
            "complete model",
            param="tie_word_embeddings",
        )
    if missing or unexpected:
        raise ModelLoadError(
            "the checkpoint does not hold the parameters of this model. "
            f"{_list_names('Missing', missing)}{_list_names('Unexpected', unexpected)}"
            "Check that config.json belongs to these weights and that all files are there",
            param=show_name((missing or unexpected)[0], 200),
        )
    wrong = [
        f"{name} has {list(found[name])}, needs {list(shape)}"
        for name, shape in wanted.items()
        if found[name] != shape
    ]
    if wrong:
        raise ModelLoadError(
            f"{len(wrong)} shapes differ from config.json: {'; '.join(wrong[:10])}",
            param=next(name for name, shape in wanted.items() if found[name] != shape),
        )
    if tied and HEAD in source.tensors and not _is_same_tensor(source, HEAD, EMBEDDING):
        logger.warning(
            "event=tied_head_ignored reason=%s differs from %s, tie_word_embeddings=true wins",
            HEAD,
            EMBEDDING,
        )


def _list_names(title: str, names: Iterable[str]) -> str:
    names = list(names)
    if not names:
        return ""
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"{title} {len(names)}: {', '.join(show_name(name, 200) for name in names[:10])}{more}. "


def _is_same_tensor(source: WeightSource, name: str, other: str) -> bool:
    info = source.tensors[name]
    if other not in source.tensors or source.tensors[other].shape != info.shape:
        return False
    width = info.shape[1] if len(info.shape) > 1 else 1
    step = max(1, CHUNK_BYTES // (8 * width))
    for start in range(0, info.shape[0], step):
        rows = slice(start, min(start + step, info.shape[0]))
        left = torch.empty((rows.stop - start, *info.shape[1:]), dtype=torch.float32)
        right = torch.empty_like(left)
        source.read_into(name, left, rows)
        source.read_into(other, right, rows)
        if not torch.equal(left, right):
            return False
    return True
