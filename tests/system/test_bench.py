"""Measuring as a user runs it, on the tiny model."""

from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pico_vllm.bench import engine as bench_engine
from pico_vllm.bench.engine import KEYS
from pico_vllm.bench.trace import STEP
from pico_vllm.cli import main
from pico_vllm.engine.model_runner import ModelRunner
from pico_vllm.errors import ConfigError
from pico_vllm.step import StepPlan

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


def test_lines_go_out_as_soon_as_they_are_measured(
    tiny_model: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was measured before an error is printed and kept."""
    seen = []

    def measure_one_and_fail(*_: Any, **__: Any) -> Any:
        seen.append(json_lines(capsys.readouterr().out))
        yield dict.fromkeys(KEYS) | {"id": "one"}
        seen.append(json_lines(capsys.readouterr().out))
        raise ConfigError("no second one", param="model")

    monkeypatch.setattr(bench_engine, "run_workloads", measure_one_and_fail)
    record = tmp_path / "tiny.jsonl"
    command = ["bench", "engine", "--model", str(tiny_model.folder), "--only", "cpu-decode-b1"]
    assert main.run([*command, "--json", "--record", str(record), *ON_CPU]) == 1
    assert [[line["id"] for line in lines] for lines in seen] == [["startup"], ["one"]]
    assert [line["id"] for line in json_lines(record.read_text())] == ["startup", "one"]


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


def test_profile_of_a_decode_step(
    tiny_model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every step does the same operations, their times add up, the trace is kept, and the engine
    holds no request thereafter."""
    trace = tmp_path / "new" / "trace.json"
    options = ["--batch", "3", "--context", "40", "--steps", "4", "--max-num-seqs", "4"]
    model = ["--model", str(tiny_model.folder), "--max-num-batched-tokens", "64"]
    command = ["profile", *model, *options, "--json", "--trace", str(trace), *ON_CPU]
    assert main.run(command) == 0
    (found,) = json_lines(capsys.readouterr().out)
    shares = found["shares"]
    assert sum(share["pct"] for share in shares) == pytest.approx(100, abs=0.5)
    assert 0 < found["busy_ms"] <= found["traced_ms_per_step"]
    assert found["replay_ms"] is None and found["host_ms_per_step"] is None
    assert found["works"] >= found["launches"] >= 1
    assert found["works"] == pytest.approx(sum(share["per_step"] for share in shares), abs=0.5)
    assert (found["batch"], found["context"], found["config_max_num_seqs"]) == (3, 40, 4)
    marks = [e for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == STEP]
    assert len(marks) == 4


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("batch", [0, 3])
def test_profile_of_a_step_with_prompts(
    tiny_model: Any,
    batch: int,
    overlap: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every step from the first timed one on has the same requests that decode and as many prompts,
    each computed whole."""
    launch, kinds = ModelRunner.launch, []

    def launched(runner: ModelRunner, plan: StepPlan) -> Any:
        kinds.append((plan.num_decodes, tuple(plan.query_lens.tolist())))
        return launch(runner, plan)

    monkeypatch.setattr(ModelRunner, "launch", launched)
    options = ["--batch", str(batch), "--context", "20", "--prompts", "2", "--prompt-tokens", "13"]
    sizes = ["--steps", "5", "--max-num-seqs", "8", "--overlap", overlap]
    command = ["profile", "--model", str(tiny_model.folder), *options, *sizes, "--json", *ON_CPU]
    assert main.run(command) == 0
    (found,) = json_lines(capsys.readouterr().out)
    assert (found["batch"], found["prompts"], found["prompt_tokens"]) == (batch, 2, 13)
    assert found["ms_per_step"] > 0 and 0 < found["busy_ms"] <= found["traced_ms_per_step"]
    alike = (batch, (*[1] * batch, 13, 13))
    # Timed, one to get the profiler going, recorded.
    assert kinds.count(alike) >= 5 + 1 + 5
    first = kinds.index(alike)
    assert kinds[first : first + 5 + 1 + 5] == [alike] * 11


@pytest.mark.parametrize(
    ("command", "call", "row"),
    [
        (["bench", "engine", "--only", "cpu-decode-b1"], 40, "startup"),
        (["profile", "--context", "8", "--steps", "4"], 30, None),
    ],
)
def test_a_step_that_fails_is_named_and_no_figure(
    tiny_model: Any,
    command: list[str],
    call: int,
    row: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line says what failed and what helps, and what was measured before it is shown."""
    launch, calls = ModelRunner.launch, itertools.count(1)

    def failing(runner: ModelRunner, plan: StepPlan) -> Any:
        if next(calls) >= call:
            raise torch.OutOfMemoryError("planted")
        return launch(runner, plan)

    monkeypatch.setattr(ModelRunner, "launch", failing)
    model = ["--model", str(tiny_model.folder)]
    assert main.run([*command, *model, *ON_CPU]) == 1
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].startswith(
        "error: a step failed while it was measured: the device is out of memory; lower max_num"
    )
    assert row is None or row in captured.out


def test_profile_prints_tables(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --json a person gets the step and its operations, long names cut."""
    monkeypatch.setattr("pico_vllm.cli.profile.NAME_WIDTH", 9)
    model = ["--model", str(tiny_model.folder), "--max-model-len", "64"]
    assert main.run(["profile", *model, "--context", "8", "--steps", "2", *ON_CPU]) == 0
    out = capsys.readouterr().out
    assert "a step, without the profiler, ms" in out and "aten::..." in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--context", "60"], "batch 1 and context 60 need 74 tokens a request and max_model_len"),
        (["--batch", "5"], "batch 5 and context 4 need 5 requests at once and max_num_seqs"),
        (["--batch", "0"], "--batch 0 without --prompts leaves nothing to profile; give either"),
        (
            ["--prompts", "2"],
            "batch 1 and context 4 with 2 prompts of 128 tokens a step need 5 req",
        ),
        (
            ["--prompts", "1", "--prompt-tokens", "40", "--max-num-batched-tokens", "40"],
            "batch 1 and context 4 with 1 prompt of 40 tokens a step need 41 tokens a step and ",
        ),
        (
            ["--prompts", "1", "--prompt-tokens", "9", "--long-prefill-token-threshold", "8"],
            "batch 1 and context 4 with 1 prompt of 9 tokens a step need 9 tokens of a prompt in ",
        ),
        (["--trace", "x.txt"], "--trace x.txt must end in .json or .json.gz"),
        (["--trace", "/proc/x/t.json"], "--trace /proc/x/t.json cannot be written to"),
        (
            # 64 tokens hold both, but a block is one request's.
            ["--batch", "2", "--block-size", "64", "--num-kv-blocks", "1"],
            "batch 2 and context 4 need 2 KV blocks and num_kv_blocks allows 1",
        ),
    ],
)
def test_a_profile_that_does_not_fit_is_refused(
    tiny_model: Any, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line has the need, the limit and the way out."""
    model = ["--model", str(tiny_model.folder), "--max-model-len", "64", "--max-num-seqs", "4"]
    sizes = ["--context", "4", "--steps", "2"]
    assert main.run(["profile", *model, *sizes, *options, *ON_CPU]) == 1
    assert capsys.readouterr().err.startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "bench kernels needs a GPU and was given the CPU; bench engine"),
        (
            ["--rows", "1,x"],
            "--rows '1,x' must be whole numbers from 1 to 2147483647, with commas between",
        ),
        (["--context", "0"], "--context '0' must be whole numbers from 1 to 2147483647"),
        (["--block-size", "0"], "block_size must be a whole number from 1 to 256"),
    ],
)
def test_kernels_without_a_gpu_are_one_line(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong options are told first, then that there is nothing to time on."""
    assert main.run(["bench", "kernels", "--device", "cpu", *options]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {message}") and captured.err.count("\n") == 1


def test_ladder_on_a_cpu(
    tiny_model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every stage runs with its own settings, every point has a time, and the picture is drawn."""
    command = ["bench", "ladder", "--model", str(tiny_model.folder), "--context", "100,20"]
    options = ["--json", "--commit", "abc123"]
    plot = tmp_path / "ladder.png"
    has_plot = importlib.util.find_spec("matplotlib") is not None
    if has_plot:
        options += ["--plot", str(plot)]
    assert main.run([*command, *options, *ON_CPU]) == 0
    lines = json_lines(capsys.readouterr().out)
    assert [(line["stage"], line["context"]) for line in lines] == [
        (stage, context)
        for stage in ("no cache", "contiguous cache", "paged", "graph")
        for context in (20, 100)
    ]
    assert all(line["ms_per_step"] > 0 and line["skipped"] is None for line in lines)
    assert [line["config_kv"] for line in lines[::2]] == ["none", "contiguous", "paged", "paged"]
    assert [line["config_cpu_graph"] for line in lines[::2]] == ["off", "off", "off", "on"]
    assert all(line["commit"] == "abc123" for line in lines)
    if has_plot:
        assert plot.read_bytes().startswith(b"\x89PNG")


def test_ladder_prints_a_row_a_stage(tiny_model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Contexts are columns."""
    command = ["bench", "ladder", "--model", str(tiny_model.folder), "--context", "8,16"]
    assert main.run([*command, "--only", "paged", *ON_CPU]) == 0
    out = capsys.readouterr().out
    assert [word for word in ("stage", "8", "16", "paged") if word not in out] == []
