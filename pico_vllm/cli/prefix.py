"""pico-vllm bench prefix: what the prefix cache costs and saves."""

from __future__ import annotations

from itertools import chain
from typing import Annotated

import typer

from pico_vllm.cli.lines import Commit, IsJson, Lines, RecordFile
from pico_vllm.cli.options import names, takes_config
from pico_vllm.cli.terminal import load_llm
from pico_vllm.config.engine import EngineConfig
from pico_vllm.errors import ConfigError

COLUMNS = (
    "id", "hit_rate", "device_hit_rate", "host_hit_rate", "disk_hit_rate", "out_tok_s_on",
    "out_tok_s_off", "on_over_off", "cold_ms", "warm_ms", "warm_minus_cold_ms", "ttft_ms_p50",
    "ttft_ms_p99", "computed_ms", "loaded_ms", "found_ms", "store_gb_s", "load_gb_s", "cache_us",
    "scheduler_off_us", "scheduler_on_us",
)  # fmt: skip
HOST_COST, TURNS, HOST_MEMORY = "host-cost", "turns", "host-memory"


@takes_config
def bench_prefix(
    only: Annotated[
        str | None,
        typer.Option(
            help="Measure these cases only, with commas between: zero-hit, groups, chat, mixed, "
            "turns, host-memory, host-cost."
        ),
    ] = None,
    sizes: Annotated[str, typer.Option(help="gpu, cpu or tiny; auto goes by the device.")] = "auto",
    is_json: IsJson = False,
    record: RecordFile = None,
    commit: Commit = None,
    *,
    engine: EngineConfig,
) -> None:
    """Time what the prefix cache costs who shares nothing and saves who does, on and off in
    turn."""
    if engine.enable_prefix_caching == "off" or engine.kv != "paged":
        raise ConfigError(
            "bench prefix measures the prefix cache, on and off; leave --prefix-cache and --kv out",
            param="enable_prefix_caching",
        )
    from pico_vllm.bench.host_memory import run_host_memory
    from pico_vllm.bench.model_sizes import read_model_config
    from pico_vllm.bench.prefix import (
        CASES,
        SIZES,
        check_cases,
        run_host_cost,
        run_prefix,
        run_turns,
    )
    from pico_vllm.bench.record import environment, machine
    from pico_vllm.engine.loading import settle_device

    cases = names("only", only, CASES)
    has_tiers = engine.kv_host_gb is not None or engine.kv_disk_path is not None
    if has_tiers and (not {TURNS, HOST_MEMORY} & {*cases} or engine.kv_host_gb == 0):
        raise ConfigError(
            "of bench prefix only turns and host-memory have tiers below the KV pool, and some of "
            "each: give --kv-host-gb more than 0 with --only turns or host-memory, or leave it and "
            "--kv-disk-path out",
            param="kv_host_gb",
        )
    device = settle_device(engine.device)
    if sizes == "auto":
        sizes = "cpu" if device.type == "cpu" else "gpu"
    (sizes,) = names("sizes", sizes, tuple(SIZES))[:1]
    chosen, window = SIZES[sizes], engine.max_model_len
    with_model = [case for case in cases if case != HOST_COST]
    if with_model and window is None:
        window = read_model_config(engine.model).max_model_len_default
    check_cases(with_model, chosen, window)
    on_engine = [case for case in with_model if case not in (TURNS, HOST_MEMORY)]
    lines = Lines(COLUMNS, is_json=is_json, record=record)
    with lines.shown():
        if HOST_COST in cases:
            for line in run_host_cost(chosen):
                lines.add(line | {"sizes": sizes} | machine(str(device), commit=commit))
        if on_engine:
            with load_llm(engine.without_tiers()) as llm:
                check_cases(on_engine, chosen, llm.config.max_model_len)
                for line, config in run_prefix(llm, on_engine, chosen, seed=engine.seed):
                    head = {"id": line["id"], "model": engine.model}
                    lines.add(head | line | {"sizes": sizes} | environment(config, commit=commit))
            # The engines of turns and host-memory need the memory.
            del llm
        on_their_own = []
        if HOST_MEMORY in cases:
            shape = chosen.host_memory
            on_their_own.append(run_host_memory(load_llm, engine, shape, seed=engine.seed))
        if TURNS in cases:
            on_their_own.append(run_turns(load_llm, engine, chosen, seed=engine.seed))
        for line, config in chain.from_iterable(on_their_own):
            head = {"id": line["id"], "model": engine.model}
            lines.add(head | line | {"sizes": sizes} | environment(config, commit=commit))
    lines.end()
