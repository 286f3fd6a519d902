"""Run the command line in this process, with a fake model."""

from __future__ import annotations

import io

import pytest
from cli_result import Result, RunCli

from pico_vllm.cli import chat, generate, main


@pytest.fixture
def run_cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCli:
    """`stdin` is what the command reads, `llm` what it gets instead of a loaded model."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str, stdin: bytes = b"", llm: object = None) -> Result:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        for command in (chat, generate):
            monkeypatch.setattr(command, "load_llm", lambda config: llm)
        code = main.run(list(arguments))
        return Result(code, *capsys.readouterr())

    return run
