from __future__ import annotations

import json
from typing import Any

import pytest
from cli_result import RunCli
from fake_llm import FakeLLM

from pico_vllm.outputs import Logprob


def strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_the_answer_goes_to_stdout_and_the_rest_to_stderr(run_cli: RunCli) -> None:
    """A pipe gets the text alone, with one newline at its end."""
    code, out, err = run_cli("generate", "hello", "there", llm=(llm := FakeLLM("Hi", "!")))
    assert (code, out) == (0, "Hi!\n")
    assert llm.prompts == [[("user", "hello there")]]
    assert err.startswith("[11 prompt tokens; 2 tokens, first after ") and "; stop]" in err
    assert "\x1b" not in err


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_the_prompt_may_come_from_stdin(run_cli: RunCli, arguments: list[str]) -> None:
    """Without a prompt, or with -, stdin is the prompt, but for its last newline."""
    llm = FakeLLM("ok")
    assert run_cli("generate", "--raw", *arguments, stdin="é\n\n".encode(), llm=llm).code == 0
    assert llm.prompts == ["é\n"]


@pytest.mark.parametrize(
    ("stdin", "message"),
    [(b"", "error: the prompt is empty"), (b"a\xff", "error: stdin is not UTF-8 text at byte 1")],
)
def test_unusable_stdin_is_refused(run_cli: RunCli, stdin: bytes, message: str) -> None:
    """Nothing and bytes that are no text are errors."""
    code, out, err = run_cli("generate", stdin=stdin, llm=FakeLLM("ok"))
    assert (code, out) == (1, "") and err.startswith(message)


def test_a_model_without_template_gets_the_text_as_it_is(run_cli: RunCli) -> None:
    """The template is used where there is one; --raw goes without it."""
    plain, chat = FakeLLM("ok", has_template=False), FakeLLM("ok")
    run_cli("generate", "a", llm=plain)
    run_cli("generate", "--raw", "a", llm=chat)
    run_cli("generate", "--chat", "a", llm=chat)
    assert plain.prompts == ["a"]
    assert chat.prompts == ["a", [("user", "a")]]


def test_logprobs_follow_the_answer_on_stderr(run_cli: RunCli) -> None:
    """A line a token: the chosen one first, then the likely ones; text that would break the line
    or the terminal is escaped."""
    llm = FakeLLM("a", "b")
    llm.logprobs = {
        5: Logprob(logprob=-1.25, rank=2, decoded_token="é\n"),
        7: Logprob(logprob=-0.5, rank=1, decoded_token="\x1b["),
    }
    code, out, err = run_cli("generate", "--logprobs", "1", "x", llm=llm)
    line = '  -1.2500 "é\\n"     -0.5000 "\\u001b["\n'
    assert (code, out) == (0, "ab\n") and err.startswith(line * 2 + "[1 prompt tokens; ")
    err = run_cli("generate", "--logprobs", "1", "--n", "2", "x", llm=llm).err
    assert err.startswith("[0]\n" + line * 2 + "[1]\n" + line * 2)
    assert "-1.25" not in run_cli("generate", "--json", "--logprobs", "1", "x", llm=llm).err


def test_json_is_one_strict_object(run_cli: RunCli) -> None:
    """All fields are there; speeds that one token cannot tell are null."""
    result = run_cli("generate", "--json", "a\x9bb", llm=FakeLLM("\x1b[31m"))
    found = strict(result.out)
    assert result.err == "" and result.out.count("\n") == 1 and result.out.isascii()
    assert found["prompt"] == "a\x9bb" and found["prompt_token_ids"] == [0, 0, 0]
    assert found["outputs"] == [
        {
            "index": 0,
            "text": "\x1b[31m",
            "token_ids": [0],
            "finish_reason": "stop",
            "stop_reason": None,
            "logprobs": None,
        }
    ]
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 1}
    assert found["timings"].keys() == {"load_s", "ttft_ms", "decode_tok_s"}
    assert found["timings"]["decode_tok_s"] is None


def test_several_answers_are_printed_one_after_the_other(run_cli: RunCli) -> None:
    """Answers that grow side by side are not mixed."""
    assert run_cli("generate", "--n", "2", "a", llm=FakeLLM("x", "y")).out == "[0] xy\n[1] xy\n"


def test_a_failed_step_is_an_error(run_cli: RunCli) -> None:
    """What the engine could not finish is not sold as an answer."""
    llm = FakeLLM("x")
    llm.finish_reason = "error"
    code, _, err = run_cli("generate", "a", llm=llm)
    assert code == 1 and err.startswith("error: the engine failed")
