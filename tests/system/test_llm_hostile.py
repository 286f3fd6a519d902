"""Hostile lengths, ids, parameters and texts at the Python API: refused in words, or answered to
the token. After each of them the canary gives its known answer."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from tiny import (
    BOS,
    EOS,
    FIXTURE_T,
    PIECES,
    V_TOK,
    TinyModel,
    assert_idle,
    greedy,
    quickest_s,
    random_prompts,
    scripted,
)

from pico_vllm import LLM, PicoError, RequestOutput, SamplingParams
from pico_vllm.errors import (
    ContextLengthError,
    EmptyPromptError,
    InvalidRequestError,
    TokenOutOfRangeError,
)

L = 256
MIB = 1 << 20


@pytest.fixture(autouse=True)
def canary_after(llm: LLM, tiny_model: TinyModel) -> Iterator[None]:
    """Whatever the test did, the engine goes on, holds nothing, and gives the known answer."""
    yield
    assert_idle(llm)
    tiny_model.canary.check(llm)


def refused(
    call: Callable[[], object], kind: type[PicoError], param: str, code: str, *fragments: str
) -> str:
    """The message of an error of exactly this kind, which must contain the fragments."""
    with pytest.raises(PicoError) as caught:
        call()
    error = caught.value
    assert (type(error), error.param, error.code) == (kind, param, code), error
    assert error.status == 400
    assert len(error.message) < 400 and "Traceback" not in error.message
    for fragment in fragments:
        assert fragment in error.message
    return error.message


def rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def ids_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def one(llm: LLM, prompt: Any, params: SamplingParams) -> Any:
    return llm.generate(prompt, params)[0].outputs[0]


# Length and budget.


@pytest.mark.parametrize("length", [L, L + 1, 10 * L, 100_000])
@pytest.mark.parametrize("entry", ["generate", "stream"])
def test_prompt_longer_than_the_window(llm: LLM, length: int, entry: str) -> None:
    """A prompt that leaves no room for one token is refused with both numbers, never cut."""
    call = getattr(llm, entry)
    refused(
        lambda: call([65] * length, greedy(1)),
        ContextLengthError,
        "prompt",
        "context_length_exceeded",
        str(length),
        str(L),
        "shorten",
    )


def test_a_model_by_a_path_object(tiny_model: TinyModel) -> None:
    """As by its text."""
    with LLM(tiny_model.folder, **FIXTURE_T) as llm:
        assert llm.config.model == str(tiny_model.folder)
        assert one(llm, "abc", greedy(3)).token_ids == tiny_model.oracle.greedy(list(b"abc"), 3)


def test_text_longer_than_the_window(llm: LLM) -> None:
    """A text too long is refused, at once where no tokenization could make it fit, also in chat."""
    kind = (ContextLengthError, "prompt", "context_length_exceeded")
    refused(lambda: llm.generate("a" * 257, greedy(1)), *kind, "257")
    huge = "a" * 27_000_000

    def refuse() -> None:
        refused(lambda: llm.generate(huge, greedy(1)), *kind, "27000000 characters")
        refused(lambda: llm.stream(huge, greedy(1)), *kind)

    assert quickest_s(refuse) < 0.1
    message = [{"role": "user", "content": "a" * 1_000_000}]
    refused(lambda: llm.chat(message, greedy(1)), *kind, "characters")
    refused(lambda: llm.stream(message, greedy(1)), *kind, "characters")


@pytest.mark.parametrize(("p", "m"), [(200, 55), (200, 56), (1, 255), (255, 1), (254, 1)])
def test_prompt_and_answer_just_fit(llm: LLM, tiny_model: TinyModel, p: int, m: int) -> None:
    """Prompt plus max_tokens up to the window is accepted and gives exactly that many tokens."""
    (prompt,) = random_prompts([p], seed=p)
    output = one(llm, prompt, greedy(m))
    assert output.token_ids == tiny_model.oracle.greedy(prompt, m)
    assert output.finish_reason == "length"


@pytest.mark.parametrize(("p", "m"), [(200, 57), (1, 256), (255, 2), (10, 2**31 - 1)])
def test_prompt_and_answer_do_not_fit(llm: LLM, p: int, m: int) -> None:
    """One token too many is refused, naming prompt, max_tokens, window and what would fit."""
    message = refused(
        lambda: llm.generate([65] * p, greedy(m)),
        ContextLengthError,
        "max_tokens",
        "context_length_exceeded",
        str(p),
        str(m),
        str(L),
        f"at most {L - p} tokens",
    )
    assert "-" not in message


@pytest.mark.parametrize("p", [1, 200, 254, 255])
def test_max_tokens_left_out(llm: LLM, p: int) -> None:
    """Without max_tokens an answer that meets no end fills the window."""
    (prompt,) = random_prompts([p], seed=p)
    output = one(llm, prompt, greedy(None))
    assert (len(output.token_ids), output.finish_reason) == (L - p, "length")


def test_no_memory_before_it_is_generated(llm: LLM) -> None:
    """A huge max_tokens or n is refused at once and takes no memory."""
    wild: list[dict[str, Any]] = [
        {"max_tokens": 2**31 - 1},
        {"max_tokens": 2**31},
        {"max_tokens": 10**30},
        {"n": 5},
        {"n": 128},
        {"n": 5_000_000},
        {"n": 2**63},
    ]
    before = rss_bytes()
    for settings in wild:

        def refuse(settings: dict[str, Any] = settings) -> None:
            with pytest.raises(InvalidRequestError) as caught:
                llm.generate("abc", SamplingParams(**settings))
            assert [caught.value.param] == list(settings)

        assert quickest_s(refuse) < 0.05
    assert rss_bytes() - before < MIB


def test_generation_reaches_the_window(llm: LLM, tiny_model: TinyModel) -> None:
    """Answers that end with the window are exact, and no position or block table goes past it."""
    prompts = random_prompts([200] * 5, seed=8)
    runner = llm.engine._runner
    ends, widths = [], []
    launch = runner.launch

    def watched(plan: Any) -> Any:
        ends.append(int((plan.context_lens + plan.query_lens).max()))
        widths.extend(new.index + len(new.block_ids) for new in plan.new_blocks)
        return launch(plan)

    runner.launch = watched
    try:
        outputs = llm.generate(prompts, greedy(56))
    finally:
        runner.launch = launch
    assert ids_of(outputs) == [tiny_model.oracle.greedy(prompt, 56) for prompt in prompts]
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    # The last token is chosen and not computed, so its position is never reached.
    assert (max(ends), max(widths)) == (L - 1, L // 16)


def test_min_tokens_masks_the_ends(llm: LLM) -> None:
    """EOS and stop ids are impossible for the first min_tokens tokens and possible after them."""
    wants_eos = {EOS: 100.0}
    params = greedy(10, ignore_eos=False, logit_bias=wants_eos)
    assert one(llm, "abc", params).token_ids == [EOS]
    output = one(llm, "abc", greedy(10, ignore_eos=False, logit_bias=wants_eos, min_tokens=5))
    assert (len(output.token_ids), output.token_ids[5], output.finish_reason) == (6, EOS, "stop")
    assert EOS not in output.token_ids[:5]
    output = one(llm, "abc", greedy(6, ignore_eos=False, logit_bias=wants_eos, min_tokens=6))
    assert (len(output.token_ids), output.finish_reason) == (6, "length")
    assert EOS not in output.token_ids
    output = one(llm, "abc", greedy(9, logit_bias={7: 100.0}, stop_token_ids=[7], min_tokens=4))
    assert (len(output.token_ids), output.stop_reason) == (5, 7)
    assert 7 not in output.token_ids[:4]


def test_min_tokens_and_stop_strings(llm: LLM) -> None:
    """A stop string completed within the first min_tokens tokens does not end the answer, a later
    one does."""
    prompt = tuple(b"p")
    with scripted(llm, {prompt: list(b"aXbXcXd")}):
        params = greedy(7, stop="X")
        assert one(llm, list(prompt), params).text == "a"
        assert one(llm, list(prompt), greedy(7, stop="X", min_tokens=3)).text == "aXb"
        assert one(llm, list(prompt), greedy(7, stop="X", min_tokens=5)).text == "aXbXc"
        output = one(llm, list(prompt), greedy(7, stop="X", min_tokens=7))
        assert (output.text, output.finish_reason) == ("aXbXcXd", "length")


def test_min_tokens_longer_than_the_room(llm: LLM) -> None:
    """min_tokens that the window cannot hold is refused with both numbers."""
    refused(
        lambda: llm.generate([65] * 250, greedy(None, min_tokens=7)),
        InvalidRequestError,
        "min_tokens",
        "invalid_value",
        "7",
        "6",
    )


# Empty and hostile input.


def test_empty_prompt(llm: LLM) -> None:
    """An empty prompt is refused where the tokenizer adds no BOS, alone or among good ones."""
    for call in (
        lambda: llm.generate("", greedy(1)),
        lambda: llm.generate([""], greedy(1)),
        lambda: llm.generate([[]], greedy(1)),
        lambda: llm.generate(["abc", ""], greedy(1)),
        lambda: llm.stream("", greedy(1)),
        lambda: llm.stream([], greedy(1)),
    ):
        refused(call, EmptyPromptError, "prompt", "empty_prompt", "at least one")
    assert llm.generate([], greedy(1)) == []


def test_empty_prompt_with_bos(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Where the tokenizer adds BOS, the empty text runs on that one token."""
    folder = tiny.save_model(tmp_path, tiny_model.oracle._model, has_bos=True)
    with LLM(str(folder), **FIXTURE_T) as llm:
        output = llm.generate("", greedy(5))[0]
        assert output.prompt_token_ids == [BOS]
        assert output.outputs[0].token_ids == tiny_model.oracle.greedy([BOS], 5)
        assert llm.generate("a", greedy(1))[0].prompt_token_ids == [BOS, 97]


