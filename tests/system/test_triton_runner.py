"""The whole engine on Triton kernels: under the interpreter on a CPU, compiled on a GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, get_args

import pytest
import tiny
import torch
from tiny import greedy
from torch import Tensor

from pico_vllm import LLM, SamplingParams
from pico_vllm.cache import triton_kv
from pico_vllm.engine import cuda_graph, device_batch, triton_runner
from pico_vllm.engine.cuda_graph import CudaGraphs, Tail
from pico_vllm.engine.device_batch import Shape
from pico_vllm.errors import ConfigError
from pico_vllm.kernels import (
    hopper_head,
    paged_decode,
    paged_prefill,
    shared_prefix,
    small_linear,
)
from pico_vllm.kernels.head_sample import HeadScratch
from pico_vllm.kernels.hopper_prefill import hopper_prefill_reference
from pico_vllm.layers.linear import Linear
from pico_vllm.layers.triton_linear import InvariantLinear
from pico_vllm.step import StepPlan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SETTINGS = {
    "dtype": "float32",
    "device": DEVICE,
    "max_model_len": 32,
    "num_kv_blocks": 8,
    "block_size": 8,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 8,
    "kernels": "triton",
}
# Without a graph a start decodes one token, and not the many that record it.
PLAIN_KERNELS = {"kernels": "plain", "overlap": "off", "cpu_graph": "off"}
PLAIN = SETTINGS | PLAIN_KERNELS
PROMPTS = [[5, 9, 200], list(range(7, 17))]


FAMILIES = ["qwen3"] if DEVICE == "cpu" else ["qwen2", "qwen3"]
"""The interpreter is slow."""


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs program by program: of two outputs each, half a second for the head; of
    a sixteenth of a context each, most of a test."""
    if DEVICE == "cpu":
        monkeypatch.setattr(paged_decode, "num_splits", lambda *_, **__: 2)
        monkeypatch.setattr(paged_prefill, "MOST_SPLIT_PROGRAMS", 6)
        is_gemv = small_linear.is_gemv
        monkeypatch.setattr(small_linear, "is_gemv", lambda M, N, K: N <= 40 and is_gemv(M, N, K))


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One small layer, since the interpreter is slow; with biases (Qwen2) or QK-norm (Qwen3)."""
    return saved_model(tmp_path_factory.mktemp("tiny"), request.param, num_layers=1)


def saved_model(folder: Path, family: str, *, num_layers: int) -> Path:
    config = tiny.hf_config(
        family, head_dim=16, num_attention_heads=3, num_key_value_heads=1,
        hidden_size=24, intermediate_size=20, num_hidden_layers=num_layers,
    )  # fmt: skip
    return tiny.save_model(folder, tiny.random_model(config, seed=11))


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[list[int]]:
    with LLM(str(model), **PLAIN) as llm:
        return [each.outputs[0].token_ids for each in llm.generate(PROMPTS, greedy(4))]


def test_same_answers_as_plain_operations(model: Path) -> None:
    """A whole prompt, and one in chunks beside a decoding request, give the tokens of plain
    operations, with overlap; so do temperature in the fused tail, and a filter with
    log-probabilities in the full sampler. Steps of padding alone, as graphs are captured on, change
    nothing of anybody's."""
    params = [
        SamplingParams(max_tokens=3, temperature=1.3, seed=5, ignore_eos=True),
        SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True),
    ]
    full = SamplingParams(
        max_tokens=1, temperature=1.0, top_p=0.9, seed=6, logprobs=2, prompt_logprobs=1
    )
    with LLM(str(model), **PLAIN) as llm:
        wanted = [*llm.generate(PROMPTS, params), *llm.generate(PROMPTS[0], full)]
    with LLM(str(model), **SETTINGS) as llm:
        assert llm.config.cpu_graph == "off"
        found = [*llm.generate(PROMPTS, params), *llm.generate(PROMPTS[0], full)]
        llm.engine.check_invariants()
        runner = llm.engine._runner
        pool = runner._kv.device_pool[1:].view(torch.uint8)
        before, last_tokens = pool.clone(), runner._batch_builder.last_tokens_W[:-1].clone()
        for shape in (Shape(2, 2, "decode"), Shape(8, 2, "extend")):
            for tail in ("sample", "full"):
                runner.run_padding(shape, tail)
        assert torch.equal(before, pool)
        assert torch.equal(last_tokens, runner._batch_builder.last_tokens_W[:-1])
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
    assert found[2].outputs[0].cumulative_logprob == pytest.approx(
        wanted[2].outputs[0].cumulative_logprob, abs=1e-4
    )
    values = [
        [entry.logprob for each in output.prompt_logprobs[1:] for entry in each.values()]
        for output in (found[2], wanted[2])
    ]
    assert values[0] == pytest.approx(values[1], abs=1e-4) and len(values[0]) >= 2


