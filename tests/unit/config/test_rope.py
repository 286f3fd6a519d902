"""RoPE settings, under the names of transformers 4 and 5, and the window that follows from them."""

from __future__ import annotations

import copy
import math

import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pico_vllm.config.model import ModelConfig
from pico_vllm.config.rope import RopeConfig
from pico_vllm.errors import ModelLoadError

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


def load(**changes: object) -> ModelConfig:
    return ModelConfig.from_hf({"architectures": ["LlamaForCausalLM"], **SIZES, **changes})


def test_default() -> None:
    """Without scaling, theta alone is set and the window is max_position_embeddings."""
    model = load(rope_theta=5e5)
    assert model.rope == RopeConfig(theta=5e5)
    assert model.max_model_len_default == 1024


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_both_spellings_give_the_same(name: str, key: str) -> None:
    """rope_scaling or rope_parameters, type or rope_type: one meaning."""
    model = load(**{name: {key: "linear", "factor": 2}, "rope_theta": 1e6})
    assert model.rope == RopeConfig(kind="linear", factor=2.0, theta=1e6)
    assert model.max_model_len_default == 2048


def test_precedence_is_that_of_transformers() -> None:
    """rope_scaling wins over rope_parameters, its theta too."""
    both = {
        "rope_scaling": {"rope_type": "linear", "factor": 3.0, "rope_theta": 7e4},
        "rope_parameters": {"rope_type": "linear", "factor": 2.0},
    }
    rope = load(**both).rope
    theirs = transformers.LlamaConfig(**SIZES, **copy.deepcopy(both)).rope_parameters
    assert (rope.factor, rope.theta) == (theirs["factor"], theirs["rope_theta"]) == (3.0, 7e4)


def test_dynamic() -> None:
    """Dynamic stretches from the window of the file on."""
    model = load(rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    assert model.rope == RopeConfig(kind="dynamic", factor=2.0, original_max_position=1024)
    assert model.max_model_len_default == 2048


def test_llama3() -> None:
    """llama3 keeps its four numbers, and the window of the file is already stretched."""
    model = load(rope_parameters={**LLAMA3, "rope_theta": 5e5})
    assert model.rope == RopeConfig(
        kind="llama3",
        theta=5e5,
        factor=8.0,
        original_max_position=512,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    assert model.max_model_len_default == 1024


def test_absent_original_window_is_the_window_of_the_file() -> None:
    """llama3 and yarn without original_max_position_embeddings take max_position_embeddings."""
    for scaling in (LLAMA3, YARN):
        short = {k: v for k, v in scaling.items() if k != "original_max_position_embeddings"}
        model = load(rope_scaling=short)
        theirs = transformers.LlamaConfig(**SIZES, rope_scaling=dict(short)).rope_parameters
        assert model.rope.original_max_position == 1024
        assert theirs["original_max_position_embeddings"] == 1024
    assert load(rope_scaling=YARN, original_max_position_embeddings=128).rope == (
        load(rope_scaling={**YARN, "original_max_position_embeddings": 128}).rope
    )


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"attention_factor": 1.25},
        {"mscale": 0.7, "mscale_all_dim": 1.0},
        {"mscale": 1.0},
        {"factor": 1.0},
        {"beta_fast": 16, "beta_slow": 2, "truncate": False},
        {"beta_fast": 0, "beta_slow": None},
        {"factor": None},
    ],
)
def test_yarn_attention_factor_is_that_of_transformers(extra: dict) -> None:
    """yarn: factor, betas and the multiplier of cos and sin agree with transformers."""
    scaling = {**YARN, **extra}
    rope = load(rope_scaling=scaling).rope
    theirs = transformers.LlamaConfig(**SIZES)
    theirs.rope_parameters = {**scaling, "rope_theta": 10000.0}
    _, attention = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    assert rope.attention_factor == pytest.approx(attention, abs=1e-12)
    assert rope.factor == (scaling["factor"] or 4.0)
    assert rope.beta_fast == (extra.get("beta_fast") or 32)
    assert rope.beta_slow == (extra.get("beta_slow") or 1)
    assert rope.truncate is extra.get("truncate", True)


