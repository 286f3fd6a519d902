"""pico-vllm info: what a model is, and the memory that it takes. Reads headers, never weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pico_vllm.cli.models import mebibytes
from pico_vllm.cli.options import field_option
from pico_vllm.cli.terminal import console, printable
from pico_vllm.config import hardware
from pico_vllm.config.engine import EngineConfig
from pico_vllm.config.model import ModelConfig

if TYPE_CHECKING:
    from pico_vllm.models.weights import TensorInfo

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def info(
    model: Annotated[str, typer.Argument(help="Directory, .gguf file, alias or Hub id.")],
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens of one request, prompt and answer together.", show_default="window"
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="Requests that run at once.")] = 1,
    dtype: Annotated[str, field_option(EngineConfig, "dtype")] = "auto",
    device: Annotated[str, field_option(EngineConfig, "device")] = "auto",
    weight_format: Annotated[str, field_option(EngineConfig, "weight_format")] = "auto",
    block_size: Annotated[int, field_option(EngineConfig, "block_size")] = 16,
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the sizes of a model, its layout in memory, and the memory that a load would take."""
    config = EngineConfig(
        model=model,
        max_model_len=context,
        max_num_seqs=batch,
        max_num_batched_tokens=max(2048, batch),
        dtype=dtype,
        device=device,
        weight_format=weight_format,  # type: ignore[arg-type]
        block_size=block_size,
    )
    described = describe(config)
    if is_json:
        print(json.dumps(described, allow_nan=False))
    else:
        _print_tables(described)


_PLAIN_BYTES = {"bf16": 2, "fp32": 4}


def describe(config: EngineConfig) -> dict[str, Any]:
    """Everything that `info` shows, as JSON holds it.

    Raises:
        ModelLoadError, ConfigError: as loading the model would.
    """
    from pico_vllm.engine.loading import open_model, settle_device
    from pico_vllm.models.hub import resolve_model
    from pico_vllm.models.llama import parameter_shapes
    from pico_vllm.models.loader import bytes_in_memory
    from pico_vllm.models.weights import HEAD

    files = resolve_model(config.model)
    has_weights = files.kind == "gguf" or any(files.path.glob("*.safetensors"))
    if not has_weights:
        config = replace(config, load_format="dummy")
    model, source, tokenizer = open_model(files, config)
    tensors = dict(source.tensors)
    source.close()
    device = settle_device(config.device)
    resolved = config.resolve(
        model,
        device=str(device),
        has_fast_bf16=device.type == "cuda" or hardware.cpu_has_fast_bf16(),
        num_threads=hardware.cpu_threads(),
    )
    shapes = parameter_shapes(model)
    if model.tie_word_embeddings:
        del shapes[HEAD]
    in_memory = {
        weight_format: bytes_in_memory(
            shapes,
            tensors,
            keeps_packed=weight_format == "keep",
            weight_itemsize=_PLAIN_BYTES.get(weight_format, ELEMENT_BYTES[resolved.dtype]),
            vector_itemsize=ELEMENT_BYTES[resolved.dtype],
        )
        for weight_format in ("keep", "bf16", "fp32")
        if device.type == "cpu" or weight_format != "keep"
    }
    return {
        "model": config.model,
        "path": str(files.path),
        "config": asdict(model),
        "num_parameters": sum(math.prod(shape) for shape in shapes.values()),
        "window": model.max_model_len_default,
        "has_chat_template": tokenizer is not None and tokenizer.chat_template is not None,
        "storage": storage_bytes(tensors) if has_weights else {},
        "weight_bytes": in_memory,
        "kv": kv_layout(model, resolved),
        "plan": memory_plan(model, resolved, in_memory[resolved.weight_format]),
    }


def storage_bytes(tensors: Mapping[str, TensorInfo]) -> dict[str, dict[str, int]]:
    """What the files hold, by storage type, without padding and headers."""
    from pico_vllm.models.gguf_quants import BLOCKS

    found: dict[str, dict[str, int]] = {}
    for tensor in tensors.values():
        columns, num_bytes = BLOCKS[tensor.storage]
        entry = found.setdefault(
            tensor.storage, {"num_tensors": 0, "num_parameters": 0, "num_bytes": 0}
        )
        size = math.prod(tensor.shape)
        entry["num_tensors"] += 1
        entry["num_parameters"] += size
        entry["num_bytes"] += size // columns * num_bytes
    return found


def kv_layout(model: ModelConfig, config: EngineConfig) -> dict[str, Any]:
    bytes_per_token = model.kv_bytes_per_token(ELEMENT_BYTES[config.dtype])
    return {
        "dtype": config.dtype,
        "bytes_per_token": bytes_per_token,
        "block_size": config.block_size,
        "block_bytes": bytes_per_token * config.block_size,
    }


