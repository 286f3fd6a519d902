"""A trace of prompts from a file: JSON lines, each with a prompt and what else is known of it.

    {"prompt_token_ids": [1, 2, 3], "output_tokens": 20, "arrival_s": 0.5, "salt": "a"}
    {"prompt": "Once upon", "output": " a time"}
    {"messages": [{"role": "user", "content": "Hello"}], "output": [5, 6, 7]}

Text and messages need a tokenizer. Keys that are not known are passed over, so that the log of a
server can be taken as it is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pico_vllm.errors import ConfigError, InvalidRequestError, show
from pico_vllm.sampling_params import SamplingParams
from pico_vllm.tokenizer.tokenizer import Tokenizer

PROMPT_KEYS = ("prompt_token_ids", "prompt", "messages")
MAX_ID = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    where: str
    """File and line."""
    prompt: NDArray[np.int32]
    output: NDArray[np.int32] | None
    """The answer's ids, where the trace has them."""
    arrival_s: float
    params: SamplingParams
    """Salt, priority, and as max_tokens the length of the answer."""

    @property
    def total_tokens(self) -> int:
        assert self.params.max_tokens is not None
        return len(self.prompt) + self.params.max_tokens


def read_trace(
    path: Path, *, tokenizer: Tokenizer | None, default_output_tokens: int
) -> list[TraceRequest]:
    """In order of arrival; who brings no arrival_s is there at once.

    Raises:
        ConfigError: the file cannot be read or is empty, or a line is no request; with its number,
        what is wrong, and the way out.
    """
    found = [
        _Line(where, value, tokenizer).request(default_output_tokens)
        for where, value in _values(path)
    ]
    if not found:
        raise ConfigError(
            f'trace {path} is empty; give lines like {{"prompt_token_ids": [1, 2, 3]}}',
            param="trace",
        )
    return sorted(found, key=lambda request: request.arrival_s)


def check_trace(
    requests: Sequence[TraceRequest], max_tokens: int, limit: str, way_out: str
) -> None:
    """Refuse a request that could never run. limit: whose max_tokens are.

    Raises:
        ConfigError: its line, its need, the limit and the way out.
    """
    for request in requests:
        if request.total_tokens > max_tokens:
            raise ConfigError(
                f"{request.where}: {len(request.prompt)} tokens of prompt and "
                f"{request.params.max_tokens} of answer are more than {limit} of {max_tokens} "
                f"tokens; {way_out}",
                param="trace",
            )


def _values(path: Path) -> Iterator[tuple[str, object]]:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"trace {path} cannot be read: {reason}", param="trace") from None
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                reason = getattr(error, "msg", "it cannot be parsed")
                raise ConfigError(f"{where}, is not JSON: {reason}", param="trace") from None
            yield where, value


class _Line:
    """One value of the file, and how to complain of it."""

    def __init__(self, where: str, value: object, tokenizer: Tokenizer | None) -> None:
        self._where = where
        self._tokenizer = tokenizer
        if not isinstance(value, Mapping):
            raise self._error(f"{show(value)} is no object; give {' or '.join(PROMPT_KEYS)}")
        self._value: Mapping[str, Any] = value

    def request(self, default_output_tokens: int) -> TraceRequest:
        output = self._output()
        num_outputs = self._number("output_tokens", default_output_tokens, 1, MAX_ID)
        if output is not None:
            # What is known of the answer counts for more than how long it was.
            num_outputs = len(output)
        try:
            params = SamplingParams(
                max_tokens=num_outputs,
                cache_salt=self._value.get("salt"),
                priority=self._value.get("priority", 0),
            )
        except InvalidRequestError as error:
            raise self._error(error.message.replace("cache_salt", "salt")) from None
        return TraceRequest(
            where=self._where,
            prompt=self._prompt(),
            output=output,
            arrival_s=self._arrival_s(),
            params=params,
        )

    def _prompt(self) -> NDArray[np.int32]:
        given = [key for key in PROMPT_KEYS if key in self._value]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise self._error(f"has {found}; give one of {', '.join(PROMPT_KEYS)}")
        key = given[0]
        value = self._value[key]
        if key == "prompt_token_ids":
            return self._ids(key, value)
        if key == "prompt" and not isinstance(value, str):
            raise self._error(f"prompt is {show(value)}; give text, or ids as prompt_token_ids")
        return self._encode(key, value)

    def _output(self) -> NDArray[np.int32] | None:
        value = self._value.get("output")
        if value is None:
            return None
        if not isinstance(value, str):
            return self._ids("output", value)
        return self._encode("output", value)

    def _encode(self, key: str, value: Any) -> NDArray[np.int32]:
        if self._tokenizer is None:
            raise self._error(
                f"{key} needs a tokenizer and none was given; name one by --model, or give ids"
            )
        try:
            if key == "messages":
                token_ids = self._tokenizer.encode_chat(value)
            else:
                token_ids = self._tokenizer.encode(value, add_special_tokens=key == "prompt")
        except InvalidRequestError as error:
            raise self._error(error.message) from None
        return self._ids(key, token_ids)

    def _ids(self, key: str, value: object) -> NDArray[np.int32]:
        if not isinstance(value, list) or not value:
            raise self._error(f"{key} is {show(value)}; at least one token is needed")
        most = MAX_ID if self._tokenizer is None else self._tokenizer.vocab_size - 1
        if set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= most:
            return np.array(value, np.int32)
        index = next(
            i for i, each in enumerate(value) if type(each) is not int or not 0 <= each <= most
        )
        raise self._error(
            f"{key} has {show(value[index])} at index {index}; ids go from 0 to {most}"
        )

    def _number(self, key: str, default: int, low: int, high: int) -> int:
        value = self._value.get(key, default)
        if type(value) is not int or not low <= value <= high:
            raise self._error(
                f"{key} is {show(value)}; give a whole number from {low} to {high}, or leave it out"
            )
        return value

    def _arrival_s(self) -> float:
        value = self._value.get("arrival_s", 0.0)
        if type(value) not in (int, float) or not (math.isfinite(value) and value >= 0):
            raise self._error(
                f"arrival_s is {show(value)}; give seconds from 0 up, or leave it out"
            )
        return float(value)

    def _error(self, text: str) -> ConfigError:
        return ConfigError(f"{self._where}: {text}", param="trace")
