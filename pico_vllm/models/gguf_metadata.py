"""GGUF metadata to the config.json that describes the same model.

Keys of the architecture's own name space are read or refused, as those of config.json are:
llama.cpp switches features on through them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from pico_vllm.config.hf_keys import HfKeys
from pico_vllm.errors import ModelLoadError, show

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Bookkeeping that takes no part in a forward pass.
_IGNORED = {"vocab_size", "rope.scaling.finetuned", "attention.causal"}
_STORAGE_DTYPE = {"f32": "float32", "f16": "float16"}
_MAX = 2**31


def hf_config_from_gguf(
    metadata: Mapping[str, object],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    storage: str,
    rope_factors: list[float] | None,
    where: str,
) -> dict[str, object]:
    """Build the description; `shapes` are those of the tensors by Hugging Face name.

    Raises:
        ModelLoadError: unknown architecture, a size missing or of the wrong type, a key that
            changes the computation and is not supported.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise ModelLoadError(
            f"{where}: general.architecture is {show(architecture)}: supported are "
            f"{', '.join(ARCHITECTURES)}",
            param="general.architecture",
        )
    if metadata.get("split.count", 1) not in (0, 1):
        raise ModelLoadError(
            f"{where} is one of several parts: join them with llama-gguf-split --merge",
            param="split.count",
        )
    prefix = architecture + "."
    own = {key.removeprefix(prefix): v for key, v in metadata.items() if key.startswith(prefix)}
    keys = HfKeys(own, where=f"{where}: {architecture}")
    embedding = shapes.get("model.embed_tokens.weight", ())
    if len(embedding) != 2:
        raise ModelLoadError(f"{where} has no matrix token_embd.weight: not a language model")

    num_heads = keys.integer("attention.head_count", high=_MAX)
    hidden_size = keys.integer("embedding_length", high=_MAX)
    head_dim = keys.integer("attention.key_length", max(1, hidden_size // num_heads), high=_MAX)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, head_dim, high=_MAX) != head_dim:
            raise keys.refuse(key, f"is {show(own[key])}: must be the head size {head_dim}")
    context = keys.integer("context_length", high=_MAX)
    theta = keys.number("rope.freq_base", 10000.0, low=0.0)
    config: dict[str, object] = {
        "architectures": [ARCHITECTURES[architecture]],
        "vocab_size": embedding[0],
        "hidden_size": hidden_size,
        "intermediate_size": keys.integer("feed_forward_length", high=_MAX),
        "num_hidden_layers": keys.integer("block_count", high=_MAX),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", num_heads, high=_MAX),
        "head_dim": head_dim,
        "hidden_act": "silu",
        # Stored as float32: 1e-5 would come back as 9.999999747378752e-06.
        "rms_norm_eps": _as_written(keys.number("attention.layer_norm_rms_epsilon", low=0.0)),
        "max_position_embeddings": context,
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(keys, rope_factors, theta=theta, head_dim=head_dim),
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "torch_dtype": _STORAGE_DTYPE.get(storage, "bfloat16"),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos_token_ids(metadata),
    }
    window = keys.integer("attention.sliding_window", 0, low=0, high=_MAX)
    if window and architecture == "llama":
        config["architectures"] = ["MistralForCausalLM"]
        config["sliding_window"] = window
    elif window:
        raise keys.refuse("attention.sliding_window", f"is {window}: not supported")
    if architecture != "qwen2":
        # Which biases there are shows in the tensors; check_names then demands the whole set.
        if "model.layers.0.self_attn.q_proj.bias" in shapes:
            config["attention_bias"] = True
        if "model.layers.0.mlp.gate_proj.bias" in shapes:
            config["mlp_bias"] = True
    if keys.integer("expert_count", 0, low=0, high=_MAX):
        raise keys.refuse("expert_count", f"is {own['expert_count']}: mixtures are not supported")
    keys.integer("expert_used_count", 0, low=0, high=_MAX)
    # Early converters wrote this; it names the row order of q and k that arch llama always has.
    if keys.text("tensor_data_layout") not in (None, "Meta AI original pth"):
        raise keys.refuse("tensor_data_layout", f"is {show(own['tensor_data_layout'])}: not known")
    for key, value in own.items():
        if key not in keys.used and key not in _IGNORED:
            raise keys.refuse(
                key,
                f"is {show(value)}: not known here and could change what the model computes",
            )
    return config


def _as_written(value: float) -> float:
    """The shortest decimal that float32 rounds to the same number."""
    return float(f"{value:.6g}")


def _eos_token_ids(metadata: Mapping[str, object]) -> list[object]:
    """End of text, of turn and of message all stop, as in llama.cpp."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = (metadata.get(f"tokenizer.ggml.{name}") for name in names)
    return [token for token in found if token is not None]


def _rope_scaling(
    keys: HfKeys, factors: list[float] | None, *, theta: float, head_dim: int
) -> dict[str, object] | None:
    kind = keys.text("rope.scaling.type") or "none"
    linear = keys.number("rope.scale_linear", 1.0, low=0.0)
    factor = keys.number("rope.scaling.factor", linear, low=0.0)
    original = keys.integer("rope.scaling.original_context_length", 0, low=0, high=_MAX)
    attention = keys.number("rope.scaling.attn_factor", 1.0, low=0.0)
    fast = keys.number("rope.scaling.yarn_beta_fast", 32.0, low=0.0)
    slow = keys.number("rope.scaling.yarn_beta_slow", 1.0, low=0.0)
    for key in ("yarn_ext_factor", "yarn_attn_factor"):
        if keys.number(f"rope.scaling.{key}", 1.0, low=-1.0) not in (1.0, -1.0):
            raise keys.refuse(f"rope.scaling.{key}", "is not 1: not supported")
    if attention != 1.0:
        raise keys.refuse("rope.scaling.attn_factor", f"is {attention}: only 1 is supported")
    if factors is not None and any(value != 1.0 for value in factors):
        if kind != "none" or factor != 1.0:
            raise keys.refuse("rope.scaling.type", f"is {kind!r} beside rope_freqs.weight")
        return _llama3_scaling(keys, factors, theta=theta, head_dim=head_dim)
    if kind == "none" and "rope.scale_linear" in keys.values:
        kind = "linear"
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
    if kind == "yarn":
        scaling: dict[str, object] = {
            "rope_type": "yarn",
            "factor": factor,
            "beta_fast": fast,
            "beta_slow": slow,
        }
        if original:
            scaling["original_max_position_embeddings"] = original
        return scaling
    raise keys.refuse("rope.scaling.type", f"is {kind[:40]!r}: supported are none, linear, yarn")


def _llama3_scaling(
    keys: HfKeys, factors: list[float], *, theta: float, head_dim: int
) -> dict[str, object]:
    """Recover the llama3 settings from the divisors that llama.cpp stores in their place.

    The settings of all published Llama 3.1, 3.2 and 3.3 differ in `factor` alone, which is the
    largest divisor; the whole vector is then recomputed and must agree.
    """
    factor, low, high, original = max(factors), 1.0, 4.0, 8192
    expected = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
        smooth = (original / wavelength - low) / (high - low)
        smooth = min(1.0, max(0.0, smooth))
        expected.append(1 / ((1 - smooth) / factor + smooth))
    if len(factors) != len(expected) or not all(
        math.isclose(have, want, rel_tol=1e-4) for have, want in zip(factors, expected, strict=True)
    ):
        raise keys.refuse(
            "rope_freqs.weight",
            "holds RoPE divisors that are not those of Llama 3.1 to 3.3 (low 1, high 4, original "
            "8192): not supported. Use the safetensors checkpoint",
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
