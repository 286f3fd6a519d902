"""Rotary position embedding in the half-split (NeoX) convention.

    T tokens, N heads (q and k may be rotated together), D head dim

    rope(x)[i]         = x[i] cos(p f_i) - x[i + D/2] sin(p f_i)      i < D/2
    rope(x)[i + D/2]   = x[i + D/2] cos(p f_i) + x[i] sin(p f_i)

Source: Su et al. 2021, arXiv:2104.09864; yarn: Peng et al. 2023, arXiv:2309.00071.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pico_vllm.config.model import RopeConfig


class Rope:
    """fp32 tables for positions 0 to max_len - 1; a step gathers its rows once for all layers."""

    def __init__(
        self,
        config: RopeConfig,
        head_dim: int,
        max_len: int,
        device: torch.device | str = "cpu",
    ) -> None:
        angles = torch.outer(torch.arange(max_len).float(), inverse_frequencies(config, head_dim))
        cos = angles.cos() * config.attention_factor
        sin = angles.sin() * config.attention_factor
        # The minus sign lies in the table: applying it is then a roll and two products.
        self.cos_PD = torch.cat((cos, cos), -1).to(device)
        self.sin_PD = torch.cat((-sin, sin), -1).to(device)

    def gather(self, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and signed sin of these positions in the model's dtype, [T, 1, D] each."""
        return (
            self.cos_PD.index_select(0, positions_T).unsqueeze(1).to(dtype),
            self.sin_PD.index_select(0, positions_T).unsqueeze(1).to(dtype),
        )


def apply_rope(x_TND: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Rotate N heads of each token. 8 us for one; rotate_half by negation and cat takes 15."""
    return (x_TND * cos_T1D).addcmul_(x_TND.roll(int(x_TND.shape[-1]) // 2, -1), sin_T1D)


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """[D / 2] fp32: radians per token, bit for bit those of transformers.

    "dynamic" counts as default: longer prompts than its original window are refused elsewhere.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (config.theta**exponents)
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "llama3":
        return _llama3(config, frequencies)
    if config.kind == "yarn":
        return _yarn(config, frequencies, head_dim)
    return frequencies


def _llama3(config: RopeConfig, frequencies: Tensor) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between blended."""
    assert config.original_max_position is not None
    window = config.original_max_position
    low, high = config.low_freq_factor, config.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    slowed = torch.where(wavelengths > window / low, frequencies / config.factor, frequencies)
    smooth = (window / wavelengths - low) / (high - low)
    blended = (1 - smooth) * slowed / config.factor + smooth * slowed
    is_between = ~(wavelengths < window / high) & ~(wavelengths > window / low)
    return torch.where(is_between, blended, slowed)


def _yarn(config: RopeConfig, frequencies: Tensor, head_dim: int) -> Tensor:
    """A ramp over the dimensions, from kept (fast) to divided by the factor (slow)."""
    assert config.original_max_position is not None

    def dimension_of(rotations: float) -> float:
        """The dimension that turns this often over the original window."""
        turns = config.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # avoids a division by zero
    ramp = ((torch.arange(head_dim // 2).float() - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return frequencies / config.factor * (1 - kept) + frequencies * kept
