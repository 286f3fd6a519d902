"""Mutated checkpoints through the loader: run as `fuzz_loader.py FOLDER COUNT SEED`.

The process limits its own memory. It prints one JSON line: outcomes by format, the slowest file in
CPU seconds, the memory that the fuzzing added in MiB, and the first files that did neither load nor
raise ModelLoadError.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import struct
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_gguf import HIDDEN, LAYERS, MLP, VOCAB, hf_tensors, write_gguf

from pico_vllm.config.model import ModelConfig
from pico_vllm.errors import ModelLoadError
from pico_vllm.models.gguf import GGUFSource
from pico_vllm.models.hub import read_hf_config, resolve_model
from pico_vllm.models.weights import SafetensorsSource, WeightSource, check_names

MEMORY_LIMIT_BYTES = 256 << 20
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "eos_token_id": [2, 3],
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "initializer_range": 0.02,
}
# Values that have broken parsers before.
_JSON_WORDS = """
null true false 0 -1 1e400 NaN -Infinity 1.5 4294967296 18446744073709551616 "" "x" [] {} [[]] [-1]
{"a":1} "\\u0000" "\\ud800" [1e400] 9007199254740993 -0 00 0x1 ' [1,] [8,96] [64,64] "F16" "BF16"
"""
JSON_VALUES = _JSON_WORDS.split()
INTEGERS = [0, 1, 2, 7, 127, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63]


def make_originals(folder: Path) -> None:
    tensors = {n: torch.from_numpy(w).half() for n, w in hf_tensors("llama", tied=True).items()}
    (folder / "single").mkdir(parents=True)
    save_file(tensors, folder / "single" / "model.safetensors", metadata={"format": "pt"})
    (folder / "single" / "config.json").write_text(json.dumps(CONFIG))
    (folder / "single" / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    shutil.copytree(folder / "single", folder / "sharded")
    (folder / "sharded" / "model.safetensors").unlink()
    names = sorted(tensors)
    shard_of = {name: f"model-{1 + i % 2}.safetensors" for i, name in enumerate(names)}
    for shard in ("model-1.safetensors", "model-2.safetensors"):
        part = {name: tensors[name] for name in names if shard_of[name] == shard}
        save_file(part, folder / "sharded" / shard)
    index = {"metadata": {"total_size": 1}, "weight_map": shard_of}
    (folder / "sharded" / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "gguf").mkdir()
    write_gguf(folder / "gguf" / "model.gguf", storage="q4_0")


def mutate_safetensors(data: bytes, rng: random.Random) -> bytes:
    """Change the header and, more often than not, give the changed header its right length."""
    end = 8 + int.from_bytes(data[:8], "little")
    if rng.random() < 0.2:
        return mutate_bytes(data, rng, where=end)
    header = mutate_json(data[8:end], rng)
    length = len(header) if rng.random() < 0.9 else rng.choice(INTEGERS)
    return struct.pack("<Q", length) + header + data[end:]


def mutate_gguf(data: bytes, rng: random.Random) -> bytes:
    """Most changes hit the metadata and the tensor table."""
    return mutate_bytes(data, rng, where=data.index(b"blk.1.ffn_down.weight") + 60)


def mutate_json(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.3:
        return mutate_bytes(data, rng, where=len(data))
    out = data
    for _ in range(rng.choice([1, 1, 2])):
        out = replace_json_value(out, rng)
    return out


def mutate_bytes(data: bytes, rng: random.Random, *, where: int) -> bytes:
    """1 to 4 changes, most of them in the first `where` bytes."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        limit = max(1, min(len(out), where if rng.random() < 0.9 else len(out)))
        at = rng.randrange(limit)
        kind = rng.randrange(9)
        if kind <= 1 and out:
            out[at % len(out)] ^= 1 << rng.randrange(8)
        elif kind == 2 and out:
            out[at % len(out)] = rng.randrange(256)
        elif kind == 3:
            del out[at:]
        elif kind == 4:
            del out[at : at + rng.choice([1, 4, 8, 100])]
        elif kind == 5:
            out[at:at] = out[at : at + rng.choice([1, 8, 64])] * rng.choice([1, 2, 50])
        elif kind == 6:
            out[at : at + 8] = struct.pack("<Q", rng.choice(INTEGERS))
        elif kind == 7:
            out[at : at + 4] = struct.pack("<I", rng.choice(INTEGERS) % 2**32)
        else:
            out += bytes(rng.choice([1, 32, 4096]))
    return bytes(out)


