"""What a tokenizer is made of, wherever it was read from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import tokenizers

from pico_vllm.errors import ModelLoadError

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerParts:
    backend: tokenizers.Tokenizer
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end a reply, the main one first."""
    prefix_ids: tuple[int, ...] = ()
    """Put before a text that is encoded with special tokens, besides what the backend adds."""
    suffix_ids: tuple[int, ...] = ()
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Variables of the chat template: `bos_token` and so on, by their text."""


def call_backend(what: str, build: Callable[[], _T]) -> _T:
    """Run `build`; what the library raises, panics included, becomes a ModelLoadError."""
    try:
        return build()
    except (KeyboardInterrupt, SystemExit, GeneratorExit, ModelLoadError):
        raise
    except BaseException as error:  # a panic of the Rust side is no Exception
        reason = str(error)[:300]
        raise ModelLoadError(
            f"{what} cannot be used: {reason}; get the file again from its source",
            param="tokenizer",
        ) from None
