"""From a name and settings to an engine that can run: files, configuration, weights, KV pool,
tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from pico_vllm.cache.contiguous import ContiguousKV, NoKV
from pico_vllm.cache.kv_pool import DecodeStep, PagedKV
from pico_vllm.cache.tiers.disk import make_folder
from pico_vllm.cache.tiers.host_pool import HostPool
from pico_vllm.config import hardware
from pico_vllm.config.engine import EngineConfig
from pico_vllm.config.model import ModelConfig
from pico_vllm.engine import triton_loading
from pico_vllm.engine.batch_builder import BatchBuilder
from pico_vllm.engine.cpu_graph import USES_BEFORE_CAPTURE, CpuGraphs
from pico_vllm.engine.engine import Engine
from pico_vllm.engine.model_runner import KVCache, ModelRunner, Runner
from pico_vllm.engine.tier_loading import allocate_host_pool, build_tiers
from pico_vllm.errors import ConfigError, ModelLoadError
from pico_vllm.forward_batch import ForwardBatch
from pico_vllm.layers.linear import OneDnnWeight
from pico_vllm.layers.plain import PlainLayers
from pico_vllm.models.gguf import GGUFSource
from pico_vllm.models.hub import ModelFiles, read_hf_config, resolve_model
from pico_vllm.models.identity import weights_identity
from pico_vllm.models.llama import LlamaForCausalLM, parameter_shapes
from pico_vllm.models.loader import WeightLoader, bytes_in_memory, own_format
from pico_vllm.models.registry import MODELS
from pico_vllm.models.weights import DummySource, SafetensorsSource, WeightSource, check_names
from pico_vllm.sampler.sampler import Sampler
from pico_vllm.scheduler.scheduler import Scheduler
from pico_vllm.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
OnProgress = Callable[[str, int, int], None]
"""Told the phase of a start, and how much of it is done, of how much: tensors of "loading weights",
graphs of "capturing graphs", or one piece of work. A phase that does not occur is not named."""
MIN_CAPABILITY = 8
"""First GPU generation with bf16 and asynchronous copies."""
CPU_POOL_FRACTION = 0.25
"""Part of the free memory of a CPU machine that the KV pool may take where nobody said how much."""


def _tell_nobody(phase: str, num_done: int, num_in_all: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class LoadedModel:
    engine: Engine
    tokenizer: Tokenizer | None
    """None for a configuration without a tokenizer: prompts are then token ids."""
    model_config: ModelConfig
    weight_bytes: int


def load_model(config: EngineConfig, *, on_progress: OnProgress | None = None) -> LoadedModel:
    """Load everything.

    Raises:
        ModelLoadError, ConfigError: nothing was started.
    """
    report = on_progress or _tell_nobody
    files = resolve_model(config.model)
    model_config, source, tokenizer = open_model(files, config)
    try:
        device = settle_device(config.device)
        if config.num_threads is not None or device.type == "cpu":
            torch.set_num_threads(config.num_threads or hardware.cpu_threads())
        resolved = config.resolve(
            model_config,
            device=str(device),
            has_fast_bf16=device.type == "cuda" or hardware.cpu_has_fast_bf16(),
            num_threads=torch.get_num_threads(),
        )
        if resolved.uses_triton:
            triton_loading.check(resolved, model_config, device)
        _warn_of_shorter_window(config, resolved, model_config)
        if resolved.kv_disk_path is not None:
            make_folder(resolved.kv_disk_path)  # where that fails, before gigabytes are read
        # Before the weights: the model's table of angles is as long as the window.
        resolved = settle_window(resolved)
        check_memory(resolved, model_config, source, device)
        model = load_weights(model_config, resolved, source, device, report)
    finally:
        source.close()
    activation_bytes = 0
    if resolved.uses_triton and device.type == "cuda":
        report("profiling memory", 0, 1)
        activation_bytes = triton_loading.profile_activations(model, model_config, resolved, device)
        report("profiling memory", 1, 1)
    resolved = settle_kv_blocks(resolved, model_config, device, model.num_bytes, activation_bytes)
    resolved = settle_graphs(resolved, model)
    if resolved.has_lower_tiers:
        is_dummy = resolved.load_format == "dummy"
        identity = weights_identity(files, dummy_seed=resolved.seed if is_dummy else None)
    else:
        identity = b""
    engine = build_engine(model, model_config, resolved, tokenizer, device, report, identity)
    engine.warm_up(USES_BEFORE_CAPTURE + 2 if resolved.cpu_graph == "on" else 1)
    logger.info("engine_ready %s", " ".join(f"{k}={v}" for k, v in describe(resolved).items()))
    return LoadedModel(engine, tokenizer, model_config, model.num_bytes)


def open_model(
    files: ModelFiles, config: EngineConfig
) -> tuple[ModelConfig, WeightSource, Tokenizer | None]:
    """Read and check configuration, names of the weights and tokenizer, before any weight is
    read."""
    source: WeightSource
    tokenizer = None
    if files.kind == "gguf":
        source = gguf = GGUFSource(files.path)
        try:
            model_config = ModelConfig.from_hf(gguf.hf_config())
            tokenizer = Tokenizer.from_gguf_metadata(gguf.metadata)
        except BaseException:
            source.close()
            raise
    else:
        model_config = ModelConfig.from_hf(*read_hf_config(files.path))
        has_tokenizer = files.kind == "directory" and (files.path / "tokenizer.json").exists()
        if has_tokenizer or config.load_format != "dummy":
            if files.kind == "config":
                raise ModelLoadError(
                    f"{config.model} is a configuration without weights; measure it with random "
                    "ones (pico-vllm bench or profile with --load-format dummy), or name a model "
                    "that has some",
                    param="load_format",
                )
            tokenizer = Tokenizer.from_directory(files.path)
        source = (
            SafetensorsSource(files.path)
            if config.load_format != "dummy"
            else _dummy(model_config, config)
        )
    if config.load_format == "dummy" and files.kind == "gguf":
        source.close()
        source = _dummy(model_config, config)
    try:
        _check_parts(model_config, source, tokenizer)
    except BaseException:
        source.close()
        raise
    return model_config, source, tokenizer


def _check_parts(
    model_config: ModelConfig, source: WeightSource, tokenizer: Tokenizer | None
) -> None:
    """Configuration, weights and tokenizer must belong to one model."""
    check_names(parameter_shapes(model_config), source, tied=model_config.tie_word_embeddings)
    if tokenizer is not None and tokenizer.vocab_size > model_config.vocab_size:
        raise ModelLoadError(
            f"the tokenizer has {tokenizer.vocab_size} tokens but the model only "
            f"{model_config.vocab_size} rows in its "
            "head: the tokenizer does not belong to these weights",
            param="tokenizer",
        )
    unknown = [i for i in model_config.eos_token_ids if tokenizer and i >= tokenizer.vocab_size]
    if unknown:
        raise ModelLoadError(
            f"eos_token_id {unknown[0]} is not among the tokenizer's tokens: it could never end an "
            "answer; correct config.json or generation_config.json",
            param="eos_token_id",
        )


def _dummy(model_config: ModelConfig, config: EngineConfig) -> DummySource:
    shapes = parameter_shapes(model_config)
    if model_config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    return DummySource(shapes, model_config.initializer_range, config.seed)


def settle_device(name: str) -> torch.device:
    """auto is the first GPU that torch sees, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device {name} was asked for, but torch {torch.__version__} {why_no_gpu()}; use "
            "--device cpu",
            param="device",
        )
    index = int(name.partition(":")[2] or 0)
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name} was asked for, but there are {torch.cuda.device_count()} GPUs, "
            "numbered from 0",
            param="device",
        )
    major, minor = torch.cuda.get_device_capability(index)
    if major < MIN_CAPABILITY:
        raise ConfigError(
            f"{torch.cuda.get_device_name(index)} has compute capability {major}.{minor}; "
            f"{MIN_CAPABILITY}.0 or newer (Ampere) is needed; use --device cpu",
            param="device",
        )
    return torch.device("cuda", index)


