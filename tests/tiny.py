"""Tiny random models with the awkwardness of real ones: GQA, odd sizes, padding rows in the head.

`save_model` writes a random model as a safetensors directory through transformers, which is then
also the oracle: a forward pass over the whole sequence, without any cache, in fp32. `FIXTURE_T` and
`FIXTURE_T_SMALL` are the engine settings of the tests of hostile input, `Canary` the request that
must give its known answer after each of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from torch import Tensor

from pico_vllm import LLM, SamplingParams

torch.set_num_threads(1)  # no tensor here is large enough for two

V_TOK = 300
"""Ids that the tokenizer knows."""
V_PAD = 320
"""Rows of the head."""
EOS, IM_START, IM_END, BOS = 256, 257, 258, 259
PIECES = {" gam": 260, "ma": 261, "EF": 262, "HI": 263, "D": 68, "G": 71, "J": 74, "K": 75}
"""Ids of some tokens by their text. Ids below 256 are single bytes."""

FIXTURE_T: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "num_threads": 1,
    "max_model_len": 256,
    "block_size": 16,
    "num_kv_blocks": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
}
FIXTURE_T_SMALL = FIXTURE_T | {"num_kv_blocks": 8}
"""128 tokens in all: for pool pressure."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_ROPE: dict[str, tuple[int, dict[str, Any]]] = {
    # max_position_embeddings and rope_parameters such that the window is 256 and stretching acts
    # within it.
    "default": (256, {"rope_type": "default", "rope_theta": 500.0}),
    "linear": (64, {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}),
    "llama3": (
        256,
        {
            "rope_type": "llama3",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "yarn": (
        256,
        {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
}

_CONFIGS = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


def hf_config(
    family: str, *, rope: str = "default", **overrides: Any
) -> transformers.PretrainedConfig:
    """A configuration of 2 layers with sizes that no kernel would choose."""
    max_position, rope_parameters = _ROPE[rope]
    settings: dict[str, Any] = {
        "vocab_size": V_PAD,
        "hidden_size": 36,
        "intermediate_size": 50,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": max_position,
        "rope_parameters": rope_parameters,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": None,
    }
    if family == "mistral":
        settings["sliding_window"] = None
    if family.startswith("qwen"):
        settings["use_sliding_window"] = False
    if family == "qwen3":
        settings["head_dim"] = 10
    return _CONFIGS[family][0](**(settings | overrides))


def random_model(config: transformers.PretrainedConfig, *, seed: int = 0, std: float = 0.3) -> Any:
    """Normal weights, wide enough that greedy output does not settle in a loop at once; norms about
    1."""
    model = dict(_CONFIGS.values())[type(config)](config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, std, generator=generator)
            if name.endswith("norm.weight"):
                parameter.add_(1.0)
    return model


def save_model(folder: Path, model: Any, *, has_bos: bool = False) -> Path:
    """Model and tokenizer as a directory that `LLM` loads."""
    model.save_pretrained(folder)
    save_tokenizer(folder, has_bos=has_bos)
    return folder


def save_tokenizer(folder: Path, *, has_bos: bool = False) -> None:
    """Byte-level: id = byte, then special tokens and pieces that decode but that no text encodes
    to."""
    vocab = {_byte_chars(bytes([byte])): byte for byte in range(256)}
    specials = {
        "<|endoftext|>": EOS,
        "<|im_start|>": IM_START,
        "<|im_end|>": IM_END,
        "<|bos|>": BOS,
    }
    vocab |= specials
    vocab |= {_byte_chars(text.encode()): i for text, i in PIECES.items() if i >= 256}
    vocab |= {f"<filler{i}>": i for i in range(264, V_TOK)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in specials])
    if has_bos:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", BOS)]
        )
    backend.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"eos_token": "<|endoftext|>", "chat_template": CHAT_TEMPLATE}
    if has_bos:
        config["bos_token"] = "<|bos|>"
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def _byte_chars(data: bytes) -> str:
    """Bytes as the characters by which a byte-level vocabulary spells them."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return "".join(chr(b) if b in printable else chr(256 + others.index(b)) for b in data)


class Oracle:
    """The answer as the definition gives it: the whole sequence through transformers for each
    token."""

    def __init__(self, model: Any, vocab_size: int = V_TOK) -> None:
        self._model = model
        self._vocab_size = vocab_size

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """[T, V] fp32, the padding rows of the head included."""
        return self._model(torch.tensor([list(token_ids)]), use_cache=False).logits[0].float()

    def logprobs(self, token_ids: Sequence[int]) -> Tensor:
        """[T, V_TOK]: row t predicts token t + 1."""
        return self.logits(token_ids)[:, : self._vocab_size].log_softmax(-1)

    def greedy(
        self, prompt: Sequence[int], count: int, *, stop_ids: Sequence[int] = ()
    ) -> list[int]:
        token_ids = list(prompt)
        while len(token_ids) < len(prompt) + count:
            token_ids.append(int(self.logits(token_ids)[-1, : self._vocab_size].argmax()))
            if token_ids[-1] in stop_ids:
                break
        return token_ids[len(prompt) :]


def random_prompts(lengths: Sequence[int], *, seed: int = 0) -> list[list[int]]:
    """Ids below 256, so that a prompt is also a byte string."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, length).tolist() for length in lengths]


