"""What all Triton kernels share: programmatic dependent launch, and the plain fallback.

Under programmatic dependent launch (compute capability 9.0 and newer) a kernel's blocks may start
while the kernel before it still runs: they fetch what does not depend on it, wait, and go on. Every
kernel of a forward pass calls `wait_for_inputs` before it reads or writes anything that another
kernel writes, so that waiting for the last one is waiting for all.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl

NUM_MULTIPROCESSORS = 132
"""Of an H100 or H200, for which tiles are chosen."""


@functools.cache
def has_dependent_launch(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def launch_options(device: torch.device) -> dict[str, bool]:
    """Keyword arguments of every launch: the constexpr USE_PDL and the launch attribute."""
    use_pdl = has_dependent_launch(device)
    return {"USE_PDL": use_pdl, "launch_pdl": use_pdl} if use_pdl else {"USE_PDL": False}


@triton.jit
def wait_for_inputs(USE_PDL: tl.constexpr):
    """From here on, what earlier kernels wrote may be read and overwritten."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(USE_PDL: tl.constexpr):
    """The next kernel may start once all blocks of this one have come here."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()


_ONE_AT_A_TIME = threading.Lock()


@contextmanager
def compiled_in_parallel(device: torch.device) -> Iterator[None]:
    """Within, launches of this thread compile their kernels on threads and run nothing; after, all
    are ready.

    What reads a kernel's output meanwhile reads memory that nobody wrote. Kernels one after the
    other, each at its first launch, took most of a start without a compile cache.
    """
    kernels = []
    thread = threading.get_ident()

    def compile_only(kernel: Any, grid: Any) -> Any:
        if threading.get_ident() != thread:
            return launch(kernel, grid)

        def submit(*arguments: Any, **options: Any) -> None:
            kernels.append(kernel.warmup(*arguments, grid=grid, **options))

        return submit

    def load(kernel: Any) -> None:
        with torch.cuda.device(device):
            # Triton compiles the C code of a launch when it is first asked for.
            _ = (kernel.result() if hasattr(kernel, "result") else kernel).run

    with _ONE_AT_A_TIME, ThreadPoolExecutor(os.cpu_count()) as threads:
        launch = triton.JITFunction.__getitem__
        with triton.AsyncCompileMode(threads):
            triton.JITFunction.__getitem__ = compile_only  # in place of what it inherits
            try:
                yield
            finally:
                del triton.JITFunction.__getitem__
        list(threads.map(load, {id(kernel): kernel for kernel in kernels}.values()))
