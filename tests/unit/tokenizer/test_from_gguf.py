"""Tokenizers out of GGUF metadata: the right ids, and nothing but ModelLoadError for bad files."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_files import (
    TEXTS,
    byte_level,
    byte_level_metadata,
    sentencepiece_metadata,
    user_token,
    with_words_of,
)

from pico_vllm.errors import ModelLoadError
from pico_vllm.tokenizer.tokenizer import Tokenizer


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_byte_level_ids_equal_the_original(pre: str) -> None:
    """A byte-level tokenizer gives the same ids after a trip through GGUF metadata."""
    original = with_words_of(byte_level(vocab_size=600), pre)
    original.add_tokens([user_token("<tool_call>")])
    metadata = byte_level_metadata(original, pre, add_bos_token=False)
    ours = Tokenizer.from_gguf_metadata(metadata)
    for text in [*TEXTS, "<|im_start|>user\n<tool_call>12345 \r\n x<|im_end|>"]:
        ids = original.encode(text).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == original.decode(ids)


def test_default_words_follow_llama_cpp() -> None:
    """Without a named pre-tokenizer punctuation stands alone and digits go in threes."""
    metadata = byte_level_metadata(byte_level(vocab_size=270, specials=["<|im_end|>"]), "default")
    backend = Tokenizer.from_gguf_metadata(metadata)._backend
    words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str("a $b, 1234567...")]
    assert words == ["a", "Ġ", "$", "b", ",", "Ġ", "123", "456", "7", "..."]


def sentencepiece_reference(metadata: dict[str, Any], text: str) -> list[int]:
    """Join the best-scored neighbours until none can be joined, the leftmost of equals first."""
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {
        text: i for i, text in enumerate(tokens) if metadata["tokenizer.ggml.token_type"][i] == 1
    }
    scores = metadata["tokenizer.ggml.scores"]
    parts = list(text.replace(" ", "▁"))
    while True:
        pairs = [
            (-scores[ids[left + right]], i)
            for i, (left, right) in enumerate(pairwise(parts))
            if left + right in ids and left in ids and right in ids
        ]
        if not pairs:
            break
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    result: list[int] = []
    for part in parts:
        result += [ids[part]] if part in ids else [3 + byte for byte in part.encode()]
    return result


def test_sentencepiece_ids_equal_the_definition() -> None:
    """Scores turned into merges give the ids that SentencePiece's own rule gives."""
    metadata = sentencepiece_metadata()
    ours = Tokenizer.from_gguf_metadata(metadata)
    for text in TEXTS:
        expected = sentencepiece_reference(metadata, " " + text if text else "")
        assert ours.encode(text) == [1, *expected]
        assert ours.decode([1, *expected]) == text


def test_sentencepiece_without_space_prefix() -> None:
    """add_space_prefix=False puts no space before a text and drops none from it."""
    metadata = sentencepiece_metadata(add_space_prefix=False, add_bos_token=False)
    ours = Tokenizer.from_gguf_metadata(metadata)
    for text in TEXTS:
        assert ours.encode(text) == sentencepiece_reference(metadata, text)
        assert ours.decode(ours.encode(text)) == text


def test_sentencepiece_special_and_user_tokens() -> None:
    """Control tokens are special, user-defined ones are parsed and shown, bytes are neither."""
    ours = Tokenizer.from_gguf_metadata(sentencepiece_metadata())
    extra = ours.vocab_size - 1
    assert ours.special_ids == {0, 1, 2}
    assert ours.encode("</s><extra_0>", add_special_tokens=False) == [2, extra]
    assert ours.encode("<extra_0>", add_special_tokens=False, parse_special=False) == [extra]
    assert 2 not in ours.encode("</s>", parse_special=False)
    assert ours.decode([2, extra, 3 + 0x41]) == "<extra_0>A"


def test_unused_tokens_at_the_end_are_not_counted() -> None:
    """Padding of the vocabulary is not a token that could be decoded."""
    metadata = byte_level_metadata(byte_level(), "gpt-2")
    size = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += ["[PAD0]", "[PAD1]"]
    metadata["tokenizer.ggml.token_type"] += [5, 5]
    assert Tokenizer.from_gguf_metadata(metadata).vocab_size == size


def test_bos_eos_and_further_ends() -> None:
    """BOS and EOS are added where the file says so; eot and eom ids end a reply as well."""
    metadata = byte_level_metadata(
        byte_level(),
        "llama-bpe",
        bos_token_id=3,
        eos_token_id=6,
        eot_token_id=2,
        eom_token_id=6,
        add_eos_token=True,
    )
    ours = Tokenizer.from_gguf_metadata(metadata)
    assert ours.eos_token_ids == (6, 2)
    ids = ours.encode("hello")
    assert (ids[0], ids[-1]) == (3, 6)
    assert ours.encode("hello", add_special_tokens=False) == ids[1:-1]


