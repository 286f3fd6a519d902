from __future__ import annotations

import gc
import io
import sys
import weakref

import pytest

from pico_vllm.bench.memory import free_memory
from pico_vllm.cli import terminal
from pico_vllm.cli.terminal import printable, write_answer
from pico_vllm.config.engine import EngineConfig


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("tab\tand\nnewline", "tab\tand\nnewline"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("\x9b31m \x7f \x00", "\\x9b31m \\x7f \\x00"),
        ("a\r\nb\rc", "a\nbc"),
        ("žluťoučký 🐎 \xa0", "žluťoučký 🐎 \xa0"),
    ],
)
def test_control_characters_become_visible(text: str, shown: str) -> None:
    """Only newline and tab pass; other scripts are untouched."""
    assert printable(text) == shown


def test_answers_are_made_harmless_for_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file gets what the model wrote, a terminal nothing that drives it."""
    screen, file = Screen(), io.StringIO()
    for stream in (screen, file):
        monkeypatch.setattr(sys, "stdout", stream)
        write_answer("\x1b[31mred")
    assert (screen.getvalue(), file.getvalue()) == ("\\x1b[31mred", "\x1b[31mred")


def test_each_phase_of_a_start_has_its_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars stand one below the other and are gone when the model is there."""
    from rich.console import Console

    from pico_vllm.engine import llm

    screen = io.StringIO()
    monkeypatch.setattr(
        terminal, "console", lambda stderr: Console(file=screen, force_terminal=True, width=80)
    )

    class Loaded:
        def __init__(self, *, model: str, on_progress: llm.OnProgress, **settings: object) -> None:
            on_progress("loading weights", 3, 290)
            on_progress("loading weights", 290, 290)
            on_progress("profiling memory", 1, 1)

    monkeypatch.setattr(llm, "LLM", Loaded)
    assert isinstance(terminal.load_llm(EngineConfig(model="some/model")), Loaded)
    shown = screen.getvalue()
    assert shown.index("some/model: loading weights") < shown.index("some/model: profiling memory")
    assert "290/290" in shown and "1/1" in shown


def test_a_loaded_model_is_no_garbage_and_its_end_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collections pass by what was there after loading, until memory is wanted for another: what
    nobody refers to any more is collected then, circles included."""
    from pico_vllm.engine import llm

    class Loaded:
        def __init__(self, **settings: object) -> None:
            self.itself = self

    monkeypatch.setattr(llm, "LLM", Loaded)
    loaded = terminal.load_llm(EngineConfig(model="some/model"))
    assert gc.get_freeze_count() > 0 and gc.get_threshold()[0] == terminal.YOUNG_OBJECTS
    model = weakref.ref(loaded)
    del loaded
    gc.collect()
    assert model() is not None
    free_memory()
    assert model() is None and gc.get_freeze_count() == 0
