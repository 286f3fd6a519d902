"""EngineConfig: every setting of one engine, checked when made, "auto" settled once by
`resolve`."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Literal

from pico_vllm.config.model import ModelConfig
from pico_vllm.errors import ConfigError, show

KvKind = Literal["paged", "contiguous", "none"]
WeightFormat = Literal["auto", "keep", "bf16", "fp32"]

_DTYPES = {
    "bf16": "bfloat16", "bfloat16": "bfloat16",
    "fp16": "float16", "float16": "float16", "half": "float16",
    "fp32": "float32", "float32": "float32", "float": "float32",
}  # fmt: skip
_CHOICES: dict[str, tuple[str, ...]] = {
    "kv": ("paged", "contiguous", "none"),
    "weight_format": ("auto", "keep", "bf16", "fp32"),
    "load_format": ("auto", "dummy"),
    "cpu_graph": ("on", "off"),
    "kernels": ("auto", "triton", "attention", "plain"),
    "cuda_graph": ("lazy", "eager-start", "off"),
    "overlap": ("auto", "on", "off"),
    "scheduling_policy": ("fcfs", "priority", "shortest-prompt", "longest-prefix-match"),
    "enable_prefix_caching": ("auto", "on", "off"),
    "eviction_policy": ("lru", "lfu", "fifo", "priority"),
}
MAX_TIER_GB = 1 << 20
DISK_GB = 16.0
WITH_TRITON = ("triton", "attention")
"""Of kernels: those whose attention, and with it the batch and its runner, is Triton's."""