def memory_plan(model: ModelConfig, config: EngineConfig, num_weight_bytes: int) -> dict[str, Any]:
    """Weights and the KV of max_num_seqs full windows against what is free. Not in it: activations
    and torch itself."""
    assert config.max_model_len is not None
    block_bytes = kv_layout(model, config)["block_bytes"]
    blocks_per_request = -(-config.max_model_len // config.block_size)
    num_blocks = blocks_per_request * config.max_num_seqs
    kv_bytes = (num_blocks + 1) * block_bytes
    # TODO once the engine tells the free memory of a GPU: show it too.
    free_bytes = hardware.available_memory_bytes() if config.device == "cpu" else None
    room = None if free_bytes is None else free_bytes - num_weight_bytes - block_bytes
    return {
        "device": config.device,
        "context": config.max_model_len,
        "batch": config.max_num_seqs,
        "weight_format": config.weight_format,
        "weight_bytes": num_weight_bytes,
        "num_kv_blocks": num_blocks,
        # kv_pool[B, G, L, 2, S, D]; one block more than requests can use: the null block.
        "pool_shape": [
            num_blocks + 1,
            model.num_kv_heads,
            model.num_layers,
            2,
            config.block_size,
            model.head_dim,
        ],
        "kv_bytes": kv_bytes,
        "total_bytes": num_weight_bytes + kv_bytes,
        "free_bytes": free_bytes,
        "fits": None if free_bytes is None else num_weight_bytes + kv_bytes <= free_bytes,
        "max_batch": None if room is None else max(0, room // (blocks_per_request * block_bytes)),
    }


def _print_tables(info: Mapping[str, Any]) -> None:
    config, kv, plan = info["config"], info["kv"], info["plan"]
    rope = f"{config['rope']['kind']}, theta {config['rope']['theta']:g}"
    if config["rope"]["factor"] != 1:
        rope += f", factor {config['rope']['factor']:g}"
    window = f"{info['window']:,} tokens"
    if config["sliding_window"] is not None:
        window += f", sliding over {config['sliding_window']:,}"
    _print_table(
        printable(info["model"]),
        [
            ("path", printable(info["path"])),
            ("architecture", config["architecture"]),
            ("parameters", f"{info['num_parameters']:,}"),
            ("layers L", f"{config['num_layers']}"),
            ("query heads H", f"{config['num_heads']}"),
            ("KV heads G", f"{config['num_kv_heads']}"),
            ("head dim D", f"{config['head_dim']}"),
            ("hidden size E", f"{config['hidden_size']:,}"),
            ("MLP size F", f"{config['intermediate_size']:,}"),
            ("vocabulary V", f"{config['vocab_size']:,}"),
            ("head", "shares the embedding" if config["tie_word_embeddings"] else "its own"),
            ("RoPE", rope),
            ("window", window),
            ("chat template", "yes" if info["has_chat_template"] else "no"),
        ],
    )
    on_disk = [
        (f"on disk, {storage}", mebibytes(entry["num_bytes"]), f"{entry['num_tensors']} tensors")
        for storage, entry in info["storage"].items()
    ]
    in_memory = [
        (f"in memory, {weight_format}", mebibytes(num_bytes), f"--weight-format {weight_format}")
        for weight_format, num_bytes in info["weight_bytes"].items()
    ]
    _print_table("weights", [*(on_disk or [("on disk", "none", "")]), *in_memory])
    _print_table(
        "KV cache",
        [
            ("kv_pool[B, G, L, 2, S, D]", f"{plan['pool_shape']} {kv['dtype']}"),
            ("block", f"{kv['block_bytes']:,} bytes for {kv['block_size']} tokens"),
            ("token", f"{kv['bytes_per_token']:,} bytes"),
        ],
    )
    free: list[tuple[str, ...]] = []
    if plan["free_bytes"] is not None:
        verdict = "fits" if plan["fits"] else "does not fit"
        free = [
            ("free now", f"{mebibytes(plan['free_bytes'])}: {verdict}"),
            ("largest batch", f"{plan['max_batch']:,}"),
        ]
    _print_table(
        f"memory plan: {plan['batch']} x {plan['context']:,} tokens on {plan['device']}",
        [
            (f"weights, {plan['weight_format']}", mebibytes(plan["weight_bytes"])),
            (f"KV, {plan['num_kv_blocks']:,} blocks", mebibytes(plan["kv_bytes"])),
            ("total", mebibytes(plan["total_bytes"])),
            *free,
            (
                "to run it so",
                f"--max-model-len {plan['context']} --max-num-seqs {plan['batch']} "
                f"--num-kv-blocks {plan['num_kv_blocks']}",
            ),
        ],
    )


def _print_table(title: str, rows: list[tuple[str, ...]]) -> None:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    screen = console()
    screen.print(table)
    screen.print()
