"""ModelConfig.from_hf: the defaults of transformers, and every key used, neutral or refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import transformers

from pico_vllm.config.model import ModelConfig
from pico_vllm.errors import ModelLoadError

FAMILIES = ["Llama", "Mistral", "Qwen2", "Qwen3"]
SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def config_of(family: str = "Llama", **changes: object) -> dict[str, object]:
    """A small config.json; a change to `...` takes the key away."""
    config = {"architectures": [f"{family}ForCausalLM"], **SIZES, **changes}
    return {key: value for key, value in config.items() if value is not ...}


def refused(param: str, family: str = "Llama", **changes: object) -> str:
    with pytest.raises(ModelLoadError) as caught:
        ModelConfig.from_hf(config_of(family, **changes))
    assert caught.value.param == param, caught.value.message
    assert len(caught.value.message) < 500 and "\n" not in caught.value.message
    return caught.value.message


def saved_by_transformers(family: str, folder: Path, **changes: object) -> tuple[dict, object]:
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    config.architectures = [f"{family}ForCausalLM"]
    config.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text()), config


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 4, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
        {"dtype": "bfloat16", "eos_token_id": [5, 7], "bos_token_id": 3, "head_dim": 32},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ],
)
def test_reads_what_transformers_saves(family: str, changes: dict, tmp_path: Path) -> None:
    """A config.json written by save_pretrained gives the values that transformers itself holds."""
    saved, theirs = saved_by_transformers(family, tmp_path, **changes)
    ours = ModelConfig.from_hf(saved)
    assert ours.architecture == f"{family}ForCausalLM"
    assert (ours.vocab_size, ours.hidden_size, ours.intermediate_size) == (320, 64, 96)
    assert (ours.num_layers, ours.num_heads) == (2, 4)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == getattr(theirs, "head_dim", 16)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.sliding_window == theirs.sliding_window if family == "Mistral" else True
    assert ours.bos_token_id == theirs.bos_token_id
    eos = theirs.eos_token_id
    assert ours.eos_token_ids == tuple(
        eos if isinstance(eos, list) else [] if eos is None else [eos]
    )
    assert ours.dtype == ("bfloat16" if "dtype" in changes else "float32")
    assert ours.max_position_embeddings == ours.max_model_len_default == 256


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_keys_take_the_defaults_of_transformers(family: str) -> None:
    """With sizes alone, everything else is what the transformers class has by default."""
    theirs = getattr(transformers, f"{family}Config")(**SIZES)
    ours = ModelConfig.from_hf(config_of(family))
    assert ours.head_dim == getattr(theirs, "head_dim", 16)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.tie_word_embeddings is theirs.tie_word_embeddings
    assert ours.sliding_window == (4096 if family == "Mistral" else None)
    assert ours.bos_token_id == theirs.bos_token_id
    eos = theirs.eos_token_id
    assert ours.eos_token_ids == (() if eos is None else (eos,))
    assert ours.initializer_range == theirs.initializer_range


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_kv_heads_means_one_per_query_head(family: str) -> None:
    """Models from before grouped attention have no num_key_value_heads."""
    assert ModelConfig.from_hf(config_of(family, num_key_value_heads=...)).num_kv_heads == 4
    assert ModelConfig.from_hf(config_of(family, num_key_value_heads=None)).num_kv_heads == 4


@pytest.mark.parametrize(
    ("family", "changes", "qkv", "o", "mlp", "qk_norm"),
    [
        ("Llama", {}, False, False, False, False),
        ("Llama", {"attention_bias": True}, True, True, False, False),
        ("Llama", {"mlp_bias": True}, False, False, True, False),
        ("Mistral", {}, False, False, False, False),
        ("Mistral", {"attention_bias": False}, False, False, False, False),
        ("Qwen2", {}, True, False, False, False),
        ("Qwen3", {}, False, False, False, True),
        ("Qwen3", {"attention_bias": True}, True, True, False, True),
    ],
)
def test_biases_of_each_architecture(
    family: str, changes: dict, qkv: bool, o: bool, mlp: bool, qk_norm: bool
) -> None:
    """Which projections have a bias follows from the architecture and its switches."""
    model = ModelConfig.from_hf(config_of(family, **changes))
    assert (model.qkv_bias, model.o_bias, model.mlp_bias) == (qkv, o, mlp)
    assert model.qk_norm is qk_norm


def test_bias_switch_that_the_architecture_lacks_is_refused() -> None:
    """A switch that transformers would ignore must not be believed or skipped."""
    assert "no such biases" in refused("attention_bias", "Mistral", attention_bias=True)
    assert "always has" in refused("attention_bias", "Qwen2", attention_bias=False)
    refused("mlp_bias", "Qwen3", mlp_bias=True)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", 0),
        ("vocab_size", -1),
        ("vocab_size", 2**24 + 1),
        ("vocab_size", True),
        ("vocab_size", 320.0),
        ("vocab_size", "320"),
        ("vocab_size", ...),
        ("hidden_size", None),
        pytest.param("hidden_size", 10**5000, id="huge"),
        ("intermediate_size", 0),
        ("num_hidden_layers", 10**9),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 3),
        ("num_key_value_heads", 8),
        ("head_dim", 15),
        ("head_dim", 2048),
        ("head_dim", -2),
        ("max_position_embeddings", 0),
        ("max_position_embeddings", ...),
        ("rms_norm_eps", math.nan),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", -1e-6),
        ("rms_norm_eps", "1e-6"),
        pytest.param("rms_norm_eps", 10**400, id="beyond-float"),
        ("rope_theta", math.inf),
        ("rope_theta", 1),
        ("rope_theta", -1.0),
        ("tie_word_embeddings", 1),
        ("attention_bias", "false"),
        ("initializer_range", math.nan),
        ("torch_dtype", "float8_e4m3fn"),
        ("dtype", 16),
        ("architectures", []),
        ("architectures", ...),
        ("architectures", "LlamaForCausalLM"),
        ("architectures", ["LlamaForCausalLM", "LlamaModel"]),
        ("model_type", "gemma"),
    ],
)
def test_bad_value_is_refused_by_name(key: str, value: object) -> None:
    """A missing, mistyped or absurd value names its key."""
    message = refused(key, **{key: value})
    assert key in message


def test_hidden_size_must_divide_where_head_dim_is_not_given() -> None:
    """66 over 4 heads has no head size; with head_dim given it has."""
    refused("hidden_size", hidden_size=66)
    assert ModelConfig.from_hf(config_of(hidden_size=66, head_dim=16)).head_dim == 16


def test_unknown_architecture_lists_the_supported_ones() -> None:
    """The message for FooForCausalLM is the list of what can be loaded."""
    message = refused("architectures", architectures=["FooForCausalLM"])
    for family in FAMILIES:
        assert f"{family}ForCausalLM" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quantization_config", {"quant_method": "awq"}),
        ("hidden_act", "gelu"),
        ("auto_map", {"AutoModelForCausalLM": "modeling_x.X"}),
        ("model_file", "modeling_x.py"),
        ("custom_pipelines", {"x": {}}),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("pretraining_tp", 2),
        ("rope_interleaved", True),
        ("partial_rotary_factor", 0.5),
        ("sliding_window", 128),
        ("logits_scaling", 8.0),
        ("activation", "geglu"),
        ("embedding_multiplier", 12.0),
        ("is_encoder_decoder", True),
        ("dual_chunk_attention_config", {"chunk_size": 262144}),
        ("num_local_experts", 8),
        ("some_new_switch", True),
        ("some_new_switch", False),
        ("layer_types", ["full_attention", "linear_attention"]),
        ("layer_types", ["sliding_attention", "sliding_attention"]),
        ("layer_types", ["full_attention"]),
    ],
)
def test_key_that_changes_the_computation_is_refused(key: str, value: object) -> None:
    """No behaviour-changing key is skipped, known or unknown."""
    with pytest.raises(ModelLoadError, match=key):
        ModelConfig.from_hf(config_of(**{key: value}))


def test_custom_code_is_refused_with_that_word() -> None:
    """auto_map says that custom code is not supported."""
    assert "custom code is not supported" in refused("auto_map", auto_map={"AutoConfig": "c.C"})


def test_metadata_and_neutral_keys_are_accepted() -> None:
    """Bookkeeping keys, null keys and switches in their off position change nothing."""
    plain = ModelConfig.from_hf(config_of())
    decorated = ModelConfig.from_hf(
        config_of(
            transformers_version="4.57.1",
            _name_or_path="somewhere",
            use_cache=True,
            attention_dropout=0.1,
            pad_token_id=-1,
            quantization_config=None,
            auto_map={},
            some_new_switch=None,
            pretraining_tp=1,
            rope_interleaved=False,
            is_llama_config=True,
            hidden_act="silu",
            activation="swiglu",
            neftune_noise_alpha=5.0,
            layer_types=["full_attention"] * 2,
            rope_scaling=None,
            model_type="llama",
            id2label={"0": "LABEL_0"},
            unsloth_version="2025.1",
        )
    )
    assert decorated == plain


def test_sliding_window_of_mistral() -> None:
    """Mistral slides wherever sliding_window is not null; layer_types must agree."""
    assert ModelConfig.from_hf(config_of("Mistral", sliding_window=None)).sliding_window is None
    assert ModelConfig.from_hf(config_of("Mistral", sliding_window=100)).sliding_window == 100
    refused("sliding_window", "Mistral", sliding_window=0)
    refused("layer_types", "Mistral", sliding_window=100, layer_types=["full_attention"] * 2)


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"sliding_window": 64}, None),
        ({"sliding_window": 64, "use_sliding_window": False, "max_window_layers": 0}, None),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2}, None),
        ({"sliding_window": 64, "use_sliding_window": True}, None),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0}, 64),
        ({"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, None),
        (
            {
                "sliding_window": 64,
                "use_sliding_window": True,
                "max_window_layers": 0,
                "layer_types": ["full_attention"] * 2,
            },
            None,
        ),
    ],
)
def test_sliding_window_of_qwen(family: str, changes: dict, window: int | None) -> None:
    """Qwen slides only with use_sliding_window, from layer max_window_layers on, as in
    transformers.
    """
    assert ModelConfig.from_hf(config_of(family, **changes)).sliding_window == window
    theirs = getattr(transformers, f"{family}Config")(**SIZES, **changes)
    slides = ["sliding_attention" in kind for kind in theirs.layer_types]
    assert (theirs.sliding_window if all(slides) else None) == window


def test_mixture_of_sliding_layers_is_refused() -> None:
    """One sliding layer of two is a computation that is not supported."""
    message = refused(
        "max_window_layers",
        "Qwen2",
        sliding_window=64,
        use_sliding_window=True,
        max_window_layers=1,
    )
    assert "1 of 2 layers" in message
    kinds = ["full_attention", "sliding_attention"]
    window = {"sliding_window": 64, "use_sliding_window": True}
    refused("layer_types", "Qwen3", layer_types=kinds, **window)
    refused("layer_types", "Qwen3", layer_types=["sliding_attention"] * 2)


def test_stop_ids_of_both_files_are_joined() -> None:
    """Every id in either eos list stops, in the order in which it is first seen."""
    config = config_of("Qwen2", eos_token_id=[9, 4])
    model = ModelConfig.from_hf(config, {"eos_token_id": [4, 11], "temperature": 0.7})
    assert model.eos_token_ids == (9, 4, 11)
    assert ModelConfig.from_hf(config, {"eos_token_id": 3}).eos_token_ids == (9, 4, 3)
    assert ModelConfig.from_hf(config_of("Llama"), {"eos_token_id": 3}).eos_token_ids == (3,)
    assert ModelConfig.from_hf(config_of("Llama", eos_token_id=None)).eos_token_ids == ()


@pytest.mark.parametrize("bad", [-1, 320, 1.5, "2", True, [2, 400], [[2]], list(range(1025))])
def test_bad_stop_ids_are_refused(bad: object) -> None:
    """An id outside the vocabulary is an error in either file, with the range in the message."""
    message = refused("eos_token_id", eos_token_id=bad)
    assert "319" in message or "1024" in message
    with pytest.raises(ModelLoadError, match=r"generation_config\.json"):
        ModelConfig.from_hf(config_of(), {"eos_token_id": bad})


def test_dtype_under_both_names() -> None:
    """transformers 4 writes torch_dtype, 5 dtype; a torch. prefix is the same type."""
    assert ModelConfig.from_hf(config_of(torch_dtype="float16")).dtype == "float16"
    assert ModelConfig.from_hf(config_of(dtype="torch.bfloat16")).dtype == "bfloat16"


@pytest.mark.parametrize("value", [None, [], "x", 3, {1: 2}])
def test_what_is_not_an_object_is_refused(value: object) -> None:
    """config.json and generation_config.json must hold objects."""
    with pytest.raises(ModelLoadError):
        ModelConfig.from_hf(value)  # type: ignore[arg-type]
    if value is not None and not isinstance(value, dict):
        with pytest.raises(ModelLoadError, match="generation_config"):
            ModelConfig.from_hf(config_of(), value)  # type: ignore[arg-type]


def test_message_stays_one_line_whatever_the_key() -> None:
    """A key with a newline is quoted, a long one cut."""
    with pytest.raises(ModelLoadError) as caught:
        ModelConfig.from_hf(config_of(**{"a\nb" + "c" * 500: 1}))
    assert "\n" not in caught.value.message and len(caught.value.message) < 400
