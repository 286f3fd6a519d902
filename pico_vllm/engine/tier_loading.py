"""The part of loading that is for tiers below the device: host memory and disk for cached KV."""

from __future__ import annotations

import json
import math
from hashlib import sha256

import torch

from pico_vllm.cache.tiers.disk import DiskTier
from pico_vllm.cache.tiers.host_pool import HostPool
from pico_vllm.cache.tiers.lower import LowerTiers
from pico_vllm.config import hardware
from pico_vllm.config.engine import EngineConfig
from pico_vllm.config.model import ModelConfig
from pico_vllm.errors import ConfigError
from pico_vllm.models.llama import parameter_shapes

# Rates, on purpose in favour of loading: what is computed instead takes the device from others.
# (FLOP/s, bytes/s from host memory, bytes/s from disk.) An H200 computes prompts at 590e12, and
# loads at 49e9 alone and 34e9 beside products; the CPU's and the disks' are rough.
GPU_RATES = (200e12, 40e9, 4e9)
CPU_RATES = (0.3e12, 5e9, 2e9)
HOST_WAIT_S = 1e-3
"""What a load takes however short it is: a step until it is planned, and one until it is seen."""
DISK_WAIT_S = 5e-3


def allocate_host_pool(
    model: ModelConfig, config: EngineConfig, dtype: torch.dtype, device: torch.device
) -> HostPool:
    """Raises ConfigError: it holds no block, or the machine has less memory."""
    assert config.kv_host_gb is not None
    block_bytes = model.kv_bytes_per_token(dtype.itemsize) * config.block_size
    num_bytes = int(config.kv_host_gb * 2**30)
    free_bytes = hardware.available_memory_bytes()
    if num_bytes < block_bytes:
        raise ConfigError(
            f"kv_host_gb {config.kv_host_gb} is {num_bytes} bytes, and a block of "
            f"{config.block_size} tokens takes {block_bytes}; raise it",
            param="kv_host_gb",
        )
    if num_bytes > free_bytes:
        raise ConfigError(
            f"kv_host_gb is {config.kv_host_gb}, but {free_bytes / 2**30:.2f} GiB of host memory "
            "are free; lower it",
            param="kv_host_gb",
        )
    return HostPool(
        num_bytes // block_bytes,
        config.block_size,
        model,
        dtype=dtype,
        is_pinned=device.type == "cuda" and config.uses_triton,
    )


def build_tiers(
    model: ModelConfig, config: EngineConfig, host_pool: HostPool, weights_identity: bytes
) -> LowerTiers:
    """weights_identity: what blocks on disk are known by, beside model and configuration.

    Raises:
        ConfigError: the disk's folder cannot be used.
    """
    num_host_blocks, block_bytes = host_pool.bytes.shape
    # What may change the bits of KV, or where in a block they lie.
    computed_with = {
        name: getattr(config, name)
        for name in ("dtype", "weight_format", "kernels", "batch_invariant")
    } | {"device": config.device.partition(":")[0]}
    text = f"{model!r} {json.dumps(computed_with)}".encode()
    identity = sha256(text + weights_identity).digest()
    disk = None
    if config.kv_disk_path is not None:
        assert config.kv_disk_gb is not None
        layout = {
            "architecture": model.architecture,
            "layers": model.num_layers,
            "kv_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
            "block_size": config.block_size,
            "dtype": config.dtype,
        }
        disk = DiskTier(
            config.kv_disk_path,
            max_bytes=int(config.kv_disk_gb * 2**30),
            layout=layout,
            identity=identity,
            block_tokens_bytes=4 * config.block_size,
            block_bytes=block_bytes,
        )
    min_host_tokens, min_disk_tokens = least_tokens(
        model, block_bytes / config.block_size, is_cpu=config.device == "cpu"
    )
    return LowerTiers(
        num_host_blocks,
        block_size=config.block_size,
        block_bytes=block_bytes,
        identity=identity,
        min_host_tokens=min_host_tokens,
        min_disk_tokens=min_disk_tokens,
        disk=disk,
        host_memory=host_pool.bytes,
    )


def least_tokens(
    model: ModelConfig, token_bytes: float, *, is_cpu: bool
) -> tuple[int | None, int | None]:
    """From how many on it is faster to load what is in host memory, and what is on disk, than to
    compute it; None is never."""
    flops, host_rate, disk_rate = CPU_RATES if is_cpu else GPU_RATES
    num_parameters = sum(math.prod(shape) for shape in parameter_shapes(model).values())
    compute_s = 2 * num_parameters / flops
    host_s, disk_s = token_bytes / host_rate, token_bytes / disk_rate
    return (
        _least_tokens(HOST_WAIT_S, compute_s, host_s),
        _least_tokens(DISK_WAIT_S, compute_s, host_s + disk_s),
    )


def _least_tokens(wait_s: float, compute_s: float, load_s: float) -> int | None:
    """From how many on loading is faster; None is never."""
    if load_s >= compute_s:
        return None
    return max(1, math.ceil(wait_s / (compute_s - load_s)))
