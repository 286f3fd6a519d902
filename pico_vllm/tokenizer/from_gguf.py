"""Build a tokenizer from the metadata of a GGUF file, which anyone may have written.

Two models: `gpt2`, byte-level BPE with merges and a named way to cut text into words, and `llama`,
SentencePiece BPE with scores. Each is put together so that it gives the ids of the tokenizer.json
that the file was converted from.

Source: llama.cpp's metadata keys and word patterns; the tokenizer.json of the models they name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from pico_vllm.errors import ModelLoadError
from pico_vllm.tokenizer.tokenizer_parts import TokenizerParts, call_backend

UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6
"""Values of token_type; 1 is a normal token."""

MAX_TOKENS = 2**22
MAX_TOKEN_CHARS = 1024

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a UTF-16 pair: a Python string can hold it, UTF-8 cannot."""

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2_WORDS,),
    # Every digit a word of its own.
    "smollm": (r"\p{N}", _GPT2_WORDS),
    "llama-bpe": (_LLAMA3_WORDS,),
    "qwen2": (_QWEN2_WORDS,),
    # What llama.cpp uses where a file names nothing.
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
"""Patterns applied one after the other, each cutting the pieces of the one before."""
_SAME_WORDS = {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
}
_MODELS = ("gpt2", "llama")


def read_gguf_metadata(metadata: Mapping[str, Any]) -> TokenizerParts:
    """`metadata` maps GGUF keys to Python values, arrays as lists.

    Raises:
        ModelLoadError: a key missing, of the wrong type or contradicting another; an unknown model
            or pre-tokenizer.
    """
    model = _get(metadata, "model", str)
    if model not in _MODELS:
        raise _refuse(f"tokenizer.ggml.model is {model!r}; supported: {', '.join(_MODELS)}")
    vocabulary = _Vocabulary(metadata)
    pre = _pre_tokenizer_name(metadata) if model == "gpt2" else ""
    build = _byte_level if model == "gpt2" else _sentencepiece
    backend = call_backend("the GGUF tokenizer", lambda: build(metadata, vocabulary, pre))
    call_backend("the GGUF tokenizer", lambda: backend.add_tokens(vocabulary.added_tokens(model)))

    bos_id = vocabulary.bos_id
    adds_bos = _get(metadata, "add_bos_token", bool, model == "llama" or pre == "llama-bpe")
    adds_eos = _get(metadata, "add_eos_token", bool, False)
    if (adds_bos and bos_id is None) or (adds_eos and not vocabulary.eos_ids):
        raise _refuse("add_bos_token or add_eos_token is set and the token's id is missing")
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise _refuse("tokenizer.chat_template must be a string")
    return TokenizerParts(
        backend=backend,
        bos_token_id=bos_id,
        eos_token_ids=vocabulary.eos_ids,
        prefix_ids=(bos_id,) if adds_bos and bos_id is not None else (),
        suffix_ids=vocabulary.eos_ids[:1] if adds_eos else (),
        chat_template=template,
        special_tokens=vocabulary.named_texts,
    )