def test_the_likeliest_alone_where_nobody_asks_for_more(
    model: Path, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a head can do without logits, steps of greedy requests take it, captured or not, and
    those with a sampled one beside them do not; the greedy one's tokens stay the same."""
    num_taken = []

    def choose(
        x_RE: Tensor, head_VE: Tensor, *, vocab_size: int, rows_R: Tensor, last_tokens_W: Tensor,
        scratch: HeadScratch, out_R: Tensor,
    ) -> None:  # fmt: skip
        num_taken.append(len(x_RE))
        ids_R = (x_RE @ head_VE.T)[:, :vocab_size].argmax(1)
        out_R.copy_(ids_R)
        last_tokens_W[rows_R.long()] = ids_R

    monkeypatch.setattr(hopper_head, "can_take", lambda *_: True)
    monkeypatch.setattr(hopper_head, "is_faster", lambda R, vocab_size: R >= 2)
    monkeypatch.setattr(hopper_head, "hopper_head", choose)
    params = [greedy(2), SamplingParams(max_tokens=2, temperature=1.3, seed=5, ignore_eos=True)]
    with LLM(str(model), **SETTINGS) as llm:
        for has_graphs in (False, True):
            if has_graphs:
                _run_at_once(llm)
            num_taken.clear()
            outputs = llm.generate(PROMPTS, greedy(2))
            assert [each.outputs[0].token_ids for each in outputs] == [ids[:2] for ids in wanted]
            assert num_taken and set(num_taken) == {2}
        llm.engine._runner.capture_decodes(lambda *_: None)
        tails = {
            (s.num_requests, t) for s, t in llm.engine._runner.graphs._graphs if s.kind == "decode"
        }
        assert tails == {(1, "sample"), (1, "full"), *((2, t) for t in get_args(Tail))}
        num_taken.clear()
        outputs = llm.generate(PROMPTS, params)
        assert outputs[0].outputs[0].token_ids == wanted[0][:2]
        assert not num_taken


@pytest.mark.parametrize(
    "settings", [{"kernels": "attention"}, {"kernels": "triton", "weight_format": "bf16"}]
)
def test_plain_layers_around_triton_attention(model: Path, settings: dict[str, str]) -> None:
    """With PyTorch's layers around our attention, since they were asked for or since the weights
    have another dtype, greedy and sampled tokens are those of plain operations; the head is then
    PyTorch's too."""
    params = [greedy(2), SamplingParams(max_tokens=2, temperature=1.3, seed=5, ignore_eos=True)]
    with LLM(str(model), **PLAIN | settings | {"kernels": "plain"}) as llm:
        wanted = [each.outputs[0].token_ids for each in llm.generate(PROMPTS, params)]
    with LLM(str(model), **SETTINGS | settings) as llm:
        assert type(llm.engine._runner._model.head) is Linear
        found = [each.outputs[0].token_ids for each in llm.generate(PROMPTS, params)]
        llm.engine.check_invariants()
    assert found == wanted


def test_batch_invariant_gives_the_same_answers(model: Path) -> None:
    """One kernel for all rows and one for all attention: a prompt in chunks beside a request that
    decodes, and decoding steps, give the tokens of plain operations."""
    params = [greedy(3), SamplingParams(max_tokens=2, temperature=1.3, seed=5, ignore_eos=True)]
    with LLM(str(model), **PLAIN) as llm:
        wanted = [each.outputs[0].token_ids for each in llm.generate(PROMPTS, params)]
    with LLM(str(model), **SETTINGS, batch_invariant=True) as llm:
        assert type(llm.engine._runner._model.head) is InvariantLinear
        kv = llm.engine._runner._kv
        assert not kv.can_share and kv.prefill_scratch is None
        found = [each.outputs[0].token_ids for each in llm.generate(PROMPTS, params)]
    assert found == wanted


def test_a_cached_prompt(model: Path) -> None:
    """A prompt that is cached whole, so that a block is copied for all but its last token, is
    answered as without a cache."""
    prompt = list(range(7, 15))
    with LLM(str(model), **PLAIN, enable_prefix_caching=False) as llm:
        wanted = llm.generate(prompt, greedy(1))[0].outputs
    with LLM(str(model), **SETTINGS | {"kernels": "attention", "cow_min_tokens": 1}) as llm:
        for num_cached in (0, 7):
            output = llm.generate(prompt, greedy(1))[0]
            assert (output.outputs, output.num_cached_tokens) == (wanted, num_cached)
        llm.engine.check_invariants()


def test_a_cached_prefix_whose_keys_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few tokens behind a cached prefix, whose keys are attended in splits, are answered as
    without a cache."""
    # In the last layer only one token attends.
    model = saved_model(tmp_path, "qwen3", num_layers=2)
    config = paged_prefill.PrefillConfig(block_m=32, block_n=16, num_warps=4, num_stages=1)
    monkeypatch.setattr(paged_prefill, "choose_config", lambda *_, **__: config)
    monkeypatch.setattr(paged_prefill, "FEW_ROUNDS", 0)
    prompts = [list(range(7, 39)), [*range(7, 39), 5, 9, 200]]
    more = {"max_model_len": 40, "max_num_batched_tokens": 32}
    with LLM(str(model), **PLAIN | more, enable_prefix_caching=False) as llm:
        wanted = [llm.generate(prompt, greedy(1))[0].outputs for prompt in prompts]
    with LLM(str(model), **SETTINGS | more | {"kernels": "attention"}) as llm:
        found = [llm.generate(prompt, greedy(1))[0] for prompt in prompts]
        assert llm.engine._runner._kv.prefill_scratch.num_used[:3].tolist() == [2, 2, 2]
        llm.engine.check_invariants()
    assert [output.outputs for output in found] == wanted
    assert found[1].num_cached_tokens == 32


def test_a_prefix_that_is_attended_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where requests that decode share cached blocks, and one beside them does not, those are
    attended for all at once, with the tokens of plain operations: while one after the other ends,
    and with blocks that are appended meanwhile."""
    seen: list[list[int]] = []
    decode = shared_prefix.shared_prefix_decode

    def decode_shared(*inputs: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.append(inputs[8].tolist())
        return decode(*inputs, **options)

    monkeypatch.setattr(shared_prefix, "shared_prefix_decode", decode_shared)
    monkeypatch.setattr(shared_prefix, "is_faster", lambda num, *_: num > 1)
    monkeypatch.setattr(triton_runner, "MIN_SHARING", 2)
    common = list(range(7, 23))
    prompts = [[5, 9, 200], [*common, 3], [*common, 50, 51, 52, 53, 54, 55], [*common, 9, 8]]
    params = [greedy(3), greedy(2), greedy(3), greedy(3)]
    more = {"max_num_seqs": 4, "num_kv_blocks": 20, "max_num_batched_tokens": 32}
    more |= {"cuda_graph": "off"}  # a replay would not be seen
    with LLM(str(model), **PLAIN | more) as llm:
        wanted = [each.outputs[0].token_ids for each in llm.generate(prompts, params)]
    with LLM(str(model), **SETTINGS | more | {"kernels": "attention"}) as llm:
        llm.generate([*common, 1], greedy(1))
        found = [each.outputs[0].token_ids for each in llm.generate(prompts, params)]
        llm.engine.check_invariants()
    assert found == wanted
    assert [0, 16, 16, 16] in seen and [0, 16, 16] in seen


def test_fresh_prompts_beside_older_ones(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a kernel for fresh prompts is there it gets those alone, each from its first token on,
    beside decoding requests and later chunks in one step; answers stay the same."""
    seen: list[list[int]] = []

    def attend_fresh(*tensors: torch.Tensor, scale: float, out: torch.Tensor) -> torch.Tensor:
        starts = tensors[3].tolist()
        seen.append(starts)
        attended = hopper_prefill_reference(*(x.cpu() for x in tensors), scale=scale)
        out[starts[0] :] = attended[starts[0] :]
        return out

    monkeypatch.setattr(triton_kv, "can_take", lambda *_: True)
    monkeypatch.setattr(triton_kv, "hopper_prefill", attend_fresh)
    monkeypatch.setattr(device_batch, "FEW_TOKENS", 0)
    prompts = [[11], list(range(7, 17)), [5, 9, 200]]
    params = [greedy(4), *[greedy(1, prompt_logprobs=0)] * 2]
    settings = SETTINGS | {"kernels": "attention", "max_num_seqs": 3, "cuda_graph": "off"}
    with LLM(str(model), **PLAIN) as llm:
        wanted = llm.generate(prompts, params)
    with LLM(str(model), **settings) as llm:
        seen.clear()  # what was compiled at the start
        # Steps of 1 + 7, of 1 + 3 + 3, and of decoding.
        found = llm.generate(prompts, params)
    assert seen == [[0, 1, 8], [4, 4, 4, 7]]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        values = [
            [
                entry.logprob
                for each in output.prompt_logprobs or ()
                if each
                for entry in each.values()
            ]
            for output in (ours, theirs)
        ]
        assert values[0] == pytest.approx(values[1], abs=1e-4)


@pytest.mark.parametrize("takes_fresh", [False, True])
def test_graphs_of_every_kind_of_request(
    model: Path, takes_fresh: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps in which each kind of request has its own kernel, as large ones do, in graphs with
    padded tokens and requests: the first time kernel by kernel, then captured and replayed, the
    answers are those of plain operations."""

    def attend_fresh(*tensors: torch.Tensor, scale: float, out: torch.Tensor) -> torch.Tensor:
        first = int(tensors[3][0])
        attended = hopper_prefill_reference(*(x.cpu() for x in tensors), scale=scale)
        out[first:] = attended[first:]
        return out

    monkeypatch.setattr(triton_kv, "can_take", lambda *_: takes_fresh)
    monkeypatch.setattr(triton_kv, "hopper_prefill", attend_fresh)
    monkeypatch.setattr(cuda_graph, "MAX_ALIKE_TOKENS", 0)
    monkeypatch.setattr(device_batch, "FEW_TOKENS", 0)
    prompts = [[11], list(range(7, 17)), [5, 9, 200]]
    settings = SETTINGS | {"kernels": "attention", "max_num_seqs": 5, "cuda_graph": "off"}
    settings |= {"max_num_batched_tokens": 8, "enable_prefix_caching": "off"}
    with LLM(str(model), **PLAIN) as llm:
        wanted = [each.outputs[0].token_ids for each in llm.generate(prompts, greedy(4))]
    with LLM(str(model), **settings) as llm:
        _run_at_once(llm)
        for _ in range(3):
            found = [each.outputs[0].token_ids for each in llm.generate(prompts, greedy(4))]
            assert found == wanted
        shapes = {shape for shape, _ in llm.engine._runner.graphs._graphs}
        tiny.assert_idle(llm)
    assert {Shape(8, 5, "fresh"), Shape(8, 5, "mixed")} <= shapes


def test_every_kind_of_request_with_overlap(model: Path) -> None:
    """Requests with penalties, filters, biases, a minimum of tokens and log-probabilities, in one
    batch with a plain one and with overlap, give what each gives alone in the plain loop, on plain
    operations."""
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.4}
    common: dict[str, Any] = {"max_tokens": 2, "ignore_eos": True}
    params = [
        SamplingParams(temperature=0.0, logprobs=3, **penalties, **common),
        SamplingParams(temperature=1.1, seed=3, top_k=30, top_p=0.9, **penalties, **common),
        SamplingParams(temperature=0.9, seed=8, **common),
        SamplingParams(
            temperature=0.0, logit_bias={9: 60.0, 200: -5.0}, stop_token_ids=[9], min_tokens=1,
            logprobs=0, **common,
        ),
    ]  # fmt: skip
    prompts = [[5, 9, 200], [7, 8], [17, 3, 5], [9]]
    more = {"max_num_seqs": 4, "num_kv_blocks": 16}
    with LLM(str(model), **PLAIN | more) as llm:
        wanted = [
            llm.generate(prompt, each)[0] for prompt, each in zip(prompts, params, strict=True)
        ]
    assert wanted[3].outputs[0].finish_reason == "stop"
    assert len(wanted[3].outputs[0].token_ids) == 2
    for overlap in ("on",) if DEVICE == "cpu" else ("on", "off"):
        with LLM(str(model), **SETTINGS | more | {"overlap": overlap}) as llm:
            found = llm.generate(prompts, params)
            llm.engine.check_invariants()
        for ours, theirs in zip(found, wanted, strict=True):
            mine, other = ours.outputs[0], theirs.outputs[0]
            assert mine.token_ids == other.token_ids
            assert mine.finish_reason == other.finish_reason
            assert (mine.logprobs is None) == (other.logprobs is None)
            for each, same in zip(mine.logprobs or (), other.logprobs or (), strict=True):
                assert list(each) == list(same)
                for entry, twin in zip(each.values(), same.values(), strict=True):
                    assert entry.logprob == pytest.approx(twin.logprob, abs=1e-4)
                    assert entry.rank == twin.rank


def test_refuses_what_the_kernels_cannot_do(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block size or a cache that the kernels do not take is named with the way out; so is a
    machine without a GPU."""
    with pytest.raises(ConfigError, match=r"block_size 24 .* use one of them"):
        LLM(str(model), **SETTINGS | {"block_size": 24})
    with pytest.raises(ConfigError, match="kernels triton needs kv paged"):
        LLM(str(model), kv="contiguous", **SETTINGS | {"num_kv_blocks": None})
    monkeypatch.delitem(os.environ, "TRITON_INTERPRET", raising=False)
    if DEVICE == "cpu":
        with pytest.raises(ConfigError, match="needs a GPU"):
            LLM(str(model), **SETTINGS)


@pytest.mark.gpu
def test_a_preempted_request_goes_on_as_it_would_have(model: Path) -> None:
    """Preempted after its second token, with that step under way or committed, a request with
    penalties and min_tokens, which sees its outputs among the ids it enters with, gives the tokens
    and log-probabilities of plain operations undisturbed."""
    params = SamplingParams(
        max_tokens=4, min_tokens=4, temperature=0.9, seed=8, top_p=0.95, presence_penalty=1.5,
        frequency_penalty=0.7, repetition_penalty=1.3, logprobs=1, prompt_logprobs=0,
        stop_token_ids=list(range(0, 300, 3)),
    )  # fmt: skip
    with LLM(str(model), **PLAIN) as llm:
        (wanted,) = llm.generate(PROMPTS[0], params)
    with LLM(str(model), **SETTINGS) as llm:
        scheduler, num_plans = llm.engine._scheduler, 0
        schedule = scheduler.schedule

        def preempt_and_schedule() -> Any:
            nonlocal num_plans
            num_plans += 1
            if num_plans == 3:
                scheduler._preempt(next(iter(scheduler._running.values())))
            return schedule()

        scheduler.schedule = preempt_and_schedule
        (found,) = llm.generate(PROMPTS[0], params)
        assert scheduler.num_preemptions == 1
        llm.engine.check_invariants()
    ours, theirs = found.outputs[0], wanted.outputs[0]
    assert ours.token_ids == theirs.token_ids and len(ours.token_ids) == 4
    assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-4)
    assert len(found.prompt_logprobs or ()) == len(PROMPTS[0])


def test_prefixes_below_the_device(model: Path) -> None:
    """Blocks that others have taken come up from host memory, by a plan without requests where
    nobody else computes, and give the tokens of plain operations."""
    settings = SETTINGS | {"num_kv_blocks": 3, "max_model_len": 24, "max_num_seqs": 1}
    prompts = [list(range(7, 16)), list(range(50, 67))]
    with LLM(str(model), **(settings | PLAIN_KERNELS)) as llm:
        wanted = [llm.generate(prompt, greedy(1))[0].outputs for prompt in prompts]
    # The other kernels take the interpreter long, and copy nothing.
    with LLM(str(model), **(settings | {"kernels": "attention"}), kv_host_gb=1e-3) as llm:
        tiers = llm.engine._scheduler._prefixes.cache.tiers
        assert tiers is not None
        tiers._min_host_tokens = 1
        for index in (0, 1, 0):
            output = llm.generate(prompts[index], greedy(1))[0]
            assert output.outputs == wanted[index]
        assert (output.num_cached_tokens, tiers.counters.num_loaded_blocks) == (8, 1)
        tiny.assert_idle(llm)


class RunAtOnce(CudaGraphs):
    """Graphs of a machine that has none: their work is done when they are replayed."""

    def capture(self, shape: Shape, tail: Tail) -> None:
        self._prepare(shape, tail)
        self._graphs[shape, tail] = None  # type: ignore[assignment]

    def replay(self, shape: Shape, tail: Tail) -> None:
        with torch.inference_mode():
            self._run(shape, tail)


def _run_at_once(llm: LLM) -> None:
    runner, config = llm.engine._runner, llm.engine.config
    runner.graphs = RunAtOnce(
        runner.run_shape,
        runner._prepare,
        lambda shape: runner._tails_of(shape.num_requests),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
    )


def test_captures_between_steps(model: Path, wanted: list[list[int]]) -> None:
    """Padding that runs behind each launch, as a capture's does, while nobody has read the ids of
    that step and of the one before, leaves them as they are; so it does the next step's words. No
    ids of older steps are there when a step begins."""
    with LLM(str(model), **SETTINGS | {"kernels": "attention"}) as llm:
        _run_at_once(llm)
        runner = llm.engine._runner
        builder, launch = runner._batch_builder, runner.launch
        fetch = builder.fetch

        def fetch_and_see(shape: Shape) -> None:
            assert runner._read_ids[builder.turn, 0] == triton_runner.NOT_YET
            fetch(shape)

        def launch_and_pad(plan: StepPlan) -> Any:
            pending = launch(plan)
            runner._prepare(Shape(2, 2, "decode"), "sample")
            return pending

        builder.fetch, runner.launch = fetch_and_see, launch_and_pad
        found = [each.outputs[0].token_ids for each in llm.generate(PROMPTS, greedy(4))]
        assert builder._counter.tolist() == [builder._num_launched]
    assert found == wanted


@pytest.mark.parametrize(
    ("has_graphs", "is_launched", "at"),
    [(True, True, 3), (True, False, 3), (False, True, 1), (False, False, 3)],
)
def test_a_launch_that_raises(
    model: Path, wanted: list[list[int]], has_graphs: bool, is_launched: bool, at: int
) -> None:
    """Whether its first kernel was launched or not, with a step before it under way: its requests
    end with an error, and all that come later get their own tokens."""
    with LLM(str(model), **SETTINGS | {"kernels": "attention", "cuda_graph": "off"}) as llm:
        if has_graphs:
            _run_at_once(llm)
        builder, num_launches = llm.engine._runner._batch_builder, 0
        fetch = builder.fetch

        def fetch_or_raise(shape: Shape) -> None:
            nonlocal num_launches
            num_launches += 1
            if num_launches != at or is_launched:
                fetch(shape)
            if num_launches == at:
                raise RuntimeError("no launch")

        builder.fetch = fetch_or_raise
        failed = llm.generate(PROMPTS[0], greedy(4))[0].outputs[0]
        assert failed.finish_reason == "error" and len(failed.token_ids) < 4
        found = llm.generate(PROMPTS[0], greedy(4))[0].outputs[0].token_ids
        assert builder._counter.tolist() == [builder._num_launched]
        tiny.assert_idle(llm)
    assert found == wanted[0]
