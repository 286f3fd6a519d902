from __future__ import annotations

import io

from pico_vllm.engine.progress import ProgressLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def test_a_terminals_line_is_overwritten() -> None:
    """At most ten times a second; prompts, output tokens a second, the time left; and no rest of a
    longer line stays."""
    stream, clock = Terminal(), Clock()
    line = ProgressLine(200, stream=stream, clock=clock)
    clock.now_s = 50.05
    assert not line.is_due()
    clock.now_s = 54.0
    assert line.is_due()
    line.show(50, 2000)
    assert not line.is_due()
    clock.now_s = 60.0
    line.close(200, 9000)
    first, last = stream.getvalue().split("\r")[1:]
    assert first == "[#####---------------]  25% 50/200 prompts, 500 tok/s, 12 s left"
    assert last.rstrip() == "[####################] 100% 200/200 prompts, 900 tok/s, 10.0 s"
    assert len(last) == len(first) + 1 and last.endswith("\n")


def test_a_file_gets_whole_lines_now_and_then() -> None:
    """Every half minute, and at the end; no control characters."""
    stream, clock = io.StringIO(), Clock()
    line = ProgressLine(4, stream=stream, clock=clock)
    clock.now_s = 79.0
    assert not line.is_due()
    clock.now_s = 80.0
    assert line.is_due()
    line.show(0, 300)
    clock.now_s = 90.0
    line.close(1, 400)
    assert stream.getvalue().split("\n") == [
        "[--------------------]   0% 0/4 prompts, 10 tok/s",
        "[#####---------------]  25% 1/4 prompts, 10 tok/s, 120 s left",
        "",
    ]


def test_a_call_without_prompts() -> None:
    """No division by the nothing that was done in no time."""
    stream = io.StringIO()
    ProgressLine(0, stream=stream, clock=Clock()).close(0, 0)
    assert stream.getvalue() == "[--------------------]   0% 0/0 prompts, 0 tok/s\n"
