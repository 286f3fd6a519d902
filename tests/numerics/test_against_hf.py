"""Modules and whole models against transformers in fp32: logits, then tokens, then
log-probabilities.

Each row of MODELS is a random model of 2 layers. Together they cover every family, every RoPE kind,
GQA ratios 1 to 8, odd sizes, an explicit head_dim, tied and untied heads, and biases on and off.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import transformers
from tiny import V_TOK, Oracle, greedy, random_prompts
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from pico_vllm import LLM
from pico_vllm.cache.contiguous import NoKVStep
from pico_vllm.config.model import ModelConfig
from pico_vllm.layers.attention import Attention
from pico_vllm.layers.linear import DenseWeight, Linear, Residual
from pico_vllm.layers.mlp import MLP
from pico_vllm.layers.norm import RMSNorm
from pico_vllm.layers.rope import Rope

MODELS: dict[str, dict[str, Any]] = {
    "llama_default_gqa1_tied": {
        "family": "llama", "num_attention_heads": 3, "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "llama_linear_gqa2_all_biases": {
        "family": "llama", "rope": "linear", "hidden_size": 32, "num_attention_heads": 4,
        "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True,
    },
    "llama_llama3_gqa4_attention_bias": {
        "family": "llama", "rope": "llama3", "hidden_size": 40, "num_attention_heads": 4,
        "num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": True,
    },
    "llama_yarn_gqa5_mlp_bias": {
        "family": "llama", "rope": "yarn", "hidden_size": 30, "num_attention_heads": 5,
        "num_key_value_heads": 1, "mlp_bias": True,
    },
    "llama_head_dim_of_its_own": {
        "family": "llama", "hidden_size": 39, "intermediate_size": 51, "num_attention_heads": 3,
        "num_key_value_heads": 1, "head_dim": 14,
    },
    "mistral_default_gqa7": {
        "family": "mistral", "hidden_size": 28, "num_attention_heads": 7, "num_key_value_heads": 1,
        "head_dim": 6,
    },
    "mistral_window_wider_than_ours": {
        "family": "mistral", "sliding_window": 256, "hidden_size": 24, "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
    "qwen2_default_gqa3": {"family": "qwen2"},
    "qwen2_yarn_gqa6_tied": {
        "family": "qwen2", "rope": "yarn", "num_key_value_heads": 1, "tie_word_embeddings": True,
    },
    "qwen2_one_layer_mlp_of_3": {
        "family": "qwen2", "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "std": 0.5,
    },
    "qwen3_default_gqa3": {"family": "qwen3", "std": 0.7},
    "qwen3_linear_gqa8_bias_tied": {
        "family": "qwen3", "rope": "linear", "num_attention_heads": 8, "num_key_value_heads": 1,
        "attention_bias": True, "tie_word_embeddings": True, "std": 0.5,
    },
    "qwen3_llama3_three_layers": {
        "family": "qwen3", "rope": "llama3", "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16,
    },
    "qwen3_yarn_gqa1": {
        "family": "qwen3", "rope": "yarn", "num_attention_heads": 2, "num_key_value_heads": 2,
    },
}  # fmt: skip
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "num_threads": 1,
    "max_num_seqs": 8,
    "num_kv_blocks": 2048,
}
NUM_TOKENS = 64
TIE = 1e-5
"""Log-probabilities in fp32 that differ by less may come in either order, and do on some machines:
processors sum in different orders."""
PROMPT_LENGTHS = (1, 16, 17, 40, 61, 150)


class Subject:
    """One model with its oracle's greedy answers."""

    def __init__(self, name: str, folder: Path) -> None:
        settings = dict(MODELS[name])
        std = settings.pop("std", 0.3)
        config = tiny.hf_config(settings.pop("family"), **settings)
        model = tiny.random_model(config, seed=list(MODELS).index(name), std=std)
        self.folder = str(tiny.save_model(folder, model))
        self.oracle = Oracle(model)
        self.prompts = random_prompts(PROMPT_LENGTHS, seed=1)
        self.answers = [self.oracle.greedy(prompt, NUM_TOKENS) for prompt in self.prompts]

    def llm(self, **settings: Any) -> LLM:
        if settings.get("kv", "paged") != "paged":
            settings["num_kv_blocks"] = None
        return LLM(self.folder, **(SETTINGS | {"max_model_len": 256} | settings))


