"""Rope against transformers: frequencies bit for bit, rotation within rounding."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from pico_vllm.config.model import RopeConfig
from pico_vllm.layers.rope import Rope, apply_rope, inverse_frequencies

HEAD_DIM, MAX_LEN = 64, 600
CASES = {
    "default": (RopeConfig(theta=500000.0), {"rope_type": "default"}),
    "linear": (
        RopeConfig(kind="linear", theta=500000.0, factor=4.0),
        {"rope_type": "linear", "factor": 4.0},
    ),
    "dynamic": (
        RopeConfig(kind="dynamic", theta=500000.0, factor=2.0, original_max_position=4096),
        {"rope_type": "dynamic", "factor": 2.0},
    ),
    "llama3": (
        RopeConfig(
            kind="llama3",
            theta=500000.0,
            factor=8.0,
            original_max_position=512,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 512,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ),
    "yarn": (
        RopeConfig(
            kind="yarn",
            theta=500000.0,
            factor=4.0,
            original_max_position=1024,
            attention_factor=0.1 * torch.log(torch.tensor(4.0)).item() + 1.0,
        ),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    ),
    "yarn untruncated": (
        RopeConfig(
            kind="yarn",
            theta=500000.0,
            factor=4.0,
            original_max_position=1024,
            beta_fast=16.0,
            beta_slow=2.0,
            attention_factor=1.5,
            truncate=False,
        ),
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "attention_factor": 1.5,
            "truncate": False,
        },
    ),
}


def their_rope(name: str) -> LlamaRotaryEmbedding:
    return LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=2 * HEAD_DIM,
            num_attention_heads=2,
            max_position_embeddings=4096,
            rope_parameters={"rope_theta": 500000.0, **CASES[name][1]},
        )
    )


@pytest.mark.parametrize("name", CASES)
def test_frequencies(name: str) -> None:
    """Frequencies of every kind are transformers' own bits."""
    assert torch.equal(inverse_frequencies(CASES[name][0], HEAD_DIM), their_rope(name).inv_freq)


def rotate_both(name: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ours, theirs and theirs in fp64, of the same heads at positions out of order."""
    torch.manual_seed(0)
    positions = torch.tensor([599, 0, 1, 17, 300])
    x_TND = torch.randn(5, 12, HEAD_DIM).to(dtype)
    rope = Rope(CASES[name][0], HEAD_DIM, MAX_LEN)
    ours = apply_rope(x_TND, *rope.gather(positions, dtype))
    x_1NTD = x_TND.transpose(0, 1)[None]
    cos, sin = their_rope(name)(x_1NTD, positions[None])
    theirs, _ = apply_rotary_pos_emb(x_1NTD, x_1NTD, cos, sin)
    cos, sin = their_rope(name)(x_1NTD.float(), positions[None])
    exact, _ = apply_rotary_pos_emb(x_1NTD.double(), x_1NTD.double(), cos.double(), sin.double())
    return ours, theirs[0].transpose(0, 1), exact[0].transpose(0, 1)


@pytest.mark.parametrize("name", CASES)
def test_fp32_rotation(name: str) -> None:
    """Rotated heads agree with transformers within 1e-6 of their size."""
    ours, theirs, _ = rotate_both(name, torch.float32)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6 * theirs.abs().max().item())


@pytest.mark.parametrize("name", CASES)
def test_bf16_rotation_is_no_worse(name: str) -> None:
    """The mean error in bf16 is at most that of transformers."""
    ours, theirs, exact = rotate_both(name, torch.bfloat16)
    assert (ours.double() - exact).abs().mean() <= (theirs.double() - exact).abs().mean()


def test_position_zero_and_small_heads() -> None:
    """Position 0 leaves a head as it is; a head of 2 turns by its position in radians."""
    rope = Rope(RopeConfig(), 2, 3)
    x = torch.tensor([[[3.0, 4.0]], [[1.0, 0.0]]])
    rotated = apply_rope(x, *rope.gather(torch.tensor([0, 2]), torch.float32))
    angle = torch.tensor(2.0)
    expected = torch.tensor([[[3.0, 4.0]], [[angle.cos(), angle.sin()]]])
    torch.testing.assert_close(rotated, expected, rtol=0, atol=1e-7)
