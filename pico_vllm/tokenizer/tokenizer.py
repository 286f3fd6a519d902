"""Text to token ids and back, for one model: the door of this room.

    text ----- encode -------> ids    special-token text is parsed, or not, as the caller says
    messages - encode_chat --> ids    users' words never become special tokens
    ids ------ decode -------> text   the same as IncrementalDetokenizer's, all at once

Read from a model directory or from GGUF metadata; both end in the `tokenizers` library.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import tokenizers

from pico_vllm.errors import (
    ChatTemplateError,
    ContextLengthError,
    InvalidRequestError,
    ModelLoadError,
    TokenOutOfRangeError,
    show,
)
from pico_vllm.tokenizer.chat_template import ChatTemplate, check_messages
from pico_vllm.tokenizer.from_directory import read_directory
from pico_vllm.tokenizer.from_gguf import read_gguf_metadata
from pico_vllm.tokenizer.special_text import SpecialText, StandIns
from pico_vllm.tokenizer.token_bytes import TokenDecoder
from pico_vllm.tokenizer.tokenizer_parts import TokenizerParts


class Tokenizer:
    """Immutable after construction; threads may share one."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._backend = parts.backend
        self._prefix_ids = parts.prefix_ids
        self._suffix_ids = parts.suffix_ids
        self.bos_token_id = parts.bos_token_id
        self.eos_token_ids = parts.eos_token_ids
        """Ids that end a reply, by the tokenizer's files; generation_config.json may add some."""
        self.eos_token_id = parts.eos_token_ids[0] if parts.eos_token_ids else None
        self.chat_template = parts.chat_template
        self._template = (
            None
            if parts.chat_template is None
            else ChatTemplate(parts.chat_template, parts.special_tokens)
        )
        vocab = self._backend.get_vocab(with_added_tokens=True)
        if not vocab:
            raise ModelLoadError("the tokenizer has no tokens", param="tokenizer")
        self.vocab_size = max(vocab.values()) + 1
        """Number of ids that it can decode: the largest id + 1, added tokens included."""
        self.max_token_chars = max(map(len, vocab))
        """Longest token in characters (in bytes, which are no fewer, if it is byte-level)."""
        self._added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self._special_text = SpecialText(self._added[i].content for i in self.special_ids)
        self._token_decoder = TokenDecoder(_decoder_description(self._backend))
        self._token_bytes: dict[int, bytes] = {}
        self._plain: _PlainEncoder | None = None
        self._plain_lock = threading.Lock()

    @classmethod
    def from_directory(cls, path: str | PathLike[str]) -> Tokenizer:
        """Read a model directory: tokenizer.json, tokenizer_config.json, chat_template.jinja.

        Raises:
            ModelLoadError: a file missing, damaged or of a kind that is not supported, or custom
                code asked for.
        """
        return cls(read_directory(Path(path)))

    @classmethod
    def from_gguf_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build from the key-value pairs of a GGUF file, arrays as lists.

        Raises:
            ModelLoadError: keys missing, of the wrong type, contradictory, or of a kind that is
                not supported.
        """
        return cls(read_gguf_metadata(metadata))

    @property
    def strips_leading_space(self) -> bool:
        """Decoding drops the space that a SentencePiece tokenizer puts before a text."""
        return self._token_decoder.strips_leading_space

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Turn text into ids. No limit on its length: see `check_text_length`.

        `add_special_tokens` adds BOS and EOS where the tokenizer's files ask for them. With
        `parse_special`, the text of a special token such as `<|im_end|>` becomes that token;
        without, it is spelled out like any other text.

        Raises:
            InvalidRequestError: not a string, or with a lone surrogate; without `parse_special`, a
                text whose special-token text this tokenizer cannot spell out.
        """
        _check_text(text)
        if parse_special:
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        else:
            ids = self._plain_encoder().encode(text, add_special_tokens=add_special_tokens)
        if add_special_tokens:
            return [*self._prefix_ids, *ids, *self._suffix_ids]
        return list(ids)

    def encode_chat(
        self,
        messages: object,
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        parse_special_in_messages: bool = False,
        max_tokens: int | None = None,
        client_variables: Mapping[str, Any] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Render messages with the model's chat template and encode them.

        Special tokens come from the template alone: their text inside messages, tools and
        variables is spelled out. `parse_special_in_messages` gives up that protection, for callers
        who write special tokens into messages on purpose. Tokens that the tokenizer does not mark
        as special, as `<think>` of some models, are parsed everywhere.

        `max_tokens` refuses a prompt that cannot fit before it is encoded. Further keywords are
        variables of the template; those that a client names go into `client_variables`, where no
        name can reach the arguments of this method.

        Raises:
            InvalidRequestError: messages, tools or variables of the wrong shape, or variables that
                are set here.
            ChatTemplateError: no template, or the template refused or failed.
            ContextLengthError: see `check_text_length`.
        """
        own = {**variables, "add_generation_prompt": add_generation_prompt, "tools": tools}
        text, stand_ins = self._render(
            messages,
            None if parse_special_in_messages else self._special_text,
            {**_checked_variables(client_variables, {"messages", *own}), **own},
        )
        if max_tokens is not None:
            self.check_text_length(text, max_tokens)
        if stand_ins is None:
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        return self._plain_encoder().encode_rendered(text, stand_ins)

    def render_chat(self, messages: object, /, **variables: Any) -> str:
        """The prompt text, for reading only: it does not show who wrote a special text."""
        return self._render(messages, None, variables)[0]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Turn ids into text, bytes that form no character into U+FFFD.

        An id below `vocab_size` that names no token adds nothing.

        Raises:
            TokenOutOfRangeError: an id below 0 or at least `vocab_size`.
        """
        skipped = self.special_ids if skip_special_tokens else frozenset[int]()
        data = b"".join([self.token_bytes(i) for i in ids if i not in skipped])
        text = data.decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """What one id adds to the output, special tokens as their text."""
        data = self._token_bytes.get(token_id)
        if data is None:
            if not 0 <= token_id < self.vocab_size:
                raise TokenOutOfRangeError(
                    f"token id {token_id} is not between 0 and {self.vocab_size - 1}"
                )
            token = self._backend.id_to_token(token_id)
            data = b"" if token is None else self._token_decoder.to_bytes(token)
            self._token_bytes[token_id] = data
        return data

    def token_text(self, token_id: int) -> str:
        """One id as readable text, parts of characters as U+FFFD: for showing, not for joining."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def check_text_length(self, text: str, max_tokens: int) -> None:
        """Refuse a text that could not fit even if every token were the longest.

        Costs nothing, however long the text is.

        Raises:
            ContextLengthError: more than `max_tokens * max_token_chars` characters.
        """
        if len(text) > max_tokens * self.max_token_chars:
            raise ContextLengthError(
                f"the text has {len(text)} characters, and {max_tokens} tokens of at most "
                f"{self.max_token_chars} characters each cannot hold it; send a shorter text",
                param="prompt",
            )

    def close(self) -> None:
        """End the process that renders templates; a later chat starts another."""
        if self._template is not None:
            self._template.close()

    def _render(
        self, messages: object, hidden: SpecialText | None, variables: Mapping[str, Any]
    ) -> tuple[str, StandIns | None]:
        """The rendered text, users' special texts in it with the stand-ins given beside it."""
        if self._template is None:
            raise ChatTemplateError(
                "this model has no chat template; send a prompt instead of messages",
                param="messages",
            )
        checked = check_messages(messages)
        if hidden is None:
            return self._template.render(checked, **variables), None
        stand_ins = StandIns(_all_text([checked, variables]))
        try:
            text = self._template.render(
                hidden.hide(checked, stand_ins), **hidden.hide(dict(variables), stand_ins)
            )
        except ChatTemplateError as error:
            raise ChatTemplateError(stand_ins.reveal(error.message), param=error.param) from None
        return text, stand_ins

    def _plain_encoder(self) -> _PlainEncoder:
        """Made by the first who needs it: a second copy of the vocabulary."""
        with self._plain_lock:
            if self._plain is None:
                specials = {i: token for i, token in self._added.items() if token.special}
                self._plain = _PlainEncoder(self._backend, specials)
            return self._plain


class _PlainEncoder:
    """A copy of the backend that spells out special-token text.

    It knows each special token under an alias that nobody can guess, so that one call encodes a
    text in which some special texts are tokens (written as their alias) and others are words, with
    the library's own rules for the text between them.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, specials: Mapping[int, tokenizers.AddedToken]
    ) -> None:
        self._backend = tokenizers.Tokenizer.from_str(backend.to_str())
        self._backend.encode_special_tokens = True
        secret = secrets.token_hex(16)
        self._alias_of = {
            token.content: f"<{secret}-{token_id}>" for token_id, token in specials.items()
        }
        self._backend.add_tokens(
            [
                tokenizers.AddedToken(
                    self._alias_of[token.content],
                    special=False,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    single_word=token.single_word,
                    normalized=token.normalized,
                )
                for token in specials.values()
            ]
        )
        self._id_of_alias = {
            self._backend.token_to_id(self._alias_of[token.content]): token_id
            for token_id, token in specials.items()
        }
        # A text that the vocabulary cannot spell gives the unknown token, which may be marked
        # special.
        unknown_id = backend.token_to_id(getattr(backend.model, "unk_token", None) or "")
        self._forbidden_ids = frozenset(specials) - {unknown_id}
        longest_first = sorted(map(re.escape, self._alias_of), key=len, reverse=True)
        self._special = re.compile("|".join(longest_first) or "(?!)")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        encoding = self._backend.encode(text, add_special_tokens=False)
        self._check(encoding.ids)
        if add_special_tokens:
            encoding = self._backend.post_process(encoding, add_special_tokens=True)
        return list(encoding.ids)

    def encode_rendered(self, text: str, stand_ins: StandIns) -> list[int]:
        """Special texts without a stand-in become their tokens, the others words."""
        aliased = self._special.sub(lambda match: self._alias_of[match[0]], text)
        ids = self._backend.encode(stand_ins.reveal(aliased), add_special_tokens=False).ids
        self._check(ids)
        return [self._id_of_alias.get(i, i) for i in ids]

    def _check(self, ids: Sequence[int]) -> None:
        """Some vocabularies make a special token of plain text: refusing is all that is left."""
        if not self._forbidden_ids.isdisjoint(ids):
            raise InvalidRequestError(
                "the text contains that of a special token, which this tokenizer cannot spell out; "
                "remove it",
                param="prompt",
            )


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise InvalidRequestError("the text must be a string", param="prompt")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the text holds a lone surrogate at character {error.start}, half of a UTF-16 "
                "pair, which is not a character",
                param="prompt",
            ) from None


def _checked_variables(variables: object, taken: set[str]) -> Mapping[str, Any]:
    if variables is None:
        return {}
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise InvalidRequestError(
            "chat_template_kwargs must map names of the template's variables to JSON values, not "
            f"{show(variables)}",
            param="chat_template_kwargs",
        )
    for name in variables:
        if name in taken:
            raise InvalidRequestError(
                f"chat_template_kwargs names {name}, which is set for each conversation; leave it "
                "out",
                param="chat_template_kwargs",
            )
    return variables


def _all_text(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise InvalidRequestError(
            "the messages, tools or variables are nested too deeply", param="messages"
        ) from None
    except (TypeError, ValueError):
        raise InvalidRequestError(
            "the messages, tools and variables may hold only JSON values", param="messages"
        ) from None


def _decoder_description(backend: tokenizers.Tokenizer) -> dict[str, Any] | None:
    """The decoder as JSON; asking it alone saves writing out the whole vocabulary."""
    if backend.decoder is None:
        return None
    description: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    return description
