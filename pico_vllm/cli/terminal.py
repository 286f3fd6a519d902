"""What a person sees: text made harmless, notes on stderr, a bar while a model loads."""

from __future__ import annotations

import gc
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

    from pico_vllm.config.engine import EngineConfig
    from pico_vllm.engine.llm import LLM

# C0 but newline and tab, DEL, and C1, where one character begins an escape sequence too. Carriage
# returns go: alone they would overwrite the line, before a newline nobody misses them.
_HARMLESS: dict[int, str] = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"
} | {ord("\r"): ""}

YOUNG_OBJECTS = 20_000
"""With Python's 700 one collection took up to 7 ms while 256 requests were answered on an H200's
host, and one of all objects 230."""


def printable(text: str) -> str:
    """Control characters as their codes: who wrote the text shall not drive the terminal."""
    return text.translate(_HARMLESS)


def one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def write_answer(text: str) -> None:
    """To a terminal made harmless, to a pipe or file as the model wrote it; at once."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def drop(stream: TextIO) -> None:
    """Let what goes to a stream be lost: Python would fail once more when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def console(*, stderr: bool = False) -> Console:
    """A console that takes text as it is; tables in a pipe are wide, as nothing there is narrow."""
    from rich.console import Console

    found = Console(stderr=stderr, markup=False, highlight=False, emoji=False)
    if not found.is_terminal:
        found.width = 160
    return found


def note(text: str) -> None:
    """A dim line on stderr; no colour codes where that is no terminal. Lost where that cannot be
    written to: the answer matters more."""
    sys.stdout.flush()
    with suppress(OSError):
        console(stderr=True).print(printable(text), style="dim", soft_wrap=True)


def print_error(message: str) -> None:
    with suppress(OSError):
        sys.stdout.flush()
    with suppress(OSError):
        print(f"error: {one_line(message)}", file=sys.stderr, flush=True)


def load_llm(config: EngineConfig) -> LLM:
    """Load a model, showing a bar for each phase where stderr is a terminal.

    What is there then stays, so the garbage collector passes it by from now on, and looks at what
    comes when that is more than a step makes: in this process nobody else minds.
    """
    llm = _load(config)
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
    return llm


def _load(config: EngineConfig) -> LLM:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

    screen = console(stderr=True)
    if not screen.is_terminal:
        from pico_vllm.engine.llm import LLM

        return LLM(**_settings(config))
    with screen.status("starting torch"):
        from pico_vllm.engine.llm import LLM
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        console=screen,
        transient=True,
    )
    name = one_line(config.model)
    tasks: dict[str, TaskID] = {}

    def show(phase: str, num_done: int, num_in_all: int) -> None:
        # Not earlier: before the first tensor the Hub may show a bar of its own.
        progress.start()
        if phase not in tasks:
            tasks[phase] = progress.add_task(f"{name}: {phase}")
        progress.update(tasks[phase], completed=num_done, total=num_in_all)

    try:
        return LLM(**_settings(config), on_progress=show)
    finally:
        progress.stop()


def _settings(config: EngineConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}
