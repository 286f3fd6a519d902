"""A step's attention over the pool: a projection in parts against the same in one piece."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pico_vllm.cache.triton_kv import TritonKV
from pico_vllm.config.model import RopeConfig
from pico_vllm.layers.rope import Rope

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
H, G, D, S = 4, 2, 32, 16
CONTEXTS, LENS = [37, 0], [5, 9]
"""Of two prompts: one goes on behind cached tokens."""


def extend(parts: Tensor, bias_N: Tensor | None, *, only_last: bool) -> tuple[Tensor, Tensor]:
    """What is attended, and the pool, of a step of these two."""
    num_tokens = sum(LENS)
    rope = Rope(RopeConfig(theta=10000.0), D, 64, DEVICE)
    model: Any = SimpleNamespace(num_heads=H, num_kv_heads=G, num_layers=1, head_dim=D)
    kv = TritonKV(
        model, num_device_blocks=8, block_size=S, max_num_seqs=2, cos_PD=rope.cos_PD,
        sin_PD=rope.sin_PD, dtype=torch.float32, device=DEVICE,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    kv.device_pool.copy_(torch.randn(kv.device_pool.shape, generator=generator))
    table = torch.tensor([[3, 1, 7], [5, 2, 0]], dtype=torch.int32)
    positions = torch.cat([torch.arange(c, c + n) for c, n in zip(CONTEXTS, LENS, strict=True)])
    rows = torch.repeat_interleave(torch.arange(2), torch.tensor(LENS))
    slots = table[rows, positions // S].long() * S + positions % S
    ends = torch.tensor(LENS).cumsum(0)

    def ints(values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=DEVICE)

    feed = SimpleNamespace(
        table_rows=ints([0, 1]), is_long=False, prefix_lens=None, fresh_request=2,
        fresh_token=num_tokens, sample_at=(ends - 1).to(DEVICE),
    )  # fmt: skip
    batch: Any = SimpleNamespace(
        feed=feed, num_decodes=0, num_tokens=num_tokens, block_table=ints(table),
        seq_lens=ints([c + n for c, n in zip(CONTEXTS, LENS, strict=True)]),
        query_start_loc=ints([0, *ends.tolist()]), positions=ints(positions),
        slot_mapping=slots.to(DEVICE),
    )  # fmt: skip
    step = kv.for_step(batch)
    assert step.adds_parts
    return step.rotate_and_attend(0, parts, bias_N, None, only_last=only_last), kv.device_pool


@pytest.mark.parametrize("only_last", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_prompts_of_a_projection_in_parts(has_bias: bool, only_last: bool) -> None:
    """The same attention and the same pool as from their sum."""
    generator = torch.Generator().manual_seed(1)
    parts = torch.randn(3, sum(LENS), (H + 2 * G) * D, generator=generator).to(DEVICE)
    bias_N = torch.randn((H + 2 * G) * D, generator=generator).to(DEVICE) if has_bias else None
    whole = parts.sum(0) if bias_N is None else parts.sum(0) + bias_N
    expected, expected_pool = extend(whole[None], None, only_last=only_last)
    found, pool = extend(parts, bias_N, only_last=only_last)
    assert found.shape == (2 if only_last else sum(LENS), H, D)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pool, expected_pool, atol=1e-5, rtol=1e-5)
