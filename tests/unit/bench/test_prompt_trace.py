from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pico_vllm.bench.prompt_trace import TraceRequest, check_trace, read_trace
from pico_vllm.errors import ConfigError


def read(path: Path, *lines: Any, tokenizer: Any = None) -> list[TraceRequest]:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text, encoding="utf-8")
    return read_trace(path, tokenizer=tokenizer, default_output_tokens=7)


def test_what_a_line_may_say(tmp_path: Path) -> None:
    """Ids, answer or its length, salt and priority, in order of arrival; other keys are passed
    over."""
    first, second, third = read(
        tmp_path / "t.jsonl",
        {"prompt_token_ids": [4, 5], "output_tokens": 3, "arrival_s": 2, "user": "x"},
        "",
        {"prompt_token_ids": [1], "output": [8, 9], "output_tokens": 100, "salt": "a"},
        {"prompt_token_ids": [2, 3], "priority": -4},
    )
    assert (first.prompt.tolist(), first.params.cache_salt, first.arrival_s) == ([1], "a", 0.0)
    # The answer itself says more than its length.
    assert first.output is not None and first.output.tolist() == [8, 9]
    assert (first.params.max_tokens, first.total_tokens) == (2, 3)
    assert (second.params.max_tokens, second.output, second.params.priority) == (7, None, -4)
    assert (third.prompt.tolist(), third.params.max_tokens, third.arrival_s) == ([4, 5], 3, 2.0)


class BytesTokenizer:
    vocab_size = 256

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [0] * add_special_tokens + list(text.encode())

    def encode_chat(self, messages: Any) -> list[int]:
        return [1, *messages[0]["content"].encode()]


def test_text(tmp_path: Path) -> None:
    """Only a prompt gets special tokens; an answer goes on after it."""
    prompt, messages = read(
        tmp_path / "t.jsonl",
        {"prompt": "ab", "output": "c"},
        {"messages": [{"role": "user", "content": "d"}]},
        tokenizer=BytesTokenizer(),
    )
    assert prompt.prompt.tolist() == [0, 97, 98] and messages.prompt.tolist() == [1, 100]
    assert prompt.output is not None and prompt.output.tolist() == [99]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", ", is not JSON: Expecting property name"),
        ("[" * 100_000, ", is not JSON: "),
        ([1], ": [1] is no object; give prompt_token_ids or prompt or messages"),
        ({}, ": has none of them; give one of prompt_token_ids, prompt, messages"),
        ({"prompt": "a", "messages": []}, ": has prompt and messages; give one of "),
        ({"prompt": "a"}, ": prompt needs a tokenizer and none was given; name one by --model"),
        ({"prompt": 5}, ": prompt is 5; give text, or ids as prompt_token_ids"),
        ({"prompt_token_ids": []}, ": prompt_token_ids is []; at least one token"),
        ({"prompt_token_ids": "12"}, ": prompt_token_ids is '12'; at least one token"),
        ({"prompt_token_ids": [1, -2]}, ": prompt_token_ids has -2 at index 1; ids go from 0 to "),
        ({"prompt_token_ids": [True]}, ": prompt_token_ids has True at index 0; ids go from"),
        ({"prompt_token_ids": [2**31]}, ": prompt_token_ids has 2147483648 at index 0; ids go"),
        ({"prompt_token_ids": [1], "output": []}, ": output is []; at least one token is needed"),
        (
            {"prompt_token_ids": [1], "output_tokens": 0},
            ": output_tokens is 0; give a whole number",
        ),
        ({"prompt_token_ids": [1], "arrival_s": -1}, ": arrival_s is -1; give seconds from 0 up"),
        ('{"prompt_token_ids": [1], "arrival_s": NaN}', ": arrival_s is nan; give seconds from 0"),
        (
            {"prompt_token_ids": [1], "salt": 3},
            ": salt must be a string of 1 to 1024 whole characters",
        ),
        ({"prompt_token_ids": [1], "priority": "high"}, ": priority must be a whole number from"),
    ],
)
def test_a_line_that_is_no_request(tmp_path: Path, line: Any, message: str) -> None:
    """File and line, the value, and the way out."""
    path = tmp_path / "t.jsonl"
    with pytest.raises(ConfigError) as caught:
        read(path, {"prompt_token_ids": [1]}, line)
    assert caught.value.message.startswith(f"{path}, line 2{message}")


def test_a_file_that_is_no_trace(tmp_path: Path) -> None:
    """Missing, empty, or no text."""
    for content, message in ((None, "No such file"), (b"\n \n", "is empty"), (b"\xff", "UTF-8")):
        path = tmp_path / "t.jsonl"
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError, match=message) as caught:
            read_trace(path, tokenizer=None, default_output_tokens=1)
        assert str(path) in caught.value.message


def test_ids_that_the_tokenizer_does_not_know(tmp_path: Path) -> None:
    """With a model its vocabulary is the limit."""
    line = {"prompt_token_ids": [255, 256]}
    with pytest.raises(ConfigError, match="has 256 at index 1; ids go from 0 to 255"):
        read(tmp_path / "t.jsonl", line, tokenizer=BytesTokenizer())


def test_a_request_that_does_not_fit(tmp_path: Path) -> None:
    """Prompt and answer together, against the limit that is named."""
    path = tmp_path / "t.jsonl"
    requests = read(path, {"prompt_token_ids": [1] * 10, "output_tokens": 6})
    check_trace(requests, 16, "the pool", "raise --num-kv-blocks")
    with pytest.raises(ConfigError) as caught:
        check_trace(requests, 15, "the pool", "raise --num-kv-blocks")
    assert caught.value.message == (
        f"{path}, line 1: 10 tokens of prompt and 6 of answer are more than the pool of 15 tokens; "
        "raise --num-kv-blocks"
    )
