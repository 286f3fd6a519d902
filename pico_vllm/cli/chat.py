"""pico-vllm chat: a conversation in the terminal."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Annotated, Self

import typer

from pico_vllm.cli.answer import fit_max_tokens, stream_answer
from pico_vllm.cli.options import takes_config
from pico_vllm.cli.terminal import load_llm, note, print_error, write_answer
from pico_vllm.config.engine import EngineConfig
from pico_vllm.errors import (
    ChatTemplateError,
    ContextLengthError,
    InvalidRequestError,
    PicoError,
)
from pico_vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pico_vllm.engine.llm import LLM

HELP = """\
/reset        forget the conversation, keep the system text
/system TEXT  set the system text, from the next message on; without TEXT, drop it
/help         show this
/exit         leave; so does Ctrl-D
Ctrl-C stops an answer; what came so far stays in the conversation."""


@takes_config
def chat(
    system: Annotated[
        str | None, typer.Option("--system", help="System text that the conversation begins with.")
    ] = None,
    *,
    engine: EngineConfig,
    sampling: SamplingParams,
) -> None:
    """Talk with a model: /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves."""
    if sampling.n != 1:
        raise InvalidRequestError(
            f"n is {sampling.n}, but a conversation goes on from one answer; leave --n out",
            param="n",
        )
    with load_llm(engine) as llm:
        if llm.tokenizer.chat_template is None:
            raise ChatTemplateError(
                f"{engine.model} has no chat template; use pico-vllm generate --raw"
            )
        _Chat(llm, sampling, system).run()


class CtrlC:
    """While it is entered, the first Ctrl-C is only remembered, so that the engine's step is not
    cut in two; a second one, for a step that takes too long, interrupts as ever."""

    is_pressed = False

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _press(self, signal_number: int, frame: FrameType | None) -> None:
        if self.is_pressed:
            raise KeyboardInterrupt
        self.is_pressed = True


class _Chat:
    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self._turns: list[dict[str, str]] = []
        self._is_terminal = sys.stdin.isatty()

    def run(self) -> None:
        """Until /exit, the end of stdin, or Ctrl-C twice at the prompt."""
        if self._is_terminal:
            # Importing it gives input() a line editor and Up for earlier lines.
            with suppress(ImportError):
                import readline  # noqa: F401
            note(f"{self._llm.config.model} is ready; /help lists the commands, Ctrl-D leaves")
        num_interrupts = 0
        while True:
            try:
                line = input(">>> " if self._is_terminal else "").strip()
            except EOFError:
                if self._is_terminal:
                    write_answer("\n")
                return
            except KeyboardInterrupt:
                num_interrupts = 1 if _has_typed() else num_interrupts + 1
                write_answer("\n")
                if num_interrupts == 2:
                    return
                note("Ctrl-C once more leaves, as does Ctrl-D")
                continue
            num_interrupts = 0
            if line.partition(" ")[0] == "/exit":
                return
            if line.startswith("/"):
                self._obey(line)
            elif line:
                self._answer(line)

    def _obey(self, line: str) -> None:
        command, _, text = line.partition(" ")
        if command == "/reset":
            self._turns = []
            note("the conversation is forgotten")
        elif command == "/system":
            self._system = text.strip() or None
            note("the system text is set" if self._system else "the system text is dropped")
        elif command == "/help":
            note(HELP)
        else:
            note(f"there is no command {command}; /help lists them")

    def _answer(self, text: str) -> None:
        """Answer one message. If that fails, the conversation stays as it was before."""
        turns = [*self._turns, {"role": "user", "content": text}]
        try:
            with CtrlC() as ctrl_c:
                prompt_token_ids = self._encode(turns)
                answer = stream_answer(
                    self._llm,
                    prompt_token_ids,
                    fit_max_tokens(self._llm, prompt_token_ids, self._params),
                    on_delta=lambda delta: write_answer(delta.text),
                    is_stopped=lambda: ctrl_c.is_pressed,
                )
        except ContextLengthError as error:
            print_error(
                f"the conversation does not fit: {error.message}; /reset starts a new one, "
                "nothing of this one is lost"
            )
            return
        except PicoError as error:
            write_answer("\n")
            print_error(error.message)
            return
        output = answer.outputs[0]
        write_answer("\n")
        if output.text:
            self._turns = [*turns, {"role": "assistant", "content": output.text}]
        end = "" if output.finish_reason == "stop" else f", {output.finish_reason or 'stopped'}"
        note(f"[{answer.speed()}{end}]")

    def _encode(self, turns: list[dict[str, str]]) -> list[int]:
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return self._llm.tokenizer.encode_chat(
            [*system, *turns], max_tokens=self._llm.engine.max_model_len
        )


def _has_typed() -> bool:
    """Whether the line that Ctrl-C cancelled had text in it, where a line editor knows."""
    editor = sys.modules.get("readline")
    return editor is not None and bool(editor.get_line_buffer())
