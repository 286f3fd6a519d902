"""What a user types stays text: special tokens in a rendered prompt come from the template alone.

A template mixes its own special tokens with the users' words in one string: `<|im_end|>` looks
the same whoever wrote it. So before rendering, the first character of each special text inside a
user's string is replaced by a stand-in, a private-use character found nowhere in the input. The
string keeps its length, and trimming, slicing and joining leave the stand-in where it is. After
rendering, special texts still in one piece are the template's; then the stand-ins become their
characters again.

Also replaced: the first or last character of a string that could complete a special text together
with its neighbours, and the first of a role that no template knows and that is part of a special
text, as some templates write `'<|' + role + '|>'`. Not covered: a template that changes or
takes out characters in the middle of a user's string.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable
from typing import Any

KNOWN_ROLES = frozenset(
    {"system", "developer", "user", "assistant", "model"}
    | {"tool", "function", "ipython", "observation", "documents", "critic"}
)
_PRIVATE_USE = range(0xF0000, 0x10FFFE)
_PRIVATE_USE_PATTERN = re.compile("[\U000f0000-\U0010fffd]")


class StandIns:
    """The characters replaced in one request, and their way back."""

    def __init__(self, used_text: str) -> None:
        """`used_text` holds every character of the input: none of them can be a stand-in."""
        self._taken = set(_PRIVATE_USE_PATTERN.findall(used_text))
        self._by_char: dict[str, str] = {}

    def stand_in(self, char: str) -> str:
        if char not in self._by_char:
            # By chance and not in order: a template may write JSON escapes, and a user could type
            # the next one.
            chosen = chr(secrets.choice(_PRIVATE_USE))
            while chosen in self._taken:
                chosen = chr(secrets.choice(_PRIVATE_USE))
            self._taken.add(chosen)
            self._by_char[char] = chosen
        return self._by_char[char]

    def reveal(self, text: str) -> str:
        """Put the characters back, also where the template wrote a stand-in as a JSON escape."""
        for char, stand_in in self._by_char.items():
            text = text.replace(stand_in, char)
            text = text.replace(json.dumps(stand_in)[1:-1], json.dumps(char)[1:-1])
        return text


class SpecialText:
    """The special texts of one tokenizer, and how to hide them."""

    def __init__(self, texts: Iterable[str]) -> None:
        # Whitespace alone is never hidden: a stand-in for it would not be trimmed.
        kept = sorted({text for text in texts if text.strip()}, key=len, reverse=True)
        self._starting_with: dict[str, tuple[str, ...]] = {
            char: tuple(text for text in kept if text[0] == char) for char in {t[0] for t in kept}
        }
        self._beginnings = tuple({text[:k] for text in kept for k in range(1, len(text))})
        self._endings = tuple({text[k:] for text in kept for k in range(1, len(text))})
        self._all = kept
        firsts = "".join(re.escape(char) for char in self._starting_with)
        self._first_char = re.compile(f"[{firsts}]") if kept else None

    def hide(self, value: Any, stand_ins: StandIns) -> Any:
        """Copy a JSON value with each string and each key hidden."""
        if isinstance(value, str):
            return self._hide_string(value, stand_ins)
        if isinstance(value, dict):
            return {
                self.hide(key, stand_ins): (
                    self._hide_role(item, stand_ins)
                    if key == "role" and isinstance(item, str)
                    else self.hide(item, stand_ins)
                )
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.hide(item, stand_ins) for item in value]
        return value

    def _hide_role(self, role: str, stand_ins: StandIns) -> str:
        if role in KNOWN_ROLES:
            return role
        if role.strip() and any(role.strip() in text for text in self._all):
            return _replace_chars(role, {_first_visible(role, 0)}, stand_ins)
        return self._hide_string(role, stand_ins)

    def _hide_string(self, text: str, stand_ins: StandIns) -> str:
        if self._first_char is None or not text.strip():
            return text
        positions = {
            _first_visible(text, match.start())
            for match in self._first_char.finditer(text)
            if text.startswith(self._starting_with[match[0]], match.start())
        }
        # A plain word is left alone here: templates compare types and names with such.
        if not text.isidentifier():
            if text.startswith(self._endings) or text.lstrip().startswith(self._endings):
                positions.add(_first_visible(text, 0))
            if text.endswith(self._beginnings) or text.rstrip().endswith(self._beginnings):
                positions.add(len(text.rstrip()) - 1)
        return _replace_chars(text, positions, stand_ins) if positions else text


def _first_visible(text: str, start: int) -> int:
    """Index of the first character from `start` on that trimming would keep."""
    return next(i for i in range(start, len(text)) if not text[i].isspace())


def _replace_chars(text: str, positions: set[int], stand_ins: StandIns) -> str:
    pieces: list[str] = []
    done = 0
    for position in sorted(positions):
        pieces += [text[done:position], stand_ins.stand_in(text[position])]
        done = position + 1
    return "".join([*pieces, text[done:]])
