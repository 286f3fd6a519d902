"""`pico-vllm bench prefix` as a user runs it, on the tiny model."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from tiny import FIXTURE_T, assert_idle, greedy

from pico_vllm import LLM
from pico_vllm.bench.prefix import SIZES, _Talks, run_prefix, run_turns
from pico_vllm.bench.workload import PromptSource
from pico_vllm.cli import main
from pico_vllm.config.engine import EngineConfig
from pico_vllm.engine import tier_loading

ON_CPU = ["--device", "cpu", "--threads", "1", "--dtype", "float32", "--cpu-graph", "off"]
TINY = SIZES["tiny"]


@pytest.fixture
def any_load_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of this model would, which is computed in no time."""
    monkeypatch.setattr(tier_loading, "least_tokens", lambda *_, **__: (1, 1))


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.usefixtures("any_load_pays")
def test_every_case(
    overlap: str, tiny_model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line a case, in the order asked for but for turns, of which there are three, flat and kept;
    what a cache must find is found, and nothing where nothing is shared."""
    record = tmp_path / "prefix.jsonl"
    cases = ["turns", "chat", "zero-hit", "groups", "mixed"]
    command = ["bench", "prefix", "--model", str(tiny_model.folder), "--sizes", "tiny", "--json"]
    options = ["--only", ",".join(cases), "--record", str(record), "--commit", "abc123"]
    pool = ["--num-kv-blocks", "128", "--overlap", overlap]
    assert main.run([*command, *options, *pool, *ON_CPU]) == 0
    captured = capsys.readouterr()
    lines = [json.loads(line) for line in captured.out.splitlines()]
    assert [json.loads(line) for line in record.read_text().splitlines()] == lines
    assert captured.err == f"[7 lines appended to {record}]\n"
    turns = ["turns", "turns-host", "turns-host-disk"]
    assert [line["id"] for line in lines] == [*cases[1:], *turns]
    for line in lines:
        assert line["commit"] == "abc123" and line["sizes"] == "tiny" and line["seed"] == 0
        assert line["config_overlap"] == overlap and line["config_enable_prefix_caching"] == "on"
        assert not any(isinstance(value, (dict, list)) for value in line.values())
    chat, zero_hit, groups, mixed, *turns = lines
    assert (chat["num_requests"], chat["num_hits"], chat["num_hit_tokens"]) == (9, 6, 6 * 144)
    assert 6 / 9 * 144 / 160 <= chat["hit_rate"] <= 6 / 9 * 144 / 152
    assert 6 / 9 * 144 / 160 <= groups["hit_rate"] <= 6 / 9 * 144 / 152
    assert groups["warm_ms"] > 0 and groups["cold_ms"] > 0 and groups["suffix"] == "8-16"
    assert zero_hit["hit_rate"] == 0.0 and mixed["hit_rate"] > 0.5
    for line in (zero_hit, mixed):
        assert all(line[f"out_tok_s_{way}"] > 0 for way in ("on", "off"))
        assert line["on_over_off"] > 0
    # Of a single pair the ratio is that of the medians.
    assert mixed["repeats"] == 1 and mixed["on_over_off"] == pytest.approx(
        mixed["out_tok_s_on"] / mixed["out_tok_s_off"], rel=1e-3
    )
    for line in turns:
        assert line["pool_blocks"] == int(0.4 * line["working_set_blocks"])
        assert line["config_num_kv_blocks"] == line["pool_blocks"]
        assert line["num_requests"] == 24 and 0 < line["hit_rate"] < 1
        assert line["num_evicted_blocks"] > 0
        assert 0 < line["ttft_ms_p50"] <= line["ttft_ms_p99"]
        rates = [line[f"{tier}_hit_rate"] for tier in ("device", "host", "disk")]
        assert sum(each or 0.0 for each in rates) == pytest.approx(line["hit_rate"], abs=2e-4)
    none, host, disk = turns
    assert [line["tiers"] for line in turns] == ["none", "host", "host+disk"]
    assert none["host_blocks"] is None and host["disk_blocks"] is None
    assert host["host_blocks"] == disk["host_blocks"] == int(0.2 * host["working_set_blocks"])
    assert none["hit_rate"] < host["hit_rate"] and host["host_hit_blocks"] > 0
    assert disk["disk_hit_blocks"] > 0 and disk["config_kv_disk_path"] is not None
    assert not Path(disk["config_kv_disk_path"]).exists()
    assert (disk["failed_reads"], disk["damaged_blocks"], disk["dropped_blocks"]) == (0, 0, 0)


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.usefixtures("any_load_pays")
def test_host_memory(
    overlap: str, tiny_model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each prompt comes up from host memory the first time in a round, and is found on the device
    the second time."""
    record = tmp_path / "prefix.jsonl"
    command = ["bench", "prefix", "--model", str(tiny_model.folder), "--sizes", "tiny", "--json"]
    options = ["--only", "host-memory", "--record", str(record), "--overlap", overlap]
    assert main.run([*command, *options, *ON_CPU]) == 0
    (line,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [json.loads(text) for text in record.read_text().splitlines()] == [line]
    assert line["id"] == "host-memory" and line["suffix"] == "4-8" and line["sizes"] == "tiny"
    assert min(line["computed_ms"], line["loaded_ms"], line["found_ms"]) > 0
    assert line["loaded_best_ms"] <= line["loaded_ms"]
    # Two rounds of two prompts of four blocks; of one the tail or a block may be left.
    assert line["device_blocks"] == line["config_num_kv_blocks"] == 6
    assert 2 * 2 * 3 <= line["host_hit_blocks"] == line["loaded_blocks"] <= 2 * 2 * 4
    assert line["device_hit_blocks"] + line["host_hit_blocks"] == 2 * 2 * 4 * 2
    assert line["store_gb_s"] is None and line["load_gb_s"] is None


@pytest.mark.parametrize("ends", ["well", "by an interrupt"])
@pytest.mark.usefixtures("any_load_pays")
def test_turns_leave_a_folder_as_it_was(
    ends: str, tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another engine keeps there stays, with the sizes asked for; and every engine is closed,
    also after an interrupt."""
    folder, engines = tmp_path / "kv", []
    settings = {name: FIXTURE_T[name] for name in ("dtype", "device", "num_threads", "block_size")}
    below = {"kv_host_gb": 5e-5, "kv_disk_path": str(folder), "kv_disk_gb": 0.01}
    config = EngineConfig(model=str(tiny_model.folder), **settings, **below)
    (tmp_path / "kv").mkdir()
    (folder / "other.kv").write_text("of another engine")

    def interrupted() -> Any:
        raise KeyboardInterrupt

    def playing(talks: _Talks, engine: Any, *others: Any) -> list[float]:
        stats = engine.cache_stats()
        assert (stats.num_cached_blocks, stats.below.num_host_cached_blocks) == (0, 0)
        return play(talks, engine, *others)

    play = _Talks.play

    def load(asked: EngineConfig) -> LLM:
        llm = LLM(**{name: getattr(asked, name) for name in asked.__dataclass_fields__})
        engines.append(llm)
        if ends != "well" and asked.kv_disk_path is not None:
            monkeypatch.setattr(llm.engine, "step", interrupted)
        return llm

    if ends == "well":
        monkeypatch.setattr(_Talks, "play", playing)
        lines, configs = zip(*run_turns(load, config, TINY, seed=0), strict=True)
        assert Path(configs[2].kv_disk_path or "").parent == folder
        # 3,072 bytes a block, with the table's entry 4,172 or more on disk.
        assert [line["host_blocks"] for line in lines] == [None, 17, 17]
        assert [line["disk_blocks"] for line in lines] == [None, None, 2569]
    else:
        with pytest.raises(KeyboardInterrupt):
            list(run_turns(load, config, TINY, seed=0))
    assert len(engines) == 3 and [each.name for each in folder.iterdir()] == ["other.kv"]
    assert all(each._is_closed for each in engines)


def test_conversations_go_on_from_their_answers(tiny_model: Any) -> None:
    """In a pool for all of them each turn finds its conversation so far but a tail too short to
    copy; the seed draws lengths and order, and the engine is as it was."""
    with LLM(str(tiny_model.folder), **FIXTURE_T | {"num_kv_blocks": 256}) as llm:
        source, engine = PromptSource(llm.engine.vocab_size, 0), llm.engine
        talks = _Talks(TINY.turns, 3)
        ttft_s = talks.play(engine, source, TINY.turns.turns)
        stats = engine.cache_stats()
        assert len(ttft_s) == stats.num_queries == 24 and all(each > 0 for each in ttft_s)
        # All but the first turns; of the last token the KV is not there.
        wanted = []
        for prompts, outs in zip(talks._prompts, talks._outs, strict=True):
            ends = accumulate(p + o for p, o in zip(prompts[:-1], outs[:-1], strict=True))
            wanted += [
                (end - 1) // 16 * 16 + (end - 1) % 16 * ((end - 1) % 16 >= 8) for end in ends
            ]
        assert stats.num_hit_tokens == sum(wanted) > 0
        assert stats.num_hits == sum(each > 0 for each in wanted)
        assert stats.num_evicted_blocks == 0
        again, other = _Talks(TINY.turns, 3), _Talks(TINY.turns, 4)
        assert again.total_tokens() == talks.total_tokens() != other.total_tokens()
        assert_idle(llm)
        config = llm.config
        for case in ("zero-hit", "groups"):
            assert [config for _, config in run_prefix(llm, [case], TINY, seed=1)] == [config]
        assert llm.engine.config == config and llm.engine.max_model_len == 256
        assert len(llm.generate([1] * 200, greedy(5))[0].outputs[0].token_ids) == 5
        assert_idle(llm)


def test_an_interrupt_leaves_an_engine(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes out as it is; nothing runs on, and the engine has its own settings again."""
    with LLM(str(tiny_model.folder), **FIXTURE_T, overlap="on") as llm:
        config, step, count = llm.config, llm.engine.step, 0

        def interrupted() -> Any:
            nonlocal count
            count += 1
            if count == 30:
                raise KeyboardInterrupt
            return step()

        for case in ("groups", "zero-hit"):
            count = 0
            monkeypatch.setattr(llm.engine, "step", interrupted)
            with pytest.raises(KeyboardInterrupt):
                list(run_prefix(llm, [case], TINY, seed=0))
            monkeypatch.undo()
            assert llm.engine.config == config
            assert_idle(llm)


def test_host_cost_needs_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    """A line a workload and one of decoding, in a table for people."""
    command = ["bench", "prefix", "--model", "nonsense", "--only", "host-cost", "--sizes", "tiny"]
    assert main.run([*command, "--json", *ON_CPU]) == 0
    lines = {}
    for line in map(json.loads, capsys.readouterr().out.splitlines()):
        lines[line["id"]] = line
    names = ("144", "2083", "156-alone", "2121-alone", "decode")
    assert list(lines) == [f"host-cost-{name}" for name in names]
    for line in lines.values():
        assert line["scheduler_off_us"] > 0 and line["scheduler_on_us"] > 0 and line["cpu"]
    assert lines["host-cost-2083"]["cache_us"] > 0 and "cache_us" not in lines["host-cost-decode"]
    assert main.run([*command, *ON_CPU]) == 0
    assert "host-cost-2121-alone" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "turn"], "--only names turn; there are zero-hit, groups, chat, mixed, turns, "),
        (["--sizes", "huge"], "--sizes names huge; there are gpu, cpu, tiny"),
        (["--prefix-cache", "off"], "bench prefix measures the prefix cache, on and off; leave"),
        (["--kv", "none"], "bench prefix measures the prefix cache, on and off; leave"),
        (["--sizes", "cpu", "--max-model-len", "1000"], "mixed needs 1184 tokens a request and"),
        (
            ["--only", "chat", "--kv-host-gb", "1"],
            "of bench prefix only turns and host-memory have tiers",
        ),
        (
            ["--only", "turns", "--kv-host-gb", "0"],
            "of bench prefix only turns and host-memory have tiers",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_before_loading(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line; the model, which does not exist, was not looked for."""
    assert main.run(["bench", "prefix", "--model", "nonsense", *options, *ON_CPU]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {message}") and captured.err.count("\n") == 1


def test_a_window_too_small_is_told_before_anything_is_measured(
    tiny_model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of the model, where nobody asks for another."""
    command = ["bench", "prefix", "--model", str(tiny_model.folder), "--sizes", "cpu"]
    assert main.run([*command, *ON_CPU]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: mixed needs 1184 tokens a request and the window holds ")
    assert captured.err.count("\n") == 1 and captured.out == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "groups needs 161 tokens a request and the window holds 160; raise --max-model-len"),
        (["--only", "turns", "--num-kv-blocks", "6"], "turns needs a pool of "),
        (
            ["--only", "host-memory", "--num-kv-blocks", "5"],
            "host-memory needs a pool of 6 KV blocks",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    options: list[str],
    message: str,
    tiny_model: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Once the pool and its window are known."""
    command = ["bench", "prefix", "--model", str(tiny_model.folder), "--sizes", "tiny"]
    pool = ["--num-kv-blocks", "10", *options]
    assert main.run([*command, *pool, *ON_CPU]) == 1
    captured = capsys.readouterr()
    assert f"error: {message}" in captured.err and captured.err.count("error") == 1
