"""Rotary embedding settings, read as transformers reads them. Host only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from pico_vllm.config.hf_keys import HfKeys
from pico_vllm.errors import show

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]

MAX_POSITION = 10**8
"""Upper limit of any window in tokens; far above all models, far below what overflows."""

_COMMON = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}
# transformers ignores these two for the kinds that do not use them.
_HARMLESS = {"original_max_position_embeddings", "finetuned"}
_KEYS_OF_KIND: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {
        "factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary embedding: frequencies are `theta ** (-2i / head_dim)`, changed as `kind` says."""

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    """How many times longer than `original_max_position` the window became."""
    original_max_position: int | None = None
    """Window of the model before it was stretched, in tokens. Set for dynamic, llama3 and yarn."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    """llama3 only: wavelengths longer than original / low are divided by `factor`,
    shorter than original / high kept."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """yarn only: cos and sin are multiplied by it."""
    truncate: bool = True
    """yarn only: round the correction range to whole dimensions."""


def rope_from_hf(config: HfKeys, *, max_position: int) -> RopeConfig:
    """Read `rope_scaling` (transformers 4) or `rope_parameters` (5), `rope_theta` and defaults.

    As in transformers, a non-empty `rope_scaling` wins over `rope_parameters`, a theta inside the
    object over the one beside it, `rope_type` over the older `type`, and an
    `original_max_position_embeddings` beside the object over the one inside.

    Raises:
        ModelLoadError: longrope, mrope, partial rotation, an unknown kind or key, a bad value.
    """
    parameters, scaling = config.table("rope_parameters"), config.table("rope_scaling")
    name = "rope_scaling" if scaling else "rope_parameters"
    rope = HfKeys(scaling or parameters or {}, where=f"{config.where}: {name}")
    kind = _kind(rope)
    for key, value in rope.values.items():
        if value is not None and key not in _COMMON | _HARMLESS | _KEYS_OF_KIND[kind]:
            raise rope.refuse(
                key,
                f"is {show(value)}: not a setting of rope_type {kind!r}. Supported with it: "
                f"{', '.join(sorted(_COMMON | _KEYS_OF_KIND[kind]))}",
            )
    for keys in (rope, config):
        partial = keys.number("partial_rotary_factor", 1.0, low=0.0)
        if partial != 1.0:
            raise keys.refuse("partial_rotary_factor", f"is {partial}: only 1.0 is supported")
    beside = config.number("rope_theta", 10000.0, low=1.0)
    theta = rope.number("rope_theta", beside, low=1.0)
    if config.values.get("rope_theta") is not None and beside != theta:
        raise config.refuse(
            "rope_theta", f"is {beside}, but {name} says {theta}: correct the one that is wrong"
        )
    if theta == 1.0:
        raise config.refuse("rope_theta", "is 1.0: must be above 1")
    original = _original_max_position(config, rope, kind, max_position)

    if kind == "default":
        return RopeConfig(theta=theta)
    factor = _factor(rope, kind, max_position, original)
    if kind in ("linear", "dynamic"):
        return RopeConfig(kind=kind, theta=theta, factor=factor, original_max_position=original)
    if kind == "llama3":
        low = rope.number("low_freq_factor", low=1e-6)
        high = rope.number("high_freq_factor", low=1e-6)
        if high <= low:
            raise rope.refuse("high_freq_factor", f"is {high}: must be above low_freq_factor {low}")
        return RopeConfig(
            kind=kind,
            theta=theta,
            factor=factor,
            original_max_position=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    # transformers takes 0 for "not given" here.
    fast = rope.number("beta_fast", 32.0, low=0.0) or 32.0
    slow = rope.number("beta_slow", 1.0, low=0.0) or 1.0
    if fast < slow:
        raise rope.refuse("beta_fast", f"is {fast}: must be at least beta_slow {slow}")
    return RopeConfig(
        kind=kind,
        theta=theta,
        factor=factor,
        original_max_position=original,
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=_yarn_attention_factor(rope, factor),
        truncate=rope.flag("truncate", True),
    )


def _kind(rope: HfKeys) -> RopeKind:
    old, new = rope.text("type"), rope.text("rope_type")
    if old is not None and new is not None and old != new:
        # One reader takes the first, another the second: the file does not say what it means.
        raise rope.refuse("type", f"is {show(old)} and rope_type is {show(new)}: remove one")
    name = new or old or "default"
    for kind in get_args(RopeKind):
        if name == kind:
            return kind  # type: ignore[no-any-return]
    supported = ", ".join(get_args(RopeKind))
    raise rope.refuse("rope_type", f"is {show(name)}: not supported. Supported: {supported}")


def _original_max_position(
    config: HfKeys, rope: HfKeys, kind: RopeKind, max_position: int
) -> int | None:
    inside = rope.integer("original_max_position_embeddings", max_position, high=MAX_POSITION)
    beside = config.integer("original_max_position_embeddings", inside, high=MAX_POSITION)
    if kind in ("llama3", "yarn"):
        return beside
    return max_position if kind == "dynamic" else None


def _factor(rope: HfKeys, kind: RopeKind, max_position: int, original: int | None) -> float:
    if kind == "yarn" and rope.has("factor") and rope.raw("factor") is None:
        # An explicit null: transformers derives it from the two windows.
        assert original is not None
        return max(1.0, max_position / original)
    return rope.number("factor", low=1.0, high=1e6)


def _yarn_attention_factor(rope: HfKeys, factor: float) -> float:
    given = rope.raw("attention_factor")
    mscale = rope.number("mscale", 0.0, low=0.0, high=1e6)
    mscale_all_dim = rope.number("mscale_all_dim", 0.0, low=0.0, high=1e6)
    if given is not None:
        return rope.number("attention_factor", low=0.0, high=1e6)

    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)
