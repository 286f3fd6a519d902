"""Attention that also gives the softmax's denominator, without torch's CPU operation for it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from paged import LAYER, TOLERANCE, paged_case

from pico_vllm.kernels.cpu import tiles
from pico_vllm.kernels.cpu.paged_decode import paged_decode, plan_decode
from pico_vllm.kernels.cpu.paged_prefill import paged_prefill, plan_prefill
from pico_vllm.kernels.cpu.tiles import attend_by_products, attend_with_lse


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("H", "G", "Q", "N"), [(1, 1, 1, 1), (6, 2, 5, 17), (4, 4, 9, 9)])
def test_products_give_what_the_cpu_operation_gives(
    H: int, G: int, Q: int, N: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Result and denominator are equal, with a mask, causal and neither, in one piece or several,
    and for tensors that are not contiguous."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn((3, num_tokens, heads, 20), generator=generator).to(dtype).transpose(1, 2)
        for num_tokens, heads in ((Q, H), (N, G), (N, G))
    )
    mask = torch.zeros(3, 1, 1, N, dtype=dtype)
    mask[1, ..., 1:] = mask[2, ..., N // 2 + 1 :] = float("-inf")
    for at_once in (2, 1024):
        monkeypatch.setattr(tiles, "QUERIES_AT_ONCE", at_once)
        for options in ({}, {"mask": mask}, {"is_causal": True}):
            if "is_causal" in options and Q != N:
                continue
            arguments = {"mask": None, "scale": 0.3} | options
            out, lse = attend_by_products(q, k, v, **arguments)
            expected, expected_lse = attend_with_lse(q, k, v, **arguments)
            assert out.dtype == dtype and lse.dtype == torch.float32
            torch.testing.assert_close(out, expected, atol=TOLERANCE[dtype], rtol=0)
            torch.testing.assert_close(lse, expected_lse, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_plain_attention_on_a_gpu(dtype: torch.dtype) -> None:
    """Decode rows and prompt chunks over tiles of several sizes give on a GPU what they give on
    the CPU, whatever unused slots hold."""
    decode = paged_case([2500, 5, 0, 130, 64], head_dim=16, dtype=dtype)
    q_RHD = torch.randn(5, 6, 16).to(dtype)
    prefill = paged_case([100, 0, 33], head_dim=16, dtype=dtype)
    new = torch.randn(40, 12, 16).to(dtype).split((6, 3, 3), 1)
    for most_tokens in (64, 4096):
        outs = []
        for device in ("cpu", "cuda"):
            k_BGSD, v_BGSD = _layer(decode.k_BGSD, device)
            plan = plan_decode(decode.block_table, decode.seq_lens, 16, tile_tokens=most_tokens)
            decoded = paged_decode(q_RHD.to(device), k_BGSD, v_BGSD, plan, scale=0.25)
            lens = ([7, 32, 1], np.array([100, 0, 33]))
            chunks = plan_prefill(prefill.block_table, *lens, 16, tile_tokens=most_tokens)
            attended = paged_prefill(
                *(x.to(device) for x in new), *_layer(prefill.k_BGSD, device), chunks, scale=0.25
            )
            outs.append((decoded.cpu(), attended.cpu()))
        for ours, theirs in zip(*outs, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2 * TOLERANCE[dtype], rtol=0)


def _layer(k_BGSD: torch.Tensor, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the same layer in a copy of its pool."""
    base = k_BGSD._base
    assert base is not None
    pool = base.to(device)
    return pool[:, :, LAYER, 0], pool[:, :, LAYER, 1]
