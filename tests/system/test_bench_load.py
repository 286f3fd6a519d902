"""Load and interference as a user runs them, on the tiny model."""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import FIXTURE_T, assert_idle

from pico_vllm import LLM
from pico_vllm.bench.arrivals import Arrivals
from pico_vllm.bench.interference import Scenario, measure
from pico_vllm.bench.lengths import UniformLengths
from pico_vllm.bench.load import DueRequest, plan_load, run_load
from pico_vllm.bench.workload import PromptSource
from pico_vllm.cli import main
from pico_vllm.engine import tier_loading

ON_CPU = ["--device", "cpu", "--threads", "1", "--dtype", "float32", "--cpu-graph", "off"]


def json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module", params=["off", "on"])
def either_llm(request: pytest.FixtureRequest, tiny_model: Any) -> Iterator[LLM]:
    """Fixture T, step after step and with one launched before the one before it is read."""
    with LLM(str(tiny_model.folder), overlap=request.param, **FIXTURE_T) as engine:
        yield engine


def crowd(llm: LLM) -> list[DueRequest]:
    """More requests than rows, faster than they can run."""
    return plan_load(
        llm.engine,
        Arrivals(rate_req_s=2000.0, burst_size=4),
        UniformLengths(prompt_tokens=(3, 40), output_tokens=(2, 12)),
        num_requests=30,
        seed=1,
        prompts=PromptSource(llm.engine.vocab_size, 1),
    )


def test_every_request_gets_its_tokens_in_order(either_llm: LLM) -> None:
    """Each has its length, none a token before its arrival, and first tokens come first come, first
    served."""
    due = crowd(either_llm)
    times = run_load(either_llm.engine, due)
    assert_idle(either_llm)
    assert [len(each.token_s) for each in times] == [each.request.max_tokens for each in due]
    assert len({each.request.max_tokens for each in due}) > 5
    assert [each.num_prompt_tokens for each in times] == [len(d.request.token_ids) for d in due]
    for each in times:
        assert each.arrival_s < each.token_s[0] and each.token_s == sorted(set(each.token_s))
    first_s = [each.token_s[0] for each in times]
    assert first_s == sorted(first_s)
    # The last of 30 requests on 4 rows waits for most of the others: that is in its TTFT.
    assert times[-1].ttft_s > 0.5 * max(each.e2e_s for each in times)