BAD_IDS: list[Any] = [-1, V_TOK, 319, 320, 2**31, 2**63, 10**19, 10**5000, 1.0, True, None, "1", []]


@pytest.mark.parametrize("index", range(len(BAD_IDS)))
@pytest.mark.parametrize("at", [0, 2])
def test_ids_outside_the_vocabulary(llm: LLM, index: int, at: int) -> None:
    """An id that the tokenizer does not know, padding rows of the head included, is refused with
    its place and the range."""
    prompt: list[Any] = [1, 2, 3]
    prompt[at] = BAD_IDS[index]
    for call in (lambda: llm.generate([prompt], greedy(1)), lambda: llm.stream(prompt, greedy(1))):
        refused(
            call,
            TokenOutOfRangeError,
            "prompt",
            "token_out_of_range",
            f"prompt token {at} ",
            f"0 to {V_TOK - 1}",
        )


def test_ids_of_any_integer_type(llm: LLM) -> None:
    """NumPy's integers are ids as Python's are, also among those; its bools and floats are not."""
    wanted = llm.generate([[5, 6, 7]], greedy(4))[0]
    for prompt in (list(np.array([5, 6, 7])), [5, np.uint8(6), np.int32(7)]):
        output = llm.generate([prompt], greedy(4))[0]
        assert output.outputs[0].token_ids == wanted.outputs[0].token_ids
        assert [type(token_id) for token_id in output.prompt_token_ids] == [int] * 3
        assert next(llm.stream(prompt, greedy(1))).token_ids == (wanted.outputs[0].token_ids[0],)
    for bad in (np.True_, np.float64(6), np.int64(V_TOK), True, np.array([5, 6])):
        with pytest.raises(TokenOutOfRangeError, match="prompt token 1 "):
            llm.generate([[np.int64(5), bad]], greedy(1))


