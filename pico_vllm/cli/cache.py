"""pico-vllm cache: what the prefix cache would do with a trace of prompts, without running a
model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pico_vllm.cli.lines import Commit, IsJson, Lines, RecordFile, print_table
from pico_vllm.cli.options import field_option, integers
from pico_vllm.cli.terminal import printable
from pico_vllm.config.engine import DISK_GB, EngineConfig
from pico_vllm.errors import ConfigError

if TYPE_CHECKING:
    from pico_vllm.bench.prompt_trace import TraceRequest
    from pico_vllm.bench.replay import TierSizes
    from pico_vllm.config.model import ModelConfig
    from pico_vllm.tokenizer.tokenizer import Tokenizer

HIT_COLUMNS = (
    "num_kv_blocks", "num_requests", "num_hits", "hit_rate", "saved_tokens", "computed_tokens",
    "output_tokens", "num_steps",
)  # fmt: skip
POOL_COLUMNS = (
    "num_kv_blocks", "num_nodes", "cached_blocks", "peak_cached_blocks", "peak_held_blocks",
    "evicted_blocks", "num_copies", "num_preemptions",
)  # fmt: skip
TIER_COLUMNS = (
    "num_kv_blocks", "tier", "hit_tokens", "hit_blocks", "hit_rate", "blocks", "cached_blocks",
    "down_blocks", "away_blocks",
)  # fmt: skip
MOVE_COLUMNS = (
    "num_kv_blocks", "stored_blocks", "loaded_blocks", "written_blocks", "read_blocks",
    "stored_bytes", "loaded_bytes", "written_bytes", "read_bytes", "unwritten_blocks",
    "failed_reads",
)  # fmt: skip
PREFIX_COLUMNS = ("saved_tokens", "num_requests", "prefix_tokens", "own_tokens", "begins")
MAX_BLOCKS = 100_000_000
"""Some 40 bytes each, whatever they would hold."""
KV_ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
REPLAYED_SETTINGS = (
    "dtype", "block_size", "max_num_seqs", "max_num_batched_tokens", "scheduling_policy",
    "enable_prefix_caching", "cow_min_tokens", "eviction_policy", "max_cached_fraction",
    "kv_host_gb", "kv_disk_path", "kv_disk_gb",
)  # fmt: skip
NO_MODEL = "none"
MAX_KV_GB = 100_000
MAX_IDS, MAX_CHARS = 8, 60
"""Of the beginning of a prefix."""


def cache(
    trace: Annotated[
        Path,
        typer.Argument(
            help="JSON lines with prompt, prompt_token_ids or messages, and perhaps output, "
            "output_tokens, salt, priority and arrival_s."
        ),
    ],
    num_kv_blocks: Annotated[
        str | None, typer.Option(help="KV blocks of the pool, with commas between: one run each.")
    ] = None,
    kv_gb: Annotated[
        float | None,
        typer.Option(help="Memory of the pool in GB instead; --model says what a token takes."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Whose tokenizer, window and KV; its weights are not read."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the KV: bfloat16, float16 or float32.")] = (
        "bfloat16"
    ),
    output_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of an answer of which the trace says nothing.")
    ] = 16,
    step_ms: Annotated[
        float,
        typer.Option(min=0.001, max=3.6e6, help="What a step takes on the clock of arrival_s."),
    ] = 20.0,
    top: Annotated[int, typer.Option(min=0, help="Shared prefixes to show.")] = 10,
    block_size: Annotated[int, field_option(EngineConfig, "block_size")] = 16,
    max_num_seqs: Annotated[
        int, typer.Option(help="Most requests that run at once.", rich_help_panel="Engine")
    ] = 32,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Most tokens computed in one step.", rich_help_panel="Engine")
    ] = 8192,
    scheduling_policy: Annotated[str, field_option(EngineConfig, "scheduling_policy")] = "fcfs",
    prefix_cache: Annotated[
        str,
        typer.Option(help="on, or off to see what is computed without.", rich_help_panel="Engine"),
    ] = "on",
    cow_min_tokens: Annotated[int, field_option(EngineConfig, "cow_min_tokens")] = 8,
    eviction_policy: Annotated[str, field_option(EngineConfig, "eviction_policy")] = "lru",
    max_cached_fraction: Annotated[float, field_option(EngineConfig, "max_cached_fraction")] = 1.0,
    kv_host_gb: Annotated[float | None, field_option(EngineConfig, "kv_host_gb")] = None,
    kv_disk_path: Annotated[
        str | None,
        typer.Option(
            help="As of an engine: with it there is a disk tier of --kv-disk-gb. The folder is "
            "neither read nor written.",
            rich_help_panel="Engine",
        ),
    ] = None,
    kv_disk_gb: Annotated[float | None, field_option(EngineConfig, "kv_disk_gb")] = None,
    num_host_blocks: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_BLOCKS, help="KV blocks in host memory, without --kv-host-gb."),
    ] = None,
    num_disk_blocks: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_BLOCKS, help="KV blocks on disk, without --kv-disk-path."),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            help="cuda or cpu: where --model runs, which says from how many tokens on a block is "
            "loaded rather than computed. Without --model all are loaded."
        ),
    ] = "cuda",
    is_json: IsJson = False,
    record: RecordFile = None,
    commit: Commit = None,
) -> None:
    """Replay a trace of prompts against the prefix cache, and show what it would save. No model
    runs: answers are those of the trace, or made up."""
    if (num_kv_blocks is None) == (kv_gb is None):
        raise ConfigError(
            "the pool needs one size: --num-kv-blocks, or --kv-gb with --model",
            param="num_kv_blocks",
        )
    if prefix_cache not in ("on", "off"):
        raise ConfigError(f"--prefix-cache {prefix_cache}: give on or off", param="prefix_cache")
    if scheduling_policy == "longest-prefix-match" and prefix_cache == "off":
        raise ConfigError(
            "--scheduling-policy longest-prefix-match needs --prefix-cache on; use fcfs",
            param="scheduling_policy",
        )
    config = EngineConfig(
        model=model or NO_MODEL,
        dtype=dtype,
        device="cpu",
        num_kv_blocks=1,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        scheduling_policy=scheduling_policy,
        enable_prefix_caching=prefix_cache,
        cow_min_tokens=cow_min_tokens,
        eviction_policy=eviction_policy,
        max_cached_fraction=max_cached_fraction,
        kv_host_gb=kv_host_gb,
        kv_disk_path=kv_disk_path,
        kv_disk_gb=kv_disk_gb,
    )
    if device not in ("cuda", "cpu"):
        raise ConfigError(f"--device {device}: give cuda or cpu", param="device")
    with _opened(model) as (model_config, tokenizer):
        pools = (
            integers("num-kv-blocks", num_kv_blocks)
            if num_kv_blocks is not None
            else [_num_blocks(kv_gb or 0.0, config, model_config)]
        )
        if max(pools) > MAX_BLOCKS:
            raise ConfigError(
                f"a pool of {max(pools)} blocks is more than the {MAX_BLOCKS} that a replay has "
                "memory for; give fewer with --num-kv-blocks or --kv-gb",
                param="num_kv_blocks",
            )
        below = _tier_sizes(
            config, num_host_blocks, num_disk_blocks, model_config, is_cpu=device == "cpu"
        )
        from pico_vllm.bench.prompt_trace import read_trace

        requests = read_trace(trace, tokenizer=tokenizer, default_output_tokens=output_tokens)
        for each in pools:
            _check(requests, each * block_size, model_config)
        lines = Lines(HIT_COLUMNS, is_json=is_json, record=record)
        settings = {"trace": str(trace), "model": model, "step_ms": step_ms}
        if is_json or record is not None:
            settings |= _facts(config, commit)
        for each in pools:
            sized = replace(config, num_kv_blocks=each)
            for line in _replayed(requests, sized, step_ms, top, below):
                begin = line.pop("begin", None)
                if begin is not None:
                    line["begins"] = _shown(begin, tokenizer)
                lines.add(line | settings)
    runs = [line for line in lines.lines if line["id"] == "cache"]
    lines.show(runs)
    if not is_json:
        print_table(POOL_COLUMNS, runs)
        if below is not None:
            print_table(TIER_COLUMNS, list(_by_tier(runs)))
            print_table(MOVE_COLUMNS, runs)
        of_last = [each for each in lines.lines if each["num_kv_blocks"] == pools[-1]]
        if len(of_last) > 1:
            print_table(PREFIX_COLUMNS, of_last[1:])
    lines.end()


def _replayed(
    requests: Sequence[TraceRequest],
    config: EngineConfig,
    step_ms: float,
    top: int,
    below: TierSizes | None,
) -> Iterator[dict[str, Any]]:
    """The line of a run, and one for each shared prefix."""
    from pico_vllm.bench.figures import rounded
    from pico_vllm.bench.replay import replay, shared_prefixes

    pool = {"num_kv_blocks": config.num_kv_blocks}
    found = replay(requests, config, step_s=step_ms / 1e3, below=below)
    yield {"id": "cache"} | pool | rounded(found.figures())
    for number, prefix in enumerate(shared_prefixes(found.requests, top), 1):
        yield {"id": f"prefix-{number}"} | pool | prefix.figures() | {"begin": prefix.begin}


def _by_tier(runs: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row a pool and tier."""
    for run in runs:
        for tier in ("device", "host", "disk"):
            row = {key: run.get(f"{tier}_{key}") for key in TIER_COLUMNS[2:]}
            if row["hit_tokens"] is not None:
                yield {"num_kv_blocks": run["num_kv_blocks"], "tier": tier} | row