@pytest.mark.parametrize("place", ["launch", "schedule"])
def test_an_interrupted_load_leaves_nothing(
    either_llm: LLM, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """The interrupt comes out, the engine is idle, and the next load is whole."""
    engine, due = either_llm.engine, crowd(either_llm)
    owner: Any = engine._runner if place == "launch" else engine._scheduler
    original, count = getattr(owner, place), itertools.count(1)

    def interrupted(*args: Any) -> Any:
        if next(count) == 9:
            raise KeyboardInterrupt
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_load(engine, due)
    assert_idle(either_llm)
    assert all(each.is_complete for each in run_load(engine, due))


def test_interference_with_and_without_overlap(either_llm: LLM) -> None:
    """Every figure is there, and nothing is left."""
    scenario = Scenario(num_decoding=3, context=4, prompt_tokens=200, num_prompts=2, idle_steps=5)
    figures = measure(either_llm.engine, scenario, PromptSource(either_llm.engine.vocab_size, 0))
    assert len(figures) == 14 and all(value is not None and value > 0 for value in figures.values())
    assert_idle(either_llm)


def test_load_lines(tiny_model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One flat line a rate with all it depends on; the figures agree with each other, the record
    holds the same, the picture is drawn."""
    record, plot = tmp_path / "load.jsonl", tmp_path / "load.png"
    path = tmp_path / "lengths.jsonl"
    pairs = [(5, 4), (20, 9), (11, 1)]
    path.write_text(
        "\n".join(json.dumps({"prompt_tokens": p, "output_tokens": o}) for p, o in pairs)
    )
    command = ["bench", "load", "--model", str(tiny_model.folder), "--rate", "50,400"]
    options = ["--num-requests", "25", "--lengths", str(path), "--json", "--commit", "abc123"]
    options += ["--record", str(record), "--seed", "3", "--e2e-limit-ms", "60000"]
    has_plot = importlib.util.find_spec("matplotlib") is not None
    if has_plot:
        options += ["--plot", str(plot)]
    assert main.run([*command, *options, *ON_CPU]) == 0
    slow, fast = lines = json_lines(capsys.readouterr().out)
    assert json_lines(record.read_text()) == lines
    assert [line["id"] for line in lines] == ["load-r50", "load-r400"]
    for line in lines:
        assert (line["num_requests"], line["num_failed"], line["seed"]) == (25, 0, 3)
        assert line["req_s"] == pytest.approx(25 / line["duration_s"], rel=1e-3)
        # Every request met a limit of a minute.
        assert line["goodput_req_s"] == line["req_s"] and line["limit_e2e_ms"] == 60_000
        for key in ("ttft", "itl", "tpot", "e2e"):
            found = [line[f"{key}_ms_{of}"] for of in ("p50", "p90", "p99")]
            assert 0 < found[0] <= found[1] <= found[2], key
        assert line["ttft_ms_p50"] <= line["e2e_ms_p50"] <= line["duration_s"] * 1e3
        assert 0 <= line["hit_rate"] < 0.5 and line["num_evicted_blocks"] >= 0
        assert line["device_hit_tokens"] == line["num_hit_tokens"] and line["host_hit_rate"] is None
        assert line["commit"] == "abc123" and line["config_cpu_graph"] == "off"
        assert line["lengths"] == str(path) and line["prompt_tokens"] is None
        assert not any(isinstance(value, (dict, list)) for value in line.values())
    # The same lengths and the same pattern of arrivals, eight times as fast.
    assert slow["out_tok_s"] * slow["duration_s"] == pytest.approx(
        fast["out_tok_s"] * fast["duration_s"], rel=1e-3
    )
    assert fast["offered_req_s"] == pytest.approx(8 * slow["offered_req_s"], rel=1e-3)
    if has_plot:
        assert plot.read_bytes().startswith(b"\x89PNG")


def test_load_by_tier(
    tiny_model: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With host memory below a pool too small, prompts that come again are found there, and the
    line says so: of this run, not of the one to warm up."""
    # Computing this model takes no time, so that nothing would pay.
    monkeypatch.setattr(tier_loading, "least_tokens", lambda *_, **__: (1, 1))
    prompts = [list(range(1 + 40 * number, 41 + 40 * number)) for number in range(4)] * 4

    class Repeated(PromptSource):
        def prompt(self, num_tokens: int) -> list[int]:
            prompts.append(prompts.pop(0))
            return prompts[-1]

    monkeypatch.setattr("pico_vllm.bench.workload.PromptSource", Repeated)
    command = ["bench", "load", "--model", str(tiny_model.folder), "--rate", "1e4", "--json"]
    options = ["--num-requests", "12", "--prompt-tokens", "40", "--output-tokens", "2"]
    pool = ["--num-kv-blocks", "4", "--max-num-seqs", "1", "--kv-host-gb", "0.001"]
    assert main.run([*command, *options, *pool, *ON_CPU, "--num-warmups", "8"]) == 0
    (line,) = json_lines(capsys.readouterr().out)
    found = (line["device_hit_tokens"], line["host_hit_tokens"], line["disk_hit_tokens"])
    assert found == (0, 12 * 32, None) and line["num_hit_tokens"] == 12 * 32
    assert line["hit_rate"] == line["host_hit_rate"] == pytest.approx(32 / 40)
    assert (line["loaded_blocks"], line["config_kv_host_gb"]) == (24, 0.001)
    assert line["loaded_bytes"] == 24 * 3072


def test_load_prints_tables(tiny_model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Throughput a rate, and a row for each latency; all at once has no rate."""
    command = ["bench", "load", "--model", str(tiny_model.folder), "--rate", "7"]
    options = ["--num-requests", "3", "--burst-size", "3", "--prompt-tokens", "4-9"]
    assert main.run([*command, *options, "--output-tokens", "2", *ON_CPU]) == 0
    captured = capsys.readouterr()
    for word in ("req_s", "out_tok_s", "ttft_ms", "itl_ms", "tpot_ms", "e2e_ms", "p99", "7.00"):
        assert word in captured.out, word
    assert "offered_req_s" not in captured.out
    assert captured.err == "[7 requests/s: 3 requests, the last due after 0.0 s]\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rate", "1,0"], "rate is 0 requests a second; it must be above 0"),
        (["--rate", "fast"], "--rate 'fast' must be numbers of requests a second"),
        (["--burst-size", "0"], "burst_size is 0; give at least 1"),
        (["--burstiness", "0"], "burstiness is 0; give one from 0.01"),
        (["--ttft-limit-ms", "0"], "ttft_limit_ms is 0; a limit must be above 0"),
        (["--output-tokens", "4-2"], "--output-tokens '4-2' must be a whole number from 1"),
        (["--lengths", "missing.jsonl"], "--lengths missing.jsonl cannot be read: No such file"),
        (["--max-model-len", "191"], "--prompt-tokens 128, --output-tokens 64 needs 192 tokens a"),
        (["--plot", "x.txt"], "--plot x.txt must end in .png"),
    ],
)
def test_a_load_that_cannot_be_is_refused_before_loading(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line; the model, which does not exist, was not looked for."""
    assert main.run(["bench", "load", "--model", "nonsense", *options, *ON_CPU]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {message}") and captured.err.count("\n") == 1


def test_lengths_past_the_models_window_are_refused(
    tiny_model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once the window is known, before anything runs."""
    command = ["bench", "load", "--model", str(tiny_model.folder), "--prompt-tokens", "250-300"]
    assert main.run([*command, *ON_CPU]) == 1
    message = "error: --prompt-tokens 300, --output-tokens 64 needs 364 tokens a request and the"
    assert capsys.readouterr().err.startswith(message)


def test_interference_lines(tiny_model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """One line a budget, each run with its own; the ratios are those of the figures."""
    command = ["bench", "interference", "--model", str(tiny_model.folder), "--budgets", "16,128"]
    sizes = ["--decoding", "3", "--context", "8", "--prompt-tokens", "100", "--prompts", "2"]
    assert main.run([*command, *sizes, "--idle-steps", "10", "--json", *ON_CPU]) == 0
    lines = json_lines(capsys.readouterr().out)
    assert [(line["id"], line["config_max_num_batched_tokens"]) for line in lines] == [
        ("interference-t16", 16),
        ("interference-t128", 128),
    ]
    for line in lines:
        assert line["itl_ratio_p99"] == pytest.approx(
            line["loaded_itl_ms_p99"] / line["idle_itl_ms_p99"], rel=0.01
        )
        assert all(line[f"{phase}_itl_ms_p50"] > 0 for phase in ("idle", "loaded"))
        assert 0 < line["ttft_ms_p50"] <= line["ttft_ms_p99"]
        assert (line["num_decoding"], line["prompt_tokens"]) == (3, 100)
        assert line["config_max_num_seqs"] == 4
        assert not any(isinstance(value, (dict, list)) for value in line.values())


def test_interference_steps(llm: LLM) -> None:
    """As many steps idle as asked for, as many loaded as the chunks take; nothing is left."""
    scenario = Scenario(num_decoding=3, context=4, prompt_tokens=200, num_prompts=2, idle_steps=5)
    steps: list[int] = []
    step = llm.engine.step

    def counted() -> Any:
        events = step()
        steps.append(len(events.request_ids))
        return events

    llm.engine.step = counted  # type: ignore[method-assign]
    try:
        figures = measure(llm.engine, scenario, PromptSource(llm.engine.vocab_size, 0))
    finally:
        del llm.engine.step  # type: ignore[method-assign]
    assert_idle(llm)
    # A budget of 64 leaves 61 tokens for a prompt of 200: four steps, the last with its token.
    assert steps[-8:] == [3, 3, 3, 4, 3, 3, 3, 4]
    assert steps[-17:-8] == [3, 3, 3, 4] + [3] * 5
    assert all(value > 0 for value in figures.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budgets", "64,4"], "a budget of 4 tokens leaves 4 decoding requests and a prompt no"),
        (["--budgets", "x"], "--budgets 'x' must be whole numbers"),
        (["--max-num-seqs", "4"], "4 decoding requests and a prompt need 5 rows and max_num_seqs"),
        (["--prompt-tokens", "256"], "a request needs 257 tokens and the window holds 256; lower"),
        # 8 tokens of context, 7 steps for four of them, 32 of lead-in, 2 prompts of 102, 9 and 4.
        (["--budgets", "5"], "a request needs 264 tokens and the window holds 256; lower"),
        (["--num-kv-blocks", "9"], "4 decoding requests and a prompt need "),
        (["--max-num-batched-tokens", "64"], "bench interference runs one engine for each of"),
    ],
)
def test_interference_that_does_not_fit_is_refused(
    tiny_model: Any, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The need, the limit and the way out, before anything is measured."""
    command = ["bench", "interference", "--model", str(tiny_model.folder), "--budgets", "64"]
    sizes = ["--decoding", "4", "--context", "8", "--prompt-tokens", "100", "--prompts", "1"]
    assert main.run([*command, *sizes, "--idle-steps", "9", *options, *ON_CPU]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {message}") and captured.out == ""
