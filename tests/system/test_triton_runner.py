"""The whole engine on Triton kernels: under the interpreter on a CPU, compiled on a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tiny
import torch
from tiny import greedy

from pico_vllm import LLM, SamplingParams
from pico_vllm.errors import ConfigError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SETTINGS = {
    "dtype": "float32",
    "device": DEVICE,
    "max_model_len": 64,
    "num_kv_blocks": 16,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 24,
    "kernels": "triton",
}
PROMPTS = [[5, 9, 200], list(range(7, 26)), [17] * 9, [250, 3]]


@pytest.fixture(scope="module", params=["qwen2", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers with biases (Qwen2) or QK-norm (Qwen3), GQA, a tied head."""
    config = tiny.hf_config(
        request.param, head_dim=16, num_attention_heads=6, num_key_value_heads=2,
        hidden_size=48, intermediate_size=72, num_hidden_layers=2,
    )  # fmt: skip
    random = tiny.random_model(config, seed=11)
    return tiny.save_model(tmp_path_factory.mktemp("tiny"), random)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    plain = SETTINGS | {"kernels": "plain", "overlap": "off"}
    with LLM(str(model), **plain) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, greedy(5))]


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_same_tokens_as_plain_operations(
    model: Path, expected: list[list[int]], overlap: str
) -> None:
    """Whole and chunked prompts mixed with decoding requests that join and leave give the tokens of
    plain operations, with and without overlap."""
    with LLM(str(model), overlap=overlap, **SETTINGS) as llm:
        outputs = llm.generate(PROMPTS, greedy(5))
        assert [output.outputs[0].token_ids for output in outputs] == expected
        llm.engine.check_invariants()


def test_sampling_and_logprobs(model: Path) -> None:
    """Temperature in the fused tail, filters and log-probabilities in the full sampler: ids and
    values are those of plain operations."""
    params = [
        SamplingParams(max_tokens=3, temperature=1.3, seed=5, ignore_eos=True),
        SamplingParams(max_tokens=3, temperature=0.0, logprobs=2, prompt_logprobs=1),
        SamplingParams(max_tokens=3, temperature=1.0, top_p=0.9, seed=6, presence_penalty=1.0),
    ]
    plain = SETTINGS | {"kernels": "plain", "overlap": "off"}
    with LLM(str(model), **plain) as llm:
        wanted = llm.generate(PROMPTS[:1] * 3, params)
    with LLM(str(model), **SETTINGS) as llm:
        alone = llm.generate(PROMPTS[0], params[0])
        found = llm.generate(PROMPTS[:1] * 3, params)
    assert alone[0].outputs[0].token_ids == wanted[0].outputs[0].token_ids
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert ours.outputs[0].cumulative_logprob == pytest.approx(
            theirs.outputs[0].cumulative_logprob, abs=1e-4
        )
    values = [
        [entry.logprob for each in output.prompt_logprobs[1:] for entry in each.values()]
        for output in (found[1], wanted[1])
    ]
    assert values[0] == pytest.approx(values[1], abs=1e-4) and len(values[0]) >= 2


def test_refuses_what_the_kernels_cannot_do(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block size or a cache that the kernels do not take is named with the way out; so is a
    machine without a GPU."""
    with pytest.raises(ConfigError, match=r"block_size 24 .* use one of them"):
        LLM(str(model), **SETTINGS | {"block_size": 24})
    with pytest.raises(ConfigError, match="kernels triton needs kv paged"):
        LLM(str(model), kv="contiguous", **SETTINGS | {"num_kv_blocks": None})
    monkeypatch.delitem(os.environ, "TRITON_INTERPRET", raising=False)
    if DEVICE == "cpu":
        with pytest.raises(ConfigError, match="needs a GPU"):
            LLM(str(model), **SETTINGS)
