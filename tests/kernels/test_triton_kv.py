"""A step's attention over the pool: by the kernels of each kind of request against one for all, and
of a projection in parts against the same in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pico_vllm.cache import triton_kv
from pico_vllm.cache.triton_kv import TritonKV
from pico_vllm.config.model import RopeConfig
from pico_vllm.kernels.hopper_prefill import hopper_prefill_reference
from pico_vllm.layers.rope import Rope

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
H, G, D, S = 4, 2, 32, 16
Requests = Sequence[tuple[int, int]]
"""Cached tokens and new ones of each, at most four blocks together."""
PROMPTS: Requests = [(37, 5), (0, 9)]


def attend(
    parts_SMN: Tensor,
    bias_N: Tensor | None,
    requests: Requests = PROMPTS,
    *,
    num_decodes: int = 0,
    num_fresh: int = 0,
    head_dim: int = D,
    only_last: bool = False,
    is_batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """What is attended, and the pool. num_fresh: at the end, those that a kernel for prompts
    without a context takes."""
    lens = [n for _, n in requests]
    num_tokens, R = sum(lens), len(requests)
    rope = Rope(RopeConfig(theta=10000.0), head_dim, 64, DEVICE)
    model: Any = SimpleNamespace(num_heads=H, num_kv_heads=G, num_layers=1, head_dim=head_dim)
    kv = TritonKV(
        model, num_device_blocks=4 * R, block_size=S, max_num_seqs=R, cos_PD=rope.cos_PD,
        sin_PD=rope.sin_PD, dtype=torch.float32, device=DEVICE,
        is_batch_invariant=is_batch_invariant,
    )  # fmt: skip
    kv.takes_fresh = num_fresh > 0
    generator = torch.Generator().manual_seed(3)
    kv.device_pool.copy_(torch.randn(kv.device_pool.shape, generator=generator))
    order = torch.randperm(4 * R, generator=generator) + 1
    table = order.view(R, 4).int()
    positions = torch.cat([torch.arange(c, c + n) for c, n in requests])
    rows = torch.repeat_interleave(torch.arange(R), torch.tensor(lens))
    slots = table[rows, positions // S].long() * S + positions % S
    ends = torch.tensor(lens).cumsum(0)

    def ints(values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=DEVICE)

    feed = SimpleNamespace(
        table_rows=ints(range(R)), is_long=False, prefix_lens=None, fresh_request=R - num_fresh,
        fresh_token=num_tokens - sum(lens[R - num_fresh :]), sample_at=(ends - 1).to(DEVICE),
    )  # fmt: skip
    batch: Any = SimpleNamespace(
        feed=feed, num_decodes=num_decodes, num_tokens=num_tokens, block_table=ints(table),
        seq_lens=ints([c + n for c, n in requests]),
        query_start_loc=ints([0, *ends.tolist()]), positions=ints(positions),
        slot_mapping=slots.to(DEVICE),
    )  # fmt: skip
    step = kv.for_step(batch)
    if len(parts_SMN) > 1:
        assert step.adds_parts
    return step.rotate_and_attend(0, parts_SMN, bias_N, None, only_last=only_last), kv.device_pool


def projection(num_parts: int, requests: Requests, head_dim: int = D) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    num_tokens = sum(n for _, n in requests)
    return torch.randn(num_parts, num_tokens, (H + 2 * G) * head_dim, generator=generator).to(
        DEVICE
    )


@pytest.mark.parametrize("only_last", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_prompts_of_a_projection_in_parts(has_bias: bool, only_last: bool) -> None:
    """The same attention and the same pool as from their sum."""
    parts = projection(3, PROMPTS)
    bias_N = parts[0, 0].clone() if has_bias else None
    whole = parts.sum(0) if bias_N is None else parts.sum(0) + bias_N
    expected, expected_pool = attend(whole[None], None, only_last=only_last)
    found, pool = attend(parts, bias_N, only_last=only_last)
    assert found.shape == (2 if only_last else 14, H, D)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pool, expected_pool, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("only_last", [False, True])
@pytest.mark.parametrize(
    ("requests", "num_decodes", "num_fresh", "head_dim"),
    [
        ([(20, 1), (3, 1), (37, 5), (17, 2), (0, 9), (0, 3)], 2, 2, 80),
        ([(20, 1), (0, 9), (0, 20)], 1, 2, D),
        ([(20, 1), (37, 5)], 1, 0, D),
        ([(37, 5), (0, 9)], 0, 1, D),
    ],
)
def test_each_kind_of_request_has_its_own_tokens(
    requests: Requests, num_decodes: int, num_fresh: int, only_last: bool, head_dim: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Those that decode, that go on behind a context and that are fresh, each by its own kernel:
    attention and pool are those of one kernel for all."""
    taken = []

    def prefill(q_THD: Tensor, *around: Tensor, scale: float, out: Tensor) -> None:
        taken.append(len(q_THD))
        out.copy_(hopper_prefill_reference(q_THD, *around, scale=scale))

    monkeypatch.setattr(triton_kv, "hopper_prefill", prefill)
    qkv = projection(1, requests, head_dim)
    sizes: dict[str, Any] = {"num_decodes": num_decodes, "head_dim": head_dim}
    expected, expected_pool = attend(
        qkv, None, requests, is_batch_invariant=True, only_last=only_last, **sizes
    )
    found, pool = attend(qkv, None, requests, num_fresh=num_fresh, only_last=only_last, **sizes)
    torch.testing.assert_close(found, expected, atol=3e-5, rtol=1e-5)
    torch.testing.assert_close(pool, expected_pool, atol=1e-5, rtol=1e-5)
    num_tokens = sum(n for _, n in requests[len(requests) - num_fresh :])
    assert taken == ([num_tokens] if num_fresh and not only_last else [])
