"""What goes wrong inside or stops half-way costs only the requests it hit: failing steps, bad
logits, interrupts, abandoned streams, closing. And the plain life of an LLM around it."""

from __future__ import annotations

import gc
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from tiny import (
    EOS,
    FIXTURE_T,
    TinyModel,
    assert_idle,
    greedy,
    quickest_s,
    random_prompts,
    scripted,
)

from pico_vllm import LLM, SamplingParams
from pico_vllm.engine import output_processor
from pico_vllm.errors import ConfigError, InvalidRequestError, ModelLoadError, PicoError
from pico_vllm.outputs import CompletionOutput


@pytest.fixture(scope="module")
def llm(tiny_model: TinyModel) -> Iterator[LLM]:
    """Fixture T with every step run op by op, so that faults can be planted in its forward."""
    with LLM(str(tiny_model.folder), cpu_graph="off", **FIXTURE_T) as engine:
        yield engine


@pytest.fixture(autouse=True)
def canary_after(llm: LLM, tiny_model: TinyModel) -> Iterator[None]:
    """Whatever the test did, the engine goes on, holds nothing, and gives the known answer."""
    yield
    assert_idle(llm)
    tiny_model.canary.check(llm)


def raising_at(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, error: BaseException
) -> None:
    """The given call of a method (counted from 1) raises, after the real one has run."""
    original = getattr(owner, name)
    count = itertools.count(1)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if next(count) == call:
            raise error
        return result

    monkeypatch.setattr(owner, name, wrapped)


def num_free_blocks(llm: LLM) -> int:
    return llm.engine._scheduler._num_available_blocks


# Failing steps and bad numbers.


@pytest.mark.parametrize("call", [1, 2, 5])
@pytest.mark.parametrize("place", ["forward", "logits", "sample", "append", "schedule", "commit"])
def test_a_step_that_raises(
    llm: LLM, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, place: str, call: int
) -> None:
    """An exception in a step ends the requests of that step with reason error, keeps what they had,
    and those that wait behind them are answered as if alone."""
    runner = llm.engine._runner
    owner = {
        "forward": runner._model,
        "logits": runner._model,
        "sample": runner._sampler,
        "append": runner._batch_builder,
        "schedule": llm.engine._scheduler,
        "commit": llm.engine._scheduler,
    }[place]
    prompts = random_prompts([5] * 6, seed=call)
    raising_at(monkeypatch, owner, place, call, RuntimeError("planted"))
    outputs = llm.generate(prompts, greedy(20))
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        answer = output.outputs[0]
        wanted = tiny_model.oracle.greedy(prompt, 20)
        if index < FIXTURE_T["max_num_seqs"]:
            assert answer.finish_reason == "error"
            assert answer.token_ids == wanted[: call - 1]
        else:
            assert (answer.finish_reason, answer.token_ids) == ("length", wanted)


def test_a_step_that_raises_ends_a_stream(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream whose step fails gives one last delta with reason error."""
    raising_at(monkeypatch, llm.engine._runner, "launch", 3, RuntimeError("planted"))
    deltas = list(llm.stream("abc", greedy(20)))
    assert [delta.finish_reason for delta in deltas] == [None, None, "error"]
    assert [len(delta.token_ids) for delta in deltas] == [1, 1, 0]


def test_the_log_has_the_fault_and_no_text(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A failed step is logged with its traceback, and without the prompt."""
    raising_at(monkeypatch, llm.engine._runner, "launch", 1, RuntimeError("planted"))
    with caplog.at_level(logging.DEBUG):
        llm.generate("my secret words", greedy(3))
    assert "step_failed num_requests=1" in caplog.text and "planted" in caplog.text
    assert "secret" not in caplog.text
    assert llm.engine.last_failure == "RuntimeError: planted"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits_end_one_request(
    llm: LLM, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, bad: float, temperature: float
) -> None:
    """A request whose logits are not numbers ends with reason error at that token; its batch mates
    do not notice, filtered and penalised ones neither."""
    runner = llm.engine._runner
    sample = runner._sampler.sample

    def poisoned(logits_NV: torch.Tensor, rows: Any, positions: Any) -> Any:
        for i, row in enumerate(rows.tolist()):
            if runner._batch_builder.row_tokens(row, 0, 3).tolist() == [7, 7, 7]:
                logits_NV[i] = bad if positions[i] == 6 else logits_NV[i]
        return sample(logits_NV, rows, positions)

    prompts: list[Any] = [[1, 2, 3, 4], [7, 7, 7], [5, 6], [8, 9, 10]]
    settings: dict[str, Any] = {"temperature": temperature, "seed": 1, "logprobs": 2}
    params = [
        greedy(8, **settings),
        greedy(8, **settings, top_k=5, top_p=0.9, min_p=0.01, presence_penalty=0.5),
        greedy(8, **settings, top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.2),
        greedy(8, **settings, logit_bias={3: 2.0}, min_tokens=2, stop_token_ids=[EOS]),
    ]
    clean = llm.generate(prompts, params)
    monkeypatch.setattr(runner._sampler, "sample", poisoned)
    dirty = llm.generate(prompts, params)
    for index in (0, 2, 3):
        _assert_alike(dirty[index].outputs[0], clean[index].outputs[0])
    hit = dirty[1].outputs[0]
    assert (hit.finish_reason, hit.token_ids) == ("error", clean[1].outputs[0].token_ids[:3])
    assert hit.logprobs is not None and len(hit.logprobs) == 3


def _assert_alike(ours: CompletionOutput, theirs: CompletionOutput) -> None:
    """But for rounding: some processors sum the rows of three requests in another order than those
    of four."""
    assert replace(ours, logprobs=None, cumulative_logprob=None) == replace(
        theirs, logprobs=None, cumulative_logprob=None
    )
    assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-4)
    assert ours.logprobs is not None and theirs.logprobs is not None
    for our_entries, their_entries in zip(ours.logprobs, theirs.logprobs, strict=True):
        assert list(our_entries) == list(their_entries)
        for token_id, entry in our_entries.items():
            assert entry.rank == their_entries[token_id].rank
            assert entry.logprob == pytest.approx(their_entries[token_id].logprob, abs=1e-5)


def test_poison_does_not_outlive_its_request(llm: LLM, tiny_model: TinyModel) -> None:
    """KV left behind in free blocks, NaN included, has no influence on requests that get them."""
    pool = llm.engine._runner._kv.device_pool
    kept = pool[0].clone()
    llm.reset_prefix_cache()
    pool[1:] = float("nan")
    prompts = random_prompts([1, 15, 16, 17, 70], seed=3)
    for prompt, output in zip(prompts, llm.generate(prompts, greedy(20)), strict=True):
        assert output.outputs[0].token_ids == tiny_model.oracle.greedy(prompt, 20)
    assert torch.equal(pool[0], kept)
    llm.reset_prefix_cache()
    pool.zero_()


