"""Pico-vLLM: an LLM inference engine small enough to read in a weekend, correct to the token.

Names are loaded when first used, so that the host-only rooms import on a machine without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pico_vllm.engine.llm import LLM
    from pico_vllm.errors import PicoError
    from pico_vllm.outputs import RequestOutput
    from pico_vllm.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "PicoError", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": "pico_vllm.engine.llm",
    "PicoError": "pico_vllm.errors",
    "RequestOutput": "pico_vllm.outputs",
    "SamplingParams": "pico_vllm.sampling_params",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'pico_vllm' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
