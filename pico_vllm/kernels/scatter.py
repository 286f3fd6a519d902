"""Change single elements of the device's batch state. U changes"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pico_vllm.kernels.launch import cdiv

BLOCK = 256


def scatter_reference(target: Tensor, changes_2U: Tensor) -> None:
    target[changes_2U[0].long()] = changes_2U[1]


@triton.jit(do_not_specialize=["num_changes"])
def _scatter_kernel(target_ptr, changes_ptr, num_changes, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_there = at < num_changes
    index = tl.load(changes_ptr + at, mask=is_there, other=0).to(tl.int64)
    value = tl.load(changes_ptr + num_changes + at, mask=is_there, other=0)
    tl.store(target_ptr + index, value, mask=is_there)


def scatter(target: Tensor, changes_2U: Tensor) -> None:
    """target[changes[0]] = changes[1]; all int32 and contiguous, no index twice.

    Raises:
        ValueError: another dtype or layout.
    """
    for name, tensor in (("target", target), ("changes", changes_2U)):
        if tensor.itemsize != 4 or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {tensor.dtype} with strides {tensor.stride()}; it must be int32 and "
                "contiguous"
            )
    num_changes = changes_2U.shape[1]
    if num_changes:
        _scatter_kernel[(cdiv(num_changes, BLOCK),)](target, changes_2U, num_changes, BLOCK=BLOCK)
