"""Every exception that a user can meet, and what it tells them.

    PicoError                     code and param, as the body of an OpenAI-style error carries them
    ├── InvalidRequestError       the caller can fix it: one request is refused, no other touched
    │   ├── ContextLengthError    prompt, or prompt + max_tokens, does not fit the window
    │   ├── EmptyPromptError      no token to start from
    │   ├── TokenOutOfRangeError  an id that the tokenizer does not know
    │   └── ChatTemplateError     the template refused the messages, or ran out of its limits
    ├── ConfigError               an engine setting that cannot be used
    └── ModelLoadError            weights, config.json or tokenizer missing, damaged or unsupported

A step that fails is our fault and no exception for the caller: the requests in it end with finish
reason "error", all others go on.

A message names the value, the limit and the way out. It never carries a traceback, and never
another user's text.
"""

from __future__ import annotations

import reprlib


class PicoError(Exception):
    """Base of all errors raised on purpose.

    `code` is a stable machine-readable word, `param` the argument at fault (None where there is no
    single one), `status` the HTTP status a server answers with.
    """

    code = "internal_error"
    status = 500

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequestError(PicoError):
    code = "invalid_value"
    status = 400


class ContextLengthError(InvalidRequestError):
    code = "context_length_exceeded"


class EmptyPromptError(InvalidRequestError):
    code = "empty_prompt"


class TokenOutOfRangeError(InvalidRequestError):
    code = "token_out_of_range"


class ChatTemplateError(InvalidRequestError):
    code = "chat_template_error"


class ConfigError(PicoError):
    code = "invalid_config"
    status = 400


class ModelLoadError(PicoError):
    code = "model_load_failed"
    status = 500


_shorten = reprlib.Repr()
_shorten.maxstring = 80
_shorten.maxother = 80


def show(value: object) -> str:
    """A value as an error message quotes it: short, and safe for huge integers."""
    try:
        return _shorten.repr(value)
    except (ValueError, RecursionError):
        return "a value too large to print"


def show_name(name: str, limit: int = 80) -> str:
    """A name from a file as a message carries it: one line, valid UTF-8, not too long."""
    return name[:limit] if name.isprintable() else repr(name[:limit])
