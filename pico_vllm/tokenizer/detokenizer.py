"""Token ids to text while they arrive, with stop strings. Host only, constant work a token.

**What the text is.** The bytes of all output tokens in a row, read as UTF-8 (`token_bytes.py`). The
output continues the prompt: bytes of an unfinished character at the end of the prompt belong to the
output's first character, and the leading space that SentencePiece tokenizers drop is dropped only
if the prompt has no text of its own.

**Where a stop string cuts it.** Tokens are taken in order. The first token that completes a stop
string, beyond the first `min_tokens` tokens, decides; if it completes several, the one that begins
first counts, then the longest. So the result depends on the ids alone, not on how they were grouped
into `append` calls.

Text that could be the beginning of a stop string waits until the next tokens decide.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

_MAX_CHAR_BYTES = 4


class TokenSource(Protocol):
    """The part of `Tokenizer` that is needed here."""

    @property
    def special_ids(self) -> frozenset[int]: ...
    @property
    def strips_leading_space(self) -> bool: ...
    def token_bytes(self, token_id: int) -> bytes: ...


class IncrementalDetokenizer:
    """One request's output.

    `stop_reason` is the stop string that was found, `num_tokens` counts the tokens up to there.
    """

    def __init__(
        self,
        tokenizer: TokenSource,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        stop: tuple[str, ...] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        assert all(stop), f"empty stop string in {stop!r}"
        self._tokenizer = tokenizer
        self._skipped_ids = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._stops = [_StopSearch(text) for text in stop]
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._sent: list[str] = []
        self._is_finished = False
        self.stop_reason: str | None = None
        self.num_tokens = 0

        prompt_tail = self._last_bytes(prompt_token_ids)
        self._drop_space = tokenizer.strips_leading_space and not prompt_tail
        self._utf8.decode(_unfinished_char(prompt_tail))

    @property
    def text(self) -> str:
        """All text returned so far."""
        self._sent = ["".join(self._sent)]
        return self._sent[0]

    def append(self, ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that is certain now.

        Returns '' once a stop string was found.
        """
        parts: list[str] = []
        for token_id in ids:
            if self._is_finished or self.stop_reason is not None:
                break
            self.num_tokens += 1
            parts.append(self._take(self._utf8.decode(self._bytes(token_id))))
        return self._send("".join(parts))

    def finish(self) -> str:
        """No token follows: return what was held back, an unfinished character as U+FFFD."""
        if self._is_finished or self.stop_reason is not None:
            self._is_finished = True
            return ""
        self._is_finished = True
        text = self._take(self._utf8.decode(b"", final=True))
        if self.stop_reason is None:
            text += self._held
            self._held = ""
        return self._send(text)

    def _bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._skipped_ids else self._tokenizer.token_bytes(token_id)

    def _take(self, new: str) -> str:
        """Add one token's characters; return those that no stop string can claim any more."""
        if self._drop_space and new:
            self._drop_space = False
            new = new.removeprefix(" ")
        if not self._stops:
            return new
        window = self._held + new
        if found := self._find_stop(new, len(self._held)):
            start, length, self.stop_reason = found
            self._held = ""
            return window[: start + length] if self._include_stop else window[:start]
        num_held = max(search.num_matched for search in self._stops)
        self._held = window[len(window) - num_held :]
        return window[: len(window) - num_held]

    def _find_stop(self, new: str, num_before: int) -> tuple[int, int, str] | None:
        """(start in the window, length, text) of the match ending in `new` that counts."""
        found = [
            (num_before + end - len(search.text), len(search.text), search.text)
            for search in self._stops
            for end in search.ends_in(new)
        ]
        if self.num_tokens <= self._min_tokens:
            return None
        return min(found, key=lambda match: (match[0], -match[1]), default=None)

    def _send(self, text: str) -> str:
        if text:
            self._sent.append(text)
        return text

    def _last_bytes(self, ids: Sequence[int]) -> bytes:
        """The end of the prompt's bytes, enough for any unfinished character."""
        tail = b""
        for token_id in reversed(ids):
            if len(tail) >= _MAX_CHAR_BYTES:
                break
            tail = self._bytes(token_id) + tail
        return tail


def _unfinished_char(data: bytes) -> bytes:
    """The bytes at the end of `data` that begin a UTF-8 character and do not complete it."""
    for length in range(min(len(data), _MAX_CHAR_BYTES - 1), 0, -1):
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        if not decoder.decode(data[-length:]):
            return data[-length:]
    return b""


class _StopSearch:
    """Knuth-Morris-Pratt: how much of one stop string the text so far ends with."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._fallback = [0] * (len(text) + 1)
        """[n]: the longest proper beginning of `text` that `text[:n]` ends with."""
        for n in range(1, len(text)):
            self._fallback[n + 1] = self._advance(self._fallback[n], text[n])

    def ends_in(self, new: str) -> list[int]:
        """Add characters; return after how many of them the stop string was complete."""
        ends: list[int] = []
        for count, char in enumerate(new, 1):
            self.num_matched = self._advance(self.num_matched, char)
            if self.num_matched == len(self.text):
                ends.append(count)
                self.num_matched = self._fallback[self.num_matched]
        return ends

    def _advance(self, matched: int, char: str) -> int:
        while matched and self.text[matched] != char:
            matched = self._fallback[matched]
        return matched + 1 if self.text[matched] == char else 0
