"""Measuring as a user runs it, on the tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pico_vllm.bench.engine import KEYS
from pico_vllm.cli import main

ON_CPU = ["--device", "cpu", "--threads", "1", "--dtype", "float32"]


def json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_engine_lines_are_flat_and_kept(
    tiny_model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The start first, then the workload, each with all it depends on; the record holds the
    same."""
    record = tmp_path / "records" / "tiny.jsonl"
    command = ["bench", "engine", "--model", str(tiny_model.folder), "--only", "cpu-decode-b1"]
    options = ["--json", "--record", str(record), "--commit", "abc123", "--max-num-seqs", "2"]
    assert main.run([*command, *options, *ON_CPU]) == 0
    startup, decode = lines = json_lines(capsys.readouterr().out)
    assert json_lines(record.read_text()) == lines
    assert (startup["id"], decode["id"]) == ("startup", "cpu-decode-b1")
    assert startup["startup_s"] > 0 and startup["startup_from"] in ("process", "command")
    assert all(startup[key] is None for key in KEYS)
    assert decode["ms_per_step"] > 0 and 0 < decode["pct_of_read_limit"] < 100
    assert decode["host_ms_per_step"] is None  # on the CPU a launch is the computation itself
    for line in lines:
        assert line["commit"] == "abc123" and line["model"] == str(tiny_model.folder)
        assert line["config_max_num_seqs"] == 2 and line["config_dtype"] == "float32"
        assert line["threads"] == 1 and line["torch"] and line["cpu"] and line["gpu"] is None
        assert not any(isinstance(value, (dict, list)) for value in line.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "decode-b1"], "no workload decode-b1; there are cpu-decode-b1, "),
        (["--max-model-len", "100"], "cpu-decode-b1 needs 192 tokens a request and the window"),
        (["--max-num-seqs", "7"], "cpu-decode-b8 needs 8 requests at once and max_num_seqs is 7"),
    ],
)
def test_a_workload_that_cannot_run_is_refused_before_loading(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that names the way out; the model, which does not exist, was not looked for."""
    assert main.run(["bench", "engine", "--model", "nonsense", *options, *ON_CPU]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {message}") and captured.err.count("\n") == 1
