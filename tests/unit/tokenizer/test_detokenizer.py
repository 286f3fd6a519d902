"""Streaming text equals one-shot text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pico_vllm.tokenizer.detokenizer import IncrementalDetokenizer
from pico_vllm.tokenizer.tokenizer import Tokenizer

EXAMPLES = 2000


class SpelledTokens:
    """A vocabulary given as a list of byte strings; id 0 is special."""

    special_ids = frozenset({0})

    def __init__(self, tokens: Sequence[bytes], *, strips_leading_space: bool = False) -> None:
        self.tokens = list(tokens)
        self.strips_leading_space = strips_leading_space

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id]


FAMILY = "👩‍👩‍👧".encode()
VOCABULARY = [
    *(b"<|end|>", b"a", b"b", b"ab", b"ba", b"aba", b" a", b" ", b"\n", b"xyz"),
    *(FAMILY[:2], FAMILY[2:5], FAMILY[5:], "é".encode(), "é".encode()[:1], "é".encode()[1:]),
    *(b"\xff", b"\xe3\x81", b"\x82", b"\xf0", b"\x80"),
]
STOPS = [
    "a",
    "ab",
    "ba",
    "aba",
    "abab",
    "b a",
    "\n",
    "x",
    "yz",
    "é",
    "👩",
    "\ufffd",
    "zzz",
    "<|end",
]


def one_shot(
    data: list[bytes], stops: Sequence[str], include: bool, min_tokens: int
) -> tuple[str, str | None, int]:
    """(text, stop string, tokens used), by looking at the text after each number of tokens."""
    done = ""
    for count in range(1, len(data) + 2):
        is_flush = count > len(data)
        so_far = b"".join(data[:count])
        text, _ = codecs.utf_8_decode(so_far, "replace", is_flush)
        used = min(count, len(data))
        matches = [
            (start, -len(stop), stop)
            for stop in stops
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > len(done)
        ]
        if matches and used > min_tokens:
            start, _, stop = min(matches)
            return text[: start + len(stop) * include], stop, used
        done = text
    return done, None, len(data)


@st.composite
def chunks(draw: st.DrawFn, max_id: int) -> list[list[int]]:
    return draw(
        st.lists(st.lists(st.integers(0, max_id), max_size=4), max_size=10),
    )


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    pieces=chunks(len(VOCABULARY) - 1),
    stops=st.lists(st.sampled_from(STOPS), max_size=4, unique=True),
    include=st.booleans(),
    skip=st.booleans(),
    min_tokens=st.integers(0, 6),
)
def test_any_chunking_gives_the_one_shot_text(
    pieces: list[list[int]], stops: list[str], include: bool, skip: bool, min_tokens: int
) -> None:
    """For any ids, any chunking and any stop strings, the stream joins to the one-shot text."""
    source = SpelledTokens(VOCABULARY)
    detokenizer = IncrementalDetokenizer(
        source,
        skip_special_tokens=skip,
        stop=tuple(stops),
        include_stop_str_in_output=include,
        min_tokens=min_tokens,
    )
    deltas = [detokenizer.append(piece) for piece in pieces] + [detokenizer.finish()]

    ids = [token_id for piece in pieces for token_id in piece]
    data = [b"" if skip and i == 0 else VOCABULARY[i] for i in ids]
    text, stop, used = one_shot(data, stops, include, min_tokens)
    assert "".join(deltas) == detokenizer.text == text
    assert detokenizer.stop_reason == stop
    assert detokenizer.num_tokens == used


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_without_stops_the_stream_is_decode(
    bytes_tokenizer: Tokenizer, pieces_tokenizer: Tokenizer, data: st.DataObject
) -> None:
    """Both kinds of tokenizer stream exactly the text that decode gives for all ids."""
    for tokenizer in (bytes_tokenizer, pieces_tokenizer):
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
        skip = data.draw(st.booleans())
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
        streamed = "".join(detokenizer.append([i]) for i in ids) + detokenizer.finish()
        assert streamed == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_output_after_a_prompt_is_the_rest_of_the_whole(
    pieces_tokenizer: Tokenizer, bytes_tokenizer: Tokenizer, data: st.DataObject
) -> None:
    """Prompt text, then output text, is the text of both, however the prompt ends."""
    for tokenizer in (pieces_tokenizer, bytes_tokenizer):
        a_list_of_ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=8)
        prompt, output = data.draw(a_list_of_ids), data.draw(a_list_of_ids)
        detokenizer = IncrementalDetokenizer(tokenizer, prompt)
        streamed = detokenizer.append(output) + detokenizer.finish()

        prompt_bytes = b"".join(
            tokenizer.token_bytes(i) for i in prompt if i not in tokenizer.special_ids
        )
        _, num_whole = codecs.utf_8_decode(prompt_bytes, "replace", False)
        prompt_text = prompt_bytes[:num_whole].decode("utf-8", "replace")
        if tokenizer.strips_leading_space:
            prompt_text = prompt_text.removeprefix(" ")
        assert prompt_text + streamed == tokenizer.decode([*prompt, *output])


@pytest.mark.parametrize("kind", ["bytes_tokenizer", "pieces_tokenizer"])
def test_characters_spread_over_byte_tokens(kind: str, request: pytest.FixtureRequest) -> None:
    """Byte by byte, whole characters come out at once, and never a replacement character."""
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    single = {
        tokenizer.token_bytes(i): i
        for i in range(tokenizer.vocab_size)
        if len(tokenizer.token_bytes(i)) == 1
    }
    text = "삼겹살👩‍👩‍👧ď"
    ids = [single[bytes([byte])] for byte in text.encode()]
    detokenizer = IncrementalDetokenizer(tokenizer, [single[b":"]])
    deltas = [detokenizer.append([i]) for i in ids]
    assert [delta for delta in deltas if delta] == list(text)
    assert detokenizer.finish() == ""


LETTERS = [b"<|end|>", b"D", b"EF", b"G", b"HI", b"J", b"K", b" gam|ma", b"DE", b"X"]


def test_stop_string_over_several_tokens_shows_nothing() -> None:
    """Of the stop string DEFGHIJ sent as D, EF, G, HI, J, K nothing is shown, nor what follows."""
    detokenizer = IncrementalDetokenizer(SpelledTokens(LETTERS), stop=("DEFGHIJ",))
    assert [detokenizer.append([i]) for i in (9, 1, 2, 3, 4, 5, 6)] == ["X", *[""] * 6]
    assert detokenizer.finish() == ""
    assert (detokenizer.text, detokenizer.stop_reason, detokenizer.num_tokens) == (
        "X",
        "DEFGHIJ",
        6,
    )


def test_stop_string_is_included_once_on_request() -> None:
    """With include_stop_str_in_output the text ends with the stop string, once."""
    detokenizer = IncrementalDetokenizer(
        SpelledTokens(LETTERS), stop=("DEFGHIJ",), include_stop_str_in_output=True
    )
    assert detokenizer.append([9, 1, 2, 3, 4, 5, 6]) + detokenizer.finish() == "XDEFGHIJ"


def test_stop_inside_one_token_is_cut() -> None:
    """A stop string in the middle of a token cuts that token."""
    detokenizer = IncrementalDetokenizer(SpelledTokens(LETTERS), stop=("|",))
    assert detokenizer.append([9, 7, 1]) == "X gam"
    assert detokenizer.stop_reason == "|"


def test_text_held_for_a_stop_is_sent_when_it_goes_on_differently() -> None:
    """Text that only looked like the stop string arrives in full, once a token shows it."""
    detokenizer = IncrementalDetokenizer(SpelledTokens(LETTERS), stop=("DEFGHIJ",))
    assert [detokenizer.append([i]) for i in (1, 2, 9, 1)] == ["", "", "DEFX", ""]
    assert detokenizer.finish() == "D"
    assert detokenizer.stop_reason is None


def test_of_stops_completed_by_one_token_the_leftmost_then_longest_counts() -> None:
    """Among stop strings that one token completes, the earliest start wins, then the longest."""
    source = SpelledTokens([b"", b"say abcd"])
    for stops, text, reason in (
        (("c", "abcd"), "say ", "abcd"),
        (("ab", "abc"), "say ", "abc"),
        (("d", "cd", "y"), "sa", "y"),
    ):
        detokenizer = IncrementalDetokenizer(source, stop=stops)
        assert (detokenizer.append([1]), detokenizer.stop_reason) == (text, reason)


def test_stop_may_not_end_in_the_first_min_tokens() -> None:
    """A stop string whose last character belongs to the first min_tokens tokens does not count."""
    source = SpelledTokens([b"", b"ab", b"a", b"b"])
    detokenizer = IncrementalDetokenizer(source, stop=("ab",), min_tokens=2)
    assert detokenizer.append([1, 2, 3, 1]) == "ab"
    assert (detokenizer.stop_reason, detokenizer.num_tokens) == ("ab", 3)


def test_first_word_keeps_its_space_after_a_prompt(pieces_tokenizer: Tokenizer) -> None:
    """The space that SentencePiece drops at the start of a text stays in an output after words."""
    hello = pieces_tokenizer.encode("hello", add_special_tokens=False)
    bos = [pieces_tokenizer.bos_token_id or 0]
    assert IncrementalDetokenizer(pieces_tokenizer, [*bos, *hello]).append(hello) == " hello"
    assert IncrementalDetokenizer(pieces_tokenizer, bos).append(hello) == "hello"
    assert IncrementalDetokenizer(pieces_tokenizer).append(hello) == "hello"


def test_work_a_token_does_not_grow(bytes_tokenizer: Tokenizer) -> None:
    """Bytes that form no character, and a stop that nearly matches for ever, hold back little."""
    source = SpelledTokens([b"", b"\x80", b"a"])
    detokenizer = IncrementalDetokenizer(source, stop=("a" * 255 + "b",))
    assert detokenizer.append([1] * 5000) == "\ufffd" * 5000
    assert len(detokenizer.append([2] * 5000)) == 5000 - 255
    assert detokenizer.finish() == "a" * 255
