"""The part of loading that is for Triton kernels. They are imported when they are asked for: a
machine without a GPU need not have Triton."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pico_vllm.config.engine import EngineConfig
from pico_vllm.config.model import ModelConfig
from pico_vllm.errors import ConfigError
from pico_vllm.models.llama import LlamaForCausalLM

if TYPE_CHECKING:
    from pico_vllm.cache.tiers.host_pool import HostPool
    from pico_vllm.engine.device_batch import Shape
    from pico_vllm.engine.triton_runner import TritonRunner
    from pico_vllm.layers.triton_linear import FedLayers

MAX_HEAD_DIM = 256
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
GRAPH_RESERVE_BYTES = 512 << 20
"""For the graphs themselves, which take some MiB each outside PyTorch's pool."""


def check(config: EngineConfig, model: ModelConfig, device: torch.device) -> None:
    """Refuse what the kernels cannot do, before any weight is read.

    Raises:
        ConfigError: no GPU, no Triton, or a head_dim or block_size that they do not take.
    """
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            f"kernels {config.kernels} needs a GPU, and the device is {device}; use --kernels "
            "plain",
            param="kernels",
        )
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(
            f"kernels {config.kernels} needs the package triton, which this torch came without; "
            "install it, or use --kernels plain",
            param="kernels",
        )
    check_sizes(model.head_dim, config.block_size)


def check_sizes(head_dim: int, block_size: int) -> None:
    """Raises ConfigError for those that the kernels do not take."""
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        raise ConfigError(
            f"head_dim {head_dim} is not supported by the GPU kernels, which take multiples of 8 "
            f"up to {MAX_HEAD_DIM}; use --kernels plain",
            param="kernels",
        )
    if block_size not in BLOCK_SIZES:
        raise ConfigError(
            f"block_size {block_size} is not supported by the GPU kernels, which take "
            f"{', '.join(map(str, BLOCK_SIZES))}; use one of them, or --kernels plain",
            param="block_size",
        )


def make_layers(config: EngineConfig, device: torch.device) -> FedLayers:
    from pico_vllm.kernels.launch import start_driver
    from pico_vllm.layers.triton_linear import FedLayers, TritonLayers

    start_driver(device)  # beside the weights
    if config.kernels != "triton":
        return FedLayers()
    return TritonLayers(device, is_batch_invariant=config.batch_invariant)


def build_runner(
    model: LlamaForCausalLM,
    model_config: ModelConfig,
    config: EngineConfig,
    device: torch.device,
    *,
    vocab_size: int,
    has_graphs: bool | None = None,
    host_pool: HostPool | None = None,
) -> TritonRunner:
    """vocab_size: ids that the tokenizer knows. has_graphs: whatever the configuration says where
    it is None. host_pool: of the tiers below the device."""
    from pico_vllm.cache.tiers.streams import TierStreams
    from pico_vllm.cache.triton_kv import TritonKV
    from pico_vllm.engine.device_batch import DeviceBatchBuilder
    from pico_vllm.engine.loading import TORCH_DTYPES
    from pico_vllm.engine.triton_runner import TritonRunner

    assert config.max_model_len is not None and config.num_kv_blocks is not None
    assert config.max_num_seqs is not None and config.max_num_batched_tokens is not None
    kv = TritonKV(
        model_config,
        num_device_blocks=config.num_kv_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        cos_PD=model.rope.cos_PD,
        sin_PD=model.rope.sin_PD,
        dtype=TORCH_DTYPES[config.dtype],
        device=device,
        is_batch_invariant=config.batch_invariant,
    )
    batch_builder = DeviceBatchBuilder(
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        vocab_size=vocab_size,
        device=device,
    )
    return TritonRunner(
        model,
        kv,
        batch_builder,
        vocab_size=vocab_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        has_graphs=config.cuda_graph != "off" if has_graphs is None else has_graphs,
        device=device,
        tiers=None if host_pool is None else TierStreams(kv.device_pool, host_pool),
    )


def profile_activations(
    model: LlamaForCausalLM, model_config: ModelConfig, config: EngineConfig, device: torch.device
) -> int:
    """Bytes that the largest steps take besides weights and KV: batch state, penalty counts and
    scratch; a step of max_num_batched_tokens with the full sampler; and the memory of graphs.

    Runs them on padding, so it needs no KV. Raises ConfigError where even that does not fit.
    """
    from pico_vllm.engine.cuda_graph import MAX_EXTEND_TOKENS
    from pico_vllm.engine.device_batch import Shape
    from pico_vllm.kernels.paged_prefill import MOST_ROWS_OF_SMALL_TILES

    assert config.max_num_seqs is not None and config.max_num_batched_tokens is not None
    one_block = replace(config, num_kv_blocks=1)
    before = torch.cuda.memory_allocated(device)
    try:
        runner = build_runner(
            model, model_config, one_block, device,
            vocab_size=model_config.vocab_size, has_graphs=False,
        )  # fmt: skip
        kept_bytes = torch.cuda.memory_allocated(device) - before
        rows, tokens = config.max_num_seqs, config.max_num_batched_tokens
        largest = Shape(tokens, rows, "extend")
        in_graph = min(tokens, MAX_EXTEND_TOKENS)
        largest_in_graph = Shape(in_graph, min(rows, in_graph), "extend")
        # Prompts' attention has small tiles with keys in splits, and with those that are whole, of
        # which the most tokens are certain to be.
        most = (MOST_ROWS_OF_SMALL_TILES - 1) // model_config.num_heads
        short, medium = min(tokens, 128), min(tokens, most)
        of_first_answer = Shape(min(tokens, 16), 1, "extend"), Shape(1, 1, "decode")
        runner.compile(
            (
                largest, largest_in_graph, Shape(short, 1, "extend"),
                Shape(short, 1, "extend", is_long=True), Shape(short, 1, "fresh"),
                Shape(medium, 1, "extend"), Shape(rows, rows, "decode"), *of_first_answer,
            )
        )  # fmt: skip
        eager_bytes = _peak_bytes(runner, largest)
        graph_bytes = 0
        if config.cuda_graph != "off":
            # Twice: captured in any order, large ones do not fit where small ones were.
            graph_bytes = 2 * _peak_bytes(runner, largest_in_graph) + GRAPH_RESERVE_BYTES
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise ConfigError(
            f"{free / 2**30:.2f} of {total / 2**30:.2f} GiB are free on {device} beside the "
            f"weights of {model.num_bytes / 2**30:.2f} GiB, and a step of "
            f"{config.max_num_batched_tokens} tokens and {config.max_num_seqs} requests does not "
            "fit into them; lower max_num_batched_tokens or max_num_seqs, or free the device",
            param="max_num_batched_tokens",
        ) from error
    del runner
    torch.cuda.empty_cache()
    return kept_bytes + eager_bytes + graph_bytes


def _peak_bytes(runner: TritonRunner, shape: Shape) -> int:
    """What a step on padding, with the full sampler, takes at its worst moment."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    runner.run_padding(shape, "full")
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
