"""What each token id adds to the output, in bytes.

Text of a list of ids = UTF-8 of their bytes in a row, each invalid part shown as U+FFFD, and for
tokenizers of the SentencePiece kind one leading space dropped. That is what the `decoder` of a
tokenizer.json computes, in a form that can be added to token by token. One difference, with invalid
bytes only: where bytes spelled as `<0xNN>` tokens do not form characters, the `tokenizers` library
gives up on the whole run of them; here the valid characters survive.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from pico_vllm.errors import ModelLoadError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SUPPORTED = "ByteLevel; Metaspace; Replace, ByteFallback, Fuse and a Strip of one leading space"


def _byte_level_chars() -> dict[str, int]:
    """Bytes that print stand for themselves, the others have characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table |= {chr(0x100 + i): byte for i, byte in enumerate(others)}
    assert set(table) == set(ByteLevel.alphabet())
    return table


_BYTE_OF_CHAR = _byte_level_chars()


class TokenDecoder:
    """Token text to bytes, as one tokenizer's `decoder` (its JSON form) says."""

    def __init__(self, decoder: Mapping[str, Any] | None) -> None:
        """`decoder` as tokenizer.json writes it.

        Raises:
            ModelLoadError: a decoder that cannot be applied token by token.
        """
        self.strips_leading_space = False
        self._steps: list[Callable[[str], str]] = []
        self._is_byte_level = False
        self._has_byte_tokens = False
        self._is_fused = False
        if decoder is None:
            raise _unsupported("none")
        steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        for step in steps:
            self._add_step(step)

    def _add_step(self, step: Mapping[str, Any]) -> None:
        match step:
            case {"type": "ByteLevel"}:
                self._is_byte_level = True
            case {"type": "ByteFallback"}:
                self._has_byte_tokens = True
            case {"type": "Fuse"}:
                self._is_fused = True
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if (
                old and (len(old) == 1 or not self._is_fused)
            ):
                self._steps.append(lambda text: text.replace(old, new))
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0} if (
                self._is_fused
            ):
                self.strips_leading_space = start == 1
            case {"type": "Metaspace", "replacement": str(mark)}:
                self._steps.append(lambda text: text.replace(mark, " "))
                self.strips_leading_space = step.get("prepend_scheme", "always") != "never"
            case _:
                raise _unsupported(str(step.get("type")))

    def to_bytes(self, token: str) -> bytes:
        if self._is_byte_level:
            # A token with a character that stands for no byte is an added one, spelled as it is.
            if all(char in _BYTE_OF_CHAR for char in token):
                return bytes(_BYTE_OF_CHAR[char] for char in token)
            return token.encode()
        if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for step in self._steps:
            token = step(token)
        return token.encode()


def _unsupported(kind: str) -> ModelLoadError:
    return ModelLoadError(
        f"the tokenizer's decoder ({kind}) is not supported; supported: {_SUPPORTED}",
        param="tokenizer",
    )
