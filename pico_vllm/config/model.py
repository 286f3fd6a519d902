"""What a model is, read from config.json: sizes, RoPE, biases, KV geometry. Host only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pico_vllm.config.hf_keys import HfKeys
from pico_vllm.config.rope import MAX_POSITION, RopeConfig, RopeKind, rope_from_hf
from pico_vllm.errors import ModelLoadError, show

__all__ = ["ModelConfig", "RopeConfig", "RopeKind"]

# architectures[0] -> model_type, the only pairs that from_hf reads.
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_DTYPES = ("bfloat16", "float16", "float32")


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
    """Tokens that a query sees, itself included; None where the model attends to everything."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Stops of config.json, then those that generation_config.json adds."""
    dtype: str
    """Storage type that the checkpoint declares: bfloat16, float16 or float32."""
    initializer_range: float = 0.02
    """Standard deviation of dummy weights."""

    @property
    def max_model_len_default(self) -> int:
        """The window L in tokens, where the user asks for none. The rule is vLLM's.

        default and llama3: `max_position_embeddings`, which llama3 files give already stretched.
        linear and dynamic: `max_position_embeddings * factor`: these files keep the old window.
        yarn: `original_max_position_embeddings * factor`, since files disagree about which of the
        two windows `max_position_embeddings` holds.
        """
        if self.rope.kind in ("default", "llama3"):
            return self.max_position_embeddings
        window = self.max_position_embeddings
        if self.rope.kind == "yarn":
            window = self.rope.original_max_position or window
        return int(window * self.rope.factor)

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_bytes

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, object],
        generation_config: Mapping[str, object] | None = None,
    ) -> ModelConfig:
        """Read the object in config.json, with the defaults that transformers gives absent keys.

        Sizes have no defaults: a file without `hidden_size` is damaged, not a 7B model. An absent
        `num_key_value_heads` means one KV head per query head.

        Raises:
            ModelLoadError: `param` is the key at fault. Unknown architecture, a size missing or out
                of range, a key that changes the computation and is not supported, a bad stop id.
        """
        if not isinstance(config, Mapping) or not all(isinstance(key, str) for key in config):
            raise ModelLoadError(f"config.json holds {show(config)}: must be an object")
        keys = HfKeys(config)
        architecture = _architecture(keys)
        is_llama = architecture == "LlamaForCausalLM"
        is_qwen3 = architecture == "Qwen3ForCausalLM"

        vocab_size = keys.integer("vocab_size", high=2**24)
        hidden_size = keys.integer("hidden_size", high=2**18)
        num_layers = keys.integer("num_hidden_layers", high=4096)
        num_heads = keys.integer("num_attention_heads", high=4096)
        num_kv_heads = keys.integer("num_key_value_heads", num_heads, high=4096)
        if num_heads % num_kv_heads:
            raise keys.refuse(
                "num_key_value_heads",
                f"is {num_kv_heads}: must divide num_attention_heads {num_heads}",
            )
        max_position = keys.integer("max_position_embeddings", high=MAX_POSITION)
        attention_bias = _bias(keys, "attention_bias", architecture)
        bos_default, eos_default = (None, None) if "Qwen" in architecture else (1, 2)
        model = cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=keys.integer("intermediate_size", high=2**20),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_head_dim(keys, hidden_size, num_heads, 128 if is_qwen3 else None),
            rms_norm_eps=keys.number("rms_norm_eps", 1e-6, low=1e-30, high=1.0),
            rope=rope_from_hf(keys, max_position=max_position),
            tie_word_embeddings=keys.flag("tie_word_embeddings", False),
            qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
            o_bias=attention_bias and (is_llama or is_qwen3),
            mlp_bias=_bias(keys, "mlp_bias", architecture),
            qk_norm=is_qwen3,
            max_position_embeddings=max_position,
            sliding_window=_sliding_window(keys, architecture, num_layers),
            bos_token_id=_bos_token_id(keys, bos_default, vocab_size),
            eos_token_ids=_eos_token_ids(keys, generation_config, eos_default, vocab_size),
            dtype=_dtype(keys),
            initializer_range=keys.number("initializer_range", 0.02, low=0.0, high=1.0),
        )
        keys.refuse_leftovers()
        return model


def _architecture(keys: HfKeys) -> str:
    names = keys.raw("architectures")
    supported = ", ".join(ARCHITECTURES)
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise keys.refuse(
            "architectures", f"is {show(names)}: must be a list of one name of {supported}"
        )
    if names[0] not in ARCHITECTURES:
        raise keys.refuse(
            "architectures", f"is {show(names)}: not supported. Supported: {supported}"
        )
    model_type, wanted = keys.text("model_type"), ARCHITECTURES[names[0]]
    if model_type not in (None, wanted):
        raise keys.refuse("model_type", f"is {show(model_type)}: {names[0]} needs {wanted!r}")
    return names[0]


def _head_dim(keys: HfKeys, hidden_size: int, num_heads: int, default: int | None) -> int:
    if default is None and keys.raw("head_dim") is None:
        if hidden_size % num_heads:
            raise keys.refuse(
                "hidden_size",
                f"is {hidden_size}: must be a multiple of num_attention_heads {num_heads} "
                "where head_dim is not given",
            )
        default = hidden_size // num_heads
    head_dim = keys.integer("head_dim", default, high=1024)
    if head_dim % 2 or head_dim > 1024:
        raise keys.refuse("head_dim", f"is {head_dim}: must be even and at most 1024")
    return head_dim