@pytest.fixture(scope="module", params=MODELS)
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    yield Subject(request.param, tmp_path_factory.mktemp("model"))


def test_the_oracles_answers_are_worth_comparing(subject: Subject) -> None:
    """Greedy answers differ between prompts, do not settle in a loop, and no step of them is a
    near tie."""
    assert len({tuple(answer) for answer in subject.answers}) == len(subject.answers)
    for prompt, answer in zip(subject.prompts, subject.answers, strict=True):
        assert len(set(answer)) >= 8
        top = subject.oracle.logprobs(prompt + answer)[len(prompt) - 1 : -1].topk(2).values
        assert float((top[:, 0] - top[:, 1]).min()) > 1e-5


@pytest.mark.parametrize("budget", [256, 13])
def test_logits(subject: Subject, budget: int) -> None:
    """Logits of every position, prompt (whole or in chunks) and answer, are those of transformers
    within 1e-4."""
    prompt, answer = subject.prompts[3], subject.answers[3]
    with subject.llm(max_num_batched_tokens=budget) as llm, tiny.recorded_logits(llm) as found:
        llm.generate(prompt, greedy(NUM_TOKENS, prompt_logprobs=0))
    ours = torch.cat(found)
    wanted = subject.oracle.logits(prompt + answer)[: len(ours)]
    assert ours.shape == wanted.shape == (len(prompt) + NUM_TOKENS - 1, tiny.V_PAD)
    assert float((ours - wanted).abs().max()) < 1e-4


@pytest.mark.parametrize("kv", ["paged", "contiguous", "none"])
def test_each_request_alone(subject: Subject, kv: Any) -> None:
    """64 greedy tokens of a request that runs alone are those of the oracle, with any cache."""
    with subject.llm(kv=kv) as llm:
        for prompt, answer in list(zip(subject.prompts, subject.answers, strict=True))[::2]:
            assert llm.generate(prompt, greedy(NUM_TOKENS))[0].outputs[0].token_ids == answer


@pytest.mark.parametrize("kv", ["paged", "contiguous", "none"])
def test_requests_that_join_and_leave(subject: Subject, kv: Any) -> None:
    """Tokens do not change when requests of other lengths join and leave at every third step."""
    with subject.llm(kv=kv, max_num_seqs=4, max_num_batched_tokens=64) as llm:
        assert run_staggered(llm, subject) == expected_staggered(subject)


@pytest.mark.parametrize(("block_size", "budget"), [(1, 33), (8, 8), (16, 33), (64, 8)])
def test_chunked_prefill_and_block_sizes(subject: Subject, block_size: int, budget: int) -> None:
    """Tokens do not change with the size of a block, nor when prompts are computed in chunks beside
    decoding requests."""
    with subject.llm(block_size=block_size, max_num_batched_tokens=budget) as llm:
        outputs = llm.generate(subject.prompts, greedy(NUM_TOKENS))
        assert [output.outputs[0].token_ids for output in outputs] == subject.answers


def run_staggered(llm: LLM, subject: Subject) -> dict[int, list[int]]:
    """Each prompt twice, one more every third step, every one with another length of answer."""
    engine = llm.engine
    waiting = list(enumerate(subject.prompts * 2))
    index_of: dict[str, int] = {}
    found: dict[int, list[int]] = {}
    step = 0
    while waiting or engine.has_work():
        if waiting and step % 3 == 0:
            index, prompt = waiting.pop(0)
            index_of[engine.add_request(prompt, greedy(NUM_TOKENS - 5 * index))] = index
            found[index] = []
        events = engine.step()
        engine.check_invariants()
        for request_id, token_id in zip(events.request_ids, events.token_ids, strict=True):
            found[index_of[request_id]].append(token_id)
        step += 1
    return found


