"""Measuring on a GPU: every figure is there and they agree. How fast it is, records say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from pico_vllm.bench.memory import free_memory
from pico_vllm.bench.profile import SteadyStep, profile_steps
from pico_vllm.cli import main
from pico_vllm.engine.llm import LLM

pytestmark = pytest.mark.gpu

MODEL = ["--model", "qwen3-0.6b", "--load-format", "dummy", "--gpu-memory-utilization", "0.3"]


@pytest.fixture(autouse=True)
def _free() -> Iterator[None]:
    """One process loads many models here, each of which the command keeps to its end."""
    yield
    free_memory()


def run(capsys: pytest.CaptureFixture[str], *command: str) -> list[dict[str, Any]]:
    assert main.run([*command, "--json"]) == 0, capsys.readouterr().err
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_engine(capsys: pytest.CaptureFixture[str]) -> None:
    """A step is no faster than reading, and the host's part of it shorter than the whole."""
    startup, decode = run(capsys, "bench", "engine", *MODEL, "--only", "decode-b1")
    assert startup["startup_s"] > 0 and startup["gpu"] and startup["driver"]
    assert 0 < decode["pct_of_read_limit"] < 100
    assert 0 < decode["host_ms_per_step"] < decode["ms_per_step"]
    assert decode["config_kernels"] == "triton" and decode["config_overlap"] == "on"


def test_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    """Each kernel stays below the limit of its run."""
    sizes = ["--model", "qwen3-0.6b", "--rows", "1,8", "--context", "640"]
    lines = run(capsys, "bench", "kernels", *sizes)
    assert len({line["kernel"] for line in lines}) == 12
    assert all(0 < line["pct_of_limit"] < 105 for line in lines)
    assert all(line["twin_us"] > 0 for line in lines)


def test_ladder(capsys: pytest.CaptureFixture[str]) -> None:
    """All seven stages fit one after the other; a cache beats none."""
    lines = run(capsys, "bench", "ladder", *MODEL, "--context", "16,1024")
    step_ms = {(line["stage"], line["context"]): line["ms_per_step"] for line in lines}
    assert len(step_ms) == 14 and all(value > 0 for value in step_ms.values())
    assert step_ms["overlap", 1024] < step_ms["no cache", 1024]


def test_profile(capsys: pytest.CaptureFixture[str]) -> None:
    """A step is one graph and few copies; alone it takes no longer than the step."""
    (found,) = run(capsys, "profile", *MODEL, "--batch", "4", "--context", "100")
    assert 0 < found["replay_ms"] < found["ms_per_step"] * 1.1
    assert 0 < found["busy_ms"] <= found["traced_ms_per_step"] * 1.01
    assert found["launches"] < 10 < found["works"]
    assert sum(share["pct"] for share in found["shares"]) == pytest.approx(100, abs=0.5)


def test_profile_of_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    """A step of prompts beside requests that decode is a graph too, and takes longer than one of
    those alone."""
    sizes = ["--batch", "4", "--context", "100", "--steps", "6"]
    (alone,) = run(capsys, "profile", *MODEL, *sizes)
    free_memory()
    (found,) = run(capsys, "profile", *MODEL, *sizes, "--prompts", "3", "--prompt-tokens", "500")
    assert alone["ms_per_step"] < found["replay_ms"] < found["ms_per_step"] * 1.1
    assert found["launches"] < 10 < found["works"]


def test_engine_goes_on_after_a_profile() -> None:
    """Replays of a step's graph leave host and device agreed on whose turn it is."""
    with LLM("qwen3-0.6b", load_format="dummy", gpu_memory_utilization=0.3) as llm:
        shape = SteadyStep(batch=4, context=100)
        for _ in range(2):
            profile = profile_steps(llm, shape, num_steps=3, trace=None)
            assert profile.replay_ms is not None and profile.replay_ms > 0
