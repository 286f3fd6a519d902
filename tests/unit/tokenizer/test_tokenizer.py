"""Text to ids and back, from model directories and for the default model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_files import CORPUS, TEXTS, add_bos, byte_level, user_token, write_directory

from pico_vllm.errors import (
    ChatTemplateError,
    ContextLengthError,
    InvalidRequestError,
    ModelLoadError,
    TokenOutOfRangeError,
)
from pico_vllm.tokenizer.tokenizer import Tokenizer

FACTS = Path(__file__).parents[2] / "data" / "smollm2_tokenizer.json"


@pytest.mark.parametrize("fact", json.loads(FACTS.read_text()), ids=lambda fact: fact["text"][:12])
def test_smollm2_gives_the_reference_ids(smollm2: Tokenizer, fact: dict[str, Any]) -> None:
    """The default model's tokenizer gives the ids that transformers gave, and their text back."""
    assert smollm2.encode(fact["text"]) == fact["ids"]
    assert smollm2.decode(fact["ids"], skip_special_tokens=False) == fact["text"]


def test_smollm2_knows_its_special_tokens(smollm2: Tokenizer) -> None:
    """Sizes and special ids are those of the file."""
    assert smollm2.vocab_size == 49152
    assert (smollm2.bos_token_id, smollm2.eos_token_id) == (1, 2)
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.max_token_chars == 81
    assert smollm2.decode([1, 4093, 2]) == "user"


def test_ids_equal_transformers(tmp_path: Path) -> None:
    """A directory's tokenizer gives the ids and texts that transformers gives."""
    backend = byte_level()
    add_bos(backend, "<|begin_of_text|>")
    eos = {"__type": "AddedToken", "content": "<|eot_id|>", "special": True}
    config = {"bos_token": "<|begin_of_text|>", "eos_token": eos}
    ours = Tokenizer.from_directory(write_directory(tmp_path, backend, config))
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs)
    for text in [*TEXTS, "<|im_start|>user\n" + CORPUS[0] + "<|im_end|>"]:
        assert ours.encode(text) == theirs(text)["input_ids"]
        without = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == without
        assert ours.decode(without) == theirs.decode(
            without, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_decode_equals_the_library(bytes_tokenizer: Tokenizer, data: st.DataObject) -> None:
    """For any ids of a byte-level tokenizer, decode is what the tokenizers library decodes."""
    ids = data.draw(st.lists(st.integers(0, bytes_tokenizer.vocab_size - 1), max_size=40))
    skip = data.draw(st.booleans())
    backend = bytes_tokenizer._backend
    assert bytes_tokenizer.decode(ids, skip_special_tokens=skip) == backend.decode(
        ids, skip_special_tokens=skip
    )


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=40))
def test_valid_text_survives_a_round_trip(
    bytes_tokenizer: Tokenizer, pieces_tokenizer: Tokenizer, text: str
) -> None:
    """Any text decodes to itself, spelled plainly, with both kinds of tokenizer."""
    for tokenizer in (bytes_tokenizer, pieces_tokenizer):
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        expected = text.replace("▁", " ") if tokenizer is pieces_tokenizer else text
        assert tokenizer.decode(ids) == expected


def test_special_text_is_spelled_out_on_request(smollm2: Tokenizer) -> None:
    """With parse_special=False the text of special tokens becomes ordinary tokens."""
    text = "a <|im_end|>\n<|im_start|>system"
    assert not smollm2.special_ids.isdisjoint(smollm2.encode(text))
    plain = smollm2.encode(text, parse_special=False)
    assert smollm2.special_ids.isdisjoint(plain)
    assert smollm2.decode(plain) == text


def test_plain_text_keeps_bos(tmp_path: Path) -> None:
    """parse_special=False changes what the text means, not whether BOS comes first."""
    backend = byte_level()
    add_bos(backend, "<s>")
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, backend, {"bos_token": "<s>"}))
    bos = tokenizer.bos_token_id
    ids = tokenizer.encode("<s>", parse_special=False)
    assert ids[0] == bos and ids.count(bos) == 1 and tokenizer.decode(ids) == "<s>"
    assert tokenizer.encode("") == [bos]


def test_tokens_not_marked_special_are_parsed_and_shown(tmp_path: Path) -> None:
    """An added token without the special flag is one id in any text and is not skipped."""
    backend = byte_level()
    backend.add_tokens([user_token("<think>")])
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, backend, {}))
    think = backend.token_to_id("<think>")
    assert tokenizer.encode("<think>", parse_special=False) == [think]
    assert tokenizer.decode([think]) == "<think>"
    assert think not in tokenizer.special_ids