def byte_metadata(*, pre: Any = "gpt-2", **changes: Any) -> dict[str, Any]:
    return byte_level_metadata(byte_level(vocab_size=280), pre, **changes)


SPM = sentencepiece_metadata()
TOKENS, TYPES, SCORES = (
    SPM[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type", "scores")
)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({}, "model is missing"),
        ({"tokenizer.ggml.model": 5}, "model must be of type str"),
        ({"tokenizer.ggml.model": "bert"}, "supported: gpt2, llama"),
        (byte_metadata(pre="martian"), "supported: .*llama-bpe.*qwen2.*smollm"),
        (byte_metadata(pre=3), "pre must be of type str"),
        (byte_metadata(tokens="abc"), "must be a list of str"),
        (byte_metadata(tokens=[]), "0 tokens"),
        (byte_metadata(tokens=["a", 1]), "must be a list of str"),
        (byte_metadata(tokens=["a", "\ud800"]), "must be a list of str"),
        (byte_metadata(token_type=[1, 2]), "2 token types"),
        (byte_metadata(token_type=None, merges=["a b c"]), "merge"),
        (byte_metadata(merges=["nospace"]), "merge"),
        (byte_metadata(merges=None), "merges is missing"),
        (byte_metadata(merges=[["a", "b"]]), "must be a list of str"),
        (byte_metadata(eos_token_id=-1), "no token of this file"),
        (byte_metadata(eos_token_id=10**30), "no token of this file"),
        (byte_metadata(eos_token_id=2.5), "must be of type int"),
        (byte_metadata(bos_token_id=True), "must be of type int"),
        (byte_metadata(add_bos_token=True), "id is missing"),
        (byte_metadata(add_bos_token=1, bos_token_id=1), "must be of type bool"),
        ({**byte_metadata(), "tokenizer.chat_template": ["x"]}, "chat_template"),
        (sentencepiece_metadata(scores=None), "scores is missing"),
        (sentencepiece_metadata(scores=SCORES[:-1]), "scores"),
        (sentencepiece_metadata(scores=[math.nan, *SCORES[1:]]), "finite"),
        (sentencepiece_metadata(scores=[math.inf, *SCORES[1:]]), "finite"),
        (sentencepiece_metadata(token_type=[9, *TYPES[1:]]), "unknown type 9"),
        (sentencepiece_metadata(tokens=[*TOKENS[:3], "<0x-1>", *TOKENS[4:]]), "name a byte"),
        (sentencepiece_metadata(tokens=[*TOKENS[:3], "<0x100>", *TOKENS[4:]]), "name a byte"),
        (sentencepiece_metadata(tokens=[*TOKENS[:-1], TOKENS[300]]), "repeats"),
        (sentencepiece_metadata(tokens=[*TOKENS[:-1], "x" * 5000]), "5000 characters"),
        (sentencepiece_metadata(add_space_prefix="yes"), "must be of type bool"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_metadata_is_a_load_error(metadata: dict[str, Any], words: str) -> None:
    """Each contradiction in the metadata is refused with a sentence that names it."""
    with pytest.raises(ModelLoadError, match=words):
        Tokenizer.from_gguf_metadata(metadata)


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.lists(
        st.one_of(st.integers(-3, 300), st.floats(), st.text(max_size=3), st.none()), max_size=5
    ),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
    st.binary(max_size=4),
)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), base=st.sampled_from([sentencepiece_metadata(), byte_metadata()]))
def test_random_damage_is_a_load_error(data: st.DataObject, base: dict[str, Any]) -> None:
    """Whatever replaces a value or an item, the answer is a tokenizer or a ModelLoadError."""
    metadata = dict(base)
    for key in data.draw(st.lists(st.sampled_from(sorted(base)), min_size=1, max_size=2)):
        value = metadata[key]
        if isinstance(value, list) and value and data.draw(st.booleans()):
            changed = list(value)
            changed[data.draw(st.integers(0, len(value) - 1))] = data.draw(JUNK)
            metadata[key] = changed
        else:
            metadata[key] = data.draw(JUNK)
    try:
        tokenizer = Tokenizer.from_gguf_metadata(metadata)
    except ModelLoadError as error:
        assert error.message
    else:
        assert isinstance(tokenizer.decode(tokenizer.encode("hi <0x41>")), str)
