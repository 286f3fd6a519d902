"""What a model is, read from config.json: sizes, RoPE, biases, KV geometry. Host only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary embedding. Frequencies are `theta ** (-2i / head_dim)`, then changed as `kind` says."""

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    """How many times longer than `original_max_position` the window became."""
    original_max_position: int | None = None
    """Window of the model before it was stretched, in tokens."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    """llama3 only: wavelengths longer than original / low are divided by `factor`, shorter than original / high kept."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """yarn only: cos and sin are multiplied by it."""
    truncate: bool = True
    """yarn only: round the correction range to whole dimensions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Sizes in elements, counts per whole model (not per rank)."""

    architecture: str
    """`architectures[0]` of config.json: the key into `models/registry.py`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """RMSNorm over head_dim on q and k before RoPE (Qwen3)."""
    max_position_embeddings: int
    sliding_window: int | None
    """Tokens a query may look back; None where the model attends to everything."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str
    """Storage type that the checkpoint declares: bfloat16, float16 or float32."""
    initializer_range: float = 0.02
    """Standard deviation of dummy weights."""

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_bytes
