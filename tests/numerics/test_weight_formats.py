"""Packed and bf16 weights say nearly what the same weights say in fp32."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from pico_vllm import LLM, SamplingParams

LICENSE = Path(__file__).parents[2] / "LICENSE"
NUM_TOKENS = 2000


def _logprobs(num_tokens: int = NUM_TOKENS, **settings: str) -> list[float]:
    """Of the first tokens of a text that never changes, each given the ones before."""
    # Without a graph, for which a start decodes many tokens: nothing is decoded here.
    sizes: dict[str, Any] = {"max_model_len": num_tokens + 16, "max_num_seqs": 1}
    with LLM("smollm2-135m", cpu_graph="off", **sizes, **settings) as llm:
        token_ids = llm.tokenizer.encode(LICENSE.read_text())[:num_tokens]
        assert len(token_ids) == num_tokens
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        entries = llm.generate(token_ids, params)[0].prompt_logprobs
    assert entries is not None and entries[0] is None and len(entries) == num_tokens
    return [
        entry[token_id].logprob
        for entry, token_id in zip(entries[1:], token_ids[1:], strict=True)
        if entry is not None
    ]


@pytest.fixture(scope="module")
def exact() -> list[float]:
    return _logprobs(dtype="float32", weight_format="fp32")


@pytest.mark.parametrize("weight_format", ["keep", "bf16"])
def test_mean_logprob_is_within_one_percent_of_fp32(exact: list[float], weight_format: str) -> None:
    """The mean log-probability of 2,000 tokens moves by less than 1 % in 4 bits and in bf16."""
    values = _logprobs(dtype="bfloat16", weight_format=weight_format)
    assert fmean(values) == pytest.approx(fmean(exact), rel=0.01)


def test_packed_weights_also_serve_fp32_activations(exact: list[float]) -> None:
    """dtype float32 with packed weights multiplies in bf16 and stays within 1 % too."""
    values = _logprobs(400, dtype="float32", weight_format="keep")
    assert fmean(values) == pytest.approx(fmean(exact[: len(values)]), rel=0.01)
