"""SamplingParams refuses what cannot be used, names the argument, and keeps what it accepts."""

from __future__ import annotations

import json
import math
import pickle
import time
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from pico_vllm.errors import InvalidRequestError
from pico_vllm.sampling_params import SamplingParams

NAN, INF = math.nan, math.inf
NOT_NUMBERS = [None, "1", "nan", [], {}, True, False, 1j, b"1", object()]
HUGE = [10**30, 10**400, 10**5000, -(10**5000)]

BAD: dict[str, list[Any]] = {
    "cache_salt": ["", "x" * 1025, 5, b"x", "half a \ud800"],
    "max_tokens": [-1, 0, 1.5, 1.0, True, "5", 2**31, 2**63, NAN, INF, [], *HUGE],
    "min_tokens": [-1, 1.5, True, None, "5", 2**31, NAN, *HUGE],
    "temperature": [-1e-9, -1, 2.0000001, NAN, INF, -INF, *NOT_NUMBERS, *HUGE],
    "top_k": [-2, 1.0, 1.5, True, None, "5", 2**31, NAN, *HUGE],
    "top_p": [0, 0.0, -0.0, -1e-9, 1.0000001, NAN, INF, -INF, *NOT_NUMBERS, *HUGE],
    "min_p": [-1e-9, 1.0000001, NAN, INF, -INF, *NOT_NUMBERS, *HUGE],
    "presence_penalty": [-2.1, 2.1, NAN, INF, -INF, *NOT_NUMBERS, *HUGE],
    "frequency_penalty": [-2.1, 2.1, NAN, INF, -INF, *NOT_NUMBERS, *HUGE],
    "repetition_penalty": [0, 0.009, 1e-300, -1, 10.1, NAN, INF, -INF, *NOT_NUMBERS, *HUGE],
    "seed": [2**63, -(2**63) - 1, 1.0, True, "1", NAN, *HUGE],
    "n": [0, -1, 129, 5_000_000, 1.0, True, None, "2", NAN, *HUGE],
    "logprobs": [-1, 21, 1.0, True, "5", NAN, *HUGE],
    "prompt_logprobs": [-1, 21, 1.0, True, "5", NAN, *HUGE],
    "stop": ["", [""], ["a", ""], [1], [None], 5, {"a": 1}, "x" * 257, ["a"] * 17, b"a", *HUGE],
    "stop_token_ids": [5, "5", [-1], [1.0], [True], [None], [2**31], [1] * 129, {1}, [10**5000]],
    "include_stop_str_in_output": [0, 1, None, "true"],
    "ignore_eos": [0, 1, None, "true"],
    "skip_special_tokens": [0, 1, None, "true"],
    "detokenize": [0, 1, None, "true"],
}
BAD_BIAS: list[Any] = [
    [],
    "5",
    5,
    [[1, 2]],
    {"-1": 1},
    {-1: 1},
    {"abc": 1},
    {"1.5": 1},
    {1.5: 1},
    {"": 1},
    {" 5": 1},
    {"²": 1},
    {"1" * 5000: 1},
    {True: 1},
    {None: 1},
    {10**5000: "x"},
    {5: NAN},
    {5: INF},
    {5: 100.1},
    {5: -101},
    {5: 1e308},
    {5: "1"},
    {5: None},
    {5: True},
    {5: 10**400},
    {5: 10**5000},
    dict.fromkeys(range(1025), 1.0),
    dict.fromkeys(range(10**6), 1.0),
]


def refused(name: str, value: object) -> InvalidRequestError:
    started = time.thread_time()
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})
    assert time.thread_time() - started < 0.05
    error = caught.value
    assert (error.param, error.code, error.status) == (name, "invalid_value", 400)
    assert name in error.message and len(error.message) < 300
    json.dumps(error.message, allow_nan=False)
    return error


@pytest.mark.parametrize("name", BAD)
def test_bad_values(name: str) -> None:
    """Every value of the wrong type or out of range is refused at once, by the name of its
    argument."""
    for value in BAD[name]:
        refused(name, value)


@pytest.mark.parametrize("index", range(len(BAD_BIAS)))
def test_bad_logit_bias(index: int) -> None:
    """A logit bias with a key that is no id, a value out of range, or too many entries is
    refused."""
    refused("logit_bias", BAD_BIAS[index])