def expected_staggered(subject: Subject) -> dict[int, list[int]]:
    answers = enumerate(subject.answers * 2)
    return {index: answer[: NUM_TOKENS - 5 * index] for index, answer in answers}


@pytest.mark.parametrize("budget", [256, 8])
def test_logprobs(subject: Subject, budget: int) -> None:
    """Log-probabilities of prompt and answer, the top five and the ranks are those of transformers
    over the ids the tokenizer knows, within 1e-3."""
    params = greedy(16, logprobs=5, prompt_logprobs=5)
    with subject.llm(max_num_batched_tokens=budget, max_num_seqs=8) as llm:
        outputs = llm.generate(subject.prompts, params)
    for prompt, answer, output in zip(subject.prompts, subject.answers, outputs, strict=True):
        token_ids = prompt + answer[:16]
        completion = output.outputs[0]
        assert completion.token_ids == answer[:16]
        assert output.prompt_logprobs is not None and completion.logprobs is not None
        assert output.prompt_logprobs[0] is None
        entries = [*output.prompt_logprobs[1:], *completion.logprobs]
        wanted = subject.oracle.logprobs(token_ids)[:-1]
        assert len(entries) == len(wanted) == len(token_ids) - 1
        for logprobs_V, token_id, entry in zip(wanted, token_ids[1:], entries, strict=True):
            top = logprobs_V.topk(5)
            assert next(iter(entry)) == token_id
            assert set(entry) == {token_id, *top.indices.tolist()}
            ids = list(entry)
            ours = [entry[i].logprob for i in ids]
            assert ours == pytest.approx(logprobs_V[ids].tolist(), abs=1e-3)
            above = logprobs_V - logprobs_V[token_id]
            before, tied = int((above > TIE).sum()), int((above.abs() <= TIE).sum())
            rank = entry[token_id].rank
            assert rank is not None and before < rank <= before + tied
            assert entry[token_id].decoded_token == llm.tokenizer.token_text(token_id)
        total = sum(
            entry[i].logprob for i, entry in zip(answer[:16], completion.logprobs, strict=True)
        )
        assert completion.cumulative_logprob == pytest.approx(total, abs=1e-4)


# Modules.


@pytest.mark.parametrize("size", [1, 7, 64, 577])
@pytest.mark.parametrize("num_tokens", [1, 5, 40])
def test_rms_norm(size: int, num_tokens: int) -> None:
    """RMSNorm equals that of transformers within 1e-5, for rows near zero and large ones too."""
    torch.manual_seed(size)
    theirs = modeling_llama.LlamaRMSNorm(size, eps=1e-5)
    with torch.no_grad():
        theirs.weight.normal_()
    x_TE = torch.randn(num_tokens, size) * torch.logspace(-4, 3, num_tokens)[:, None]
    ours = RMSNorm(theirs.weight.detach(), 1e-5)
    torch.testing.assert_close(ours(x_TE), theirs(x_TE).detach(), rtol=1e-5, atol=1e-6)


ROPE_PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn_with_its_own_betas": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "beta_fast": 16.0, "beta_slow": 2.0,
        "attention_factor": 1.25, "original_max_position_embeddings": 2048,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", ROPE_PARAMETERS)