def why_no_gpu() -> str:
    """What stands between torch and a GPU, and the way out, in a few words."""
    if torch.version.cuda is None:
        return "is a build without CUDA; install one with it"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        # torch names the driver's version and what it needs in its first sentence.
        return f"cannot use a GPU: {str(error).splitlines()[0].rstrip('.')}"
    return "sees no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES"


def _weight_dtype(config: EngineConfig) -> torch.dtype:
    """Of weights that are not packed."""
    named = {"bf16": torch.bfloat16, "fp32": torch.float32}
    return named.get(config.weight_format, TORCH_DTYPES[config.dtype])


def load_weights(
    model_config: ModelConfig,
    config: EngineConfig,
    source: WeightSource,
    device: torch.device,
    on_progress: OnProgress = _tell_nobody,
) -> LlamaForCausalLM:
    num_tensors, num_done = len(source.tensors), 0

    def progress(count: int) -> None:
        nonlocal num_done
        num_done += count
        on_progress("loading weights", min(num_done, num_tensors), num_tensors)

    dtype = TORCH_DTYPES[config.dtype]
    weight_dtype = _weight_dtype(config)
    loader = WeightLoader(
        source,
        dtype=dtype,
        weight_dtype=weight_dtype,
        # Packed weights have products on the CPU only.
        keeps_packed=config.weight_format == "keep" and device.type == "cpu",
        device=device,
        layers=triton_loading.make_layers(config, device) if config.uses_triton else PlainLayers(),
        progress=progress,
    )
    assert config.max_model_len is not None
    return MODELS[model_config.architecture](model_config, loader, config.max_model_len)


