"""A small model as Hugging Face tensors, and the GGUF file that llama.cpp's converter would
write.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, MLP, VOCAB, LAYERS = 4, 2, 16, 64, 96, 40, 2
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def hf_tensors(arch: str, *, tied: bool, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        of_layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (HIDDEN,),
            "self_attn.q_proj.weight": (q, HIDDEN),
            "self_attn.k_proj.weight": (kv, HIDDEN),
            "self_attn.v_proj.weight": (kv, HIDDEN),
            "self_attn.o_proj.weight": (HIDDEN, q),
            "post_attention_layernorm.weight": (HIDDEN,),
            "mlp.gate_proj.weight": (MLP, HIDDEN),
            "mlp.up_proj.weight": (MLP, HIDDEN),
            "mlp.down_proj.weight": (HIDDEN, MLP),
        }
        if arch == "qwen2":
            of_layer |= {
                f"self_attn.{n}_proj.bias": (r,) for n, r in zip("qkv", (q, kv, kv), strict=True)
            }
        if arch == "qwen3":
            of_layer |= {f"self_attn.{n}_norm.weight": (HEAD_DIM,) for n in "qk"}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if stem in top:
        return f"{top[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[rest]}.{kind}"


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """The converter's reordering: the two halves of each head's rows become neighbours."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def metadata(arch: str) -> dict[str, object]:
    return {
        f"{arch}.block_count": LAYERS,
        f"{arch}.context_length": 256,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.feed_forward_length": MLP,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.key_length": HEAD_DIM,
        f"{arch}.attention.value_length": HEAD_DIM,
        f"{arch}.rope.dimension_count": HEAD_DIM,
        f"{arch}.rope.freq_base": 500000.0,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(VOCAB)],
        "tokenizer.ggml.scores": [float(i) for i in range(VOCAB)],
        "tokenizer.ggml.token_type": [1] * VOCAB,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.add_bos_token": True,
    }


def write_gguf(
    path: Path,
    arch: str = "llama",
    *,
    tied: bool = True,
    storage: str = "q8_0",
    changes: dict[str, object] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    blocks: dict[str, tuple[str, np.ndarray]] | None = None,
) -> dict[str, np.ndarray]:
    """Write the file, return its tensors as float32 under Hugging Face names.

    A change to None drops the key. `blocks` are tensors that lie in the file as they are.
    """
    writer = gguf.GGUFWriter(str(path), arch)
    for key, value in (metadata(arch) | (changes or {})).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
    kind = gguf.GGMLQuantizationType[storage.upper()]
    plain = gguf.GGMLQuantizationType.F32
    stored = {}
    for name, weight in hf_tensors(arch, tied=tied).items():
        matrix_kind = kind if weight.ndim == 2 else plain
        raw = gguf.quants.quantize(weight, matrix_kind)
        stored[name] = gguf.quants.dequantize(raw, matrix_kind)
        if arch == "llama" and ".q_proj." in name:
            raw = interleave(raw, HEADS)
        if arch == "llama" and ".k_proj." in name:
            raw = interleave(raw, KV_HEADS)
        writer.add_tensor(gguf_name(name), raw, raw_dtype=matrix_kind)
    for name, weight in (extra or {}).items():
        writer.add_tensor(name, weight)
    for name, (block_storage, raw) in (blocks or {}).items():
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[block_storage.upper()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored
