"""pico-vllm generate: one prompt, one answer."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pico_vllm.cli.answer import Answer, fit_max_tokens, stream_answer
from pico_vllm.cli.options import takes_config
from pico_vllm.cli.terminal import load_llm, note, write_answer
from pico_vllm.config.engine import EngineConfig
from pico_vllm.errors import EmptyPromptError, InvalidRequestError
from pico_vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pico_vllm.engine.llm import LLM
    from pico_vllm.outputs import CompletionDelta, CompletionOutput, Logprob


@takes_config
def generate(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PROMPT]...", help="The prompt; read from stdin where there is none, or -."
        ),
    ] = None,
    is_chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Send the prompt as a user's message through the chat template, or as it is.",
            show_default="chat where the model has a template",
        ),
    ] = None,
    is_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the text.")
    ] = False,
    *,
    engine: EngineConfig,
    sampling: SamplingParams,
) -> None:
    """Answer one prompt and print the answer as it comes."""
    prompt = _read_stdin() if words in (None, [], ["-"]) else _from_arguments(words or [])
    if not prompt:
        raise EmptyPromptError("the prompt is empty; give it as an argument or on stdin")
    start = time.perf_counter()
    with load_llm(engine) as llm:
        load_s = time.perf_counter() - start
        prompt_token_ids = _encode(llm, prompt, is_chat)
        if sampling.max_tokens is None:
            sampling = fit_max_tokens(llm, prompt_token_ids, sampling)
        is_streamed = not is_json and sampling.n == 1

        def show(delta: CompletionDelta) -> None:
            if is_streamed and delta.text:
                write_answer(delta.text)

        answer = stream_answer(llm, prompt_token_ids, sampling, show)
    if is_json:
        described = {"model": engine.model, "prompt": prompt, **_describe(answer, load_s)}
        print(json.dumps(described, allow_nan=False))
        return
    if is_streamed:
        write_answer("\n")
    else:
        for output in answer.outputs:
            write_answer(f"[{output.index}] {output.text}\n")
    if sampling.logprobs is not None:
        _show_logprobs(answer.outputs)
    reasons = ", ".join(str(output.finish_reason) for output in answer.outputs)
    note(f"[{len(prompt_token_ids)} prompt tokens; {answer.speed()}; {reasons}]")


def _show_logprobs(outputs: list[CompletionOutput]) -> None:
    """A line a token on stderr: its log-probability and text, then the most likely ones'."""
    for output in outputs:
        if len(outputs) > 1:
            note(f"[{output.index}]")
        for entries in output.logprobs or []:
            shown = [
                f"{each.logprob:9.4f} {json.dumps(each.decoded_token, ensure_ascii=False)}"
                for each in entries.values()
            ]
            note("   ".join(shown))


def _read_stdin() -> str:
    """All of stdin without its last newline: the one that echo adds is not part of the prompt."""
    if sys.stdin.isatty():
        note("reading the prompt from the terminal; Ctrl-D on an empty line ends it")
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"stdin is not UTF-8 text at byte {error.start}", param="prompt"
        ) from None


def _from_arguments(words: list[str]) -> str:
    prompt = " ".join(words)
    try:
        os.fsencode(prompt).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"the prompt is not UTF-8 text at byte {error.start}", param="prompt"
        ) from None
    return prompt


def _encode(llm: LLM, prompt: str, is_chat: bool | None) -> list[int]:
    tokenizer, window = llm.tokenizer, llm.engine.max_model_len
    if is_chat or (is_chat is None and tokenizer.chat_template is not None):
        return tokenizer.encode_chat([{"role": "user", "content": prompt}], max_tokens=window)
    tokenizer.check_text_length(prompt, window)
    return tokenizer.encode(prompt)


def _describe(answer: Answer, load_s: float) -> dict[str, Any]:
    return {
        "prompt_token_ids": answer.prompt_token_ids,
        "outputs": [_describe_output(output) for output in answer.outputs],
        "usage": {
            "prompt_tokens": len(answer.prompt_token_ids),
            "completion_tokens": answer.num_tokens,
        },
        "timings": {
            "load_s": round(load_s, 4),
            "ttft_ms": None if answer.ttft_s is None else round(answer.ttft_s * 1e3, 3),
            "decode_tok_s": None if answer.decode_tok_s is None else round(answer.decode_tok_s, 3),
        },
    }


def _describe_output(output: CompletionOutput) -> dict[str, Any]:
    return {
        "index": output.index,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "logprobs": None
        if output.logprobs is None
        else [_describe_logprobs(entries) for entries in output.logprobs],
    }


def _describe_logprobs(entries: dict[int, Logprob]) -> list[dict[str, Any]]:
    """The chosen token first, then the most likely ones."""
    return [
        {
            "token_id": token_id,
            "token": entry.decoded_token,
            "logprob": entry.logprob,
            "rank": entry.rank,
        }
        for token_id, entry in entries.items()
    ]
