"""The real weights of SmolLM2-135M against an independent implementation, in fp32 on the CPU.

`data/smollm2_greedy_fp32.json` holds what transformers generates from the same GGUF file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from smollm2 import smollm2_path
from tiny import greedy

from pico_vllm import LLM, RequestOutput
from pico_vllm.models.gguf import GGUFSource

REFERENCE = json.loads(
    (Path(__file__).parents[1] / "data" / "smollm2_greedy_fp32.json").read_text(encoding="utf-8")
)
CASES = {case["name"]: case for case in REFERENCE["cases"]}
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "num_threads": 1,
    "max_model_len": 160,
    "num_kv_blocks": 100,
}


@pytest.fixture(scope="module")
def answers() -> dict[str, tuple[RequestOutput, RequestOutput]]:
    """Of each case: EOS ignored, and stopped at EOS. All in one batch, which is how the weights are
    read least often."""
    params = [
        greedy(64, ignore_eos=ignore_eos, logprobs=1, skip_special_tokens=False)
        for ignore_eos in (True, False)
        for _ in CASES
    ]
    prompts = [
        [REFERENCE["messages_for_chat_case"]] if case["name"] == "chat" else case["prompt"]
        for case in CASES.values()
    ]
    with LLM(str(smollm2_path()), **SETTINGS) as llm:
        token_ids = [
            llm.tokenizer.encode_chat(prompt[0]) if isinstance(prompt, list) else prompt
            for prompt in prompts
        ]
        outputs = llm.generate(token_ids * 2, params)
    pairs = zip(outputs[: len(CASES)], outputs[len(CASES) :], strict=True)
    return dict(zip(CASES, pairs, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_prompt_gives_the_ids_of_the_reference(
    answers: dict[str, tuple[RequestOutput, RequestOutput]], name: str
) -> None:
    """Text, and messages through the chat template, become the reference's prompt ids."""
    assert answers[name][0].prompt_token_ids == CASES[name]["prompt_ids"]


@pytest.mark.parametrize("name", CASES)
def test_greedy_ids_with_eos_ignored(
    answers: dict[str, tuple[RequestOutput, RequestOutput]], name: str
) -> None:
    """64 greedy ids are those of the reference, past EOS too, and so is their text with special
    tokens shown."""
    answer = answers[name][0].outputs[0]
    assert answer.token_ids == CASES[name]["greedy_ids_ignore_eos"]
    assert answer.text == CASES[name]["text_ignore_eos"]
    assert (answer.finish_reason, answer.stop_reason) == ("length", None)


@pytest.mark.parametrize("name", CASES)
def test_greedy_ids_up_to_eos(
    answers: dict[str, tuple[RequestOutput, RequestOutput]], name: str
) -> None:
    """Generation ends with the EOS id where the reference does, and says why."""
    answer, wanted = answers[name][1].outputs[0], CASES[name]["generate_ids_stop_eos"]
    assert (answer.token_ids, answer.text) == (wanted, CASES[name]["text"])
    assert answer.finish_reason == ("length" if len(wanted) == 64 else "stop")
    assert answer.stop_reason is None


@pytest.mark.parametrize("name", CASES)
def test_logprobs_of_the_chosen_tokens(
    answers: dict[str, tuple[RequestOutput, RequestOutput]], name: str
) -> None:
    """Each greedy token has rank 1 and the reference's log-probability within 1e-3, and they sum to
    the cumulative one."""
    answer = answers[name][0].outputs[0]
    assert answer.logprobs is not None
    chosen = [entries[i] for i, entries in zip(answer.token_ids, answer.logprobs, strict=True)]
    assert [entry.rank for entry in chosen] == [1] * 64
    values = [entry.logprob for entry in chosen]
    assert values == pytest.approx(CASES[name]["top1_logprobs"], abs=1e-3)
    assert answer.cumulative_logprob == pytest.approx(sum(values), abs=1e-6)


def test_chat_and_generate_are_one_path() -> None:
    """llm.chat renders the messages to the reference's prompt ids and answers with its ids; stream
    gives the same text."""
    case = CASES["chat"]
    params = greedy(8, ignore_eos=False, skip_special_tokens=False)
    with LLM(str(smollm2_path()), **SETTINGS) as llm:
        output = llm.chat(REFERENCE["messages_for_chat_case"], params)[0]
        streamed = "".join(d.text for d in llm.stream(REFERENCE["messages_for_chat_case"], params))
    assert output.prompt_token_ids == case["prompt_ids"]
    assert output.outputs[0].token_ids == case["generate_ids_stop_eos"]
    assert output.outputs[0].text == streamed == case["text"]


def test_qwen2_with_real_weights(tmp_path: Path) -> None:
    """The same weights as a Qwen2 checkpoint in safetensors, with biases of zero, give the same
    ids."""
    source = GGUFSource(smollm2_path())
    hf = source.hf_config()
    tensors: dict[str, torch.Tensor] = {}
    for name, info in source.tensors.items():
        tensors[name] = torch.empty(info.shape)
        source.read_into(name, tensors[name])
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            tensors[name.replace("weight", "bias")] = torch.zeros(info.shape[0])
    source.close()
    sizes = {key: hf[key] for key in hf if key not in ("architectures", "model_type")}
    config = transformers.Qwen2Config(**sizes, architectures=["Qwen2ForCausalLM"])
    config.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    del tensors
    _save_gguf_tokenizer(tmp_path)
    names = ["plain_1", "code", "chat"]
    with LLM(str(tmp_path), **SETTINGS) as llm:
        assert llm.model_config.architecture == "Qwen2ForCausalLM"
        outputs = llm.generate([CASES[name]["prompt_ids"] for name in names], greedy(24))
    for name, output in zip(names, outputs, strict=True):
        assert output.outputs[0].token_ids == CASES[name]["greedy_ids_ignore_eos"][:24]


def _save_gguf_tokenizer(folder: Path) -> None:
    """A tokenizer.json with the vocabulary of the GGUF file, enough for prompts of ids."""
    tokens = gguf.GGUFReader(smollm2_path()).fields["tokenizer.ggml.tokens"].contents()
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
