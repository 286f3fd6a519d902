"""What all Triton kernels share: programmatic dependent launch, and the plain fallback.

Under programmatic dependent launch (compute capability 9.0 and newer) a kernel's blocks may start
while the kernel before it still runs: they fetch what does not depend on it, wait, and go on. Every
kernel of a forward pass calls `wait_for_inputs` before it writes anything, or reads what another
kernel of the step writes, so that waiting for the last one is waiting for all.
"""

from __future__ import annotations

import functools
import os
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl
import triton.runtime.build

NUM_MULTIPROCESSORS = 132
"""Of an H100 or H200, for which tiles are chosen."""


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own also runs in kernels and takes 100 times as long."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least that is not below n, which is at least 1; like cdiv far quicker than Triton's."""
    return 1 << (n - 1).bit_length()


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


def _loaded_alone(
    load: Callable[[str, str], types.ModuleType],
) -> Callable[[str, str], types.ModuleType]:
    """load(name, path), one thread at a time, into a module that nothing else changes.

    Up to Triton 3.6 each launcher is an extension module, all of one name. Where Python loads such
    a file again, as for a kernel whose arguments are like another's, it writes the functions into
    the module that it loaded last under that name, be it another kernel's. A thread that had loaded
    that one and not yet taken its function got the wrong launcher ("function takes exactly 36
    arguments (28 given)").
    """
    lock = threading.Lock()

    @functools.wraps(load)
    def load_alone(name: str, path: str) -> types.ModuleType:
        module = types.ModuleType(name)
        with lock:
            module.__dict__.update(vars(load(name, path)))
        return module

    return load_alone


if hasattr(triton.runtime.build, "_load_module_from_path"):
    triton.runtime.build._load_module_from_path = _loaded_alone(
        triton.runtime.build._load_module_from_path
    )

_ONE_AT_A_TIME = threading.Lock()


@functools.cache
def start_driver(device: torch.device) -> threading.Thread:
    """Triton's own access to the device, in the background: from an empty cache a C compiler builds
    it, which takes a second."""

    def build() -> None:
        if device.type == "cuda":
            with torch.cuda.device(device):
                triton.runtime.driver.active.get_current_target()

    thread = threading.Thread(target=build, name="triton-driver", daemon=True)
    thread.start()
    return thread


class _Held(Executor):
    """Keeps kernels that are to be compiled until `run_all`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tasks: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, task: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._tasks.append((future, functools.partial(task, *args, **kwargs)))
        return future

    def run_all(self, threads: ThreadPoolExecutor) -> None:
        for future, task in self._tasks:
            threads.submit(self._run, future, task)

    def _run(self, future: Future[Any], task: Callable[[], Any]) -> None:
        try:
            kernel = task()
            with torch.cuda.device(self._device):
                # Triton compiles the C code of a launch when it is first asked for.
                _ = kernel.run
            future.set_result(kernel)
        except BaseException as error:
            future.set_exception(error)


@contextmanager
def compiled_in_parallel(device: torch.device) -> Iterator[None]:
    """Within, launches of this thread run nothing; after, their kernels are compiled, on threads,
    and loaded.

    What reads a kernel's output meanwhile reads memory that nobody wrote. Kernels one after the
    other, each at its first launch, took most of a start without a compile cache. Compiling begins
    once all launches are known: threads that compile hold Python's lock for milliseconds each,
    which the launches would wait for, one after the other.
    """
    thread = threading.get_ident()

    def compile_only(kernel: Any, grid: Any) -> Any:
        if threading.get_ident() != thread:
            return launch(kernel, grid)
        return lambda *arguments, **options: kernel.warmup(*arguments, grid=grid, **options)

    start_driver(device).join()
    held = _Held(device)
    with _ONE_AT_A_TIME, ThreadPoolExecutor(2 * (os.cpu_count() or 1)) as threads:
        launch = triton.JITFunction.__getitem__
        with triton.AsyncCompileMode(held):
            triton.JITFunction.__getitem__ = compile_only  # in place of what it inherits
            try:
                yield
            finally:
                del triton.JITFunction.__getitem__
                held.run_all(threads)