def greedy(max_tokens: int | None, **others: Any) -> SamplingParams:
    """Greedy to the last token, whatever it is."""
    return SamplingParams(
        **({"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True} | others)
    )


class Canary:
    """One fixed request with a known answer."""

    PROMPT = tuple(b"The canary in the mine says:")
    COUNT = 8

    def __init__(self, oracle: Oracle) -> None:
        self.answer = oracle.greedy(self.PROMPT, self.COUNT)

    def check(self, llm: LLM) -> None:
        """The engine still answers, holds nothing besides, and its books are in order."""
        output = llm.generate(list(self.PROMPT), greedy(self.COUNT))[0].outputs[0]
        assert (output.token_ids, output.finish_reason) == (self.answer, "length")
        assert_idle(llm)


def quickest_s(call: Callable[[], object], *, num_tries: int = 3) -> float:
    """The least of a few times: what else the machine did meanwhile is no part of it."""

    def once_s() -> float:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    return min(once_s() for _ in range(num_tries))


def assert_idle(llm: LLM) -> None:
    """No request is left anywhere, and every block is free or cached."""
    scheduler = llm.engine._scheduler
    llm.engine.check_invariants()
    assert not llm.engine.has_work()
    assert (scheduler.num_running, scheduler.num_waiting, len(llm._processor)) == (0, 0, 0)
    assert scheduler._num_available_blocks == llm.config.num_kv_blocks


@contextmanager
def recorded_logits(llm: LLM) -> Iterator[list[Tensor]]:
    """Every [N, V] that the head of the model gives meanwhile, in fp32, before the sampler changes
    it. A graph's are not seen."""
    runner = llm.engine._runner
    found: list[Tensor] = []

    def recording(head: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def record(hidden_NE: Tensor, *around: object) -> Tensor:
            logits_NV = head(hidden_NE, *around)
            found.append(logits_NV.float().clone())
            return logits_NV

        return record

    # On a GPU the head chooses too.
    owners = [(runner._model, "logits"), (getattr(runner, "_head", None), "choose")]
    patched = [(owner, name) for owner, name in owners if hasattr(owner, name)]
    originals = [getattr(owner, name) for owner, name in patched]
    for (owner, name), original in zip(patched, originals, strict=True):
        setattr(owner, name, recording(original))
    try:
        yield found
    finally:
        for (owner, name), original in zip(patched, originals, strict=True):
            setattr(owner, name, original)


@contextmanager
def scripted(llm: LLM, answers: dict[tuple[int, ...], Sequence[int]]) -> Iterator[None]:
    """Rig the logits: a greedy request with one of these prompts gives that answer."""
    runner = llm.engine._runner
    original = runner._sampler.sample

    def sample(logits_NV: Tensor, rows: Any, positions: Any) -> Any:
        for i, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            token_ids = runner._batch_builder.row_tokens(row, 0, position).tolist()
            for prompt, answer in answers.items():
                if tuple(token_ids[: len(prompt)]) == prompt:
                    logits_NV[i] = -20.0
                    logits_NV[i, answer[position - len(prompt)]] = 20.0
        return original(logits_NV, rows, positions)

    runner._sampler.sample = sample
    try:
        yield
    finally:
        runner._sampler.sample = original


class TinyModel(NamedTuple):
    """What the fixture of that name gives."""

    folder: Path
    oracle: Oracle
    canary: Canary