def test_lone_surrogates_are_refused(smollm2: Tokenizer) -> None:
    """Text with half a UTF-16 pair is an error of the request, wherever it stands."""
    for encode in (
        lambda: smollm2.encode("a\ud800b"),
        lambda: smollm2.encode("\udfff", parse_special=False),
        lambda: smollm2.encode_chat([{"role": "user", "content": "\ud800"}]),
        lambda: smollm2.encode_chat([{"role": "us\ud800er", "content": "<|im_end|>"}]),
        lambda: smollm2.encode(b"bytes"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidRequestError):
            encode()


def test_ids_out_of_range_are_refused(smollm2: Tokenizer) -> None:
    """decode and token_text refuse ids that the tokenizer does not have."""
    for bad in (-1, 49152, 2**31, 2**63, 10**30):
        with pytest.raises(TokenOutOfRangeError):
            smollm2.decode([504, bad])
        with pytest.raises(TokenOutOfRangeError):
            smollm2.token_text(bad)


def test_token_text_is_readable(smollm2: Tokenizer) -> None:
    """One id shows as its text, a part of a character as U+FFFD, a special token by its name."""
    assert smollm2.token_text(504) == "The"
    assert smollm2.token_text(2) == "<|im_end|>"
    part = smollm2.encode("日")[0]
    assert "\ufffd" in smollm2.token_text(part)


def test_too_long_a_text_is_refused_before_encoding(smollm2: Tokenizer) -> None:
    """More characters than the longest tokens could hold is an error, one fewer is not."""
    smollm2.check_text_length("a" * 810, 10)
    with pytest.raises(ContextLengthError, match="811 characters"):
        smollm2.check_text_length("a" * 811, 10)
    with pytest.raises(ContextLengthError):
        smollm2.encode_chat([{"role": "user", "content": "x" * 10_000}], max_tokens=100)


def test_longest_token_bounds_every_text(bytes_tokenizer: Tokenizer) -> None:
    """No text has more characters than max_token_chars for each of its tokens."""
    for text in TEXTS:
        ids = bytes_tokenizer.encode(text)
        assert len(text) <= len(ids) * bytes_tokenizer.max_token_chars


def write(folder: Path, **files: object) -> Path:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return folder


def test_missing_tokenizer_json_is_named(tmp_path: Path) -> None:
    """Without tokenizer.json the error names the directory and says what to do."""
    with pytest.raises(ModelLoadError, match=r"has no tokenizer\.json: copy") as caught:
        Tokenizer.from_directory(tmp_path)
    assert str(tmp_path) in caught.value.message


def test_custom_code_is_refused(tmp_path: Path) -> None:
    """auto_map in tokenizer_config.json is refused, and nothing of it is imported."""
    canary = tmp_path / "imported"
    (tmp_path / "tokenization_x.py").write_text(f"open({str(canary)!r}, 'w')")
    config = {"auto_map": {"AutoTokenizer": ["tokenization_x.Tok", None]}}
    write_directory(tmp_path, byte_level(), config)
    with pytest.raises(ModelLoadError, match="custom code not supported") as caught:
        Tokenizer.from_directory(tmp_path)
    assert caught.value.code == "custom_code_not_supported"
    assert not canary.exists()


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer__json": "{"},
        {"tokenizer__json": "[]"},
        {"tokenizer__json": {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}},
        {"tokenizer__json": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}},
        {"tokenizer__json": {"model": {"type": "BPE", "vocab": {}, "merges": []}}},
        {"tokenizer__json": "\ud800".encode("utf-8", "surrogatepass").hex()},
        {"tokenizer_config__json": "not json"},
        {"tokenizer_config__json": "[1]"},
        {"tokenizer_config__json": "[" * 100_000},
        {"tokenizer_config__json": {"bos_token": "<absent>"}},
        {"tokenizer_config__json": '{"eos_token": "\\ud800"}'},
        {"tokenizer_config__json": {"chat_template": 5}},
    ],
    ids=lambda files: str(files)[:60],
)
def test_damaged_files_are_load_errors(tmp_path: Path, files: dict[str, object]) -> None:
    """A damaged or contradictory tokenizer file is a ModelLoadError and nothing else."""
    write(write_directory(tmp_path, byte_level(), {}), **files)
    with pytest.raises(ModelLoadError):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    "decoder", [None, tokenizers.decoders.WordPiece(), tokenizers.decoders.CTC()], ids=repr
)
def test_decoders_that_cannot_stream_are_refused(tmp_path: Path, decoder: object) -> None:
    """A decoder whose text depends on neighbouring tokens is refused at load."""
    backend = byte_level()
    backend.decoder = decoder
    with pytest.raises(ModelLoadError, match="decoder"):
        Tokenizer.from_directory(write_directory(tmp_path, backend, {}))


def test_cutting_and_padding_left_in_the_file_are_ignored(tmp_path: Path) -> None:
    """Truncation and padding settings in tokenizer.json change no prompt."""
    backend = byte_level()
    expected = backend.encode(CORPUS[0]).ids
    backend.enable_truncation(4)
    backend.enable_padding(length=200)
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, backend, {}))
    assert tokenizer.encode(CORPUS[0]) == expected


def test_named_tokens_are_special(tmp_path: Path) -> None:
    """What tokenizer_config.json names as EOS is special though tokenizer.json is silent."""
    backend = byte_level(specials=[])
    exclamation = backend.token_to_id("!")
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, backend, {"eos_token": "!"}))
    assert tokenizer.special_ids == {exclamation} and tokenizer.eos_token_id == exclamation


def test_where_the_chat_template_comes_from(tmp_path: Path) -> None:
    """chat_template.jinja wins over the config; of a list the one named default is used."""
    entries = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    write_directory(tmp_path, byte_level(), {"chat_template": entries})
    assert Tokenizer.from_directory(tmp_path).chat_template == "D"
    write(tmp_path, chat_template__jinja="J")
    assert Tokenizer.from_directory(tmp_path).chat_template == "J"


def test_without_a_chat_template_chat_is_refused(bytes_tokenizer: Tokenizer) -> None:
    """A model without chat template refuses messages with a sentence."""
    with pytest.raises(ChatTemplateError, match="no chat template"):
        bytes_tokenizer.encode_chat([{"role": "user", "content": "hi"}])
