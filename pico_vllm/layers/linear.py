"""Linear layers over weights in several storage formats.

    M rows of x (tokens), N output features, K input features

A weight object knows one format: how to multiply, its bytes, and its values in fp32. `Linear` adds
a bias. All are called once per layer and step, so they are plain objects: an nn.Module costs 2 us a
call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pico_vllm.layers.huge_pages import weight_memory

Array = np.ndarray | Tensor
INT4_GROUP = 32
CHUNK_BYTES = 16 << 20
"""Packing and unpacking go by rows whose temporaries stay this small: no second model in memory."""


class Weight(Protocol):
    """[N, K] values in some format, multiplied as x @ W.T."""

    shape: tuple[int, int]
    num_bytes: int

    def __call__(self, x_MK: Tensor, bias_N: Tensor | None = None) -> Tensor: ...

    def dequantize(self) -> Tensor: ...


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """silu(first half) * second half."""
    # int: in a graph a size is a constant, not one more operation a layer.
    size = int(gate_up_T2F.shape[-1]) // 2
    return functional.silu(gate_up_T2F[..., :size]).mul_(gate_up_T2F[..., size:])


class Norm(Protocol):
    def __call__(self, x_TE: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Residual:
    """The residual stream before a norm and a product."""

    x_TE: Tensor
    normed_TE: Tensor | None = None
    """That norm's result, where the product before made it along with the sum."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A product that is still to be added up."""

    parts_SMN: Tensor
    bias_N: Tensor | None = None
    """What has to be added too."""


class Linear:
    """y = x @ W.T + bias."""

    def __init__(self, weight: Weight, bias_N: Tensor | None = None) -> None:
        self.weight = weight
        self.bias_N = bias_N

    def __call__(self, x_MK: Tensor) -> Tensor:
        return self.weight(x_MK, self.bias_N)

    # What a layer does around its products: a device may do each in one kernel.

    def normed(self, norm: Norm, residual: Residual) -> Tensor:
        """Of the normalised rows."""
        return self(norm(residual.x_TE))

    def normed_in_parts(self, norm: Norm, residual: Residual) -> Parts:
        """Of the normalised rows; a device may leave the sum to whoever reads it."""
        return Parts(self.normed(norm, residual)[None])

    def normed_silu_mul(self, norm: Norm, residual: Residual) -> Tensor:
        """Of the normalised rows, then silu of the first half times the second: [M, N / 2]."""
        return silu_mul(self(norm(residual.x_TE)))

    def added(self, x_MK: Tensor, residual: Residual, next_norm: Norm | None = None) -> Residual:
        """next_norm: what the sum goes through next; None where that is not known."""
        return Residual(residual.x_TE + self(x_MK))

    @property
    def num_bytes(self) -> int:
        return self.weight.num_bytes + (0 if self.bias_N is None else self.bias_N.nbytes)


