"""WeightLoader: from a weight source to layers, in the format that was asked for. One tensor at a
time.

Parts of a fused linear share one format, the widest of their own: if one part is not stored in 4
bits the whole is held in 8, if one part is in no packed form the whole is dense.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from pico_vllm.layers.embedding import Embedding
from pico_vllm.layers.huge_pages import weight_memory
from pico_vllm.layers.linear import (
    DenseWeight,
    Int4Weight,
    Int8Weight,
    Linear,
    OneDnnWeight,
    Weight,
)
from pico_vllm.layers.plain import PlainLayers
from pico_vllm.models.weights import EMBEDDING, TensorInfo, WeightSource

FOUR_BIT = {"q4_0", "q4_1", "q4_k"}
EIGHT_BIT = {"q8_0", "q6_k"}


class CastingWeight:
    """A weight whose products are computed in another dtype than that of the activations."""

    def __init__(self, weight: Weight, dtype: torch.dtype) -> None:
        self.weight = weight
        self.dtype = dtype
        self.shape = weight.shape
        self.num_bytes = weight.num_bytes

    def __call__(self, x_MK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        y_MN = self.weight(x_MK.to(self.dtype)).to(x_MK.dtype)
        return y_MN if bias_N is None else y_MN.add_(bias_N)

    def dequantize(self) -> Tensor:
        return self.weight.dequantize()


_FUSED = re.compile(r"(?<=\.)([qkv]|gate|up)_(?=proj\.)")
"""Parts of one linear have one name but for this."""


def bytes_in_memory(
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, TensorInfo],
    *,
    keeps_packed: bool,
    weight_itemsize: int,
    vector_itemsize: int,
) -> int:
    """Memory that all weights will take, by the choices that WeightLoader makes."""
    fused: dict[str, list[str]] = {}
    total = 0
    for name, shape in shapes.items():
        if len(shape) == 1:
            total += shape[0] * vector_itemsize
        else:
            fused.setdefault(_FUSED.sub("", name), []).append(name)
    for names in fused.values():
        shape = (sum(shapes[name][0] for name in names), shapes[names[0]][1])
        storages = {tensors[name].storage for name in names}
        packed = packed_class(storages, shape, is_embedding=names == [EMBEDDING])
        if keeps_packed and packed is not None:
            total += packed.bytes_for(shape)
        else:
            total += shape[0] * shape[1] * weight_itemsize
    return total


def packed_class(
    storages: set[str], shape: tuple[int, int], *, is_embedding: bool
) -> type[Int4Weight] | type[Int8Weight] | None:
    """Which packed form takes parts of these storage types; None where they must be plain."""
    # An embedding is read row by row, which 4-bit weights do not offer.
    if storages <= FOUR_BIT and not is_embedding and Int4Weight.fits(shape):
        return Int4Weight
    if storages <= FOUR_BIT | EIGHT_BIT and Int8Weight.fits(shape):
        return Int8Weight
    return None


def own_format(weight: Weight) -> Weight:
    """The weight itself, without what casts for it."""
    return weight.weight if isinstance(weight, CastingWeight) else weight


class WeightLoader:
    def __init__(
        self,
        source: WeightSource,
        *,
        dtype: torch.dtype,
        weight_dtype: torch.dtype,
        keeps_packed: bool,
        device: torch.device,
        layers: PlainLayers,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """dtype: of activations. weight_dtype: of weights that are not packed. layers: makes
        what weights are put into. progress: told the tensors read."""
        self.device = device
        self._source = source
        self.dtype = dtype
        self._weight_dtype = weight_dtype
        self._keeps_packed = keeps_packed
        self._progress = progress or (lambda num_tensors: None)
        self._layers = layers

    def vector(self, name: str) -> Tensor:
        """A norm weight or a bias, in the dtype of activations."""
        out = torch.empty(self._source.tensors[name].shape, dtype=self.dtype, device=self.device)
        self._source.read_into(name, out)
        self._progress(1)
        return out

    def linear(self, *names: str) -> Linear:
        """One linear from the rows of one or more projections, with their biases if they have
        any."""
        weight_names = [f"{name}.weight" for name in names]
        bias_names = [f"{name}.bias" for name in names if f"{name}.bias" in self._source.tensors]
        assert len(bias_names) in (0, len(names)), bias_names
        bias = torch.cat([self.vector(name) for name in bias_names]) if bias_names else None
        return self._layers.linear(self._weight(weight_names), bias)

    def embedding(self, name: str) -> Embedding:
        return self._layers.embedding(self._weight([name], is_embedding=True), self.dtype)

    def tied_head(self, embedding: Embedding) -> Linear:
        """The head that shares the embedding's weight: one copy in memory."""
        return self._layers.linear(self._cast(embedding.weight), None)

    def _weight(self, names: Sequence[str], *, is_embedding: bool = False) -> Weight:
        infos = [self._source.tensors[name] for name in names]
        shape = (sum(info.shape[0] for info in infos), infos[0].shape[1])
        packed = None
        if self._keeps_packed:
            storages = {info.storage for info in infos}
            packed = packed_class(storages, shape, is_embedding=is_embedding)
        weight: Weight
        if packed is Int4Weight:
            weight = Int4Weight.from_rows(shape, lambda rows: self._read_codes(names, rows))
        elif packed is Int8Weight:
            weight = Int8Weight.from_rows(shape, lambda rows: self._read_rows(names, rows))
        else:
            weight = self._dense(names, shape, is_embedding=is_embedding)
        self._progress(len(names))
        return weight if is_embedding else self._cast(weight)

    def _dense(
        self, names: Sequence[str], shape: tuple[int, int], *, is_embedding: bool
    ) -> DenseWeight | OneDnnWeight:
        is_blocked = (
            self.device.type == "cpu"
            and self._weight_dtype == torch.bfloat16
            and not is_embedding
            and OneDnnWeight.is_available()
        )
        if is_blocked:
            # oneDNN keeps its own copy in another layout; this one goes away.
            return OneDnnWeight.pack(
                self._fill(names, torch.empty(shape, dtype=self._weight_dtype))
            )
        if self.device.type == "cpu":
            return DenseWeight(self._fill(names, weight_memory.empty(shape, self._weight_dtype)))
        out = torch.empty(shape, dtype=self._weight_dtype, device=self.device)
        return DenseWeight(self._fill(names, out))

    def _fill(self, names: Sequence[str], out: Tensor) -> Tensor:
        start = 0
        for name in names:
            stop = start + self._source.tensors[name].shape[0]
            self._source.read_into(name, out[start:stop])
            start = stop
        return out

    def _read_rows(self, names: Sequence[str], rows: slice) -> Tensor:
        """fp32 rows of the parts laid one below the other."""
        pieces = []
        for name, part in self._parts(names, rows):
            num_columns = self._source.tensors[name].shape[1]
            pieces.append(torch.empty(part.stop - part.start, num_columns))
            self._source.read_into(name, pieces[-1], part)
        return torch.cat(pieces)

    def _read_codes(self, names: Sequence[str], rows: slice) -> tuple[np.ndarray, ...]:
        """Codes, scales and zeros of rows of the parts laid one below the other."""
        pieces = [self._source.read_codes(name, part) for name, part in self._parts(names, rows)]
        assert all(piece.zero is not None for piece in pieces), names
        return tuple(
            np.concatenate([getattr(piece, field) for piece in pieces])
            for field in ("codes", "scale", "zero")
        )

    def _parts(self, names: Sequence[str], rows: slice) -> Iterator[tuple[str, slice]]:
        """Which rows of which parts these rows of the whole are."""
        start = 0
        for name in names:
            num_rows = self._source.tensors[name].shape[0]
            first, last = max(rows.start - start, 0), min(rows.stop - start, num_rows)
            if first < last:
                yield name, slice(first, last)
            start += num_rows

    def _cast(self, weight: Weight) -> Weight:
        own = torch.bfloat16 if isinstance(weight, (Int4Weight, Int8Weight)) else self._weight_dtype
        return weight if own == self.dtype else CastingWeight(weight, own)
