"""pico-vllm profile: where the time of a step goes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pico_vllm.cli.lines import print_table, writable
from pico_vllm.cli.options import takes_config
from pico_vllm.cli.terminal import load_llm, note
from pico_vllm.config.engine import EngineConfig
from pico_vllm.errors import ConfigError

if TYPE_CHECKING:
    from pico_vllm.bench.profile import StepProfile

NUM_SHOWN = 20
NAME_WIDTH = 60
"""Of names in tables: those of C++ templates go on for hundreds of letters. JSON has them whole."""


@takes_config
def profile(
    batch: Annotated[int, typer.Option(min=0, help="Requests that decode together.")] = 1,
    context: Annotated[int, typer.Option(min=1, help="Tokens of the prompt of each.")] = 128,
    prompts: Annotated[
        int, typer.Option(min=0, help="Other prompts, for one token each, that come with a step.")
    ] = 0,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each of those.")] = 128,
    num_steps: Annotated[int, typer.Option("--steps", min=2, help="Steps to record.")] = 20,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Keep the trace here (.json or .json.gz), for chrome://tracing.",
            callback=writable("--trace"),
        ),
    ] = None,
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    *,
    engine: EngineConfig,
) -> None:
    """Show where the time of a step goes: kernels, gaps between them, and the host. Some requests
    decode, prompts may be computed beside them."""
    if trace is not None and not trace.name.endswith((".json", ".json.gz")):
        raise ConfigError(f"--trace {trace} must end in .json or .json.gz", param="trace")
    if not batch and not prompts:
        raise ConfigError(
            "--batch 0 without --prompts leaves nothing to profile; give either", param="batch"
        )
    # The profiler's library tells stderr of every start and stop. It reads this as torch loads it.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with load_llm(engine) as llm:
        from pico_vllm.bench.profile import SteadyStep, profile_steps
        from pico_vllm.bench.record import environment

        shape = SteadyStep(
            batch=batch, context=context, prompts=prompts, prompt_tokens=prompt_tokens
        )
        found = profile_steps(llm, shape, num_steps=num_steps, trace=trace)
        summary = summarise(found)
        shares = [
            {
                "name": share.name,
                "per_step": round(share.count / found.steps.num_steps, 2),
                "us_per_step": round(share.total_us / found.steps.num_steps, 2),
                "us_each": round(share.total_us / share.count, 2),
                "pct": round(100 * share.share, 2),
            }
            for share in found.steps.shares
        ]
        if is_json:
            facts = {"model": engine.model, "batch": batch, "context": context}
            facts |= {"prompts": prompts, "prompt_tokens": prompt_tokens if prompts else None}
            line = facts | summary | {"shares": shares} | environment(llm.config)
            print(json.dumps(line, allow_nan=False))
        else:
            _print(summary, shares, is_gpu=llm.config.device != "cpu")
    if trace is not None:
        note(f"[trace written to {trace}]")


def summarise(found: StepProfile) -> dict[str, Any]:
    """Flat, of a step unless the key says otherwise. What begins with traced_ was measured under
    the profiler."""
    from pico_vllm.bench.figures import rounded

    steps = found.steps
    return rounded(
        {
            "ms_per_step": found.figures["ms_per_step"],
            "host_ms_per_step": found.figures["host_ms_per_step"],
            "replay_ms": found.replay_ms,
            "traced_ms_per_step": steps.wall_us / 1e3,
            "busy_ms": steps.busy_us / 1e3,
            "idle_within_us": steps.idle_within_us,
            "gap_mean_us": steps.mean_gap_us,
            "gap_max_us": steps.max_gap_us,
            "launches": steps.num_launches,
            "works": steps.num_works,
        }
    )


def _print(summary: dict[str, Any], shares: list[dict[str, Any]], *, is_gpu: bool) -> None:
    device, work = ("GPU", "kernels and copies") if is_gpu else ("CPU", "operations")
    meanings = {
        "ms_per_step": "a step, without the profiler, ms",
        "host_ms_per_step": "host: from ids to the next launch, waiting excluded, ms",
        "replay_ms": "the step's graph alone, ms",
        "traced_ms_per_step": "a step under the profiler, ms",
        "busy_ms": f"{device} at work, ms",
        "idle_within_us": f"{device} idle within a step, us",
        "gap_mean_us": f"{device} idle between steps, us",
        "gap_max_us": f"{device} idle between steps, the longest, us",
        "launches": "launches that brought work" if is_gpu else "outermost operations",
        "works": work,
    }
    lines = [{"a step": meaning, "figure": summary[key]} for key, meaning in meanings.items()]
    print_table(("a step", "figure"), [line for line in lines if line["figure"] is not None])
    shown = [share | {"name": _short(share["name"])} for share in shares[:NUM_SHOWN]]
    print_table(("name", "per_step", "us_each", "us_per_step", "pct"), shown)


def _short(name: str) -> str:
    return name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 3] + "..."