def test_yarn_window_is_factor_times_original() -> None:
    """L does not depend on which of the two windows max_position_embeddings holds."""
    assert load(rope_scaling=YARN).max_model_len_default == 1024
    assert load(rope_scaling=YARN, max_position_embeddings=256).max_model_len_default == 1024


@pytest.mark.parametrize(
    ("scaling", "param"),
    [
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "rope_type"),
        ({"type": "su"}, "rope_type"),
        ({"type": "mrope", "mrope_section": [16, 24, 24]}, "rope_type"),
        ({"rope_type": "default", "mrope_section": [2, 3, 3]}, "mrope_section"),
        ({"rope_type": "invented", "factor": 2.0}, "rope_type"),
        ({"rope_type": 3}, "rope_type"),
        ({"rope_type": "yarn", "type": "linear", "factor": 2.0}, "type"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": None}, "factor"),
        ({"rope_type": "linear", "factor": 0}, "factor"),
        ({"rope_type": "linear", "factor": 0.5}, "factor"),
        ({"rope_type": "linear", "factor": -2.0}, "factor"),
        ({"rope_type": "linear", "factor": math.nan}, "factor"),
        ({"rope_type": "linear", "factor": math.inf}, "factor"),
        ({"rope_type": "linear", "factor": "2"}, "factor"),
        ({"rope_type": "linear", "factor": True}, "factor"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 32}, "beta_fast"),
        ({"rope_type": "dynamic", "factor": math.nan}, "factor"),
        ({**LLAMA3, "low_freq_factor": 4.0}, "high_freq_factor"),
        ({**LLAMA3, "low_freq_factor": 0}, "low_freq_factor"),
        ({**LLAMA3, "high_freq_factor": None}, "high_freq_factor"),
        ({**LLAMA3, "factor": math.nan}, "factor"),
        ({**LLAMA3, "original_max_position_embeddings": 0}, "original_max_position_embeddings"),
        ({**LLAMA3, "original_max_position_embeddings": 1.5}, "original_max_position_embeddings"),
        ({**YARN, "attention_factor": math.nan}, "attention_factor"),
        ({**YARN, "attention_factor": -1.0}, "attention_factor"),
        ({**YARN, "beta_fast": 1, "beta_slow": 2}, "beta_fast"),
        ({**YARN, "mscale": math.inf}, "mscale"),
        ({**YARN, "truncate": 1}, "truncate"),
        ({"rope_theta": math.nan}, "rope_theta"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
    ],
)
def test_unsupported_or_malformed_is_never_plain_rope(scaling: dict, param: str) -> None:
    """Anything that is not one of the five kinds with sound numbers is refused by its key."""
    for name in ("rope_scaling", "rope_parameters"):
        with pytest.raises(ModelLoadError) as caught:
            load(**{name: scaling})
        assert caught.value.param == param, caught.value.message


@pytest.mark.parametrize("value", ["yarn", 3, ["yarn"], True])
def test_scaling_that_is_not_an_object_is_refused(value: object) -> None:
    """rope_scaling must be an object or null."""
    with pytest.raises(ModelLoadError, match="rope_scaling"):
        load(rope_scaling=value)


def test_null_and_empty_scaling_is_plain_rope() -> None:
    """null and {} both mean that nothing is scaled."""
    assert load(rope_scaling=None).rope == load(rope_scaling={}).rope == RopeConfig()


def test_two_thetas_that_differ_are_refused() -> None:
    """A rope_theta beside rope_parameters that says another one is never passed over."""
    parameters = {"rope_type": "default", "rope_theta": 10000.0}
    with pytest.raises(ModelLoadError, match=r"rope_theta.* is 5\.0, but rope_parameters says"):
        load(rope_theta=5.0, rope_parameters=parameters)
    same = load(rope_theta=10000.0, rope_parameters=parameters)
    assert same.rope.theta == 10000.0
