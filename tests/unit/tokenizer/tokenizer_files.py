"""Small tokenizers made for the tests, byte-level and SentencePiece, and four templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind: it's 1234 o'clock.",
    "def add(a, b):\n    return a + b\n\nprint(add(12, 34))  # 46\n",
    "naïve café, 日本語のテキスト 🙂 and emoji 👩‍👩‍👧, 삼겹살, ď",
    "user assistant system tool user assistant system tool hello hello world world",
]

TEXTS = [
    *CORPUS,
    "",
    " ",
    "   leading and trailing   ",
    "tabs\tand\r\nlines\n\n\n\nmore",
    "I'LL we'Ve don't 12345678 3.14 $50%",
    "mixed日本 text—with ‘quotes’ … and é (e\u0301)",
    "\x00\x01 control \x7f",
]

CHAT_SPECIALS = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<s>", "</s>", "[INST]", "[/INST]", "<|user|>", "<|assistant|>", "<|system|>"),
]

QWEN_LIKE = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "assistant" and not message.tool_calls)
        or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>assistant' }}
        {%- for tool_call in message.tool_calls %}
            {%- set call = tool_call.function %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

LLAMA3_LIKE = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + strftime_now("%d %b %Y") + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL_LIKE = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}
{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}{% else %}
{{ raise_exception('Only user and assistant roles are supported!') }}
{% endif %}
{% endfor %}"""

ZEPHYR_LIKE = """{% for message in messages %}
{{ '<|' + message['role'] + '|>\n' + message['content'] + '</s>' }}
{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}
{% endfor %}"""

TEMPLATES = {
    "qwen": QWEN_LIKE,
    "llama3": LLAMA3_LIKE,
    "mistral": MISTRAL_LIKE,
    "zephyr": ZEPHYR_LIKE,
}


def byte_level(*, vocab_size: int = 400, specials: list[str] | None = None) -> tokenizers.Tokenizer:
    """A GPT-2 style tokenizer trained on a few lines, all 256 bytes in its vocabulary."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=CHAT_SPECIALS if specials is None else specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """GGUF metadata of a Llama-2 style tokenizer: bytes, characters, and pieces of the corpus."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS, BpeTrainer(vocab_size=260, show_progress=False))
    learned = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3, *[6] * 256]
    tokens += [text for text, _ in learned] + ["<extra_0>"]
    types += [1] * len(learned) + [4]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{name}": value for name, value in changes.items()},
    }


def byte_level_metadata(backend: tokenizers.Tokenizer, pre: str, **changes: Any) -> dict[str, Any]:
    """The metadata that a GGUF converter writes for a byte-level tokenizer."""
    model = json.loads(backend.to_str())["model"]
    tokens = [text for text, _ in sorted(backend.get_vocab().items(), key=lambda item: item[1])]
    added = backend.get_added_tokens_decoder()
    types = [(3 if added[i].special else 4) if i in added else 1 for i in range(len(tokens))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.eos_token_id": backend.token_to_id("<|im_end|>"),
        **{f"tokenizer.ggml.{name}": value for name, value in changes.items()},
    }


def with_words_of(backend: tokenizers.Tokenizer, pre: str) -> tokenizers.Tokenizer:
    """The same vocabulary with the word rules that the tokenizer.json of a model family has."""
    copy = tokenizers.Tokenizer.from_str(backend.to_str())
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    contractions = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    rest = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    words = {
        "llama-bpe": contractions + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + rest,
        "qwen2": contractions + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + rest,
    }
    if pre == "smollm":
        copy.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    elif pre in words:
        copy.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(words[pre]), "isolated"), plain]
        )
        copy.model.ignore_merges = pre == "llama-bpe"
    if pre == "qwen2":
        copy.normalizer = normalizers.NFC()
    return copy


def add_bos(backend: tokenizers.Tokenizer, bos: str) -> None:
    backend.post_processor = TemplateProcessing(
        single=[bos, "$A"], special_tokens=[(bos, backend.token_to_id(bos))]
    )


def write_directory(
    folder: Path, backend: tokenizers.Tokenizer, config: dict[str, Any] | None = None
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def user_token(text: str) -> AddedToken:
    return AddedToken(text, special=False, normalized=False)
