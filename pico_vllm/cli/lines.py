"""Figures on their way out: JSON lines or a table on stdout, and a record in a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from pico_vllm.cli.terminal import console, note
from pico_vllm.errors import ConfigError

IsJson = Annotated[bool, typer.Option("--json", help="Print one JSON line a figure.")]


def writable(option: str) -> Callable[[Path | None], Path | None]:
    """A check of that option, before anything is measured, for what could not be kept after."""

    def check(path: Path | None) -> Path | None:
        if path is None:
            return None
        try:
            if not path.exists():
                target = path.resolve()  # of a link, which may lead to what is not there yet
                if not target.parent.exists():
                    target.parent.mkdir(parents=True)
                target.open("x").close()
                target.unlink()
            elif path.is_file() or path.is_dir():
                path.open("a").close()
            # Whoever reads a pipe would take the end of this try for that of the record.
        except OSError as error:
            raise ConfigError(
                f"{option} {path} cannot be written to: {error.strerror}; name a file in a folder "
                "of your own",
                param=option.removeprefix("--"),
            ) from error
        return path

    return check


RecordFile = Annotated[
    Path | None,
    typer.Option(
        help="Append the lines to this file, with all they depend on.",
        callback=writable("--record"),
    ),
]
Commit = Annotated[
    str | None, typer.Option(help="The commit that is measured, where there is no git.")
]


MAX_PIPED_WIDTH = 100_000


class Lines:
    """Each line goes out as soon as it is measured: what was measured before an error is kept."""

    def __init__(self, columns: Sequence[str], *, is_json: bool, record: Path | None) -> None:
        """columns: of the table, those that no line fills are left out."""
        self._columns = columns
        self._is_json = is_json
        self._record = record
        self._record_error: OSError | None = None
        self._num_recorded = 0
        self.lines: list[dict[str, Any]] = []

    def add(self, line: dict[str, Any]) -> None:
        if self._is_json:
            print(json.dumps(line, allow_nan=False), flush=True)
        self.lines.append(line)
        if self._record is not None and self._record_error is None:
            from pico_vllm.bench.record import append_record

            try:
                append_record(self._record, line)
                self._num_recorded += 1
            except OSError as error:
                # Told at the end: what is measured until then is still printed.
                self._record_error = error

    @contextmanager
    def shown(
        self, rows_of: Callable[[Sequence[dict[str, Any]]], list[dict[str, Any]]] | None = None
    ) -> Iterator[None]:
        """Show the table at the end of this, of what there is by then if an error ends it. rows_of:
        the table's rows, made of the lines."""
        try:
            yield
        finally:
            if self.lines:
                self.show(None if rows_of is None else rows_of(self.lines))

    def show(self, rows: Sequence[dict[str, Any]] | None = None) -> None:
        """The table, of the lines if no other rows are given."""
        if not self._is_json:
            print_table(self._columns, self.lines if rows is None else rows)

    def end(self) -> None:
        """Say where the record is. Comes last: nothing that was measured shall miss for an error.

        Raises:
            ConfigError: the record lacks lines.
        """
        if self._record_error is not None:
            raise ConfigError(
                f"--record {self._record} took {self._num_recorded} of {len(self.lines)} lines: "
                f"{self._record_error.strerror}; make room or name another file, and measure again",
                param="record",
            ) from self._record_error
        if self._record is not None:
            note(f"[{len(self.lines)} lines appended to {self._record}]")


def print_table(columns: Sequence[str], lines: Sequence[dict[str, Any]]) -> None:
    """A row a line; columns that no line fills are left out."""
    from rich.table import Table

    used = [name for name in columns if any(line.get(name) is not None for line in lines)]
    table = Table()
    for name in used:
        values = [line.get(name) for line in lines]
        is_text = any(isinstance(value, str) for value in values)
        table.add_column(name, justify="left" if is_text else "right")
    for line in lines:
        table.add_row(*(cell(line.get(name)) for name in used))
    screen = console()
    if not screen.is_terminal:
        screen.width = MAX_PIPED_WIDTH  # a table takes of it what its rows do
    screen.print(table)


def cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if isinstance(value, float) else str(value)
