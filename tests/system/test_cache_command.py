"""`pico-vllm cache` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pico_vllm.cli import main

SYSTEM = "You answer in one short sentence and you never use a long word."


def write_ids(path: Path) -> Path:
    """Three prompts of 32 tokens in common, three times each, one after another."""
    lines = [
        {
            "prompt_token_ids": [number % 3] * 32 + [100 + number] * 4,
            "output_tokens": 4,
            "arrival_s": number,
        }
        for number in range(9)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_a_trace_of_ids_needs_no_model_and_no_torch(tmp_path: Path) -> None:
    """Two tables and one of prefixes, from a process that cannot import torch."""
    trace = write_ids(tmp_path / "ids.jsonl")
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from pico_vllm.cli import main\n"
        f"sys.exit(main.run(['cache', {str(trace)!r}, '--num-kv-blocks', '40']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    rows = [line.split("│")[1:-1] for line in done.stdout.splitlines() if line.startswith("│")]
    hits, pool, *prefixes = [[cell.strip() for cell in row] for row in rows]
    # 6 of 9 requests find 32 of their 36 tokens.
    assert hits == ["40", "9", "6", "0.59", "192", "132", "36", "36"]
    assert pool[:2] == ["40", "3"] and pool[-3:] == ["0", "0", "0"]
    assert sorted(row[-1] for row in prefixes) == [
        "0 0 0 0 0 0 0 0",
        "1 1 1 1 1 1 1 1",
        "2 2 2 2 2 2 2 2",
    ]
    assert {tuple(row[:4]) for row in prefixes} == {("64", "2", "32", "32")}


def test_lines_and_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line a pool and one a prefix, flat, with machine and settings; off computes all."""
    trace, record = write_ids(tmp_path / "ids.jsonl"), tmp_path / "new" / "r.jsonl"
    command = ["cache", str(trace), "--num-kv-blocks", "40,4", "--top", "1", "--json"]
    options = ["--record", str(record), "--commit", "abc123", "--eviction-policy", "lfu"]
    assert main.run([*command, *options]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [json.loads(line) for line in record.read_text().splitlines()] == lines
    found = [(line["id"], line["num_kv_blocks"], line["saved_tokens"]) for line in lines]
    assert found == [("cache", 40, 192), ("prefix-1", 40, 64), ("cache", 4, 0)]
    for line in lines:
        assert line["commit"] == "abc123" and line["config_eviction_policy"] == "lfu"
        assert line["trace"] == str(trace) and line["cpu"] and line["model"] is None
        assert not any(isinstance(value, (dict, list)) for value in line.values())
    assert main.run([*command, "--prefix-cache", "off"]) == 0
    off = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["computed_tokens"], line["hit_rate"]) for line in off] == [(324, None)] * 2