class DenseWeight:
    """A plain [N, K] tensor in the model's dtype: every device, every shape."""

    def __init__(self, weight_NK: Tensor) -> None:
        self.weight_NK = weight_NK
        self.shape = (weight_NK.shape[0], weight_NK.shape[1])
        self.num_bytes = weight_NK.nbytes

    @classmethod
    def pack(cls, weight_NK: Tensor) -> DenseWeight:
        """Copy a CPU tensor to huge pages; one of another device is kept as it is."""
        return cls(weight_memory.copy(weight_NK) if weight_NK.device.type == "cpu" else weight_NK)

    def __call__(self, x_MK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        return functional.linear(x_MK, self.weight_NK, bias_N)

    def rows(self, ids: Tensor) -> Tensor:
        return self.weight_NK.index_select(0, ids)

    def dequantize(self) -> Tensor:
        return self.weight_NK.float()


class OneDnnWeight:
    """bf16 in oneDNN's blocked layout, CPU only.

    The 30 layers of SmolLM2-135M take 12.4 ms at 8 rows; F.linear, which reorders weights on every
    call, 20 ms.
    """

    BATCH_HINT = 8
    """oneDNN picks its layout for this many rows; other row counts run too."""

    def __init__(self, packed: Tensor, shape: tuple[int, int]) -> None:
        self.packed = packed
        self.shape = shape
        self.num_bytes = shape[0] * shape[1] * 2

    @staticmethod
    def is_available() -> bool:
        return (
            torch.backends.mkldnn.is_available()
            and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
            and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )

    @classmethod
    def pack(cls, weight_NK: Tensor) -> OneDnnWeight:
        assert weight_NK.dtype == torch.bfloat16, weight_NK.dtype
        packed = torch.ops.mkldnn._reorder_linear_weight(weight_NK.contiguous(), cls.BATCH_HINT)
        return cls(packed, (weight_NK.shape[0], weight_NK.shape[1]))

    def __call__(self, x_MK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x_MK, self.packed, bias_N, "none", [], "")

    def dequantize(self) -> Tensor:
        return self(torch.eye(self.shape[1], dtype=torch.bfloat16)).T.float()


class Int4Weight:
    """4-bit codes with a scale and a zero for each 32 of K, for bf16 x on the CPU: GGUF's Q4_1.

    w = scale * code + zero, code 0..15; stored for PyTorch's kernel as scale * (code - 8) + middle
    with bf16 scale and middle. fp32 activations would take a path 40 times slower.
    """

    BLOCK_N = 64
    """Rows are interleaved by 64: byte j of a block's column holds rows j (low) and j + 32."""
    GEMM_FROM_M = 56
    """From here on unpacking to bf16 pays. At N=3072, K=576 the kernel takes 30 us a row, unpacking
    0.9-1.2 ms and the bf16 product 0.4 ms at 32 rows, 1.0 ms at 512."""

    def __init__(self, packed: Tensor, scale_and_middle: Tensor, shape: tuple[int, int]) -> None:
        self.packed = packed
        self.scale_and_middle = scale_and_middle
        self.shape = shape
        self.num_bytes = self.bytes_for(shape)

    @staticmethod
    def fits(shape: tuple[int, int]) -> bool:
        return shape[0] % 16 == 0 and shape[1] % INT4_GROUP == 0

    @staticmethod
    def bytes_for(shape: tuple[int, int]) -> int:
        """Memory that a weight of this shape will take: codes, and a pair of bf16 a group."""
        return shape[0] * (shape[1] // 2 + shape[1] // INT4_GROUP * 4)

    @classmethod
    def from_rows(
        cls, shape: tuple[int, int], read_rows: Callable[[slice], tuple[Array, Array, Array]]
    ) -> Int4Weight:
        """`read_rows(rows)`: codes uint8 [n, K], scale and zero fp32 [n, K / 32] of a chunk."""
        assert cls.fits(shape), shape
        num_rows, num_inputs = shape
        packed = weight_memory.empty((num_rows, num_inputs // 2), torch.uint8)
        pairs = weight_memory.empty((num_inputs // INT4_GROUP, num_rows, 2), torch.bfloat16)
        for rows in _row_chunks(num_rows, 6 * num_inputs, cls.BLOCK_N):
            codes, scale, zero = (torch.as_tensor(part) for part in read_rows(rows))
            packed[rows] = torch._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
            pairs[:, rows, 0] = scale.T
            pairs[:, rows, 1] = (zero + 8 * scale).T
        return cls(packed, pairs, shape)

    @classmethod
    def pack(cls, codes_NK: Array, scale: Array, zero: Array) -> Int4Weight:
        """codes uint8 [N, K]; scale and zero fp32 [N, K / 32]."""
        shape = (codes_NK.shape[0], codes_NK.shape[1])
        return cls.from_rows(shape, lambda rows: (codes_NK[rows], scale[rows], zero[rows]))

    def __call__(self, x_MK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        if x_MK.shape[0] >= self.GEMM_FROM_M:
            y_MN = self._gemm(x_MK)
        else:
            y_MN = torch._weight_int4pack_mm_for_cpu(
                x_MK.contiguous(), self.packed, INT4_GROUP, self.scale_and_middle
            )
        return y_MN if bias_N is None else y_MN.add_(bias_N)

    def _gemm(self, x_MK: Tensor) -> Tensor:
        num_rows, num_inputs = self.shape
        whole = num_rows - num_rows % self.BLOCK_N
        parts = [
            x_MK @ self._unpack(rows) for rows in _row_chunks(whole, 4 * num_inputs, self.BLOCK_N)
        ]
        if whole < num_rows:  # the last rows are interleaved in another way
            pairs = self.scale_and_middle[:, whole:].contiguous()
            parts.append(
                torch._weight_int4pack_mm_for_cpu(
                    x_MK.contiguous(), self.packed[whole:], INT4_GROUP, pairs
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _unpack(self, rows: slice) -> Tensor:
        """[K, n] bf16 of whole blocks of rows."""
        num_inputs = self.shape[1]
        bytes_nK32 = self.packed[rows].view(-1, num_inputs, 32)
        num_blocks = bytes_nK32.shape[0]
        codes = torch.empty(num_inputs, num_blocks, 2, 32, dtype=torch.bfloat16)
        for half, nibbles in enumerate((bytes_nK32 & 15, bytes_nK32 >> 4)):
            codes[:, :, half] = nibbles.view(torch.int8).sub_(8).permute(1, 0, 2)
        scale, middle = self.scale_and_middle[:, rows].permute(2, 0, 1).unsqueeze(2).contiguous()
        return torch.addcmul(middle, codes.view(-1, INT4_GROUP, num_blocks * 64), scale).view(
            num_inputs, -1
        )

    def dequantize(self) -> Tensor:
        eye = torch.eye(self.shape[1], dtype=torch.bfloat16)
        return torch._weight_int4pack_mm_for_cpu(
            eye, self.packed, INT4_GROUP, self.scale_and_middle
        ).T.float()


class Int8Weight:
    """8-bit codes and a bf16 scale per row, for bf16 x on the CPU: the embedding of Q8_0 files.

    A code -128..127 is 16 (high - 8) + (low - 8) + 8. High and low halves lie side by side as 2 K
    inputs of the 4-bit kernel, which gets x twice: it reads memory in order where PyTorch's 8-bit
    kernel jumps, 2.2 ms against 2.6 for one row of 49152 x 576 (and 8.3 against 6.4 for eight).
    """

    GEMM_FROM_M = 22
    """From here on unpacking to bf16 pays: 49152 x 576 takes 0.9 ms a row in the kernel, 20 ms
    unpacked."""
    GEMM_CHUNK_BYTES = 4 << 20
    """A widened chunk stays in the caches."""

    def __init__(self, packed: Tensor, scale_and_middle: Tensor, scale_N: Tensor) -> None:
        self.packed = packed
        self.scale_and_middle = scale_and_middle
        self.scale_N = scale_N
        self.shape = (packed.shape[0], packed.shape[1])
        self.group = self._group(packed.shape[1])
        self.num_bytes = self.bytes_for(self.shape)

    @staticmethod
    def fits(shape: tuple[int, int]) -> bool:
        return shape[0] % Int4Weight.BLOCK_N == 0 and shape[1] % INT4_GROUP == 0

    @classmethod
    def bytes_for(cls, shape: tuple[int, int]) -> int:
        """Memory that a weight of this shape will take: codes, pairs for both halves, scales."""
        return shape[0] * (shape[1] + 2 * (shape[1] // cls._group(shape[1])) * 4 + 2)

    @staticmethod
    def _group(num_inputs: int) -> int:
        """The kernel wants a scale for each group of inputs; all groups of a row share one."""
        return 64 if num_inputs % 64 == 0 else INT4_GROUP

    @classmethod
    def from_rows(cls, shape: tuple[int, int], read_rows: Callable[[slice], Array]) -> Int8Weight:
        """Quantise each row by its largest value; `read_rows(rows)` gives a chunk as floats [n, K].

        The scale is rounded to bf16 before the codes are chosen: rounded after, it would bend a
        whole row, a logit, by up to 0.4 %.
        """
        assert cls.fits(shape), shape
        num_rows, num_inputs = shape
        packed = weight_memory.empty(shape, torch.uint8)
        scale_N = weight_memory.empty((num_rows,), torch.bfloat16)
        for rows in _row_chunks(num_rows, 16 * num_inputs, Int4Weight.BLOCK_N):
            values = torch.as_tensor(read_rows(rows)).float()
            scale_N[rows] = values.abs().amax(1).div_(127).clamp_(min=1e-30)
            values = values / scale_N[rows].float().unsqueeze(1)
            codes = values.round_().clamp_(-127, 127).to(torch.int32) + 128
            halves = torch.cat((codes >> 4, codes & 15), 1)
            packed[rows] = torch._convert_weight_to_int4pack_for_cpu(halves, 1)
        num_groups = num_inputs // cls._group(num_inputs)
        pairs = weight_memory.empty((2 * num_groups, num_rows, 2), torch.bfloat16)
        pairs[:num_groups] = torch.stack((16 * scale_N, torch.zeros_like(scale_N)), -1)
        pairs[num_groups:] = torch.stack((scale_N, 8 * scale_N), -1)
        return cls(packed, pairs, scale_N)

    @classmethod
    def pack(cls, weight_NK: Array) -> Int8Weight:
        return cls.from_rows((weight_NK.shape[0], weight_NK.shape[1]), lambda rows: weight_NK[rows])

    def __call__(self, x_MK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        if x_MK.shape[0] >= self.GEMM_FROM_M:
            y_MN = self._gemm(x_MK)
        else:
            twice = torch.cat((x_MK, x_MK), -1)
            y_MN = torch._weight_int4pack_mm_for_cpu(
                twice, self.packed, self.group, self.scale_and_middle
            )
        return y_MN if bias_N is None else y_MN.add_(bias_N)

    def _gemm(self, x_MK: Tensor) -> Tensor:
        parts = [
            x_MK @ self._codes(rows).to(x_MK.dtype)
            for rows in _row_chunks(
                self.shape[0],
                2 * self.shape[1],
                Int4Weight.BLOCK_N,
                chunk_bytes=self.GEMM_CHUNK_BYTES,
            )
        ]
        return torch.cat(parts, 1).mul_(self.scale_N)

    def _codes(self, rows: slice) -> Tensor:
        """[K, n] int8 of whole blocks of rows."""
        num_inputs = self.shape[1]
        bytes_nJ32 = self.packed[rows].view(-1, 2 * num_inputs, 32)
        high, low = bytes_nJ32[:, :num_inputs], bytes_nJ32[:, num_inputs:]
        # A byte holds a row's half below and that of the row 32 further above. ^ 128 subtracts 128.
        first = (high << 4) | (low & 15)
        second = (high & 240) | (low >> 4)
        codes_nK64 = torch.cat((first, second), -1).bitwise_xor_(128).view(torch.int8)
        return codes_nK64.transpose(0, 1).flatten(1)

    def rows(self, ids: Tensor) -> Tensor:
        num_inputs = self.shape[1]
        blocks = self.packed.view(-1, 2 * num_inputs, 32)
        bytes_nJ = blocks[ids // 64, :, ids % 32]
        halves_nJ = (bytes_nJ >> (ids % 64 // 32 * 4).to(torch.uint8).unsqueeze(1)) & 15
        codes_nK = (halves_nJ[:, :num_inputs] << 4) | halves_nJ[:, num_inputs:]
        scale_n1 = self.scale_N.index_select(0, ids).unsqueeze(1)
        return codes_nK.to(scale_n1.dtype).sub_(128).mul_(scale_n1)

    def dequantize(self) -> Tensor:
        return self._codes(slice(None)).T.float() * self.scale_N.float().unsqueeze(1)


def _row_chunks(
    num_rows: int, bytes_per_row: int, multiple: int = 1, *, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[slice]:
    """Slices of about `chunk_bytes`, each but the last a multiple of `multiple` rows."""
    step = max(chunk_bytes // max(bytes_per_row, 1) // multiple, 1) * multiple
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))
