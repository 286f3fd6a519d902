"""Kernels that are compiled ahead of their first launch."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
import triton.runtime.build

from pico_vllm.kernels.launch import cdiv, compiled_in_parallel, next_power_of_2


@triton.jit
def _add_kernel(x_ptr, AMOUNT: tl.constexpr):
    tl.store(x_ptr, tl.load(x_ptr) + AMOUNT)


def test_sizes_of_grids_are_as_triton_counts_them() -> None:
    """Only sooner."""
    for a in range(70):
        assert [cdiv(a, b) for b in range(1, 20)] == [triton.cdiv(a, b) for b in range(1, 20)]
    numbers = [*range(1, 70), 2**31 - 1, 2**31, 2**31 + 1]
    assert [next_power_of_2(n) for n in numbers] == [triton.next_power_of_2(n) for n in numbers]


@pytest.mark.gpu
def test_compiled_in_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within, launches run nothing; after, the same ones run without compiling anything, and a
    kernel that was not named compiles as ever."""
    x = torch.zeros(1, device="cuda")
    with compiled_in_parallel(x.device):
        for amount in (1, 2, 2):
            _add_kernel[(1,)](x, AMOUNT=amount)
    assert x.item() == 0
    compiled: list[object] = []
    hook = "jit_post_compile_hook"
    monkeypatch.setattr(triton.knobs.runtime, hook, lambda **about: compiled.append(about))
    for amount in (1, 2):
        _add_kernel[(1,)](x, AMOUNT=amount)
    assert x.item() == 3 and not compiled
    _add_kernel[(1,)](x, AMOUNT=5)
    assert x.item() == 8 and len(compiled) == 1


@pytest.mark.gpu
def test_other_threads_go_on_launching() -> None:
    """While one thread compiles ahead, another one's launches run."""
    x = torch.zeros(1, device="cuda")
    with compiled_in_parallel(x.device):
        other = threading.Thread(target=lambda: _add_kernel[(1,)](x, AMOUNT=7))
        other.start()
        other.join()
        _add_kernel[(1,)](x, AMOUNT=9)
        torch.cuda.synchronize()
        assert x.item() == 7


LAUNCHER = """#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"launch", launch, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef def = {PyModuleDef_HEAD_INIT, "launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit_launcher(void) { return PyModule_Create(&def); }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_launcher_that_is_loaded_again_changes_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Python fills the module that it loaded last under a name with the functions of a file of that
    name that it loads again."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    build = triton.runtime.build.compile_module_from_src
    first, second = (build(LAUNCHER % number, "launcher") for number in (1, 2))
    again = build(LAUNCHER % 1, "launcher")
    assert [module.launch() for module in (first, second, again)] == [1, 2, 1]