@contextmanager
def _opened(model: str | None) -> Iterator[tuple[ModelConfig | None, Tokenizer | None]]:
    """Sizes and tokenizer of a model; neither without one."""
    if model is None:
        yield None, None
        return
    from pico_vllm.engine.loading import open_model
    from pico_vllm.models.hub import resolve_model

    config = EngineConfig(model=model, load_format="dummy")
    model_config, source, tokenizer = open_model(resolve_model(model), config)
    source.close()
    try:
        yield model_config, tokenizer
    finally:
        if tokenizer is not None:
            tokenizer.close()


def _num_blocks(kv_gb: float, config: EngineConfig, model: ModelConfig | None) -> int:
    """What so much memory holds beside the null block."""
    if model is None:
        raise ConfigError(
            f"--kv-gb {kv_gb:g} needs --model, which says what a token takes; or give "
            "--num-kv-blocks",
            param="kv_gb",
        )
    block_bytes = _block_bytes(config, model)
    if not 2 * block_bytes <= kv_gb * 1e9 < 1e9 * MAX_KV_GB:
        raise ConfigError(
            f"--kv-gb {kv_gb:g} must hold two blocks of {block_bytes / 1e9:.6f} GB, one of them "
            f"the null block, and be less than {MAX_KV_GB}",
            param="kv_gb",
        )
    return int(kv_gb * 1e9 // block_bytes) - 1


def _block_bytes(config: EngineConfig, model: ModelConfig) -> int:
    itemsize = KV_ITEMSIZE.get(config.dtype)
    if itemsize is None:
        raise ConfigError(
            f"--dtype {config.dtype} says no size of the KV; give one of {', '.join(KV_ITEMSIZE)}",
            param="dtype",
        )
    return model.kv_bytes_per_token(itemsize) * config.block_size


def _tier_sizes(
    config: EngineConfig,
    num_host_blocks: int | None,
    num_disk_blocks: int | None,
    model: ModelConfig | None,
    *,
    is_cpu: bool,
) -> TierSizes | None:
    """Of what lies below the device, as an engine of these settings would have it."""
    host_gb, disk_path = config.kv_host_gb, config.kv_disk_path
    if host_gb is None and disk_path is not None and num_host_blocks is None:
        host_gb = 1.0  # as an engine has
    host_option = "--kv-disk-path" if config.kv_host_gb is None else "--kv-host-gb"
    for count, is_in_gb, option, instead in (
        (num_host_blocks, bool(host_gb), host_option, "--num-host-blocks"),
        (num_disk_blocks, disk_path is not None, "--kv-disk-path", "--num-disk-blocks"),
    ):
        if count is not None and is_in_gb:
            raise ConfigError(
                f"a tier has one size: give {option} or {instead}", param="num_kv_blocks"
            )
        if is_in_gb and model is None:
            raise ConfigError(
                f"{option} needs --model, which says what a block takes; or give {instead}",
                param="kv_host_gb",
            )
    if not host_gb and num_host_blocks is None:
        if num_disk_blocks is not None:
            raise ConfigError(
                f"--num-disk-blocks {num_disk_blocks}: blocks pass through host memory on their "
                "way to disk; give --num-host-blocks too",
                param="num_disk_blocks",
            )
        return None
    if config.enable_prefix_caching == "off":
        raise ConfigError(
            "tiers below the device keep cached prefixes and need --prefix-cache on; leave "
            "--kv-host-gb, --kv-disk-path, --num-host-blocks and --num-disk-blocks out",
            param="prefix_cache",
        )
    from pico_vllm.bench.replay import TierSizes

    if model is None:
        assert num_host_blocks is not None
        return TierSizes(num_host_blocks=num_host_blocks, num_disk_blocks=num_disk_blocks or 0)
    from pico_vllm.cache.radix_tree import TOKEN_BYTES
    from pico_vllm.cache.tiers.disk import num_records_in
    from pico_vllm.engine.tier_loading import least_tokens

    block_bytes = _block_bytes(config, model)
    if num_host_blocks is None:
        num_host_blocks = int((host_gb or 0.0) * 2**30) // block_bytes
    if disk_path is not None:
        num_disk_blocks = num_records_in(
            int((config.kv_disk_gb or DISK_GB) * 2**30),
            TOKEN_BYTES * config.block_size,
            block_bytes,
        )
    for name, count in (("host", num_host_blocks), ("disk", num_disk_blocks or 1)):
        if not 1 <= count <= MAX_BLOCKS:
            raise ConfigError(
                f"--kv-{name}-gb holds {count} blocks of {block_bytes} bytes; give a size of 1 to "
                f"{MAX_BLOCKS} blocks",
                param=f"kv_{name}_gb",
            )
    min_host_tokens, min_disk_tokens = least_tokens(
        model, block_bytes / config.block_size, is_cpu=is_cpu
    )
    return TierSizes(
        num_host_blocks=num_host_blocks,
        num_disk_blocks=num_disk_blocks or 0,
        block_bytes=block_bytes,
        min_host_tokens=min_host_tokens,
        min_disk_tokens=min_disk_tokens,
    )


def _check(requests: Sequence[TraceRequest], num_kv_tokens: int, model: ModelConfig | None) -> None:
    from pico_vllm.bench.prompt_trace import check_trace

    check_trace(requests, num_kv_tokens, "the pool", "raise --num-kv-blocks or --kv-gb")
    if model is not None:
        window = model.max_model_len_default
        check_trace(requests, window, "the model's window", "leave the line out")


def _facts(config: EngineConfig, commit: str | None) -> dict[str, Any]:
    """Machine and settings; torch is only started for these."""
    from pico_vllm.bench.record import machine

    return machine("cpu", commit=commit) | {
        f"config_{name}": getattr(config, name) for name in REPLAYED_SETTINGS
    }


def _shown(token_ids: Sequence[int], tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return " ".join(map(str, token_ids[:MAX_IDS]))
    text = tokenizer.decode(token_ids, skip_special_tokens=False)
    return printable(" ".join(text.split()))[:MAX_CHARS]
