"""Tables and records on their way out."""

from __future__ import annotations

import ast
import io
import os
import resource
import sys
from pathlib import Path

import pytest

from pico_vllm import cli
from pico_vllm.bench.record import append_record
from pico_vllm.cli import main
from pico_vllm.cli.lines import Lines, print_table
from pico_vllm.errors import ConfigError

COLUMNS = [f"a_column_with_a_name_{number}" for number in range(40)]
RECORDING = (
    ["bench", "engine"],
    ["bench", "kernels"],
    ["bench", "ladder"],
    ["bench", "load"],
    ["bench", "interference"],
    ["bench", "prefix"],
    ["cache", "trace.jsonl"],
)


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_whole_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many columns and however long a cell, one line a row and nothing left out; a terminal
    is as wide as it is."""
    line = {name: f"{name}={'x' * 60}" for name in COLUMNS}
    screen, pipe = Screen(), io.StringIO()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    for stream in (screen, pipe):
        monkeypatch.setattr(sys, "stdout", stream)
        print_table(COLUMNS, [line, line])
    rows = [row for row in pipe.getvalue().splitlines() if "=" in row]
    assert len(rows) == 2 and all(value in row for row in rows for value in line.values())
    assert all(name in pipe.getvalue().splitlines()[1] for name in COLUMNS)
    assert max(map(len, screen.getvalue().splitlines())) <= 80


@pytest.mark.parametrize("command", RECORDING, ids=" ".join)
def test_a_record_that_cannot_be_written(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Is refused before anything is looked for, loaded or measured, with its name and the way
    out."""
    (tmp_path / "file").touch()
    for path, reason in (
        (tmp_path, "Is a directory"),
        (tmp_path / "file" / "r.jsonl", "Not a directory"),
        (Path("/proc/r.jsonl"), "No such file or directory"),
        (tmp_path / ("r" * 300), "File name too long"),
    ):
        model = ["--model", "nonsense"]
        assert main.run([*command, *model, "--record", str(path)]) == 1
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err == (
            f"error: --record {path} cannot be written to: {reason}; name a file in a folder of "
            "your own\n"
        )
    assert sorted(os.listdir(tmp_path)) == ["file"]


def test_a_record_is_not_there_before_its_first_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that can be written is left as it is, and so is a pipe, by a command that then fails."""
    new, old, pipe = tmp_path / "new" / "r.jsonl", tmp_path / "old.jsonl", tmp_path / "pipe"
    old.write_text("{}\n")
    os.mkfifo(pipe)
    for path in (new, old, pipe):
        assert main.run(["cache", "none.jsonl", "--num-kv-blocks", "9", "--record", str(path)]) == 1
        assert "error: trace none.jsonl cannot be read" in capsys.readouterr().err
    assert not new.exists() and old.read_text() == "{}\n"
    lines = Lines(["a"], is_json=False, record=new)
    lines.add({"a": 1})
    assert new.read_text() == '{"a": 1}\n'


def test_a_record_may_be_a_link_to_what_is_not_there_yet(tmp_path: Path) -> None:
    """As a file that is not there: checked, left as it is, and made by the first line."""
    link, target = tmp_path / "link.jsonl", tmp_path / "away" / "r.jsonl"
    link.symlink_to(target)
    assert main.run(["cache", "none.jsonl", "--num-kv-blocks", "9", "--record", str(link)]) == 1
    assert link.is_symlink() and not target.exists()
    Lines(["a"], is_json=False, record=link).add({"a": 1})
    assert target.read_text() == '{"a": 1}\n'


def test_a_disk_that_fills_up_costs_no_figure(capsys: pytest.CaptureFixture[str]) -> None:
    """What was measured is printed, then how much of it the record lacks."""
    lines = Lines(["a"], is_json=False, record=Path("/dev/full"))
    lines.add({"a": 1234})
    lines.add({"a": 5678})
    lines.show()
    table = capsys.readouterr().out
    assert "1234" in table and "5678" in table
    with pytest.raises(
        ConfigError, match=r"/dev/full took 0 of 2 lines: No space left.*; make room"
    ):
        lines.end()


def test_an_error_leaves_the_table_of_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """The lines until then, as rows of their own where those are asked for; none without lines."""
    for rows_of, expected in ((None, "1234"), (lambda lines: [{"a": len(lines)}], "1")):
        lines = Lines(["a"], is_json=False, record=None)
        with pytest.raises(RuntimeError, match="planted"), lines.shown(rows_of):
            lines.add({"a": 1234})
            raise RuntimeError("planted")
        assert expected in capsys.readouterr().out
    with pytest.raises(RuntimeError), Lines(["a"], is_json=False, record=None).shown():
        raise RuntimeError
    assert not capsys.readouterr().out


def test_no_part_of_a_line_is_left_where_room_ends(tmp_path: Path) -> None:
    """The lines before are kept as they were, and the next one comes whole."""
    path = tmp_path / "r.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    append_record(path, {"a": 1})
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            append_record(path, {"a": "longer than that"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == '{"a": 1}\n'
    append_record(path, {"a": 2})
    assert path.read_text() == '{"a": 1}\n{"a": 2}\n'


def test_commands_end_their_lines_last() -> None:
    """After whatever else they show or plot of them."""
    num_commands = 0
    for path in Path(cli.__file__).parent.glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(function, ast.FunctionDef):
                continue
            if "= Lines(" in ast.unparse(function):
                num_commands += 1
                assert ast.unparse(function).rstrip().endswith("lines.end()"), function.name
    assert num_commands == len(RECORDING)
