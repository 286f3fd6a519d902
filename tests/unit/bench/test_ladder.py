from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pico_vllm.bench import ladder
from pico_vllm.bench.ladder import STAGES, choose_stages, run_ladder
from pico_vllm.bench.plot import check_plot, plot_ladder
from pico_vllm.config.engine import EngineConfig
from pico_vllm.config.model import ModelConfig
from pico_vllm.errors import ConfigError

SMALL = "qwen3-0.6b"  # a configuration that is there without weights


class FakeLLM:
    num_open = 0

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.engine = SimpleNamespace(vocab_size=100)
        FakeLLM.num_open += 1

    def close(self) -> None:
        FakeLLM.num_open -= 1


def lines_of(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float], contexts: list[int], **settings: Any
) -> list[tuple[dict[str, Any], EngineConfig]]:
    """Points take this long by their stage, and a step a hundredth of that."""
    now_s = 0.0
    opened: list[EngineConfig] = []

    def load(config: EngineConfig) -> Any:
        assert FakeLLM.num_open == 0, "one stage at a time"
        opened.append(config)
        return FakeLLM(config)

    def step_ms(engine: Any, source: Any, context: int, num_steps: int) -> float:
        nonlocal now_s
        name = next(s.name for s in STAGES["cpu"] if s.settings["kv"] == opened[-1].kv)
        now_s += seconds[name] * context / min(contexts)
        return seconds[name] * 10

    monkeypatch.setattr(ladder, "_step_ms", step_ms)
    monkeypatch.setattr(ladder, "PicoEngine", lambda llm: None)
    monkeypatch.setattr(ladder, "time", SimpleNamespace(perf_counter=lambda: now_s))
    config = EngineConfig(model=SMALL, device="cpu", load_format="dummy", **settings)
    found = list(run_ladder(choose_stages("cpu", None)[:3], contexts, config, load))
    assert FakeLLM.num_open == 0
    return found


def test_a_slow_stage_is_not_measured_at_larger_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The point that took too long counts; those after it say why they are missing."""
    seconds = {"no cache": 12.0, "contiguous cache": 1.0, "paged": 2.0}
    found = [line for line, _ in lines_of(monkeypatch, seconds, [64, 16, 32])]
    by_id = {line["id"]: line for line in found}
    assert len(found) == 9
    assert [by_id[f"no-cache-c{c}"]["ms_per_step"] for c in (16, 32, 64)] == [120.0, None, None]
    assert by_id["no-cache-c64"]["skipped"] == "context 16 took 12 s"
    assert [by_id[f"paged-c{c}"]["ms_per_step"] for c in (16, 32, 64)] == [20.0, 20.0, 20.0]


def test_stages_differ_in_what_they_are_about_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request at a time and the smallest window, unless somebody asked for others."""
    seconds = dict.fromkeys(("no cache", "contiguous cache", "paged"), 1.0)
    for _, config in lines_of(monkeypatch, seconds, [16, 64], seed=7):
        assert (config.max_num_seqs, config.max_model_len, config.seed) == (1, 64 + 8 + 1, 7)
        assert (config.kernels, config.overlap, config.cpu_graph) == ("plain", "off", "off")
    for _, config in lines_of(
        monkeypatch, seconds, [16, 64], max_model_len=128, max_num_seqs=4, num_kv_blocks=32
    ):
        assert (config.max_num_seqs, config.max_model_len) == (4, 128)
        # The other caches have no blocks and refuse the option.
        assert config.num_kv_blocks == (32 if config.kv == "paged" else None)


def test_the_ladder_of_a_gpu_ends_with_the_defaults() -> None:
    """The last stage is what the engine does by itself there."""
    assert [stage.name for stage in STAGES["cuda"]] == [
        "no cache", "contiguous cache", "paged gather", "paged kernel", "fused", "graph", "overlap",
    ]  # fmt: skip
    import json

    from pico_vllm.models.hub import BUILTIN_CONFIGS

    model = ModelConfig.from_hf(json.loads(BUILTIN_CONFIGS[SMALL].read_text()))
    settled = {"device": "cuda:0", "has_fast_bf16": True, "num_threads": 1}
    by_default = EngineConfig(model=SMALL).resolve(model, **settled)
    last = EngineConfig(model=SMALL, **STAGES["cuda"][-1].settings).resolve(model, **settled)
    assert last == by_default


def test_what_is_asked_for_must_exist_and_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages by name, contexts within the window; nothing is loaded before."""
    assert [s.name for s in choose_stages("cpu", "graph, no cache")] == ["graph", "no cache"]
    with pytest.raises(ConfigError, match="no stage overlap on cpu; there are no cache, "):
        choose_stages("cpu", "overlap")
    seconds = dict.fromkeys(("no cache", "contiguous cache", "paged"), 1.0)
    with pytest.raises(ConfigError, match="context 99999 needs 100008 tokens and the window holds"):
        lines_of(monkeypatch, seconds, [99_999])
    with pytest.raises(ConfigError, match="context 64 needs 73 tokens and the window holds 72"):
        lines_of(monkeypatch, seconds, [64], max_model_len=72)


def test_a_plot_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the package, or the endings that are pictures."""
    with pytest.raises(ConfigError, match=r"must end in \.png, \.svg, \.pdf"):
        check_plot(Path("ladder.txt"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install matplotlib"):
        check_plot(Path("ladder.png"))


def test_a_plot_leaves_out_what_was_skipped(tmp_path: Path) -> None:
    """A stage without any point is not in the legend; units and title are on it."""
    pytest.importorskip("matplotlib")
    lines = [
        {"stage": "slow", "context": 16, "ms_per_step": None},
        {"stage": "first", "context": 16, "ms_per_step": 2.0},
        {"stage": "first", "context": 64, "ms_per_step": 4.0},
        {"stage": "second", "context": 16, "ms_per_step": 1.0},
    ]
    path = tmp_path / "new" / "ladder.svg"
    plot_ladder(path, lines, "a model on a machine")
    drawn = path.read_text()
    for text in ("first", "second", "a model on a machine", "(ms)", "context (tokens)"):
        assert f"<!-- {text}" in drawn or f"{text} -->" in drawn, text
    assert "slow" not in drawn