@pytest.mark.parametrize(
    "prompts", [None, 5, 1.5, b"abc", {"a": 1}, {1, 2}, object(), ["a", 5], [[1], None], [1, "a"]]
)
def test_prompts_of_the_wrong_type(llm: LLM, prompts: Any) -> None:
    """What is neither text nor ids is refused as a prompt."""
    refused(
        lambda: llm.generate(prompts, greedy(1)), InvalidRequestError, "prompt", "invalid_value"
    )


@pytest.mark.parametrize("prompt", [None, 5, b"abc", {"a": 1}, object()])
def test_stream_of_the_wrong_type(llm: LLM, prompt: Any) -> None:
    """What is neither text, ids nor messages is refused before anything is given."""
    refused(lambda: llm.stream(prompt, greedy(1)), InvalidRequestError, "prompt", "invalid_value")


@pytest.mark.parametrize("messages", [None, "hi", 5, [], [5], ["hi"], {"role": "user"}, [{}]])
def test_messages_of_the_wrong_type(llm: LLM, messages: Any) -> None:
    """What is not a conversation is refused as messages."""
    with pytest.raises(InvalidRequestError) as caught:
        llm.chat(messages, greedy(1))
    assert caught.value.param is not None and caught.value.param.startswith("messages")


@pytest.mark.parametrize("params", [5, "x", {"n": 1}, [5], [], [SamplingParams()] * 3])
def test_params_of_the_wrong_type_or_number(llm: LLM, params: Any) -> None:
    """What is not one SamplingParams, or one for each prompt, is refused."""
    refused(
        lambda: llm.generate(["a", "b"], params), InvalidRequestError, "params", "invalid_value"
    )
    if not isinstance(params, list):
        refused(lambda: llm.stream("a", params), InvalidRequestError, "params", "invalid_value")