def test_a_fault_in_ones_text(
    llm: LLM, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception while one answer's text is made ends that request alone."""
    append = output_processor.IncrementalDetokenizer.append

    def broken(self: Any, token_ids: Any) -> str:
        if self.num_tokens == 3 and self._stops:
            raise RuntimeError("planted")
        return append(self, token_ids)

    monkeypatch.setattr(output_processor.IncrementalDetokenizer, "append", broken)
    prompts = random_prompts([4, 5, 6], seed=4)
    outputs = llm.generate(prompts, [greedy(9), greedy(9, stop="\x00\x01"), greedy(9)])
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert reasons == ["length", "error", "length"]
    for index in (0, 2):
        wanted = tiny_model.oracle.greedy(prompts[index], 9)
        assert outputs[index].outputs[0].token_ids == wanted


def test_a_fault_in_ones_prompt_logprobs(
    llm: LLM, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception while one prompt's log-probabilities are taken over ends that request alone."""
    by_token = output_processor._by_token

    def broken(value: Any, tokenizer: Any) -> Any:
        if len(value.token_ids) == 4:
            raise RuntimeError("planted")
        return by_token(value, tokenizer)

    monkeypatch.setattr(output_processor, "_by_token", broken)
    prompts = random_prompts([4, 5, 6], seed=4)
    params = [greedy(9, prompt_logprobs=1), greedy(9, prompt_logprobs=3), greedy(9)]
    outputs = llm.generate(prompts, params)
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert reasons == ["length", "error", "length"]
    for index in (0, 2):
        wanted = tiny_model.oracle.greedy(prompts[index], 9)
        assert outputs[index].outputs[0].token_ids == wanted
    assert len(outputs[0].prompt_logprobs or []) == 4


# Interrupts.


INTERRUPTED = ["forward", "sample", "schedule", "commit", "process", "add_request", "check"]


@pytest.mark.parametrize("place", INTERRUPTED)
@pytest.mark.parametrize("call", [1, 3])
def test_interrupt_inside_generate(
    llm: LLM, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, place: str, call: int
) -> None:
    """KeyboardInterrupt leaves generate at once and no request behind, wherever it struck."""
    runner = llm.engine._runner
    owner = {
        "forward": runner._model,
        "sample": runner._sampler,
        "schedule": llm.engine._scheduler,
        "commit": llm.engine._scheduler,
        "process": llm._processor,
        "add_request": llm._processor,
        "check": llm.engine,
    }[place]
    name = "add" if place == "add_request" else place
    raising_at(monkeypatch, owner, name, call, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        llm.generate(random_prompts([5] * 6), greedy(20))
    assert len(llm._processor) == 0 and num_free_blocks(llm) == llm.config.num_kv_blocks
    # Nothing is left but the news for requests that are gone.
    llm.engine.step()
    assert_idle(llm)


@pytest.mark.parametrize("place", ["forward", "sample", "commit", "process"])
def test_interrupt_and_a_stream_beside_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """A stream whose step was interrupted ends with reason error, and does not hang or go on
    wrongly."""
    runner = llm.engine._runner
    owner = {
        "forward": runner._model,
        "sample": runner._sampler,
        "commit": llm.engine._scheduler,
        "process": llm._processor,
    }[place]
    stream = llm.stream("abc", greedy(20))
    first = next(stream)
    raising_at(monkeypatch, owner, place, 2, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        llm.generate("xyz", greedy(20))
    rest = list(stream)
    assert first.finish_reason is None
    assert [delta.finish_reason for delta in rest][-1] == "error"
    assert sum(len(delta.token_ids) for delta in rest) <= 2


def test_interrupt_in_a_stream(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """KeyboardInterrupt inside a stream leaves it and frees its blocks."""
    raising_at(monkeypatch, llm.engine._runner, "launch", 3, KeyboardInterrupt())
    stream = llm.stream("abc", greedy(20))
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    assert llm.engine.last_failure == "KeyboardInterrupt"
    llm.engine.step()
    assert_idle(llm)


def test_an_error_in_on_finish(llm: LLM) -> None:
    """An exception of the caller's own function comes out of generate and leaves nothing
    behind."""

    def on_finish(output: Any) -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        llm.generate(["a", "b", "c"], [greedy(2), greedy(9), greedy(9)], on_finish=on_finish)
    assert_idle(llm)


# Streams.


def test_streams_and_generate_side_by_side(llm: LLM, tiny_model: TinyModel) -> None:
    """Streams read in turns, and a generate between, give each the answer it has alone."""
    prompts = random_prompts([3, 20, 40, 9], seed=6)
    wanted = [tiny_model.oracle.greedy(prompt, 25) for prompt in prompts]
    streams = [llm.stream(prompt, greedy(25)) for prompt in prompts[:3]]
    found: list[list[int]] = [[], [], []]
    for step in range(25):
        for index, stream in enumerate(streams):
            found[index] += next(stream).token_ids
        if step == 7:
            output = llm.generate(prompts[3], greedy(25))[0]
            assert output.outputs[0].token_ids == wanted[3]
    assert found == wanted[:3]
    for stream in streams:
        assert next(stream, None) is None


def test_a_stream_that_another_threads_step_ends(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a stream's look at its deltas and its look at whether it has ended another thread may
    step to the end: all deltas are given, the last one with the reason; and an answer's last delta
    is there before the answer shows as ended."""

    class Deltas(deque[Any]):
        is_armed = False

        def __bool__(self) -> bool:
            has_any = len(self) > 0
            if not has_any and Deltas.is_armed:
                Deltas.is_armed = False
                other = threading.Thread(target=step_to_the_end)
                other.start()
                other.join()
            return has_any

    def step_to_the_end() -> None:
        while llm.engine.has_work():
            llm._step()

    def checked_end(answer: Any, reason: Any) -> None:
        assert answer.group.deltas is None or answer.group.deltas[-1].finish_reason == reason.value
        end(answer, reason)

    end = output_processor._Answer.end
    monkeypatch.setattr(output_processor._Answer, "end", checked_end)
    monkeypatch.setattr(output_processor, "deque", Deltas)
    stream = llm.stream([1, 2, 3], greedy(6))
    deltas = [next(stream)]
    Deltas.is_armed = True
    deltas += stream
    assert not Deltas.is_armed
    wanted = llm.generate([1, 2, 3], greedy(6))[0].outputs[0]
    assert [i for delta in deltas for i in delta.token_ids] == wanted.token_ids
    assert [delta.finish_reason for delta in deltas] == [None] * 5 + ["length"]


@pytest.mark.parametrize("num_read", [0, 1, 5])
def test_an_abandoned_stream_frees_its_blocks(llm: LLM, num_read: int) -> None:
    """Leaving a stream before its end, even before its first token, ends the request at once."""
    stream = llm.stream("abc", greedy(200))
    for _ in range(num_read):
        next(stream)
    assert llm.engine.has_work()
    assert (num_free_blocks(llm) < llm.config.num_kv_blocks) is (num_read > 0)
    del stream
    assert_idle(llm)


def test_leaving_the_loop_frees_the_blocks(llm: LLM) -> None:
    """`break` in a loop over a stream ends its requests, all n of them."""
    for _ in llm.stream("abc", greedy(200, n=4)):
        break
    assert_idle(llm)


def test_a_stream_collected_amid_a_step(
    llm: LLM, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that is closed while a step runs, as the garbage collector may do, is given up after
    that step; the others' answers stay right."""
    scheduler = llm.engine._scheduler
    places = ("make", scheduler._plans), ("commit", scheduler), ("_admit", scheduler)
    for place, owner in places:
        abandoned: list[Any] = [llm.stream("abandoned", greedy(100))]
        next(abandoned[0])
        original = getattr(owner, place)

        def collecting(*args: Any, original: Any = original, held: Any = abandoned) -> Any:
            held.clear()  # the last reference: its generator is closed here and now
            return original(*args)

        with monkeypatch.context() as patch:
            patch.setattr(owner, place, collecting)
            prompts = random_prompts([5, 30], seed=7)
            outputs = llm.generate(prompts, greedy(10))
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.outputs[0].token_ids == tiny_model.oracle.greedy(prompt, 10)
        assert_idle(llm)


def test_a_stop_string_ends_the_request_in_the_engine(llm: LLM) -> None:
    """Once a stop string is seen the request computes no further step and holds no blocks."""
    prompt = list(b"go")
    with scripted(llm, {tuple(prompt): [*b"abc", *b"x" * 100]}):
        stream = llm.stream(prompt, greedy(100, stop="c"))
        assert [next(stream).text for _ in range(3)] == ["a", "b", ""]
        assert_idle(llm)
        assert list(stream) == []


def test_threads_take_turns(llm: LLM, tiny_model: TinyModel) -> None:
    """Calls from several threads at once each get their own right answer."""
    prompts = random_prompts([4, 8, 12, 16, 20, 24], seed=9)
    found: dict[int, list[int]] = {}

    def work(index: int) -> None:
        if index % 2:
            deltas = llm.stream(prompts[index], greedy(15))
            found[index] = [i for delta in deltas for i in delta.token_ids]
        else:
            found[index] = llm.generate(prompts[index], greedy(15))[0].outputs[0].token_ids

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {i: tiny_model.oracle.greedy(p, 15) for i, p in enumerate(prompts)}


# Order, closing, two of them.


def test_three_hundred_prompts_in_order(llm: LLM, tiny_model: TinyModel) -> None:
    """Far more prompts than rows are answered in their order, each once; on_finish sees each as it
    ends."""
    prompts = random_prompts([1 + i % 23 for i in range(300)], seed=10)
    lengths = [1 + i % 7 for i in range(300)]
    finished: list[str] = []
    outputs = llm.generate(
        prompts,
        [greedy(length) for length in lengths],
        on_finish=lambda output: finished.append(output.request_id),
    )
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert sorted(finished) == sorted(output.request_id for output in outputs)
    assert len(set(finished)) == 300
    for index in range(0, 300, 37):
        wanted = tiny_model.oracle.greedy(prompts[index], lengths[index])
        assert outputs[index].outputs[0].token_ids == wanted


def test_text_prompts_are_kept(llm: LLM) -> None:
    """An output carries its prompt as text, if it was text, and as ids."""
    outputs = llm.generate(["ab", [99, 100]], greedy(1))
    assert [(o.prompt, o.prompt_token_ids) for o in outputs] == [
        ("ab", [97, 98]),
        (None, [99, 100]),
    ]


def test_the_callers_lists_are_not_shared(llm: LLM) -> None:
    """Changing a prompt list during a stream, or an output afterwards, changes no answer."""
    prompt = [1, 2, 3]
    wanted = llm.generate(prompt, greedy(6))[0].outputs[0].token_ids
    stream = llm.stream(prompt, greedy(6))
    found = list(next(stream).token_ids)
    prompt.clear()
    found += [i for delta in stream for i in delta.token_ids]
    assert found == wanted


def test_chat_sees_the_template(llm: LLM, tiny_model: TinyModel) -> None:
    """chat answers one conversation or several through the template, as stream does."""
    one = [{"role": "user", "content": "hi"}]
    two = [{"role": "system", "content": "be"}, {"role": "user", "content": "yo<|im_end|>"}]
    outputs = llm.chat([one, two], greedy(6))
    start, end = tiny.IM_START, tiny.IM_END
    ids = [start, *b"user\nhi", end, *b"\n", start, *b"assistant\n"]
    assert outputs[0].prompt_token_ids == ids
    assert outputs[1].prompt_token_ids == [
        *(start, *b"system\nbe", end, *b"\n"),
        *(start, *b"user\nyo<|im_end|>", end, *b"\n", start, *b"assistant\n"),
    ]
    wanted = tiny_model.oracle.greedy(ids, 6)
    assert outputs[0].outputs[0].token_ids == wanted
    assert llm.chat(one, greedy(6))[0].outputs[0].token_ids == wanted
    assert [i for d in llm.stream(one, greedy(6)) for i in d.token_ids] == wanted


CALLS: dict[str, Callable[[LLM], object]] = {
    "generate_text": lambda llm: llm.generate("abc"),
    "generate_ids": lambda llm: llm.generate([1, 2]),
    "chat": lambda llm: llm.chat([{"role": "user", "content": "hi"}]),
    "stream_text": lambda llm: llm.stream("abc"),
    "stream_ids": lambda llm: llm.stream([1, 2]),
    "engine": lambda llm: llm.engine,
    "stream_chat": lambda llm: llm.stream([{"role": "user", "content": "hi"}]),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_after_close(tiny_model: TinyModel, name: str) -> None:
    """After close every call is refused in words, and no helper process comes back to life."""
    llm = LLM(str(tiny_model.folder), **FIXTURE_T)
    llm.close()
    llm.close()
    with pytest.raises(ConfigError, match="closed"):
        CALLS[name](llm)


def test_close_ends_open_streams(tiny_model: TinyModel) -> None:
    """A stream open at close is refused at its next step."""
    with LLM(str(tiny_model.folder), **FIXTURE_T) as llm:
        stream = llm.stream("abc", greedy(50))
        next(stream)
        idle = llm.stream("abc", greedy(50))
    with pytest.raises(ConfigError, match="closed"):
        list(stream)
    del idle
    assert len(llm._processor) == 0


def test_two_engines_in_one_process(llm: LLM, tiny_model: TinyModel) -> None:
    """Two engines work side by side, with different caches, and closing one leaves the other
    whole."""
    with LLM(
        str(tiny_model.folder), **(FIXTURE_T | {"kv": "contiguous", "num_kv_blocks": None})
    ) as other:
        mine, theirs = llm.stream("abc", greedy(10)), other.stream("abc", greedy(10))
        pairs = list(zip(mine, theirs, strict=True))
        assert [a.token_ids for a, _ in pairs] == [b.token_ids for _, b in pairs]
    assert len(llm.generate("abc", greedy(3))[0].outputs[0].token_ids) == 3


def test_many_engines_leave_nothing(tiny_model: TinyModel) -> None:
    """Engines that were made, used and closed leave no thread and no KV pool behind."""
    num_threads = threading.active_count()
    pools = []
    for _ in range(5):
        with LLM(str(tiny_model.folder), **FIXTURE_T) as llm:
            llm.generate("abc", greedy(2))
            pools.append(llm.engine._runner._kv.device_pool.data_ptr())
        assert not hasattr(llm, "_engine")
    gc.collect()
    assert threading.active_count() == num_threads


def test_without_a_tokenizer(tmp_path: Any) -> None:
    """A configuration without a tokenizer runs on ids; text, chat and stop strings are refused in
    words."""
    config = tiny.hf_config("qwen2")
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(tmp_path)
    with LLM(str(tmp_path), load_format="dummy", **FIXTURE_T) as llm:
        output = llm.generate([1, 2, 319], greedy(4, logprobs=1))[0].outputs[0]
        assert (len(output.token_ids), output.text) == (4, "")
        bad: list[tuple[Callable[[], object], str]] = [
            (lambda: llm.generate("abc"), "prompt"),
            (lambda: llm.stream("abc"), "prompt"),
            (lambda: llm.chat([{"role": "user", "content": "a"}]), "prompt"),
            (lambda: llm.generate([1], greedy(4, stop="x")), "stop"),
            (lambda: llm.stream([1], greedy(4, stop="x")), "stop"),
        ]
        for call, param in bad:
            with pytest.raises(InvalidRequestError, match="tokenizer") as caught:
                call()
            assert caught.value.param == param
        assert_idle(llm)


def test_eos_that_the_tokenizer_does_not_know(tiny_model: TinyModel, tmp_path: Any) -> None:
    """A model whose EOS id no text can have is refused when loaded."""
    tiny.save_model(tmp_path, tiny_model.oracle._model)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"eos_token_id": 256', '"eos_token_id": 310'))
    (tmp_path / "generation_config.json").unlink()
    with pytest.raises(ModelLoadError, match="310") as caught:
        LLM(str(tmp_path), **FIXTURE_T)
    assert caught.value.param == "eos_token_id"


def test_request_larger_than_the_pool(tiny_model: TinyModel, caplog: Any) -> None:
    """A pool smaller than the window shortens the window, says so, and refuses what no longer
    fits."""
    with caplog.at_level(logging.WARNING):
        small = LLM(str(tiny_model.folder), **tiny.FIXTURE_T_SMALL)
    assert "the window shrinks from 256 to that" in caplog.text and "holds 128" in caplog.text
    with small:
        assert small.config.max_model_len == 128
        for length in (128, 129):

            def refuse(length: int = length) -> None:
                with pytest.raises(PicoError, match="128") as caught:
                    small.generate([[65] * length, list(tiny.Canary.PROMPT)], greedy(1))
                assert caught.value.code == "context_length_exceeded"

            assert quickest_s(refuse) < 0.1
        (prompt,) = random_prompts([127])
        outputs = small.generate([prompt, [1, 2, 3]], greedy(1))
        assert outputs[0].outputs[0].token_ids == tiny_model.oracle.greedy(prompt, 1)
        assert outputs[1].outputs[0].token_ids == tiny_model.oracle.greedy([1, 2, 3], 1)
        tiny_model.canary.check(small)


def test_two_long_requests_and_short_ones(small_llm: LLM, tiny_model: TinyModel) -> None:
    """Requests that fit the pool alone and not together all finish, with the oracle's tokens, in
    not many more steps than one after another."""
    lengths = [(40, 80), (40, 80), (3, 5), (9, 20), (17, 2), (33, 12)]
    prompts = random_prompts([p for p, _ in lengths], seed=12)
    num_steps = itertools.count()
    launch = small_llm.engine._runner.launch

    def counted(plan: Any) -> Any:
        next(num_steps)
        return launch(plan)

    small_llm.engine._runner.launch = counted
    outputs = small_llm.generate(prompts, [greedy(m) for _, m in lengths])
    small_llm.engine._runner.launch = launch
    for prompt, (_, m), output in zip(prompts, lengths, outputs, strict=True):
        assert output.outputs[0].token_ids == tiny_model.oracle.greedy(prompt, m)
    assert next(num_steps) <= sum(m for _, m in lengths)
    tiny_model.canary.check(small_llm)


def test_default_params() -> None:
    """Without params an answer has at most 16 tokens at temperature 1."""
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.n) == (16, 1.0, 1)