def _bias(keys: HfKeys, key: str, architecture: str) -> bool:
    """The switch where the architecture has one; elsewhere it must agree with what is built in."""
    has_switch = architecture == "LlamaForCausalLM" or (
        key == "attention_bias" and architecture == "Qwen3ForCausalLM"
    )
    built_in = key == "attention_bias" and architecture == "Qwen2ForCausalLM"
    value = keys.flag(key, built_in)
    if not has_switch and value != built_in:
        always = "always has q, k and v biases" if built_in else "has no such biases"
        raise keys.refuse(key, f"is {show(value)}: {architecture} {always}; remove the key")
    return value


def _sliding_window(keys: HfKeys, architecture: str, num_layers: int) -> int | None:
    """One window for all layers, or None. A mixture of layers is refused.

    Mistral slides wherever `sliding_window` is not null. Qwen slides with `use_sliding_window`
    only, and then from layer `max_window_layers` on; `layer_types`, where given, decides.
    """
    layer_types = _layer_types(keys, num_layers)
    if architecture == "LlamaForCausalLM":
        if "sliding_attention" in layer_types:
            raise keys.refuse("layer_types", "names sliding_attention: Llama layers do not slide")
        return None
    default = 4096 if not keys.has("sliding_window") else None
    window = keys.raw("sliding_window")
    if window is not None or default is not None:
        window = keys.integer("sliding_window", default, high=MAX_POSITION)
    if architecture == "MistralForCausalLM":
        slides = [window is not None] * num_layers
        if layer_types and [kind == "sliding_attention" for kind in layer_types] != slides:
            raise keys.refuse("layer_types", f"disagrees with sliding_window {show(window)}")
    else:
        is_on = keys.flag("use_sliding_window", False)
        first = keys.integer("max_window_layers", 28, low=0, high=2**20)
        window = window if is_on else None
        if layer_types:
            slides = [kind == "sliding_attention" for kind in layer_types]
        else:
            slides = [window is not None and layer >= first for layer in range(num_layers)]
        if any(slides) and window is None:
            raise keys.refuse(
                "layer_types",
                "names sliding_attention without use_sliding_window and a sliding_window",
            )
    if any(slides) and not all(slides):
        raise keys.refuse(
            "layer_types" if layer_types else "max_window_layers",
            f"makes {sum(slides)} of {num_layers} layers slide: a mixture is not supported. "
            "Set use_sliding_window to false to attend to everything",
        )
    assert window is None or isinstance(window, int)
    return window if any(slides) else None


def _layer_types(keys: HfKeys, num_layers: int) -> list[str]:
    kinds = keys.raw("layer_types")
    if kinds is None:
        return []
    known = ("full_attention", "sliding_attention")
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or any(k not in known for k in kinds)
    ):
        raise keys.refuse(
            "layer_types",
            f"is {show(kinds)}: must be {num_layers} times one of {', '.join(known)}",
        )
    return kinds


def _dtype(keys: HfKeys) -> str:
    """transformers 5 writes `dtype`, 4 `torch_dtype`; a file with neither is taken for float32."""
    new, old = keys.text("dtype"), keys.text("torch_dtype")
    name = (new or old or "float32").removeprefix("torch.")
    if new and old and old.removeprefix("torch.") != name:
        raise keys.refuse("torch_dtype", f"is {show(old)}, but dtype is {show(new)}: name one type")
    if name not in _DTYPES:
        key = "dtype" if new else "torch_dtype"
        raise keys.refuse(key, f"is {show(name)}: must be one of {', '.join(_DTYPES)}")
    return name


def _bos_token_id(keys: HfKeys, default: int | None, vocab_size: int) -> int | None:
    if not keys.has("bos_token_id"):
        return default if default is not None and default < vocab_size else None
    ids = _token_ids(keys, "bos_token_id", vocab_size)
    return ids[0] if ids else None


def _eos_token_ids(
    keys: HfKeys,
    generation_config: Mapping[str, object] | None,
    default: int | None,
    vocab_size: int,
) -> tuple[int, ...]:
    """Stops of both files, first seen first. The default counts where neither file has the key."""
    found = _token_ids(keys, "eos_token_id", vocab_size)
    is_given = keys.has("eos_token_id")
    if generation_config is not None:
        if not isinstance(generation_config, Mapping):
            shown = show(generation_config)
            raise ModelLoadError(f"generation_config.json holds {shown}: must be an object")
        generation = HfKeys(generation_config, where="generation_config.json")
        found += _token_ids(generation, "eos_token_id", vocab_size)
        is_given = is_given or generation.has("eos_token_id")
    if not is_given and default is not None and default < vocab_size:
        found.append(default)
    return tuple(dict.fromkeys(found))


def _token_ids(keys: HfKeys, key: str, vocab_size: int) -> list[int]:
    value = keys.raw(key)
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    if len(ids) > 1024:
        raise keys.refuse(key, f"lists {len(ids)} ids: at most 1024")
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise keys.refuse(
                key,
                f"has {show(token)}: must be an id from 0 to {vocab_size - 1} (vocab_size - 1)",
            )
    return list(ids)
