"""Long prompts whose KV lies in host memory: what a first token takes when that is loaded, beside
computing it and finding it on the device; and how fast blocks move.

The pool has room for one prompt. Some are asked in turn, each twice: the first time its KV is in
host memory, where the others have pushed it, and the second time on the device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pico_vllm.bench.engine import PicoEngine
from pico_vllm.bench.figures import flat, rounded
from pico_vllm.bench.limits import cuda_ms
from pico_vllm.bench.memory import free_memory
from pico_vllm.bench.model_sizes import read_model_config
from pico_vllm.bench.tier_figures import tier_figures
from pico_vllm.bench.workload import PromptSource
from pico_vllm.cache.tiers.host_pool import HostPool
from pico_vllm.config.engine import EngineConfig
from pico_vllm.engine.llm import LLM
from pico_vllm.engine.loading import TORCH_DTYPES
from pico_vllm.errors import ConfigError

COPIED_BLOCKS = 512
NUM_TRIES = 5

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LongPrompts:
    prompts: int
    """That are asked in turn."""
    rounds: int
    shared: int
    """Tokens of a prompt that come again."""
    suffix: tuple[int, int]
    """And its own, each time."""

    @property
    def max_total_tokens(self) -> int:
        return self.shared + self.suffix[1] + 1


def run_host_memory(
    load: Callable[[EngineConfig], LLM], config: EngineConfig, shape: LongPrompts, *, seed: int
) -> Iterator[tuple[Figures, EngineConfig]]:
    """One line, with the settings that it was measured with. config: host memory is of its size
    where it names one, or holds all prompts.

    Raises:
        ConfigError: the pool would hold more blocks than asked for.
    """
    num_pool = pool_blocks(config, shape)
    host_gb = config.kv_host_gb
    if host_gb is None:
        itemsize = TORCH_DTYPES.get(config.dtype, torch.float32).itemsize
        token_bytes = read_model_config(config.model).kv_bytes_per_token(itemsize)
        host_gb = (shape.prompts + 1) * num_pool * config.block_size * token_bytes / 2**30
    below = replace(
        config.without_tiers(),
        num_kv_blocks=num_pool,
        max_model_len=shape.max_total_tokens,
        kv_host_gb=host_gb,
    )
    free_memory()
    with closing(load(below)) as llm:
        figures = _ask_in_turn(llm, shape, seed) | _copy_rates(llm)
        line = {"id": "host-memory"} | rounded(figures)
        yield line | flat(shape) | {"seed": seed}, llm.config


def pool_blocks(config: EngineConfig, shape: LongPrompts) -> int:
    """For one prompt, and the block that it copies from. Raises ConfigError where there are
    fewer."""
    num_pool, most = -(-shape.max_total_tokens // config.block_size) + 1, config.num_kv_blocks
    if most is not None and most < num_pool:
        raise ConfigError(
            f"host-memory needs a pool of {num_pool} KV blocks, those of a prompt, and there are "
            f"{most}; give other --num-kv-blocks or --sizes, or leave it out with --only",
            param="num_kv_blocks",
        )
    return num_pool


def _ask_in_turn(llm: LLM, shape: LongPrompts, seed: int) -> Figures:
    """Medians; the first round warms up."""
    engine, timed = llm.engine, PicoEngine(llm)
    source = PromptSource(engine.vocab_size, seed)

    def ask_ms(shared: list[int]) -> float:
        prompt = shared + source.prompt(source.draw(shape.suffix))
        start_s = time.perf_counter()
        timed.generate([prompt], [1])
        return 1e3 * (time.perf_counter() - start_s)

    ask_ms(source.prompt(shape.shared))
    prompts = [source.prompt(shape.shared) for _ in range(shape.prompts)]
    computed_ms = [ask_ms(each) for each in prompts]
    loaded_ms, found_ms, before = [], [], engine.cache_stats()
    for number in range(shape.rounds + 1):
        if number == 1:
            loaded_ms, found_ms, before = [], [], engine.cache_stats()
        for each in prompts:
            loaded_ms.append(ask_ms(each))
            found_ms.append(ask_ms(each))
    stats = engine.cache_stats().since(before)
    return {
        "computed_ms": statistics.median(computed_ms),
        "loaded_ms": statistics.median(loaded_ms),
        "loaded_best_ms": min(loaded_ms),
        "found_ms": statistics.median(found_ms),
        "hit_rate": stats.hit_rate,
        **tier_figures(stats),
    }


def _copy_rates(llm: LLM) -> Figures:
    """Of blocks of this model, the best of some tries. None on a CPU, which has them already."""
    config = llm.config
    names = ("store_gb_s", "load_gb_s")
    if config.device == "cpu":
        return dict.fromkeys(names)
    from pico_vllm.kernels.swap_blocks import swap_blocks

    dtype, device = TORCH_DTYPES[config.dtype], torch.device(config.device)
    host_pool = HostPool(
        COPIED_BLOCKS, config.block_size, llm.model_config, dtype=dtype, is_pinned=True
    )
    device_pool = torch.zeros_like(host_pool.blocks, device=device)
    ids = torch.from_numpy(np.tile(np.arange(COPIED_BLOCKS, dtype=np.int32), (2, 1))).to(device)

    def gb_s(source: Tensor, target: Tensor) -> float:
        best_ms = min(cuda_ms(lambda: swap_blocks(source, target, ids)) for _ in range(NUM_TRIES))
        return host_pool.bytes.nbytes / best_ms / 1e6

    rates = gb_s(device_pool, host_pool.blocks), gb_s(host_pool.blocks, device_pool)
    torch.cuda.synchronize(device)
    host_pool.close()
    return dict(zip(names, rates, strict=True))