@pytest.mark.parametrize("head_dim", [6, 64, 128])
def test_rope_tables(kind: str, head_dim: int) -> None:
    """cos and sin equal those of transformers within 1e-6 at the first, the last and middle
    positions of a window of 32768."""
    config = transformers.LlamaConfig(
        head_dim=head_dim,
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_hidden_layers=1,
        vocab_size=8,
        intermediate_size=8,
        max_position_embeddings=32768,
        rope_parameters=ROPE_PARAMETERS[kind],
        architectures=["LlamaForCausalLM"],
    )
    theirs = modeling_llama.LlamaRotaryEmbedding(config)
    model = ModelConfig.from_hf(config.to_dict() | {"bos_token_id": None, "eos_token_id": None})
    ours = Rope(model.rope, model.head_dim, 32768)
    positions = torch.tensor([0, 1, 2, 63, 4095, 8191, 20000, 32767])
    cos, sin = theirs(torch.zeros(1), positions[None])
    ours_cos, ours_sin = ours.gather(positions, torch.float32)
    sign = torch.cat((-torch.ones(head_dim // 2), torch.ones(head_dim // 2)))
    assert float((ours_cos[:, 0] - cos[0]).abs().max()) < 1e-6
    assert float((ours_sin[:, 0] * sign - sin[0]).abs().max()) < 1e-6


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (7, 1), (8, 1)])
def test_attention(family: str, num_heads: int, num_kv_heads: int) -> None:
    """Attention of whole prompts, with biases and QK-norm where the family has them, equals that of
    transformers within 1e-5."""
    config = tiny.hf_config(
        family,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=10,
        hidden_size=5 * num_heads,
        attn_implementation="eager",
        num_hidden_layers=1,
    )
    model = tiny.random_model(config, seed=3, std=0.2)
    theirs = model.model.layers[0].self_attn
    has_norm = isinstance(theirs, modeling_qwen3.Qwen3Attention)
    ours = Attention(
        0,
        norm=lambda x: x,
        qkv=_fused(theirs.q_proj, theirs.k_proj, theirs.v_proj),
        o=_fused(theirs.o_proj),
        q_norm=RMSNorm(theirs.q_norm.weight.detach(), 1e-5) if has_norm else None,
        k_norm=RMSNorm(theirs.k_norm.weight.detach(), 1e-5) if has_norm else None,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=10,
    )
    lengths = [1, 9, 16]
    rope = Rope(ModelConfig.from_hf(config.to_dict() | _ARCHITECTURES[family]).rope, 10, 64)
    x_TE = torch.randn(sum(lengths), 5 * num_heads, generator=torch.Generator().manual_seed(4))
    positions = torch.cat([torch.arange(length) for length in lengths])
    batch: Any = SimpleNamespace(query_lens=np.array(lengths))
    cos_sin = rope.gather(positions, torch.float32)
    got = ours.forward(Residual(x_TE), cos_sin, NoKVStep(batch, 10**-0.5)).x_TE
    start = 0
    for length in lengths:
        x = x_TE[None, start : start + length]
        ahead = torch.full((length, length), float("-inf")).triu(1)[None, None]
        cos_sin = model.model.rotary_emb(x, torch.arange(length)[None])
        with torch.inference_mode():
            wanted = theirs(x, position_embeddings=cos_sin, attention_mask=ahead)[0][0]
        assert float((got[start : start + length] - x[0] - wanted).abs().max()) < 1e-5
        start += length


_ARCHITECTURES = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
}


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_mlp(has_bias: bool, num_tokens: int) -> None:
    """The gated MLP with gate and up in one matrix equals that of transformers within 1e-5."""
    config = tiny.hf_config("llama", mlp_bias=has_bias, hidden_size=36, intermediate_size=47)
    theirs = modeling_llama.LlamaMLP(config)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(
            parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel())
        )
    ours = MLP(lambda x: x, _fused(theirs.gate_proj, theirs.up_proj), _fused(theirs.down_proj))
    x_TE = torch.randn(num_tokens, 36, generator=torch.Generator().manual_seed(5))
    wanted = x_TE + theirs(x_TE).detach()
    torch.testing.assert_close(ours.forward(Residual(x_TE)).x_TE, wanted, rtol=1e-5, atol=1e-5)


def _fused(*parts: torch.nn.Linear) -> Linear:
    weight = torch.cat([part.weight.detach() for part in parts])
    biases = [part.bias.detach() for part in parts if part.bias is not None]
    return Linear(DenseWeight(weight), torch.cat(biases) if biases else None)


def test_padding_rows_are_never_the_oracles_choice() -> None:
    """The tests above would notice a sampled padding id: the known ids are fewer than the head's
    rows."""
    assert V_TOK < tiny.V_PAD