def replace_json_value(data: bytes, rng: random.Random) -> bytes:
    """Put another value after some colon, or nest it deep."""
    colons = [i for i, byte in enumerate(data) if byte == ord(":")]
    if not colons:
        return data
    start = rng.choice(colons) + 1
    end = start
    depth = 0
    while end < len(data) and (depth > 0 or data[end] not in b",}]"):
        depth += (data[end] in b"[{") - (data[end] in b"]}")
        end += 1
    value = rng.choice(JSON_VALUES).encode()
    if rng.random() < 0.05:
        value = rng.choice([b"[", b'{"a":']) * rng.choice([10, 2000, 200_000])
    if rng.random() < 0.05:
        value = b"9" * rng.choice([30, 400, 5000])
    return data[:start] + value + data[end:]


def load(path: Path) -> None:
    """What starting an engine does with the files, short of running the model."""
    files = resolve_model(str(path))
    source: WeightSource
    if files.kind == "gguf":
        gguf = GGUFSource(files.path)
        source, config, generation = gguf, gguf.hf_config(), None
    else:
        config, generation = read_hf_config(files.path)
        model = ModelConfig.from_hf(config, generation)
        source = SafetensorsSource(files.path)
    try:
        model = ModelConfig.from_hf(config, generation)
        check_names(expected_shapes(model), source, tied=model.tie_word_embeddings)
        for name, info in source.tensors.items():
            source.read_into(name, torch.empty(info.shape, dtype=torch.bfloat16))
            if info.storage == "q4_0":
                source.read_codes(name, slice(0, 1))
    finally:
        source.close()


def expected_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    if model.num_layers > 8:
        # Only the names matter; a model class refuses such a file as soon as names are compared.
        raise ModelLoadError("more layers than the fuzzed model has")
    hidden, q, kv = model.hidden_size, model.num_heads, model.num_kv_heads
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (model.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{name}.weight"] = (hidden,)
        for name, heads in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (heads * model.head_dim, hidden)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (hidden, q * model.head_dim)
        for name in ("gate", "up"):
            shapes[f"{prefix}mlp.{name}_proj.weight"] = (model.intermediate_size, hidden)
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, model.intermediate_size)
    return shapes


# Target: the folder that is loaded, the file in it that is changed, and how.
TARGETS: dict[str, tuple[str, str, Callable[[bytes, random.Random], bytes]]] = {
    "safetensors": ("single", "model.safetensors", mutate_safetensors),
    "shard": ("sharded", "model-1.safetensors", mutate_safetensors),
    "config": ("single", "config.json", mutate_json),
    "generation": ("single", "generation_config.json", mutate_json),
    "index": ("sharded", "model.safetensors.index.json", mutate_json),
    "gguf": ("gguf", "model.gguf", mutate_gguf),
}


def main(folder: Path, count: int, seed: int) -> dict[str, object]:
    make_originals(folder)
    for name in ("single", "sharded", "gguf"):
        load(folder / name)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with open("/proc/self/statm") as file:
        address_space = int(file.read().split()[0]) * resource.getpagesize()
    limit = address_space + MEMORY_LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    rng = random.Random(seed)
    outcomes: dict[str, dict[str, int]] = {name: {"ok": 0, "refused": 0} for name in TARGETS}
    slowest, wrong = 0.0, []
    for number in range(count):
        target = list(TARGETS)[number % len(TARGETS)]
        subfolder, file_name, mutate = TARGETS[target]
        path = folder / subfolder / file_name
        original = path.read_bytes()
        data = mutate(original, rng)
        path.write_bytes(data)
        start = time.process_time()
        try:
            load(folder / subfolder)
            outcomes[target]["ok"] += 1
        except ModelLoadError as error:
            outcomes[target]["refused"] += 1
            is_one_line = error.message.isprintable() and len(error.message) < 4000
            if not is_one_line or not f"{error.param}".isprintable():
                wrong.append(f"{target} {number}: message {error.message!r:.3000}")
        except BaseException:
            wrong.append(f"{target} {number}: {traceback.format_exc()[-1500:]}")
            (folder / f"wrong-{number}-{file_name}").write_bytes(data)
        slowest = max(slowest, time.process_time() - start)
        path.write_bytes(original)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "outcomes": outcomes,
        "slowest_s": slowest,
        "grown_mib": grown / 1024,
        "num_wrong": len(wrong),
        "wrong": wrong[:5],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
