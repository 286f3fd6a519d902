"""GGUF files as a source of weights and of a config.json-like description.

Supported architectures: llama (which llama.cpp also writes for Mistral), qwen2, qwen3. Names become
those of Hugging Face. llama.cpp stores the rows of q and k of arch llama in another order (its RoPE
rotates neighbours, ours rotates halves); here they are put back, whole rows at a time, so codes can
stay codes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from pico_vllm.errors import ModelLoadError
from pico_vllm.models.device_reader import DeviceReader, has_own_memory
from pico_vllm.models.gguf_file import GGUFTensor, read_directory
from pico_vllm.models.gguf_metadata import hf_config_from_gguf
from pico_vllm.models.gguf_quants import CODE_FORMATS, decode, dequantise
from pico_vllm.models.raw_file import CHUNK_BYTES, RawFile, bytes_of
from pico_vllm.models.weights import (
    TORCH_DTYPES,
    Codes,
    TensorInfo,
    check_out,
    no_codes,
    require,
    row_range,
)

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_PATTERN = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.([a-z_]+)\.(weight|bias)", re.ASCII)
ROPE_FACTORS = "rope_freqs.weight"


def hf_name(name: str) -> str:
    """The Hugging Face name; an unknown tensor keeps its own, so that check_names reports it."""
    match = _LAYER_PATTERN.fullmatch(name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_NAMES and kind in ("weight", "bias"):
        return f"{_TOP_NAMES[stem]}.{kind}"
    return name


class GGUFSource:
    """A WeightSource over one file. `metadata` holds all keys of the file, tokenizer included."""

    def __init__(self, path: Path | str) -> None:
        self._file = RawFile(Path(path))
        self._reader: DeviceReader | None = None
        try:
            directory = read_directory(self._file)
            self.metadata: dict[str, object] = directory.metadata
            self._tensors = {hf_name(name): t for name, t in directory.tensors.items()}
            if len(self._tensors) != len(directory.tensors):
                raise ModelLoadError(f"{path}: two tensors stand for the same parameter")
            self._rope_factors = self._read_rope_factors()
            self._hf_config = hf_config_from_gguf(
                self.metadata,
                {name: tensor.shape for name, tensor in self._tensors.items()},
                storage=self._common_storage(),
                rope_factors=self._rope_factors,
                where=str(path),
            )
        except BaseException:
            self._file.close()
            raise
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(tensor.shape, tensor.storage) for name, tensor in self._tensors.items()
        }

    def hf_config(self) -> dict[str, object]:
        """What config.json of this model would say, for `ModelConfig.from_hf`."""
        return dict(self._hf_config)

    def read_into(self, name: str, out: torch.Tensor, rows: slice | None = None) -> None:
        info = require(self, name)
        start = check_out(name, info, rows, out)
        target, tensor = out.detach(), self._tensors[name]
        plain = TORCH_DTYPES.get(tensor.storage)
        is_as_in_file = plain is not None and self._permuted_head_dim(name) == 1
        if is_as_in_file and has_own_memory(target.device):
            self._reader = self._reader or DeviceReader(target.device)
            offset = tensor.offset + start * (tensor.num_bytes // tensor.shape[0])
            self._reader.read_into(self._file, offset, target, plain)
            return
        columns = max(1, tensor.num_bytes // tensor.shape[0])
        if plain is None:
            # Float32 copies of the rows lie beside the bytes of the file while they are decoded.
            columns = tensor.shape[-1] * 8
        step = max(1, CHUNK_BYTES // columns)
        for first in range(0, len(target), step):
            last = min(len(target), first + step)
            raw = self._raw_rows(name, start + first, start + last)
            target[first:last].copy_(self._to_tensor(tensor, raw, target[first:last].shape))

    def read_codes(self, name: str, rows: slice | None = None) -> Codes:
        info = require(self, name)
        if info.storage not in CODE_FORMATS or len(info.shape) != 2:
            raise no_codes(name, info)
        start, stop = row_range(name, info, rows)
        return decode(info.storage, self._raw_rows(name, start, stop))

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._file.close()

    def _to_tensor(
        self, tensor: GGUFTensor, raw: np.ndarray, shape: tuple[int, ...]
    ) -> torch.Tensor:
        dtype = TORCH_DTYPES.get(tensor.storage)
        if dtype is not None:
            return torch.from_numpy(raw).view(dtype).reshape(shape)
        return torch.from_numpy(dequantise(tensor.storage, raw)).reshape(shape)

    def _raw_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Bytes of rows in Hugging Face order: uint8 [rows, row bytes]."""
        tensor = self._tensors[name]
        row_bytes = tensor.num_bytes // tensor.shape[0]
        head_dim = self._permuted_head_dim(name)
        # Rows move within their head only: whole heads are read, then put in order.
        first = start - start % head_dim
        last = min(tensor.shape[0], stop + -stop % head_dim)
        raw = torch.empty((last - first, row_bytes), dtype=torch.uint8)
        if last > first:
            self._file.read_into(tensor.offset + first * row_bytes, bytes_of(raw))
        if head_dim == 1:
            return raw.numpy()
        row = np.arange(start, stop)
        half, within = np.divmod(row % head_dim, head_dim // 2)
        in_file: np.ndarray = raw.numpy()[row - row % head_dim + 2 * within + half - first]
        return in_file

    def _permuted_head_dim(self, name: str) -> int:
        """Rows per head where llama.cpp reordered them, else 1."""
        if self.metadata.get("general.architecture") != "llama":
            return 1
        heads = {
            "q_proj": self._hf_config["num_attention_heads"],
            "k_proj": self._hf_config["num_key_value_heads"],
        }
        parts = name.split(".")
        if len(parts) < 3 or parts[-2] not in heads:
            return 1
        num_heads, num_rows = heads[parts[-2]], self._tensors[name].shape[0]
        assert isinstance(num_heads, int)
        if num_rows % (2 * num_heads):
            raise ModelLoadError(f"{name} has {num_rows} rows, not {num_heads} heads of even size")
        return num_rows // num_heads

    def _common_storage(self) -> str:
        """Storage of most of the bytes."""
        total: dict[str, int] = {}
        for tensor in self._tensors.values():
            total[tensor.storage] = total.get(tensor.storage, 0) + tensor.num_bytes
        return max(total, key=lambda storage: total[storage], default="f32")

    def _read_rope_factors(self) -> list[float] | None:
        """Take the tensor of RoPE divisors out of the weights: it belongs to the configuration."""
        tensor = self._tensors.get(ROPE_FACTORS)
        if tensor is None:
            return None
        if tensor.storage != "f32" or len(tensor.shape) != 1 or tensor.shape[0] > 4096:
            raise ModelLoadError(f"{ROPE_FACTORS} must be a short vector of float32")
        out = torch.empty(tensor.shape)
        self._file.read_into(tensor.offset, bytes_of(out))
        del self._tensors[ROPE_FACTORS]
        return out.tolist()