class _Vocabulary:
    """The checked lists. `ids` leaves out unused tokens at the end: they only pad the weights."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.tokens: list[str] = _get_list(metadata, "tokens", str)
        num_tokens = len(self.tokens)
        if not 0 < num_tokens <= MAX_TOKENS:
            raise _refuse(f"{num_tokens} tokens; between 1 and {MAX_TOKENS} are supported")
        self.types: list[int] = _get_list(metadata, "token_type", int, default=[1] * num_tokens)
        if len(self.types) != num_tokens:
            raise _refuse(f"{num_tokens} tokens but {len(self.types)} token types")
        self._check_tokens()
        self.ids = {text: i for i, text in enumerate(self.tokens[: self._num_used()]) if text}
        self.bos_id = self._named_id(metadata, "bos_token_id")
        ends = [self._named_id(metadata, f"{name}_token_id") for name in ("eos", "eot", "eom")]
        self.eos_ids = tuple(dict.fromkeys(end for end in ends if end is not None))
        self.unknown_id = self._named_id(metadata, "unknown_token_id")
        named = {
            "bos_token": self.bos_id,
            "eos_token": ends[0],
            "unk_token": self.unknown_id,
            "pad_token": self._named_id(metadata, "padding_token_id"),
        }
        self.named_texts = {name: self.tokens[i] for name, i in named.items() if i is not None}

    def _check_tokens(self) -> None:
        seen: set[str] = set()
        for token_id, (text, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if not 1 <= kind <= BYTE:
                raise _refuse(f"token {token_id} has the unknown type {kind}")
            if len(text) > MAX_TOKEN_CHARS:
                raise _refuse(
                    f"token {token_id} has {len(text)} characters; limit {MAX_TOKEN_CHARS}"
                )
            if kind == BYTE and not _BYTE_TOKEN.fullmatch(text):
                raise _refuse(f"token {token_id} should name a byte and is {text[:20]!r}")
            if text and text in seen:
                raise _refuse(f"token {token_id} repeats the text {text[:80]!r}")
            seen.add(text)

    def _num_used(self) -> int:
        return max((i + 1 for i, kind in enumerate(self.types) if kind != UNUSED), default=0)

    def _named_id(self, metadata: Mapping[str, Any], name: str) -> int | None:
        token_id = _get(metadata, name, int, None)
        if token_id is None:
            return None
        if not 0 <= token_id < len(self.tokens) or self.tokens[token_id] not in self.ids:
            raise _refuse(f"tokenizer.ggml.{name} is {token_id}, which is no token of this file")
        return int(token_id)

    def is_special(self, token_id: int) -> bool:
        return self.types[token_id] in (CONTROL, UNKNOWN) or token_id in (
            self.bos_id,
            *self.eos_ids,
        )

    def added_tokens(self, model: str) -> list[AddedToken]:
        """Tokens found in text before any merging, in the order of their ids."""
        return [
            AddedToken(
                text,
                special=self.is_special(i),
                # Its spaces are written as U+2581, so it is found once the text's are too.
                normalized=model == "llama" and not self.is_special(i) and "▁" in text,
            )
            for text, i in self.ids.items()
            if self.is_special(i) or self.types[i] == USER_DEFINED
        ]


def _byte_level(metadata: Mapping[str, Any], vocabulary: _Vocabulary, pre: str) -> Tokenizer:
    ids = vocabulary.ids
    merges: list[tuple[str, str]] = []
    for merge in _get_list(metadata, "merges", str):
        left, _, right = merge.partition(" ")
        if left not in ids or right not in ids or left + right not in ids:
            raise _refuse(f"the merge {merge[:80]!r} joins or makes a token that does not exist")
        if vocabulary.is_special(ids[left + right]):
            raise _refuse(f"the merge {merge[:80]!r} would make a special token out of text")
        merges.append((left, right))
    # The tokenizer.json of Llama 3 takes a word that is a token as it is, merges or not.
    backend = Tokenizer(BPE(ids, merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(words), "isolated") for words in _WORDS[pre]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: Mapping[str, Any], vocabulary: _Vocabulary, pre: str) -> Tokenizer:
    scores = _get_list(metadata, "scores", float)
    if len(scores) != len(vocabulary.tokens):
        raise _refuse(f"{len(vocabulary.tokens)} tokens but {len(scores)} scores")
    if not all(math.isfinite(score) for score in scores):
        raise _refuse("a score is not a finite number")
    has_all_bytes = all(f"<0x{byte:02X}>" in vocabulary.ids for byte in range(256))
    unknown_id = vocabulary.unknown_id
    if unknown_id is None and not has_all_bytes:
        raise _refuse("there is neither an unknown token nor a token for each byte")
    backend = Tokenizer(
        BPE(
            vocabulary.ids,
            _merges_from_scores(vocabulary, scores),
            unk_token=None if unknown_id is None else vocabulary.tokens[unknown_id],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    puts_space_first = _get(metadata, "add_space_prefix", bool, True)
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if puts_space_first else spaces
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(
        [*steps, decoders.Strip(" ", 1, 0)] if puts_space_first else steps
    )
    return backend


def _merges_from_scores(vocabulary: _Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others.

    Best score first, of equal scores longer left parts first. Special tokens and bytes take no
    part: text must not merge into `</s>`.
    """
    mergeable = {
        text: i
        for text, i in vocabulary.ids.items()
        if vocabulary.types[i] not in (UNUSED, BYTE) and not vocabulary.is_special(i)
    }
    ranked: list[tuple[float, int, int, int, int, str, str]] = []
    for text, token_id in mergeable.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in mergeable and right in mergeable:
                order = (-scores[token_id], -len(left), -len(right), token_id, mergeable[left])
                ranked.append((*order, left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _pre_tokenizer_name(metadata: Mapping[str, Any]) -> str:
    name = _get(metadata, "pre", str, "default")
    name = _SAME_WORDS.get(name, name)
    if name not in _WORDS:
        supported = ", ".join(sorted([*_WORDS, *_SAME_WORDS]))
        raise _refuse(f"tokenizer.ggml.pre is {name!r}; supported: {supported}")
    return str(name)


_REQUIRED = object()


def _get(metadata: Mapping[str, Any], name: str, kind: type, default: Any = _REQUIRED) -> Any:
    """The value of `tokenizer.ggml.<name>`, checked to be a `kind`."""
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is None:
        if default is _REQUIRED:
            raise _refuse(f"tokenizer.ggml.{name} is missing")
        return default
    if not _is_a(value, kind):
        raise _refuse(f"tokenizer.ggml.{name} must be of type {kind.__name__}")
    return value


def _get_list(
    metadata: Mapping[str, Any], name: str, kind: type, default: list[Any] | None = None
) -> list[Any]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is None:
        value = default
    if value is None:
        raise _refuse(f"tokenizer.ggml.{name} is missing")
    if not isinstance(value, list | tuple) or not all(_is_a(item, kind) for item in value):
        raise _refuse(f"tokenizer.ggml.{name} must be a list of {kind.__name__}")
    return list(value)


def _is_a(value: object, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is str:
        return isinstance(value, str) and not _SURROGATE.search(value)
    return isinstance(value, kind)


def _refuse(sentence: str) -> ModelLoadError:
    return ModelLoadError(f"GGUF tokenizer: {sentence}", param="tokenizer")