def test_tiers_below_the_device(
    tiny_model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows by tier, in blocks without a model and in GiB with one; the folder is not touched."""
    trace = write_ids(tmp_path / "ids.jsonl")
    command = ["cache", str(trace), "--num-kv-blocks", "4", "--top", "0"]
    below = ["--num-host-blocks", "3", "--num-disk-blocks", "20"]
    assert main.run([*command, *below]) == 0
    rows = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if "│" in line]
    cells = [[cell.strip() for cell in row] for row in rows]
    # Of the 6 that may find 32 of their 36 tokens, nobody finds any on the device.
    assert [row[:4] for row in cells[2:5]] == [
        ["4", "device", "0", "0"],
        ["4", "host", "112", "7"],
        ["4", "disk", "80", "5"],
    ]
    folder = tmp_path / "none"
    model = ["--model", str(tiny_model.folder), "--dtype", "float32", "--kv-host-gb", "2e-5"]
    on_disk = ["--kv-disk-path", str(folder), "--kv-disk-gb", "1e-3"]
    assert main.run([*command, *model, *on_disk, "--json"]) == 0
    (run,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    # 3,072 bytes a block. Computing this model takes less time than any load.
    assert (run["host_blocks"], run["loaded_blocks"]) == (int(2e-5 * 2**30) // 3072, 0)
    assert 200 < run["disk_blocks"] < 2**20 // 4096 and run["hit_rate"] == 0
    assert run["stored_bytes"] == 3072 * run["stored_blocks"] > 0
    assert run["config_kv_disk_path"] == str(folder) and not folder.exists()


def test_text_through_a_models_tokenizer(
    tiny_model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Messages go through the template; a prefix shows as the text that it begins with."""
    trace = tmp_path / "chat.jsonl"
    lines = [
        {
            "messages": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": f"{number} and so on"},
            ],
            "output": "Yes.",
            "arrival_s": number,
        }
        for number in range(3)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    model = ["--model", str(tiny_model.folder), "--kv-gb", "0.0001", "--dtype", "float32"]
    assert main.run(["cache", str(trace), *model, "--json"]) == 0
    run, prefix = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    # 2 layers x K and V x 2 heads of 6 in fp32: 192 bytes a token, 3,072 a block.
    assert run["num_kv_blocks"] == 100_000 // 3072 - 1
    assert run["output_tokens"] == 12 and run["num_hits"] == 2
    assert prefix["begins"].startswith("<|im_start|>system You answer")
    assert prefix["num_requests"] == 2 and prefix["prefix_tokens"] >= len(SYSTEM)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "the pool needs one size: --num-kv-blocks, or --kv-gb with --model"),
        (["--num-kv-blocks", "9", "--kv-gb", "1"], "the pool needs one size: "),
        (
            ["--num-kv-blocks", "1000000000"],
            "a pool of 1000000000 blocks is more than the 100000000",
        ),
        (
            ["--num-kv-blocks", "x"],
            "--num-kv-blocks 'x' must be whole numbers from 1 to 2147483647",
        ),
        (["--num-kv-blocks", "40,2"], "{trace}, line 1: 36 tokens of prompt and 4 of answer are "),
        (["--kv-gb", "1"], "--kv-gb 1 needs --model, which says what a token takes"),
        (["--kv-gb", "1e-9", "--model", "{model}"], "--kv-gb 1e-09 must hold two blocks of "),
        (["--kv-gb", "nan", "--model", "{model}"], "--kv-gb nan must hold two blocks of "),
        (["--kv-gb", "1", "--model", "{model}", "--dtype", "auto"], "--dtype auto says no size"),
        (["--num-kv-blocks", "9", "--cow-min-tokens", "0"], "cow_min_tokens must be a whole "),
        (["--num-kv-blocks", "9", "--prefix-cache", "auto"], "--prefix-cache auto: give on or off"),
        (["--num-kv-blocks", "9", "--kv-host-gb", "1"], "--kv-host-gb needs --model, which says "),
        (
            ["--num-kv-blocks", "9", "--kv-disk-path", "x"],
            "--kv-disk-path needs --model, which say",
        ),
        (
            ["--num-kv-blocks", "9", "--num-host-blocks", "9", "--kv-disk-path", "x"],
            "--kv-disk-path needs --model, which says what a block takes; or give --num-disk-block",
        ),
        (
            ["--num-kv-blocks", "9", "--num-host-blocks", "9", "--kv-host-gb", "1"],
            "a tier has one size: give --kv-host-gb or --num-host-blocks",
        ),
        (["--num-kv-blocks", "9", "--num-disk-blocks", "9"], "--num-disk-blocks 9: blocks pass "),
        (["--num-kv-blocks", "9", "--kv-host-gb", "-1"], "kv_host_gb must be a number of GiB from"),
        (
            ["--num-kv-blocks", "9", "--kv-host-gb", "1e-9", "--model", "{model}"],
            "--kv-host-gb holds 0 blocks of 1536 bytes; give a size of 1 to 100000000 blocks",
        ),
        (
            [
                *("--num-kv-blocks", "9", "--kv-disk-path", "x", "--kv-disk-gb", "1e-6"),
                *("--model", "{model}"),
            ],
            "kv_disk_gb gives 1073 bytes, and one block takes 4096; raise it",
        ),
        (
            ["--num-kv-blocks", "9", "--num-host-blocks", "9", "--prefix-cache", "off"],
            "tiers below the device keep cached prefixes and need --prefix-cache on; leave",
        ),
        (["--num-kv-blocks", "9", "--device", "tpu"], "--device tpu: give cuda or cpu"),
        (
            [
                *("--num-kv-blocks", "9", "--prefix-cache", "off"),
                *("--scheduling-policy", "longest-prefix-match"),
            ],
            "--scheduling-policy longest-prefix-match needs --prefix-cache on",
        ),
    ],
)
def test_what_cannot_be_replayed_is_one_line(
    options: list[str],
    message: str,
    tiny_model: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The value, the limit and the way out."""
    names = {"trace": write_ids(tmp_path / "ids.jsonl"), "model": tiny_model.folder}
    options = [each.format(**names) for each in options]
    assert main.run(["cache", str(names["trace"]), *options]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {message.format(**names)}"), captured.err
    assert captured.err.count("\n") == 1 and captured.out == ""