def test_messages_name_value_limit_and_way_out() -> None:
    """A message says what was given, what is allowed and, where there is one, another way."""
    assert refused("max_tokens", 0).message == (
        "max_tokens must be a whole number from 1 to 2147483647, not 0; or None to fill the window"
    )
    assert refused("temperature", NAN).message == "temperature must be a number in [0, 2], not nan"
    assert refused("top_p", 0).message == "top_p must be a number in (0, 1], not 0"
    assert "not a value too large to print" in refused("seed", 10**5000).message
    assert "'abc'" in refused("logit_bias", {"abc": 1}).message
    assert "token 7 " in refused("logit_bias", {7: 101}).message
    assert "1000000 entries" in refused("logit_bias", dict.fromkeys(range(10**6), 1.0)).message


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "max_tokens": [1, 2**31 - 1, None],
        "min_tokens": [0, 16],
        "temperature": [0, -0.0, 5e-324, 1e-45, 2, 2.0],
        "top_k": [-1, 0, 1, 2**31 - 1],
        "top_p": [5e-324, 1e-9, 1, 1.0],
        "min_p": [0, 1],
        "presence_penalty": [-2, 2.0],
        "frequency_penalty": [-2.0, 2],
        "repetition_penalty": [0.01, 10],
        "seed": [-(2**63), 2**63 - 1, 0, None],
        "n": [1, 128],
        "logprobs": [0, 20, None],
        "prompt_logprobs": [0, 20, None],
        "stop": [None, [], (), "x", "x" * 256, ["a"] * 16, ("a", "b"), "\ud800"],
        "stop_token_ids": [None, [], (0,), [2**31 - 1], [1] * 128],
        "logit_bias": [None, {}, {"0": -100}, {5: 100.0}, dict.fromkeys(range(1024), 0)],
    }.items(),
)
def test_bounds_are_allowed(name: str, values: list[Any]) -> None:
    """Values on the bounds of the ranges are accepted."""
    for value in values:
        SamplingParams(**{name: value})


def test_min_tokens_above_max_tokens() -> None:
    """min_tokens above max_tokens is refused with both numbers; equal is allowed."""
    with pytest.raises(InvalidRequestError, match=r"min_tokens is 5, more than max_tokens 4") as e:
        SamplingParams(max_tokens=4, min_tokens=5)
    assert e.value.param == "min_tokens"
    SamplingParams(max_tokens=4, min_tokens=4)
    SamplingParams(max_tokens=None, min_tokens=1000)


def test_values_are_kept_in_one_form() -> None:
    """stop becomes a tuple, bias keys become ints and bias values floats; later changes to the
    caller's objects do not reach in."""
    stop, bias, ids = ["a", "b"], {"7": 1, 8: -100}, [1, 2]
    params = SamplingParams(stop=stop, logit_bias=bias, stop_token_ids=ids)
    stop.append("c")
    bias[9] = 1
    ids.append(3)
    assert params.stop_strings == ("a", "b")
    assert params.logit_bias == {7: 1.0, 8: -100.0}
    assert params.stop_token_ids == (1, 2)
    assert SamplingParams(stop="ab").stop_strings == ("ab",)


def test_stop_strings_need_text() -> None:
    """Stop strings without detokenization could never be found, so they are refused."""
    with pytest.raises(InvalidRequestError, match="detokenize=True") as caught:
        SamplingParams(stop="x", detokenize=False)
    assert caught.value.param == "stop"


@pytest.mark.parametrize(
    ("temperature", "is_greedy"),
    [(0, True), (-0.0, True), (5e-324, True), (9.9e-6, True), (1e-5, False), (1.0, False)],
)
def test_small_temperatures_are_greedy(temperature: float, is_greedy: bool) -> None:
    """Temperatures below 1e-5 mean greedy, since dividing by them would overflow."""
    assert SamplingParams(temperature=temperature).is_greedy is is_greedy


def test_biases_stay_as_they_were_checked() -> None:
    """What the caller does to the mapping afterwards changes nothing, and what was made of it
    cannot be changed; parameters that are equal have the same hash, and copies are equal."""
    biases = {7: 1.0, 8: -2.0}
    params = SamplingParams(logit_bias=biases)
    biases[7] = float("nan")
    assert params.logit_bias is not None and dict(params.logit_bias) == {7: 1.0, 8: -2.0}
    with pytest.raises(TypeError):
        params.logit_bias[7] = 0.0  # type: ignore[index]
    same = SamplingParams(logit_bias={8: -2, "7": 1})
    assert params == same and hash(params) == hash(same)
    assert params != SamplingParams(logit_bias={7: 1.0})
    for copy in (replace(params), pickle.loads(pickle.dumps(params)), deepcopy(params)):
        assert copy == params and hash(copy) == hash(params)


@pytest.mark.parametrize(
    "name", ["seed", "temperature", "stop", "stop_token_ids", "logit_bias", "ignore_eos", "n"]
)
def test_a_value_that_cannot_be_printed_is_refused_all_the_same(name: str) -> None:
    """By what it is."""

    class Bad:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    assert "<Bad instance" in refused(name, Bad()).message
