"""Embedding with slots."""

from __future__ import annotations

import pytest
import torch

from pico_vllm.kernels.embed_tokens import embed_tokens, embed_tokens_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.memcheck
@pytest.mark.parametrize("hidden", [48, 2500])
def test_embed_tokens(hidden: int) -> None:
    """Known ids, ids of the last step and padding give their embeddings and slots."""
    int32 = {"dtype": torch.int32, "device": DEVICE}
    token_ids = torch.tensor([5, -1, 7, -1, 0], **int32)
    token_rows = torch.tensor([0, 1, 2, 0, 3], **int32)
    positions = torch.tensor([0, 17, 31, 15, -1], **int32)
    last_tokens = torch.tensor([3, 9, 1, 2], device=DEVICE)
    table = torch.arange(1, 9, **int32).view(4, 2)
    weight = torch.randn(10, hidden).to(DEVICE)
    slots = [torch.full((5,), 99, dtype=torch.int64, device=DEVICE) for _ in range(2)]
    arguments = (token_ids, token_rows, positions, last_tokens, table, weight)
    x = embed_tokens(*arguments, slots[0], 16)
    assert torch.equal(x, embed_tokens_reference(*arguments, slots[1], 16))
    assert slots[0].tolist() == slots[1].tolist() == [16, 65, 111, 31, -1]
    assert torch.equal(x[1], weight[9])