def _is_path(path: object) -> bool:
    """Whether the system could have a file of this name."""
    if not isinstance(path, str) or not path or "\0" in path:
        return False
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    model: str
    """Directory, .gguf file, alias or Hub id."""
    dtype: str = "auto"
    """auto, bfloat16, float16 or float32: type of activations and KV. auto is bfloat16 where the
    machine is good at it."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    max_model_len: int | None = None
    """Most tokens of one request, prompt and answer together; None takes the model's window."""
    max_num_seqs: int | None = None
    """Most requests that run at once; None is 256 on a GPU, 32 on a CPU."""
    max_num_batched_tokens: int | None = None
    """Most tokens computed in one step: decode rows first, then prompt chunks; None is 8192 on a
    GPU, beside a token for each of max_num_seqs, and 2048 on a CPU."""
    block_size: int = 16
    """Tokens in a KV block."""
    num_kv_blocks: int | None = None
    """KV blocks for requests, the null block not counted; None takes what memory allows. Where the
    answers of all that run come to need more, the last in line is preempted and computed again."""
    gpu_memory_utilization: float = 0.9
    """Part of the device's memory that weights, activations and KV may take."""
    kv: KvKind = "paged"
    """paged; contiguous and none are the readable references."""
    weight_format: WeightFormat = "auto"
    """keep leaves 4- and 8-bit weights packed; bf16 and fp32 unpack them. auto: fp32 for dtype
    float32, else keep."""
    load_format: str = "auto"
    """dummy fills the weights with random numbers and needs only a config.json."""
    seed: int = 0
    """Start of the seeds given to requests that bring none, and of dummy weights."""
    cpu_graph: str = "on"
    """on replays decode steps of few requests on the CPU as graphs, where the weights are packed or
    plain; off runs them op by op."""
    kernels: str = "auto"
    """triton runs our own GPU kernels, plain PyTorch's operations, attention our kernels of
    attention and KV cache with PyTorch's operations around them; auto is triton on a GPU."""
    cuda_graph: str = "lazy"
    """On a GPU: lazy captures a graph when a batch size first comes up; eager-start captures all of
    decoding at start, and compiles what steps with prompts need, whose graphs come lazily; off
    launches kernel by kernel."""
    overlap: str = "auto"
    """on launches a step before the ids of the one before it are read; auto is on with
    triton and attention."""
    batch_invariant: bool = False
    """On a GPU: a request's answer has the same bits alone and in any batch, its prompt whole or in
    chunks, preempted or not. Kernels that do not depend on the batch's size take longer."""
    scheduling_policy: str = "fcfs"
    """Who leaves the waiting line first: fcfs the first to come, priority the lowest priority,
    shortest-prompt the shortest prompt, longest-prefix-match the one with most cached tokens; with
    the last three a request counts for more the longer it waits. With priority one that waits may
    also preempt those that run and come after it."""
    long_prefill_token_threshold: int | None = None
    """Most tokens of one prompt computed in one step, which leaves the rest of
    max_num_batched_tokens to other prompts; None sets no limit of its own."""
    enable_prefix_caching: str = "auto"
    """on keeps KV blocks of prompts and answers, as long as nobody needs their memory, for requests
    that begin with the same tokens; auto is on with kv paged."""
    cow_min_tokens: int = 8
    """From how many cached tokens of a block on they are copied rather than computed, where the
    whole block does not match."""
    eviction_policy: str = "lru"
    """Which cached blocks go first: lru those used longest ago, lfu those that fewest requests have
    used, fifo the oldest, priority those that only requests of the highest priority number have
    used."""
    max_cached_fraction: float = 1.0
    """Most of the KV blocks that cached prefixes may take which no running request uses."""
    kv_host_gb: float | None = None
    """GiB of host memory, pinned on a GPU, for cached prefixes that the KV pool has no room for;
    None is 0, or 1 with kv_disk_path, whose blocks pass through it."""
    kv_disk_path: str | None = None
    """Folder for cached prefixes that host memory has no room for. They outlive the process, and
    are as readable as the prompts that they are of. None keeps nothing on disk."""
    kv_disk_gb: float | None = None
    """GiB of kv_disk_path, for each model that uses it; None takes 16."""
    num_threads: int | None = None
    """CPU threads, of all engines in this process; None takes the cores it may use."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(
                f"model must be a directory, file, alias or Hub id, not {show(self.model)}",
                param="model",
            )
        if not isinstance(self.dtype, str) or self.dtype not in ("auto", *_DTYPES):
            raise ConfigError(
                f"dtype {show(self.dtype)} is not supported; use auto, bfloat16, float16 or "
                "float32",
                param="dtype",
            )
        is_known = self.device in ("auto", "cpu", "cuda") or (
            isinstance(self.device, str)
            and self.device.startswith("cuda:")
            and self.device[5:].isdigit()
        )
        if not is_known:
            raise ConfigError(
                f"device {show(self.device)} is not known; use auto, cpu, cuda or cuda:N",
                param="device",
            )
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"{name} must be one of {', '.join(allowed)}, not {show(getattr(self, name))}",
                    param=name,
                )
        self._check_count("block_size", 1, 256)
        for name, low, high in (
            ("max_num_seqs", 1, 4096),
            ("max_num_batched_tokens", 1, 1 << 20),
            ("max_model_len", 2, 1 << 31),  # one token of prompt and one of answer
            ("num_kv_blocks", 1, 1 << 31),
            ("long_prefill_token_threshold", 1, 1 << 31),
            ("cow_min_tokens", 1, 1 << 31),
            ("num_threads", 1, 1024),
        ):
            if getattr(self, name) is not None:
                self._check_count(name, low, high)
        self._check_budget(self.max_num_batched_tokens, self.max_num_seqs)
        if not isinstance(self.batch_invariant, bool):
            raise ConfigError(
                f"batch_invariant must be True or False, not {show(self.batch_invariant)}",
                param="batch_invariant",
            )
        utilization = self.gpu_memory_utilization
        if (
            isinstance(utilization, bool)
            or not isinstance(utilization, (int, float))
            or not 0 < utilization <= 1
        ):
            raise ConfigError(
                f"gpu_memory_utilization must be in (0, 1], not {show(utilization)}",
                param="gpu_memory_utilization",
            )
        fraction = self.max_cached_fraction
        if (
            isinstance(fraction, bool)
            or not isinstance(fraction, (int, float))
            or not 0 <= fraction <= 1
        ):
            raise ConfigError(
                f"max_cached_fraction must be in [0, 1], not {show(fraction)}",
                param="max_cached_fraction",
            )
        self._check_tiers()
        if (
            isinstance(self.seed, bool)
            or not isinstance(self.seed, int)
            or not -(2**63) <= self.seed < 2**63
        ):
            raise ConfigError(f"seed must be a 64-bit integer, not {show(self.seed)}", param="seed")

    def _check_tiers(self) -> None:
        for name, is_open in (("kv_host_gb", False), ("kv_disk_gb", True)):
            value = getattr(self, name)
            if value is None:
                continue
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not 0 <= value <= MAX_TIER_GB or (is_open and value == 0):
                raise ConfigError(
                    f"{name} must be a number of GiB {'above' if is_open else 'from'} 0, up to "
                    f"{MAX_TIER_GB}, not {show(value)}",
                    param=name,
                )
        path = self.kv_disk_path
        if path is not None and not _is_path(path):
            raise ConfigError(
                f"kv_disk_path must name a folder, not {show(path)}", param="kv_disk_path"
            )
        if path is None and self.kv_disk_gb is not None:
            raise ConfigError(
                f"kv_disk_gb is {self.kv_disk_gb}, but no kv_disk_path says where; give it, or "
                "leave kv_disk_gb out",
                param="kv_disk_gb",
            )
        if path is not None and self.kv_host_gb == 0:
            raise ConfigError(
                "kv_host_gb is 0, but blocks pass through host memory on their way to "
                "kv_disk_path; leave kv_host_gb out for 1 GiB, or give more than 0",
                param="kv_host_gb",
            )

    def without_tiers(self) -> EngineConfig:
        """The same, with cached prefixes in the KV pool alone."""
        return replace(self, kv_host_gb=None, kv_disk_path=None, kv_disk_gb=None)

    @property
    def has_lower_tiers(self) -> bool:
        """Resolved: whether cached prefixes may lie elsewhere than in the KV pool."""
        return bool(self.kv_host_gb)

    @property
    def uses_triton(self) -> bool:
        return self.kernels in WITH_TRITON

    @staticmethod
    def _check_budget(max_num_batched_tokens: int | None, max_num_seqs: int | None) -> None:
        if max_num_batched_tokens is None or max_num_seqs is None:
            return
        if max_num_batched_tokens < max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {max_num_batched_tokens} is less than max_num_seqs "
                f"{max_num_seqs}: "
                "a step could not take one token of each running request; raise the first or "
                "lower the second",
                param="max_num_batched_tokens",
            )

    def _check_count(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(
                f"{name} must be a whole number from {low} to {high}, not {show(value)}", param=name
            )

    def resolve(
        self, model: ModelConfig, *, device: str, has_fast_bf16: bool, num_threads: int
    ) -> EngineConfig:
        """Settle everything "auto" but the number of blocks, which depends on free memory.

        Raises:
            ConfigError: the window asked for is longer than the model's, or a sliding window would
            cut it; or something is asked of a cache that needs one with blocks.
        """
        if self.kv != "paged" and self.num_kv_blocks is not None:
            raise ConfigError(
                f"num_kv_blocks is {self.num_kv_blocks}, but kv {self.kv} has no blocks; leave "
                "num_kv_blocks out, or use kv paged",
                param="num_kv_blocks",
            )
        dtype = _DTYPES.get(self.dtype, "bfloat16" if has_fast_bf16 else "float32")
        weight_format = self.weight_format
        if weight_format == "auto":
            weight_format = "fp32" if dtype == "float32" else "keep"
        if weight_format == "bf16" and dtype == "float16":
            raise ConfigError(
                "weight_format bf16 needs dtype bfloat16 or float32, not float16; use "
                "weight_format keep",
                param="weight_format",
            )
        window = model.max_model_len_default
        max_model_len = window if self.max_model_len is None else self.max_model_len
        if max_model_len > window:
            raise ConfigError(
                f"max_model_len {max_model_len} is longer than the model's window of {window} "
                "tokens; lower it",
                param="max_model_len",
            )
        if model.sliding_window is not None and max_model_len > model.sliding_window:
            if self.max_model_len is not None:
                raise ConfigError(
                    f"max_model_len {max_model_len} is longer than the model's sliding window of "
                    f"{model.sliding_window} tokens, which is not supported; pass "
                    f"max_model_len={model.sliding_window} "
                    "or less, where the window changes nothing",
                    param="max_model_len",
                )
            max_model_len = model.sliding_window
        original = model.rope.original_max_position
        if model.rope.kind == "dynamic" and original is not None and max_model_len > original:
            if self.max_model_len is not None:
                raise ConfigError(
                    f"max_model_len {max_model_len} is beyond the original {original} tokens of a "
                    "model with dynamic "
                    "RoPE, where its answers depend on how they are computed; pass "
                    f"max_model_len={original} or less",
                    param="max_model_len",
                )
            max_model_len = original
        is_gpu = device != "cpu"
        max_num_seqs, max_tokens = self.max_num_seqs, self.max_num_batched_tokens
        # A limit that was given moves the default of the other, which must hold one token each.
        if max_num_seqs is None:
            max_num_seqs = min(256 if is_gpu else 32, max_tokens or 1 << 20)
        if max_tokens is None:
            max_tokens = 8192 + max_num_seqs if is_gpu else max(2048, max_num_seqs)
        kernels = self.kernels
        if kernels == "auto":
            kernels = "triton" if is_gpu and self.kv == "paged" else "plain"
        uses_triton = kernels in WITH_TRITON
        if uses_triton and self.kv != "paged":
            raise ConfigError(
                f"kernels {kernels} needs kv paged, not {self.kv}; use kernels plain",
                param="kernels",
            )
        if self.batch_invariant and kernels != "triton":
            raise ConfigError(
                f"batch_invariant needs kernels triton, on a GPU, not {kernels} on {device}; leave "
                "it out (on a CPU, answers in float32 do not depend on the batch)",
                param="batch_invariant",
            )
        overlap = self.overlap
        if overlap == "auto":
            overlap = "on" if uses_triton else "off"
        if overlap == "on" and self.kv == "none":
            raise ConfigError(
                "overlap on needs a KV cache: without one a step computes whole sequences, whose "
                "last ids are not known yet; use overlap off",
                param="overlap",
            )
        prefix_caching = self.enable_prefix_caching
        if prefix_caching == "auto":
            prefix_caching = "on" if self.kv == "paged" else "off"
        if prefix_caching == "on" and self.kv != "paged":
            raise ConfigError(
                f"enable_prefix_caching on needs kv paged, not {self.kv}: prefixes are shared in "
                "blocks; use enable_prefix_caching off",
                param="enable_prefix_caching",
            )
        kv_host_gb = self.kv_host_gb
        has_disk = self.kv_disk_path is not None
        if kv_host_gb is None:
            kv_host_gb = 1.0 if has_disk else 0.0
        if kv_host_gb and prefix_caching == "off":
            name = "kv_disk_path" if has_disk else "kv_host_gb"
            raise ConfigError(
                f"{name} keeps cached prefixes and needs enable_prefix_caching on; leave it out",
                param=name,
            )
        if self.scheduling_policy == "longest-prefix-match" and prefix_caching == "off":
            raise ConfigError(
                "scheduling_policy longest-prefix-match needs enable_prefix_caching on; use fcfs",
                param="scheduling_policy",
            )
        return replace(
            self,
            enable_prefix_caching=prefix_caching,
            kv_host_gb=kv_host_gb,
            kv_disk_gb=DISK_GB if has_disk and self.kv_disk_gb is None else self.kv_disk_gb,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_tokens,
            kernels=kernels,
            cuda_graph=self.cuda_graph if is_gpu and uses_triton else "off",
            overlap=overlap,
            dtype=dtype,
            device=device,
            weight_format=weight_format,
            max_model_len=max_model_len,
            num_threads=num_threads,
        )
