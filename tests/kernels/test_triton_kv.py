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
    is_mixed: bool = False,
    takes_fresh: bool = False,
    head_dim: int = D,
    only_last: bool = False,
    is_batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """What is attended, and the pool. is_mixed: each kind by its own kernel, num_decodes of the
    requests at the beginning and num_fresh at the end. What the projection has beyond the requests'
    tokens is padding, and of a mixed step there are padded requests too."""
    num_padded = 2 * is_mixed
    lens = [n for _, n in requests] + [0] * num_padded
    num_tokens, num_all, R = sum(lens), parts_SMN.shape[1], len(lens)
    rope = Rope(RopeConfig(theta=10000.0), head_dim, 64, DEVICE)
    model: Any = SimpleNamespace(num_heads=H, num_kv_heads=G, num_layers=1, head_dim=head_dim)
    kv = TritonKV(
        model, num_device_blocks=4 * R, block_size=S, max_num_seqs=R, cos_PD=rope.cos_PD,
        sin_PD=rope.sin_PD, dtype=torch.float32, device=DEVICE,
        is_batch_invariant=is_batch_invariant,
    )  # fmt: skip
    kv.takes_fresh = takes_fresh
    generator = torch.Generator().manual_seed(3)
    # Of one size whatever is padded, so that pools can be compared.
    content = torch.randn(
        4 * (len(requests) + 2) + 1, *kv.device_pool.shape[1:], generator=generator
    )
    kv.device_pool.copy_(content[: len(kv.device_pool)])
    order = torch.randperm(4 * len(requests), generator=generator) + 1
    table = torch.zeros(R, 4, dtype=torch.int32)
    table[: len(requests)] = order.view(-1, 4)
    positions = torch.cat([torch.arange(c, c + n) for c, n in requests])
    rows = torch.repeat_interleave(torch.arange(R), torch.tensor(lens))
    slots = table[rows, positions // S].long() * S + positions % S
    padding = torch.full((num_all - num_tokens,), -1)
    ends = torch.tensor(lens).cumsum(0)

    def ints(values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=DEVICE)

    def starts_of(first: int, last: int) -> Tensor:
        """Where the requests from first to before last begin; all others have no tokens."""
        own = [n if first <= r < last else 0 for r, n in enumerate(lens)]
        return ints(torch.tensor([sum(lens[:first]), *own]).cumsum(0))

    starts, seq_lens = starts_of(0, R), ints([c + n for c, n in requests] + [0] * num_padded)
    fresh = len(requests) - num_fresh
    feed = SimpleNamespace(
        table_rows=ints(range(R)), is_long=False, prefix_lens=None,
        sample_at=(ends - 1).clamp(min=0).to(DEVICE),
        decode_lens=None, older_starts=starts, fresh_starts=None,
    )  # fmt: skip
    if is_mixed:
        feed.decode_lens = seq_lens * ints([1] * num_decodes + [0] * (R - num_decodes))
        feed.older_starts = starts_of(num_decodes, fresh)
        feed.fresh_starts = starts_of(fresh, len(requests))
    batch: Any = SimpleNamespace(
        feed=feed, num_decodes=0, num_tokens=num_all, block_table=ints(table), seq_lens=seq_lens,
        query_start_loc=starts, positions=ints(torch.cat((positions, padding))),
        slot_mapping=torch.cat((slots, padding)).to(DEVICE),
    )  # fmt: skip
    step = kv.for_step(batch)
    if len(parts_SMN) > 1:
        assert step.adds_parts
    attended = step.rotate_and_attend(0, parts_SMN, bias_N, None, only_last=only_last)
    num_wanted = len(requests) if only_last else num_tokens
    return attended[:num_wanted], kv.device_pool[: 4 * len(requests) + 1]


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


@pytest.mark.parametrize("takes_fresh", [False, True])
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
def test_each_kind_of_request_has_its_own_kernel(
    requests: Requests, num_decodes: int, num_fresh: int, head_dim: int, only_last: bool,
    takes_fresh: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Those that decode, that go on behind a context and that are fresh, among padding of either
    kind: attention and pool are those of one kernel for all."""
    taken = []

    def prefill(*arguments: Tensor, scale: float, out: Tensor) -> None:
        starts = arguments[3].tolist()
        taken.append(starts[-1] - starts[0])
        out[starts[0] :] = hopper_prefill_reference(*arguments, scale=scale)[starts[0] :]

    monkeypatch.setattr(triton_kv, "hopper_prefill", prefill)
    qkv = projection(1, requests, head_dim)
    sizes: dict[str, Any] = {"only_last": only_last, "head_dim": head_dim}
    expected, expected_pool = attend(qkv, None, requests, is_batch_invariant=True, **sizes)
    padded = torch.cat((qkv, torch.full_like(qkv[:, :3], 7.0)), 1)
    found, pool = attend(
        padded, None, requests, is_mixed=True, num_decodes=num_decodes, num_fresh=num_fresh,
        takes_fresh=takes_fresh, **sizes,
    )  # fmt: skip
    torch.testing.assert_close(found, expected, atol=3e-5, rtol=1e-5)
    torch.testing.assert_close(pool, expected_pool, atol=1e-5, rtol=1e-5)
    num_tokens = sum(n for _, n in requests[len(requests) - num_fresh :])
    assert taken == ([num_tokens] if takes_fresh and not only_last else [])
