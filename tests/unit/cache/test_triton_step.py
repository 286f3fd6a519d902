"""Which steps take a projection in parts: no kernel runs here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pico_vllm.cache.triton_kv import TritonStep


def step(num_tokens: int, num_decodes: int, **kv: Any) -> TritonStep:
    feed = SimpleNamespace(table_rows=None, is_long=False, prefix_lens=None)
    batch = SimpleNamespace(num_tokens=num_tokens, num_decodes=num_decodes, feed=feed)
    given = {
        "device_pool": torch.empty(1, 2, 1, 2, 16, 64),
        "takes_many": True,
        "prefill_config": None,
    }
    return TritonStep(SimpleNamespace(**(given | kv)), batch)


@pytest.mark.parametrize(
    ("num_tokens", "num_decodes", "kv", "expected"),
    [
        (128, 128, {}, True),
        (25, 25, {}, True),
        (24, 24, {}, False),  # of two KV heads: too few for the kernel that adds them up
        (128, 0, {}, True),
        (8192, 0, {"takes_many": False}, True),
        (128, 0, {"prefill_config": object()}, False),
        (128, 128, {"takes_many": False}, False),
        # Batch-invariant: the kernel that attends all takes them whole.
        (128, 128, {"prefill_config": object()}, False),
    ],
)
def test_who_adds_parts(
    num_tokens: int, num_decodes: int, kv: dict[str, Any], expected: bool
) -> None:
    """Steps whose requests all decode, many of them, where the kernel runs that adds parts up; and
    steps with prompts."""
    assert step(num_tokens, num_decodes, **kv).adds_parts is expected