def _warn_of_shorter_window(
    asked: EngineConfig, resolved: EngineConfig, model: ModelConfig
) -> None:
    assert resolved.max_model_len is not None
    if asked.max_model_len is None and resolved.max_model_len < model.max_model_len_default:
        why = "a sliding window" if model.sliding_window is not None else "dynamic RoPE"
        logger.warning(
            "the model's window of %d tokens has %s, which is exact up to %d: longer is refused",
            model.max_model_len_default,
            why,
            resolved.max_model_len,
        )


def check_memory(
    config: EngineConfig, model: ModelConfig, source: WeightSource, device: torch.device
) -> None:
    """Refuse a start that cannot fit, before any weight is read.

    Raises:
        ConfigError: with what is needed, what is free, and what would help.
    """
    assert config.max_model_len is not None
    shapes = parameter_shapes(model)
    if model.tie_word_embeddings:
        del shapes["lm_head.weight"]
    weights = bytes_in_memory(
        shapes,
        source.tensors,
        keeps_packed=config.weight_format == "keep" and device.type == "cpu",
        weight_itemsize=_weight_dtype(config).itemsize,
        vector_itemsize=TORCH_DTYPES[config.dtype].itemsize,
    )
    token_bytes = model.kv_bytes_per_token(TORCH_DTYPES[config.dtype].itemsize)
    kv = 0
    if config.kv == "contiguous":
        kv = token_bytes * config.max_model_len * config.max_num_seqs
    elif config.kv == "paged":
        kv = token_bytes * config.block_size * (config.num_kv_blocks or 1)
    if device.type == "cpu":
        free = hardware.available_memory_bytes()
    else:
        free = torch.cuda.mem_get_info(device)[0]
    if weights + kv > free:
        raise ConfigError(
            f"weights in {config.weight_format} take {weights / 2**30:.2f} GiB and the KV cache at "
            f"least {kv / 2**30:.2f}, but {free / 2**30:.2f} GiB are free on {device}; use a "
            "smaller weight_format (keep, bf16), num_kv_blocks or max_num_seqs, or another model",
            param="num_kv_blocks" if weights < free else "model",
        )


