from __future__ import annotations

from dataclasses import fields

import pytest
from cli_result import RunCli
from fake_llm import FakeLLM

from pico_vllm.cli import generate, main, options
from pico_vllm.config.engine import EngineConfig
from pico_vllm.sampling_params import SamplingParams


def test_every_field_has_an_option_with_its_docstring_as_help(run_cli: RunCli) -> None:
    """The fields are the only place where a setting is declared."""
    shown = run_cli("generate", "--help").out
    text = " ".join(shown.replace("│", " ").split())
    for owner in (EngineConfig, SamplingParams):
        for field in fields(owner):
            if not field.init or field.name in options._NO_OPTION:
                continue
            flag = options._FLAGS.get((owner, field.name), f"--{field.name.replace('_', '-')}")
            assert f" {flag} " in text, flag
    assert "Tokens in a KV block." in text
    assert "unset takes the model's window" in text


def test_options_reach_their_fields(run_cli: RunCli) -> None:
    """Numbers, switches and repeated options arrive as the sampling parameters have them."""
    llm = FakeLLM("ok")
    flags = (
        "--max-tokens 7 --temperature 0 --top-k 5 --top-p 0.5 --min-p 0.1 --presence-penalty 1 "
        "--frequency-penalty -1 --repetition-penalty 1.5 --sample-seed 3 --n 2 --ignore-eos "
        "--logprobs 2 --stop a --stop b --stop-token-ids 4"
    )
    assert run_cli("generate", *flags.split(), "hi", llm=llm).code == 0
    assert llm.params == [
        SamplingParams(
            max_tokens=7,
            temperature=0.0,
            top_k=5,
            top_p=0.5,
            min_p=0.1,
            presence_penalty=1.0,
            frequency_penalty=-1.0,
            repetition_penalty=1.5,
            seed=3,
            n=2,
            ignore_eos=True,
            logprobs=2,
            stop=["a", "b"],
            stop_token_ids=[4],
        )
    ]


def test_engine_options_reach_the_engine(run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    """--threads and the rest end in one EngineConfig."""
    seen: list[EngineConfig] = []
    llm = FakeLLM("ok")

    def load(config: EngineConfig) -> FakeLLM:
        seen.append(config)
        return llm

    run_cli("--version")  # sets up stdin
    monkeypatch.setattr(generate, "load_llm", load)
    assert main.run(["generate", "--threads", "2", "--seed", "5", "--kv", "none", "hi"]) == 0
    assert seen == [EngineConfig(model="smollm2-135m", num_threads=2, seed=5, kv="none")]


def test_the_command_line_has_its_own_defaults(run_cli: RunCli) -> None:
    """A person gets a varied answer of at most 512 tokens, or of what the window leaves."""
    roomy, narrow = FakeLLM("ok"), FakeLLM("ok", window=10)
    run_cli("generate", "hi", llm=roomy)
    run_cli("generate", "hi", llm=narrow)
    assert roomy.params == [SamplingParams(max_tokens=512, temperature=0.7, top_p=0.95)]
    assert narrow.params == [SamplingParams(max_tokens=8, temperature=0.7, top_p=0.95)]
