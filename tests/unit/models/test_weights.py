"""Sources of weights: safetensors read in place, dummy numbers, and the set of names."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pico_vllm.errors import ModelLoadError
from pico_vllm.models import weights
from pico_vllm.models.weights import DummySource, SafetensorsSource, TensorInfo, check_names

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def make_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        EMBEDDING: torch.randn(50, 8, generator=generator),
        "model.norm.weight": torch.randn(8, generator=generator).to(torch.bfloat16),
        "model.layers.0.mlp.up_proj.weight": torch.randn(30, 8, generator=generator).half(),
    }


def write_sharded(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Two shards and their index."""
    names = sorted(tensors)
    shard_of = {
        name: f"model-0000{1 + (i > 0)}-of-00002.safetensors" for i, name in enumerate(names)
    }
    for shard in set(shard_of.values()):
        part = {name: tensors[name] for name in names if shard_of[name] == shard}
        save_file(part, folder / shard)
    write_index(folder, shard_of)
    return shard_of


def write_index(folder: Path, shard_of: object) -> None:
    index = {"metadata": {"total_size": 1}, "weight_map": shard_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def fails(folder: Path, match: str) -> str:
    with pytest.raises(ModelLoadError, match=match) as caught:
        SafetensorsSource(folder)
    return caught.value.message


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_safetensors_round_trip(tmp_path: Path, sharded: bool, dtype: torch.dtype) -> None:
    """Every tensor arrives with its values, converted as torch converts, whole or by rows."""
    tensors = make_tensors()
    if sharded:
        write_sharded(tmp_path, tensors)
    else:
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    source = SafetensorsSource(tmp_path)
    assert set(source.tensors) == set(tensors)
    assert source.tensors["model.norm.weight"] == TensorInfo((8,), "bf16")
    for name, tensor in tensors.items():
        out = torch.full(tensor.shape, torch.nan, dtype=dtype)
        source.read_into(name, out)
        assert torch.equal(out, tensor.to(dtype)), name
        part = torch.full((3, *tensor.shape[1:]), torch.nan, dtype=dtype)
        source.read_into(name, part, slice(2, 5))
        assert torch.equal(part, tensor[2:5].to(dtype)), name
    source.close()


def test_reading_into_views_and_parameters(tmp_path: Path) -> None:
    """A slice of a merged matrix, a transposed view and a Parameter can all be filled in place."""
    tensors = make_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    merged = torch.zeros(70, 8, dtype=torch.float16)
    source.read_into(name, merged[40:70])
    assert torch.equal(merged[40:], tensors[name]) and not merged[:40].any()
    columns = torch.zeros(8, 30, dtype=torch.float16)
    source.read_into(name, columns.t())
    assert torch.equal(columns.t(), tensors[name])
    parameter = torch.nn.Parameter(torch.zeros(30, 8))
    source.read_into(name, parameter)
    assert torch.equal(parameter.data, tensors[name].float())


def test_conversion_in_small_chunks_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunk borders change nothing, also where a row is larger than a chunk."""
    tensors = make_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    for chunk in (1, 40, 100):
        monkeypatch.setattr("pico_vllm.models.raw_file.CHUNK_BYTES", chunk)
        out = torch.full((50, 8), torch.nan, dtype=torch.bfloat16)
        source.read_into(EMBEDDING, out)
        assert torch.equal(out, tensors[EMBEDDING].bfloat16())


def test_wrong_destination_is_refused(tmp_path: Path) -> None:
    """An unknown name or another shape names the tensor and both shapes."""
    save_file(make_tensors(), tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    with pytest.raises(ModelLoadError, match=r"no tensor model\.nothing"):
        source.read_into("model.nothing", torch.zeros(1))
    with pytest.raises(ModelLoadError, match=r"\[50, 8\] in the checkpoint.*\[8, 50\]"):
        source.read_into(EMBEDDING, torch.zeros(8, 50))
    with pytest.raises(ModelLoadError, match="f32"):
        source.read_codes(EMBEDDING)


@pytest.mark.parametrize("cut", [1, 1024, "half", -1])
@pytest.mark.parametrize("sharded", [False, True])
def test_truncated_or_extended_shard(tmp_path: Path, cut: int | str, sharded: bool) -> None:
    """A shard of the wrong length is met on opening, with its name and both sizes."""
    tensors = make_tensors()
    tensors[EMBEDDING] = torch.randn(500, 8)
    if sharded:
        path = tmp_path / write_sharded(tmp_path, tensors)[EMBEDDING]
    else:
        path = tmp_path / "model.safetensors"
        save_file(tensors, path)
    data = path.read_bytes()
    keep = len(data) // 2 if cut == "half" else len(data) - int(cut)
    path.write_bytes((data + b"x")[:keep])
    message = fails(tmp_path, "truncated or damaged")
    assert path.name in message and str(keep) in message and str(len(data)) in message


def test_file_cut_after_opening(tmp_path: Path) -> None:
    """A file that shrinks between opening and reading gives an error, not SIGBUS or zeros."""
    save_file(make_tensors(), tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.truncate(600)
    with pytest.raises(ModelLoadError, match="cut while being read"):
        for name, info in source.tensors.items():
            source.read_into(name, torch.zeros(info.shape))


def test_missing_shard(tmp_path: Path) -> None:
    """A shard that the index names must exist."""
    shard = write_sharded(tmp_path, make_tensors())[EMBEDDING]
    (tmp_path / shard).unlink()
    assert shard in fails(tmp_path, "is missing")


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    """A tensor missing from its shard, or in a shard but not in the index, is listed by name."""
    tensors = make_tensors()
    shard_of = write_sharded(tmp_path, tensors)
    write_index(tmp_path, {**shard_of, "model.extra.weight": shard_of[EMBEDDING]})
    assert "Missing 1: model.extra.weight" in fails(tmp_path, "disagree")
    short = {name: shard for name, shard in shard_of.items() if name != "model.norm.weight"}
    write_index(tmp_path, short)
    assert "Unexpected 1: model.norm.weight" in fails(tmp_path, "disagree")


@pytest.mark.parametrize(
    "shard",
    [
        "../model.safetensors",
        "/etc/passwd",
        "sub/model.safetensors",
        "model.bin",
        3,
        None,
        "a\0.safetensors",
        "é" * 240 + ".safetensors",
        "m\x7f.safetensors",
    ],
)
def test_index_names_plain_files_only(tmp_path: Path, shard: object) -> None:
    """An index cannot make us open a file elsewhere."""
    write_index(tmp_path, {"model.norm.weight": shard})
    fails(tmp_path, "beside it")


@pytest.mark.parametrize("shard_of", [None, [], {}, "model.safetensors"])
def test_index_without_a_map(tmp_path: Path, shard_of: object) -> None:
    """weight_map must be an object with entries."""
    write_index(tmp_path, shard_of)
    fails(tmp_path, "weight_map")


def test_directories_without_usable_weights(tmp_path: Path) -> None:
    """Empty, only .incomplete, only pickle: each message says what to do."""
    fails(tmp_path / "absent", "not a directory")
    fails(tmp_path, "It holds nothing")
    (tmp_path / "model.safetensors.incomplete").write_bytes(b"x")
    fails(tmp_path, r"model\.safetensors\.incomplete")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    fails(tmp_path, "convert the model to safetensors")


def test_same_tensor_in_two_shards(tmp_path: Path) -> None:
    """A name may live in one shard only."""
    save_file({"a.weight": torch.ones(2)}, tmp_path / "x.safetensors")
    save_file({"a.weight": torch.ones(2), "b": torch.ones(1)}, tmp_path / "y.safetensors")
    write_index(tmp_path, {"a.weight": "x.safetensors", "b": "y.safetensors"})
    fails(tmp_path, "both in")


def expected_of(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def source_of(folder: Path, tensors: dict[str, torch.Tensor]) -> SafetensorsSource:
    save_file(tensors, folder / "model.safetensors")
    return SafetensorsSource(folder)


def test_check_names_accepts_the_exact_set(tmp_path: Path) -> None:
    """Equal names and shapes pass; rotary buffers of old checkpoints do not count."""
    tensors = make_tensors()
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    check_names(expected_of(tensors), source_of(tmp_path, tensors | buffer), tied=True)


def test_check_names_lists_at_most_ten_of_each(tmp_path: Path) -> None:
    """25 missing and 12 unexpected names give counts and ten names of each."""
    tensors = make_tensors()
    more = {f"extra.{i:02}.weight": torch.ones(1) for i in range(12)}
    expected = expected_of(tensors) | {f"wanted.{i:02}.weight": (1,) for i in range(25)}
    with pytest.raises(ModelLoadError) as caught:
        check_names(expected, source_of(tmp_path, tensors | more), tied=True)
    message = caught.value.message
    assert "Missing 25:" in message and "and 15 more" in message
    assert "Unexpected 12:" in message and "and 2 more" in message
    assert message.count("wanted.") == message.count("extra.") == 10


def test_check_names_compares_shapes(tmp_path: Path) -> None:
    """A transposed matrix is named with both shapes."""
    tensors = make_tensors()
    expected = expected_of(tensors) | {EMBEDDING: (8, 50)}
    with pytest.raises(ModelLoadError, match=r"embed_tokens.weight has \[50, 8\], needs \[8, 50\]"):
        check_names(expected, source_of(tmp_path, tensors), tied=True)


@pytest.mark.parametrize("expects_head", [False, True])
def test_tied_without_head(tmp_path: Path, expects_head: bool) -> None:
    """Flag true, no head in the file: nothing is missing."""
    tensors = make_tensors()
    expected = expected_of(tensors) | ({HEAD: (50, 8)} if expects_head else {})
    check_names(expected, source_of(tmp_path, tensors), tied=True)


def test_tied_with_equal_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Flag true and a copy of the embedding as head: accepted in silence."""
    tensors = make_tensors()
    tensors[HEAD] = tensors[EMBEDDING].clone()
    with caplog.at_level(logging.WARNING):
        check_names(expected_of(make_tensors()), source_of(tmp_path, tensors), tied=True)
    assert not caplog.records


def test_tied_with_other_head(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flag true and a head that differs in its last element: accepted with a warning."""
    monkeypatch.setattr(weights, "CHUNK_BYTES", 512)
    tensors = make_tensors()
    tensors[HEAD] = tensors[EMBEDDING].clone()
    tensors[HEAD][-1, -1] += 1
    with caplog.at_level(logging.WARNING):
        check_names(expected_of(make_tensors()), source_of(tmp_path, tensors), tied=True)
    assert len(caplog.records) == 1 and "tied_head_ignored" in caplog.text


def test_untied_with_head(tmp_path: Path) -> None:
    """Flag false and a head in the file: it is a parameter like any other."""
    tensors = make_tensors() | {HEAD: torch.randn(50, 8)}
    check_names(expected_of(tensors), source_of(tmp_path, tensors), tied=False)


def test_untied_without_head_names_the_remedy(tmp_path: Path) -> None:
    """Flag false and no head: the message says to set the flag or get the whole checkpoint."""
    tensors = make_tensors()
    expected = expected_of(tensors) | {HEAD: (50, 8)}
    with pytest.raises(ModelLoadError, match="set tie_word_embeddings to true") as caught:
        check_names(expected, source_of(tmp_path, tensors), tied=False)
    assert caught.value.param == "tie_word_embeddings"


def test_dummy_weights() -> None:
    """Seeded, of the standard deviation asked for, different by tensor and row; norms are ones."""
    shapes = {"a.weight": (2000, 600), "b.weight": (2000, 600), "model.norm.weight": (64,)}
    source = DummySource(shapes, std=0.02, seed=3)
    check_names(shapes, source, tied=True)
    a, b, norm = (torch.full(shape, torch.nan) for shape in shapes.values())
    for name, out in zip(shapes, (a, b, norm), strict=True):
        source.read_into(name, out)
    assert abs(a.std().item() - 0.02) < 2e-4 and abs(a.mean().item()) < 1e-4
    assert not torch.equal(a, b) and len(torch.unique(a, dim=0)) == 2000
    assert torch.equal(norm, torch.ones(64))
    again = torch.empty(100, 600)
    DummySource(shapes, std=0.02, seed=3).read_into("a.weight", again, slice(1900, 2000))
    assert torch.equal(again, a[1900:])
    DummySource(shapes, std=0.02, seed=4).read_into("a.weight", again, slice(1900, 2000))
    assert not torch.equal(again, a[1900:])
    half = torch.empty(600, 2000, dtype=torch.bfloat16).t()
    source.read_into("a.weight", half)
    assert torch.equal(half, a.bfloat16())


MEMORY_SCRIPT = """
import resource, sys, torch
from pico_vllm.models.weights import SafetensorsSource
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
torch.zeros(1 << 20, dtype=torch.bfloat16).float()
before = peak()
source = SafetensorsSource(sys.argv[1])
outs = {}
for name, info in source.tensors.items():
    outs[name] = torch.empty(info.shape, dtype=getattr(torch, sys.argv[2]))
    source.read_into(name, outs[name])
held = sum(out.numel() * out.element_size() for out in outs.values()) // 1024
print(peak() - before - held)
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_memory_while_loading(tmp_path: Path, dtype: str) -> None:
    """Beside the weights themselves, loading 96 MiB takes at most 40 MiB, converted or not."""
    tensors = {f"{i}.weight": torch.zeros(6, 1 << 22, dtype=torch.bfloat16) for i in range(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    command = [sys.executable, "-c", MEMORY_SCRIPT, str(tmp_path), dtype]
    extra_kib = int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    assert extra_kib < 40 << 10