def settle_kv_blocks(
    config: EngineConfig,
    model: ModelConfig,
    device: torch.device,
    weight_bytes: int = 0,
    activation_bytes: int = 0,
) -> EngineConfig:
    """Decide how many blocks the pool has, and shorten the window to what it holds. The weights
    are loaded; activations are what the largest step takes besides.

    Raises:
        ConfigError: not even one block fits, or no request into what does.
    """
    assert config.max_model_len is not None and config.max_num_seqs is not None
    blocks_per_request = -(-config.max_model_len // config.block_size)
    num_blocks = config.num_kv_blocks
    if config.kv != "paged":
        # These caches are as large as the window says: blocks only count what is running.
        num_blocks = blocks_per_request * config.max_num_seqs
    elif num_blocks is None:
        block_bytes = (
            model.kv_bytes_per_token(TORCH_DTYPES[config.dtype].itemsize) * config.block_size
        )
        if device.type == "cpu":
            free_bytes = int(hardware.available_memory_bytes() * CPU_POOL_FRACTION)
        else:
            free, total = torch.cuda.mem_get_info(device)
            kept_free = total * (1 - config.gpu_memory_utilization)
            free_bytes = int(free - kept_free - activation_bytes)
        num_blocks = min(free_bytes // block_bytes, blocks_per_request * config.max_num_seqs)
        if num_blocks < 1:
            raise ConfigError(
                f"{max(0, free_bytes) / 2**20:.0f} MiB are left for the KV cache, whose smallest "
                f"piece, a block of {config.block_size} tokens, takes {block_bytes / 2**20:.2f} "
                f"MiB; weights take {weight_bytes / 2**20:.0f} MiB, a step's activations "
                f"{activation_bytes / 2**20:.0f}. Free memory, raise gpu_memory_utilization "
                f"({config.gpu_memory_utilization}), or lower max_num_batched_tokens "
                f"({config.max_num_batched_tokens})",
                param="num_kv_blocks",
            )
    return settle_window(replace(config, num_kv_blocks=num_blocks))


def settle_window(config: EngineConfig) -> EngineConfig:
    """Shorten the window to what the pool holds, where its number of blocks is known.

    Raises:
        ConfigError: it holds no request at all.
    """
    num_blocks = config.num_kv_blocks
    if num_blocks is None or config.kv != "paged":
        return config
    assert config.max_model_len is not None
    max_model_len = min(config.max_model_len, num_blocks * config.block_size)
    if max_model_len < 2:
        raise ConfigError(
            f"a KV pool of {num_blocks} blocks of {config.block_size} tokens holds no request of "
            "one prompt token and one answer token; raise num_kv_blocks or block_size",
            param="num_kv_blocks",
        )
    if max_model_len < config.max_model_len:
        logger.warning(
            "the KV pool of %d blocks of %d tokens holds %d tokens: the window shrinks from %d "
            "to that",
            num_blocks, config.block_size, max_model_len, config.max_model_len,
        )  # fmt: skip
    return replace(config, max_model_len=max_model_len)


def settle_graphs(config: EngineConfig, model: LlamaForCausalLM) -> EngineConfig:
    """Turn graphs off where they cannot be: Triton's kernels have their own, and oneDNN's weights
    do not go into a TorchScript graph."""
    has_opaque = any(
        isinstance(own_format(linear.weight), OneDnnWeight) for linear in model.linears
    )
    if config.device != "cpu" or config.uses_triton or config.kv != "paged" or has_opaque:
        return replace(config, cpu_graph="off")
    return config


def build_engine(
    model: LlamaForCausalLM,
    model_config: ModelConfig,
    config: EngineConfig,
    tokenizer: Tokenizer | None,
    device: torch.device,
    on_progress: OnProgress = _tell_nobody,
    weights_identity: bytes = b"",
) -> Engine:
    """weights_identity: what blocks on disk are known by, beside the configuration."""
    assert config.max_num_seqs is not None
    vocab_size = model_config.vocab_size if tokenizer is None else tokenizer.vocab_size
    host_pool, tiers = None, None
    if config.has_lower_tiers:
        dtype = TORCH_DTYPES[config.dtype]
        host_pool = allocate_host_pool(model_config, config, dtype, device)
        tiers = build_tiers(model_config, config, host_pool, weights_identity)
    if config.uses_triton:
        on_device = triton_loading.build_runner(
            model, model_config, config, device, vocab_size=vocab_size, host_pool=host_pool
        )
        if on_device.graphs is not None and config.cuda_graph == "eager-start":
            on_device.capture_decodes(partial(on_progress, "capturing graphs"))
        runner: Runner = on_device
    else:
        sampler = Sampler(config.max_num_seqs, vocab_size, device)
        runner = _plain_runner(model, model_config, config, sampler, device, host_pool)
    return Engine(
        config,
        Scheduler.from_config(config, tiers),
        runner,
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids(model_config, tokenizer),
    )


def _plain_runner(
    model: LlamaForCausalLM,
    model_config: ModelConfig,
    config: EngineConfig,
    sampler: Sampler,
    device: torch.device,
    host_pool: HostPool | None,
) -> ModelRunner:
    assert config.max_model_len is not None and config.max_num_seqs is not None
    assert config.num_kv_blocks is not None
    dtype = TORCH_DTYPES[config.dtype]
    kv: KVCache
    if config.kv == "none":
        kv = NoKV(model_config)
    elif config.kv == "contiguous":
        kv = ContiguousKV(
            model_config,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            dtype=dtype,
            device=device,
        )
    else:
        kv = PagedKV(
            model_config,
            num_device_blocks=config.num_kv_blocks,
            block_size=config.block_size,
            dtype=dtype,
            device=device,
            host_pool=None if host_pool is None else host_pool.blocks,
        )
    batch_builder = BatchBuilder(
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        device=device,
    )

    def forward(batch: ForwardBatch, step: DecodeStep) -> Tensor:
        return model.forward(batch, step).x_TE

    graphs = CpuGraphs(forward) if config.cpu_graph == "on" else None
    return ModelRunner(model, kv, batch_builder, sampler, graphs)


def eos_token_ids(model_config: ModelConfig, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The model's list, and the tokenizer's own where it has one."""
    ids = set(model_config.eos_token_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return tuple(sorted(ids))


def describe(config: EngineConfig) -> dict[str, object]:
    """The resolved settings, flat, for logs and records."""
    return {name: getattr(config, name) for name in config.__dataclass_fields__}
