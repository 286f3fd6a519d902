"""The prefix cache with a real model on the CPU, in fp32: on, off, full or emptied, ids are the
same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny
from tiny import TinyModel, assert_idle, greedy, random_prompts

from pico_vllm import LLM, SamplingParams
from pico_vllm.errors import ConfigError, InvalidRequestError

WAYS: dict[str, dict[str, Any]] = {
    "plain": {"overlap": "off", "cow_min_tokens": 1},
    "overlapped-chunks": {
        "overlap": "on",
        "cow_min_tokens": 3,
        "long_prefill_token_threshold": 16,
        "scheduling_policy": "longest-prefix-match",
    },
}


def workload(seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts with headers in common, some the same, some exact multiples of the block size; greedy
    and sampled."""
    random = np.random.default_rng(seed)
    headers = random_prompts([11, 32, 48], seed=seed)
    prompts, params = [], []
    for number in range(16):
        own = random_prompts([int(random.choice([0, 1, 5, 16]))], seed=seed + number)[0]
        prompts.append(headers[number % 3] + own)
        count = int(random.integers(1, 14))
        params.append(
            greedy(count)
            if number % 3
            else SamplingParams(
                max_tokens=count, seed=number, ignore_eos=True, frequency_penalty=0.5
            )
        )
    return prompts, params


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_blocks", [64, 12, 6])
def test_on_and_off_give_the_same_ids(tiny_model: TinyModel, num_blocks: int, way: str) -> None:
    """Workloads with much in common, twice and then as the next turn of a conversation, in pools
    from plenty to what preempts."""
    settings = tiny.FIXTURE_T | {"num_kv_blocks": num_blocks, "max_model_len": 96}
    prompts, params = workload(num_blocks)
    with LLM(str(tiny_model.folder), **settings, enable_prefix_caching=False) as llm:
        wanted = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        turns = [[*prompt, *ids, 7, 8] for prompt, ids in zip(prompts, wanted, strict=True)]
        next_wanted = [output.outputs[0].token_ids for output in llm.generate(turns, params)]
        assert llm.engine._scheduler._prefixes is None
    with LLM(str(tiny_model.folder), **settings, **WAYS[way]) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, params)
            assert [output.outputs[0].token_ids for output in outputs] == wanted
            assert_idle(llm)
        assert sum(output.num_cached_tokens for output in outputs) > 100
        outputs = llm.generate(turns, params)
        assert [output.outputs[0].token_ids for output in outputs] == next_wanted
        if num_blocks == 64:
            for output, prompt in zip(outputs, prompts, strict=True):
                assert output.num_cached_tokens >= len(prompt) // 16 * 16
        assert_idle(llm)


def test_several_answers_share_their_prompt(tiny_model: TinyModel) -> None:
    """n answers to one prompt compute it once; each is the one that it is without the cache."""
    (prompt,) = random_prompts([70], seed=3)
    params = SamplingParams(n=4, max_tokens=5, seed=9, ignore_eos=True)
    with LLM(str(tiny_model.folder), **tiny.FIXTURE_T, enable_prefix_caching="off") as llm:
        wanted = llm.generate(prompt, params)[0]
    with LLM(str(tiny_model.folder), **tiny.FIXTURE_T, cow_min_tokens=1) as llm:
        runner, num_tokens = llm.engine._runner, 0
        launch = runner.launch

        def counting(plan: Any) -> Any:
            nonlocal num_tokens
            num_tokens += plan.num_tokens
            return launch(plan)

        runner.launch = counting
        found = llm.generate(prompt, params)[0]
        assert found.outputs == wanted.outputs
        # Of the others the tokens after the last full block; then one a step and answer.
        assert num_tokens == 70 + 3 * 6 + 4 * 4
        assert (found.num_cached_tokens, wanted.num_cached_tokens) == (0, 0)
        assert llm.generate(prompt, params)[0].num_cached_tokens == 69
        assert_idle(llm)


def test_what_is_not_shared(tiny_model: TinyModel) -> None:
    """Another salt finds nothing, nor does who wants log-probabilities of the prompt, which are
    given whole; after a reset nobody does."""
    (prompt,) = random_prompts([40], seed=5)
    with LLM(str(tiny_model.folder), **tiny.FIXTURE_T, cow_min_tokens=1) as llm:

        def num_cached(**others: Any) -> int:
            output = llm.generate(prompt, greedy(2, **others))[0]
            assert len(output.prompt_logprobs or ()) == (40 if others.get("prompt_logprobs") else 0)
            return output.num_cached_tokens

        assert [num_cached(), num_cached()] == [0, 39]
        assert [num_cached(cache_salt="a"), num_cached(cache_salt="a")] == [0, 39]
        assert [num_cached(prompt_logprobs=1), num_cached(prompt_logprobs=1)] == [0, 0]
        llm.reset_prefix_cache()
        assert llm.engine._scheduler._blocks.num_free_device_blocks == llm.config.num_kv_blocks
        assert [num_cached(), num_cached()] == [0, 39]
        with pytest.raises(InvalidRequestError, match="cache_salt"):
            num_cached(cache_salt="")
        for output in llm.generate([prompt] * 3, greedy(2)):
            assert output.num_cached_tokens == 39


def test_settings_that_are_refused(tiny_model: TinyModel) -> None:
    """Only kv paged has blocks to share: asked for with another it is refused, and off where nobody
    asked; a policy by prefixes needs it."""
    for kv in ("none", "contiguous"):
        settings = tiny.FIXTURE_T | {"num_kv_blocks": None, "kv": kv}
        with pytest.raises(ConfigError, match=f"on needs kv paged, not {kv}"):
            LLM(str(tiny_model.folder), **settings, enable_prefix_caching=True)
        with pytest.raises(ConfigError, match="needs enable_prefix_caching on"):
            LLM(str(tiny_model.folder), **settings, scheduling_policy="longest-prefix-match")
        with LLM(str(tiny_model.folder), **settings) as llm:
            assert llm.config.enable_prefix_caching == "off"
            llm.reset_prefix_cache()
    for name, value in (
        ("max_cached_fraction", 1.5), ("max_cached_fraction", float("nan")),
        ("cow_min_tokens", 0), ("eviction_policy", "random"), ("enable_prefix_caching", "maybe"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=name):
            LLM(str(tiny_model.folder), **{name: value})