def test_text_with_half_a_character(llm: LLM) -> None:
    """A lone surrogate is refused as a prompt and harmless as a stop string."""
    refused(
        lambda: llm.generate("a\ud800", greedy(1)), InvalidRequestError, "prompt", "invalid_value"
    )
    assert len(one(llm, "abc", greedy(3, stop="\ud800")).token_ids) == 3


def test_one_bad_prompt_starts_nothing(llm: LLM) -> None:
    """If one prompt of a list is bad none is started."""
    prompts: list[Any] = ["abc"] * 20 + [[V_TOK]]
    refused(
        lambda: llm.generate(prompts, greedy(1)),
        TokenOutOfRangeError,
        "prompt",
        "token_out_of_range",
    )
    assert_idle(llm)


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_padding_rows_are_never_sampled(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """Rows of the head past the tokenizer's ids never win, and log-probabilities do not know
    them."""
    model = llm.engine._runner._model
    head = model.logits

    def rigged(hidden_NE: torch.Tensor) -> torch.Tensor:
        logits_NV = head(hidden_NE)
        logits_NV[:, V_TOK:] = 1000.0
        return logits_NV

    plain = one(llm, "abc", greedy(3, logprobs=20))
    monkeypatch.setattr(model, "logits", rigged)
    params = greedy(200, temperature=temperature, seed=1, logprobs=20)
    for output in llm.generate(["abc", "d", "ef"], params):
        assert max(output.outputs[0].token_ids) < V_TOK
        for entry in output.outputs[0].logprobs or []:
            assert max(entry) < V_TOK
    rigged_output = one(llm, "abc", greedy(3, logprobs=20))
    assert rigged_output.token_ids == plain.token_ids
    assert rigged_output.logprobs == plain.logprobs


@pytest.mark.parametrize("token_id", [V_TOK, 319, 320, 999_999, 2**31 - 1])
@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids"])
def test_named_ids_outside_the_vocabulary(llm: LLM, name: str, token_id: int) -> None:
    """A bias or stop on an id that does not exist is refused with the id and the range."""
    value: Any = {str(token_id): 1.0} if name == "logit_bias" else [token_id]
    for call in (
        lambda: llm.generate("a", SamplingParams(**{name: value})),
        lambda: llm.stream("a", SamplingParams(**{name: value})),
    ):
        refused(
            call, InvalidRequestError, name, "invalid_value", str(token_id), f"0 to {V_TOK - 1}"
        )


def test_logit_bias_decides(llm: LLM) -> None:
    """-100 on all ids but one leaves that one; +100 wins under greedy; neither moves with the place
    in the batch."""
    only = SamplingParams(
        max_tokens=6, ignore_eos=True, seed=3, logit_bias={i: -100 for i in range(V_TOK) if i != 77}
    )
    wins = greedy(6, logit_bias={"88": 100})
    plain = greedy(6)
    alone = one(llm, "xyz", plain).token_ids
    for order in ([only, wins, plain], [plain, wins, only], [wins, plain, only]):
        expected = {id(only): [77] * 6, id(wins): [88] * 6, id(plain): alone}
        outputs = llm.generate(["xyz"] * 3, order)
        assert ids_of(outputs) == [expected[id(params)] for params in order]


# Sampling parameters.


@pytest.mark.parametrize("temperature", [-0.0, 5e-324, 1e-45, 1e-8, 9e-6])
def test_tiny_temperatures_are_greedy(llm: LLM, temperature: float) -> None:
    """A temperature that would overflow the logits gives the greedy answer."""
    assert (
        one(llm, "abc", greedy(20, temperature=temperature)).token_ids
        == one(llm, "abc", greedy(20)).token_ids
    )


@pytest.mark.parametrize(
    "filters", [{"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}, {"temperature": 1e-4}]
)
def test_filters_that_leave_one_token(llm: LLM, filters: dict[str, Any]) -> None:
    """Filters so narrow that one token is left give the greedy answer at any temperature."""
    assert (
        one(llm, "abc", greedy(20, **({"temperature": 1.5, "seed": 5} | filters))).token_ids
        == one(llm, "abc", greedy(20)).token_ids
    )


@pytest.mark.parametrize(
    "filters",
    [{"top_p": 1}, {"top_k": -1}, {"top_k": V_TOK}, {"top_k": 2**31 - 1}, {"min_p": 0}],
)
def test_filters_that_leave_all_tokens(llm: LLM, filters: dict[str, Any]) -> None:
    """A filter at its open end changes nothing: same seed, same ids, alone and beside a narrow
    one."""
    settings = {"temperature": 2.0, "seed": 5}
    plain = one(llm, "abc", greedy(40, **settings)).token_ids
    open_ended = greedy(40, **settings, **filters)
    narrow = greedy(40, **settings, top_k=3, top_p=0.5, min_p=0.1)
    assert one(llm, "abc", open_ended).token_ids == plain
    assert ids_of(llm.generate(["abc"] * 2, [narrow, open_ended]))[1] == plain


def test_n_answers(llm: LLM) -> None:
    """n answers differ, come in order, and the first is that of n = 1 with the same seed."""
    settings: dict[str, Any] = {"max_tokens": 12, "seed": 9, "ignore_eos": True}
    four = llm.generate("abc", SamplingParams(n=4, **settings))[0]
    assert [output.index for output in four.outputs] == [0, 1, 2, 3]
    assert len({tuple(output.token_ids) for output in four.outputs}) == 4
    two = llm.generate("abc", SamplingParams(n=2, **settings))[0]
    assert [o.token_ids for o in two.outputs] == [o.token_ids for o in four.outputs[:2]]
    assert one(llm, "abc", SamplingParams(**settings)).token_ids == four.outputs[0].token_ids
    deltas = list(llm.stream("abc", SamplingParams(n=4, **settings)))
    for output in four.outputs:
        mine = [delta for delta in deltas if delta.index == output.index]
        assert [i for delta in mine for i in delta.token_ids] == output.token_ids
        assert "".join(delta.text for delta in mine) == output.text
        assert [delta.finish_reason for delta in mine] == [None] * 11 + ["length"]


def test_n_without_a_seed_differs(llm: LLM) -> None:
    """Answers of a request without a seed are not copies of each other."""
    output = llm.generate("abc", SamplingParams(n=4, max_tokens=12, ignore_eos=True))[0]
    assert len({tuple(each.token_ids) for each in output.outputs}) == 4


@pytest.mark.parametrize("n", [5, 128])
def test_n_above_the_batch(llm: LLM, n: int) -> None:
    """n above max_num_seqs is refused with both numbers."""
    refused(
        lambda: llm.generate("abc", greedy(1, n=n)),
        InvalidRequestError,
        "n",
        "invalid_value",
        str(n),
        "4",
    )


def test_logprobs_are_strict_json(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log-probability of minus infinity is given as -9999.0, so that JSON can carry it; filters
    do not show in log-probabilities."""
    params = greedy(3, logprobs=5, prompt_logprobs=5)
    wide = one(llm, "abc", params)
    narrow = one(llm, "abc", greedy(3, logprobs=5, top_k=1, temperature=1.0))
    assert [list(e) for e in narrow.logprobs] == [list(e) for e in wide.logprobs]
    model = llm.engine._runner._model
    head = model.logits

    def rigged(hidden_NE: torch.Tensor) -> torch.Tensor:
        logits_NV = head(hidden_NE)
        logits_NV[:, : V_TOK - 3] = -math.inf
        return logits_NV

    monkeypatch.setattr(model, "logits", rigged)
    output = llm.generate("abc", params)[0]
    assert output.prompt_logprobs is not None and output.prompt_logprobs[1] is not None
    assert output.prompt_logprobs[1][ord("b")].logprob == -9999.0
    values = [
        entry.logprob
        for entries in [*output.prompt_logprobs[1:], *(output.outputs[0].logprobs or [])]
        for entry in (entries or {}).values()
    ]
    json.dumps(values, allow_nan=False)
    assert min(values) == -9999.0


MEMORY_SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import tiny
from pico_vllm import LLM, SamplingParams

def peak_mib():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("VmHWM")) / 1024

prompt = [i % 256 for i in range(400)]
with LLM({folder!r}, **(tiny.FIXTURE_T | dict(
        load_format="dummy", max_model_len=1024, max_num_batched_tokens=1024))) as llm:
    llm.generate(prompt, tiny.greedy(2, logprobs=20))
    before = peak_mib()
    output = llm.generate(prompt, tiny.greedy(2, logprobs=20, prompt_logprobs=20))[0]
    assert len(output.prompt_logprobs) == 400
    print(peak_mib() - before)
"""


def test_prompt_logprobs_take_bounded_memory(tmp_path: Path) -> None:
    """Log-probabilities of 400 prompt tokens over 152,000 ids take at most 64 MiB, not the 232
    MiB of all logits at once."""
    config = tiny.hf_config(
        "qwen2", vocab_size=152_000, hidden_size=12, max_position_embeddings=1024
    )
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(tmp_path)
    script = MEMORY_SCRIPT.format(tests=str(Path(tiny.__file__).parent), folder=str(tmp_path))
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True
    )
    assert float(run.stdout.split()[-1]) < 64


def test_seed_in_any_company(llm: LLM, small_llm: LLM) -> None:
    """A seeded request gives the same ids alone, beside seeded and unseeded ones, in a pool under
    pressure, and streamed."""
    prompt = "seed"
    seeded = SamplingParams(max_tokens=30, temperature=1.3, seed=42, ignore_eos=True)
    others = [
        SamplingParams(max_tokens=25, temperature=1.0, seed=seed, ignore_eos=True)
        for seed in (None, None, None, 1, 2, 3)
    ]
    alone = one(llm, prompt, seeded).token_ids
    assert len(set(alone)) > 10
    company = ["a", "bb", "ccc", "dddd", "eeeee", "ffffff"]
    for at in (0, 3, 6):
        prompts, params = list(company), list(others)
        prompts.insert(at, prompt)
        params.insert(at, seeded)
        assert ids_of(llm.generate(prompts, params))[at] == alone
        assert ids_of(small_llm.generate(prompts, params))[at] == alone
    streamed = [i for delta in llm.stream(prompt, seeded) for i in delta.token_ids]
    assert streamed == alone
    other_seed = SamplingParams(max_tokens=30, temperature=1.3, seed=43, ignore_eos=True)
    assert one(llm, prompt, other_seed).token_ids != alone


def test_prompt_logprobs_with_other_requests(llm: LLM) -> None:
    """Prompt log-probabilities do not change with chunks and batch mates, and n answers share
    them."""
    prompt = random_prompts([150], seed=2)[0]
    params = greedy(3, prompt_logprobs=2, logprobs=0)
    alone = llm.generate(prompt, params)[0]
    mixed = llm.generate([[1, 2, 3], prompt, [4] * 99], [greedy(40), params, greedy(9)])[1]
    n_answers = llm.generate(prompt, greedy(3, prompt_logprobs=2, logprobs=0, n=2))[0]
    assert alone.prompt_logprobs is not None and len(alone.prompt_logprobs) == 150
    for other in (mixed, n_answers):
        assert other.prompt_logprobs is not None
        for a, b in zip(alone.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert a is not None and b is not None and list(a) == list(b)
            assert [e.logprob for e in a.values()] == pytest.approx(
                [e.logprob for e in b.values()], abs=1e-4
            )


# Text.


def stream_and_generate(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[Any, list]:
    """Both ways of asking must agree on everything."""
    output = one(llm, prompt, params)
    deltas = list(llm.stream(prompt, params))
    assert "".join(delta.text for delta in deltas) == output.text
    assert [i for delta in deltas for i in delta.token_ids] == output.token_ids
    last = deltas[-1]
    assert (last.finish_reason, last.stop_reason) == (output.finish_reason, output.stop_reason)
    assert all(delta.finish_reason is None for delta in deltas[:-1])
    return output, deltas


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_over_several_tokens(llm: LLM, include: bool) -> None:
    """A stop string that no single token holds is found, never shown in a stream, and ends
    generation at the token that completes it."""
    prompt = list(b"go")
    pieces = ["D", "EF", "G", "HI", "J", "K"]
    script = [*b"ok ", *(PIECES[piece] for piece in pieces), *b"never"]
    with scripted(llm, {tuple(prompt): script}):
        params = greedy(14, stop=["zzz", "DEFGHIJ"], include_stop_str_in_output=include)
        output, deltas = stream_and_generate(llm, prompt, params)
    assert output.text == ("ok DEFGHIJ" if include else "ok ")
    assert (output.finish_reason, output.stop_reason) == ("stop", "DEFGHIJ")
    assert output.token_ids == script[:8]
    assert [delta.text for delta in deltas[:7]] == ["o", "k", " ", "", "", "", ""]


def test_a_beginning_of_a_stop_string_is_given_late(llm: LLM) -> None:
    """Text that turns out not to be the stop string is given, in the answer and in the stream."""
    prompt = list(b"go")
    with scripted(llm, {tuple(prompt): [*b"DEFGHI", *b"x", *b"DEF"]}):
        output, _ = stream_and_generate(llm, prompt, greedy(10, stop="DEFGHIJ"))
    assert (output.text, output.finish_reason) == ("DEFGHIxDEF", "length")


@pytest.mark.parametrize(
    ("stop", "text", "count"),
    [("am", "x g", 2), ("gamma", "x ", 3), (" gamma", "x", 3), ("x", "", 1), ("ma", "x gam", 3)],
)
def test_stop_string_inside_a_token(llm: LLM, stop: str, text: str, count: int) -> None:
    """A stop string that begins or ends inside a token is cut to the character."""
    prompt = list(b"go")
    script = [ord("x"), PIECES[" gam"], PIECES["ma"], *b"never"]
    with scripted(llm, {tuple(prompt): script}):
        output, _ = stream_and_generate(llm, prompt, greedy(8, stop=[stop]))
    assert (output.text, output.stop_reason) == (text, stop)
    assert output.token_ids == script[:count]


def test_characters_of_several_tokens(llm: LLM) -> None:
    """Characters whose bytes lie in several tokens come whole, in the chunk of their last byte."""
    prompt, text = list(b"go"), "삼겹살👩‍👩‍👧ď"
    script = list(text.encode())
    with scripted(llm, {tuple(prompt): script}):
        output, deltas = stream_and_generate(llm, prompt, greedy(len(script)))
    assert output.text == text == llm.tokenizer.decode(script)
    assert all("\ufffd" not in delta.text for delta in deltas)
    assert [delta.text for delta in deltas[:4]] == ["", "", "삼", ""]


def test_unfinished_character_at_the_end(llm: LLM) -> None:
    """Bytes that never become a character are one U+FFFD, given with the last token."""
    prompt, script = list(b"go"), list("a살".encode())[:3]
    with scripted(llm, {tuple(prompt): script}):
        output, deltas = stream_and_generate(llm, prompt, greedy(3))
    assert output.text == "a\ufffd" == llm.tokenizer.decode(script)
    assert [delta.text for delta in deltas] == ["a", "", "\ufffd"]


def test_stop_strings_of_random_answers(llm: LLM) -> None:
    """With stop strings drawn from what the model says, text and tokens end where a search over the
    decoded tokens ends them, streamed or not."""
    rng = random.Random(5)
    # Few characters, so that stop strings begin more often than they are completed.
    kept = {*b"abcd", *PIECES.values()}
    bias = {i: -100 for i in range(V_TOK) if i not in kept}
    for trial in range(60):
        prompt = [rng.randrange(97, 122) for _ in range(5)]
        settings: dict[str, Any] = {"temperature": 2.0, "seed": trial, "logit_bias": bias}
        whole = one(llm, prompt, greedy(30, **settings))
        stops = []
        for _ in range(rng.randint(1, 3)):
            start = rng.randrange(len(whole.text))
            stops.append(whole.text[start : start + rng.randint(1, 4)])
        output, _ = stream_and_generate(llm, prompt, greedy(30, **settings, stop=stops))
        count, text, stop = brute_force_stop(llm, whole.token_ids, stops)
        assert (output.token_ids, output.text) == (whole.token_ids[:count], text)
        assert output.stop_reason == stop


def brute_force_stop(llm: LLM, token_ids: list[int], stops: list[str]) -> tuple[int, str, str]:
    """Tokens, text and stop string, by decoding ever longer beginnings of the answer."""
    for count in range(1, len(token_ids) + 1):
        text = llm.tokenizer.decode(token_ids[:count])
        found = [(text.find(stop), -len(stop), stop) for stop in stops if stop in text]
        if found:
            start, _, stop = min(found)
            return count, text[:start], stop
    raise AssertionError("a stop string taken from the text is in the text")


def test_eos_and_stop_ids_in_the_output(llm: LLM) -> None:
    """The id that ends an answer stays in its ids; EOS, being special, shows in the text only when
    asked; a stop id is named as the reason."""
    prompt = list(b"go")
    with scripted(llm, {tuple(prompt): [*b"ab", EOS, *b"cd", 44, *b"never"]}):
        output, _ = stream_and_generate(llm, prompt, greedy(9, ignore_eos=False))
        assert (output.token_ids, output.text) == ([*b"ab", EOS], "ab")
        assert (output.finish_reason, output.stop_reason) == ("stop", None)
        shown = greedy(9, ignore_eos=False, skip_special_tokens=False)
        assert one(llm, prompt, shown).text == "ab<|endoftext|>"
        output, _ = stream_and_generate(llm, prompt, greedy(9, stop_token_ids=[44]))
        assert output.token_ids == [*b"ab", EOS, *b"cd", 44]
        assert (output.finish_reason, output.stop_reason) == ("stop", 44)


def test_answer_without_text(llm: LLM) -> None:
    """With detokenize=False the ids come and the text stays empty."""
    output, _ = stream_and_generate(llm, list(b"abc"), greedy(5, detokenize=False))
    assert (output.text, len(output.token_ids)) == ("", 5)
