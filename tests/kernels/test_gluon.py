"""Kernels in Gluon where there is no Gluon."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

NAMES = [
    f"pico_vllm.kernels.{name}"
    for name in ("gluon", "hopper_prefill", "hopper_linear", "hopper_decode")
]


def test_triton_without_gluon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their modules are imported all the same, and take nothing on a Hopper either."""
    monkeypatch.setitem(sys.modules, "triton.experimental", None)
    for name in list(sys.modules):
        if name.startswith("triton.experimental.") or name in NAMES:
            monkeypatch.delitem(sys.modules, name)
    # The package has them as attributes, which the import below sets anew.
    package = importlib.import_module("pico_vllm.kernels")
    for name in NAMES:
        short = name.rsplit(".", 1)[1]
        monkeypatch.setattr(package, short, getattr(package, short, None), raising=False)
    shared, prefill, linear, decode = (importlib.import_module(name) for name in NAMES)
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for has_gluon in (False, True):
        monkeypatch.setattr(shared, "HAS_GLUON", has_gluon)
        shared.has_hopper_gluon.cache_clear()
        assert prefill.can_take(device, torch.bfloat16, 12, 2, 128) is has_gluon
        assert linear.can_take(device, torch.bfloat16, 8, 1536, 1536, False) is has_gluon
        assert decode.can_take(device, torch.bfloat16, 12, 2, 128, 16) is has_gluon
