"""The stages of an engine's history on one model: what a decode step costs with each idea added.

A stage loads its own LLM, with the same weights, and is measured at batch 1 for several contexts:
(time of as many steps) - (time of as long a prompt with one output), over the steps, each time the
fastest of up to three.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from pico_vllm.bench.engine import PicoEngine
from pico_vllm.bench.figures import rounded
from pico_vllm.bench.memory import free_memory
from pico_vllm.bench.model_sizes import read_model_config
from pico_vllm.bench.workload import PromptSource
from pico_vllm.config.engine import EngineConfig
from pico_vllm.engine.llm import LLM
from pico_vllm.errors import ConfigError

MAX_POINT_S = 10.0
"""A stage whose point took longer is not measured at larger contexts."""
MAX_REPEATS = 3
ENOUGH_S = 3.0
"""No further repeat of a point is begun after this long."""


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    settings: dict[str, Any]
    num_steps: int = 8


_PLAIN = {"kernels": "plain", "overlap": "off", "cpu_graph": "off"}
_TRITON = {"kv": "paged", "kernels": "triton"}
_ALONE = {"cuda_graph": "off", "overlap": "off"}
_CACHES = (
    # These two have no blocks to count.
    Stage("no cache", {"kv": "none", "num_kv_blocks": None, **_PLAIN}),
    Stage("contiguous cache", {"kv": "contiguous", "num_kv_blocks": None, **_PLAIN}),
)
STAGES = {
    "cuda": (
        *_CACHES,
        Stage("paged gather", {"kv": "paged", **_PLAIN}),
        Stage("paged kernel", {"kv": "paged", "kernels": "attention", **_ALONE}, 32),
        Stage("fused", {**_TRITON, **_ALONE}, 32),
        Stage("graph", {**_TRITON, "cuda_graph": "lazy", "overlap": "off"}, 64),
        Stage("overlap", {**_TRITON, "cuda_graph": "lazy", "overlap": "on"}, 64),
    ),
    "cpu": (
        *_CACHES,
        Stage("paged", {"kv": "paged", **_PLAIN}),
        Stage("graph", {"kv": "paged", **_PLAIN, "cpu_graph": "on"}),
    ),
}


def choose_stages(device_type: str, only: str | None) -> list[Stage]:
    """Raises ConfigError for a stage that this device does not have."""
    stages = {stage.name: stage for stage in STAGES[device_type]}
    names = list(stages) if only is None else [each.strip() for each in only.split(",")]
    unknown = [name for name in names if name not in stages]
    if unknown:
        raise ConfigError(
            f"no stage {', '.join(unknown)} on {device_type}; there are {', '.join(stages)}",
            param="only",
        )
    return [stages[name] for name in names]


def run_ladder(
    stages: Sequence[Stage],
    contexts: Sequence[int],
    config: EngineConfig,
    load: Callable[[EngineConfig], LLM],
) -> Iterator[tuple[dict[str, Any], EngineConfig]]:
    """One line a stage and context, as soon as it is measured, with the stage's resolved settings.

    Raises:
        ConfigError: a context does not fit the model or the window asked for; nothing was loaded.
    """
    contexts = sorted(set(contexts))
    num_tokens = contexts[-1] + max(stage.num_steps for stage in stages) + 1
    _check_window(config, contexts[-1], num_tokens)
    for stage in stages:
        settings = {"max_num_seqs": config.max_num_seqs or 1, "max_model_len": num_tokens}
        if config.max_model_len is not None:
            settings["max_model_len"] = config.max_model_len
        yield from _run_stage(stage, contexts, replace(config, **settings, **stage.settings), load)
        free_memory()


def _check_window(config: EngineConfig, context: int, num_tokens: int) -> None:
    window = read_model_config(config.model).max_model_len_default
    window = min(window, config.max_model_len or window)
    if num_tokens > window:
        raise ConfigError(
            f"context {context} needs {num_tokens} tokens and the window holds {window}; "
            "give smaller ones with --context, or raise --max-model-len",
            param="context",
        )


def _run_stage(
    stage: Stage,
    contexts: Sequence[int],
    config: EngineConfig,
    load: Callable[[EngineConfig], LLM],
) -> Iterator[tuple[dict[str, Any], EngineConfig]]:
    with closing(load(config)) as llm:
        engine = PicoEngine(llm)
        source = PromptSource(llm.engine.vocab_size, config.seed)
        skipped = None
        for context in contexts:
            line: dict[str, Any] = {
                "id": f"{stage.name.replace(' ', '-')}-c{context}",
                "stage": stage.name,
                "context": context,
                "ms_per_step": None,
                "num_steps": stage.num_steps,
                "skipped": skipped,
            }
            if skipped is None:
                start = time.perf_counter()
                step_ms = _step_ms(engine, source, context, stage.num_steps)
                seconds = time.perf_counter() - start
                line["ms_per_step"] = step_ms if step_ms > 0 else None
                if step_ms <= 0:
                    line["skipped"] = "its steps are lost in the noise of its prompts"
                if seconds > MAX_POINT_S:
                    skipped = f"context {context} took {seconds:.0f} s"
            yield rounded(line), llm.config


def _step_ms(engine: PicoEngine, source: PromptSource, context: int, num_steps: int) -> float:
    start = time.perf_counter()

    def run_s(num_outputs: int) -> float:
        prompt = source.prompt(context)
        before = time.perf_counter()
        engine.generate([prompt], [num_outputs])
        return time.perf_counter() - before

    run_s(3)  # compiles and captures
    first_s, whole_s = [], []
    while len(first_s) < MAX_REPEATS and (not first_s or time.perf_counter() - start < ENOUGH_S):
        first_s.append(run_s(1))
        whole_s.append(run_s(num_steps + 1))
    return (min(whole_s) - min(first_s)) / num_steps * 1e3
