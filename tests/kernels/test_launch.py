"""Kernels that are compiled ahead of their first launch."""

from __future__ import annotations

import threading

import pytest
import torch
import triton
import triton.language as tl

from pico_vllm.kernels.launch import compiled_in_parallel


@triton.jit
def _add_kernel(x_ptr, AMOUNT: tl.constexpr):
    tl.store(x_ptr, tl.load(x_ptr) + AMOUNT)


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
