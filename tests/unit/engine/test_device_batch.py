"""The batch state of a device, on CPU tensors: what is staged, and what padding leaves alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pico_vllm.engine.device_batch import TURNS, DeviceBatchBuilder, Kind, Shape
from pico_vllm.engine.shared_prefixes import SharedPrefix
from pico_vllm.forward_batch import ForwardBatch
from pico_vllm.kernels.host_words import NUM_CHANGES
from pico_vllm.sampling_params import SamplingParams
from pico_vllm.step import NewBlocks, NewRow, StepPlan


def _builder() -> DeviceBatchBuilder:
    return DeviceBatchBuilder(
        max_num_seqs=4, max_model_len=64, max_num_batched_tokens=16, block_size=8, vocab_size=300,
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
    )  # fmt: skip


def _plan(
    row: int,
    tokens: list[int],
    blocks: list[int],
    params: SamplingParams | None = None,
    num_prompt_tokens: int | None = None,
) -> StepPlan:
    new = NewRow(
        row=row, token_ids=np.array(tokens, np.int32),
        num_prompt_tokens=len(tokens) if num_prompt_tokens is None else num_prompt_tokens,
        params=params or SamplingParams(temperature=0.5),
        stop_token_ids=frozenset([3, 256, 999]), seed=-7, sample_index=3,
    )  # fmt: skip
    return StepPlan(
        request_ids=(str(row),),
        rows=np.array([row], np.int32),
        context_lens=np.array([0], np.int32),
        query_lens=np.array([len(tokens)], np.int32),
        is_sampled=np.array([True]),
        num_decodes=0,
        new_rows=(new,),
        new_blocks=(NewBlocks(row=row, index=0, block_ids=blocks),),
    )


def _send(
    builder: DeviceBatchBuilder, plan: StepPlan, shape: Shape, shared: SharedPrefix | None = None
) -> ForwardBatch:
    """Staged and on the device."""
    batch = builder.stage(plan, shape, shared)
    builder.fetch(shape)
    builder.launched()
    return batch


def _decode_plan(rows: list[int], context_lens: list[int], *, repeats: bool = False) -> StepPlan:
    ones = np.ones(len(rows), np.int32)
    return StepPlan(
        request_ids=tuple(map(str, rows)), rows=np.array(rows, np.int32),
        context_lens=np.array(context_lens, np.int32), query_lens=ones,
        is_sampled=ones.astype(np.bool_), num_decodes=len(rows), repeats=repeats,
    )  # fmt: skip


def test_a_prompt_and_its_state() -> None:
    """Ids, places, blocks and sampling parameters arrive; the rest of the shape is padding."""
    builder = _builder()
    batch = _send(builder, _plan(2, list(range(50, 59)), [6, 1]), Shape(12, 2, "extend"))
    assert batch.feed is not None
    assert batch.token_ids.tolist() == [*range(50, 59), 0, 0, 0]
    assert batch.positions.tolist() == [*range(9), -1, -1, -1]
    assert batch.feed.token_rows.tolist() == [2] * 9 + [4] * 3
    assert batch.seq_lens.tolist() == [9, 0] and batch.query_start_loc.tolist() == [0, 9, 9]
    assert batch.feed.table_rows.tolist() == [2, 4] and batch.feed.sample_at.tolist() == [8, 0]
    assert builder.block_table_WM[2, :3].tolist() == [6, 1, 0]
    assert not builder.block_table_WM[[0, 1, 3, 4]].any()
    assert (builder.sampling.seeds_W[2], builder.sampling.sample_indices_W[2]) == (-7, 3)
    assert builder.sampling.temperatures_W.tolist() == [0, 0, 0.5, 0, 0]


def test_lengths_of_a_shared_prefix() -> None:
    """They arrive with a shape that is of such, and with no other; padding has none."""
    builder = _builder()
    builder._words.words[:, 2:] = 99  # as other steps may have left them
    plan = _decode_plan([2, 0], [20, 20])
    shape = Shape(3, 3, "decode", is_shared=True)
    shared = SharedPrefix(np.array([16, 16], np.int32), 2, 16)
    for _ in range(TURNS):
        feed = _send(builder, plan, shape, shared).feed
        assert feed is not None and feed.prefix_lens is not None
        assert feed.prefix_lens.tolist() == [16, 16, 0]
    feed = builder.stage_padding(shape).feed
    assert feed is not None and feed.prefix_lens is not None and not feed.prefix_lens.any()
    feed = _send(builder, plan, Shape(2, 2, "decode")).feed
    assert feed is not None and feed.prefix_lens is None


def test_kinds_of_a_mixed_step() -> None:
    """Each kind has its own requests' tokens and no others'; padding belongs to nobody, whatever
    steps before have left."""
    builder = _builder()
    builder._words.words[:, 2:] = 99
    builder._tokens |= {row: np.arange(20, dtype=np.int32) for row in range(4)}
    plan = replace(
        _decode_plan([2, 0, 3, 1], [9, 5, 4, 0]),
        query_lens=np.array([1, 3, 2, 4], np.int32), num_decodes=1,
    )  # fmt: skip
    shape = Shape(12, 4, "mixed")
    for _ in range(TURNS):
        feed = _send(builder, plan, shape).feed
        assert feed is not None and feed.prefix_lens is None
        assert feed.decode_lens is not None and feed.decode_lens.tolist() == [10, 0, 0, 0]
        assert feed.older_starts is not None and feed.older_starts.tolist() == [1, 1, 4, 6, 6]
        assert feed.fresh_starts is not None and feed.fresh_starts.tolist() == [6, 6, 6, 6, 10]
    plan = replace(
        _decode_plan([2, 0], [9, 5]), query_lens=np.array([1, 3], np.int32), num_decodes=1
    )
    feed = _send(builder, plan, shape).feed
    assert feed is not None and feed.decode_lens is not None
    assert feed.older_starts is not None and feed.fresh_starts is not None
    assert feed.decode_lens.tolist() == [10, 0, 0, 0]
    assert feed.older_starts.tolist() == [1, 1, 4, 4, 4] and feed.fresh_starts.tolist() == [4] * 5
    feed = builder.stage_padding(shape).feed
    assert feed is not None and feed.decode_lens is not None
    assert feed.older_starts is not None and feed.fresh_starts is not None
    assert not any(each.any() for each in (feed.decode_lens, feed.older_starts, feed.fresh_starts))


@pytest.mark.parametrize(("kind", "field"), [("extend", "older_starts"), ("fresh", "fresh_starts")])
def test_steps_of_one_kind(kind: Kind, field: str) -> None:
    """All tokens are of that kind."""
    builder = _builder()
    batch = _send(builder, _plan(2, list(range(50, 59)), [6, 1]), Shape(12, 2, kind))
    assert batch.feed is not None
    found = {
        name: getattr(batch.feed, name) for name in ("decode_lens", "older_starts", "fresh_starts")
    }
    assert found.pop(field) is batch.query_start_loc and not any(
        each is not None for each in found.values()
    )


def test_padding_leaves_what_a_step_still_sends() -> None:
    """A step's words may be still to fetch when a graph is captured on padding: they come all the
    same, in every turn, and in the order of the steps."""
    builder = _builder()
    shape = Shape(12, 2, "extend")
    for row in (0, 1, 2, 3, 0):
        batch = builder.stage(_plan(row, [row + 1] * 5, [row + 1]), shape)
        padded = builder.stage_padding(shape)
        assert padded.positions.tolist() == [-1] * 12
        assert builder.device_turn.tolist() == [TURNS]
        builder.fetch(shape)
        builder.launched()
        assert batch.token_ids.tolist() == [row + 1] * 5 + [0] * 7
        assert batch.positions.tolist() == [*range(5)] + [-1] * 7
        assert builder.device_turn.tolist() == [(builder.turn - 1) % TURNS]


@pytest.mark.parametrize("is_launched", [False, True])
def test_a_step_that_was_lost(is_launched: bool) -> None:
    """Whether or not the device fetched the words of a step that nobody says was launched, the
    steps after it have their own, each in the next turn."""
    builder = _builder()
    shape = Shape(12, 2, "extend")
    _send(builder, _plan(0, [7] * 3, [1]), shape)
    builder.stage(_plan(1, [8] * 4, [2]), shape)
    if is_launched:
        builder.fetch(shape)
    for turn, row in ((1, 2), (2, 3), (0, 1), (1, 0)):
        assert builder.turn == turn
        batch = _send(builder, _plan(row, [row + 1] * 5, [row + 1]), shape)
        assert batch.token_ids.tolist() == [row + 1] * 5 + [0] * 7
        assert builder.device_turn.tolist() == [turn]


@pytest.mark.parametrize("num_before", range(TURNS + 1))
def test_plans_that_repeat_one_another(num_before: int) -> None:
    """Staged again, a plan arrives as it would whole: with the memory of each turn as other steps
    have left it, behind a shared prefix, and after one that was lost."""
    shape = Shape(4, 4, "decode", is_shared=True)
    shared = SharedPrefix(np.array([8, 0, 8], np.int32), 2, 8)
    builder = _builder()
    for _ in range(num_before):
        _send(builder, _plan(2, list(range(50, 59)), [6, 1]), Shape(12, 2, "extend"))
    rows, lens = [3, 0, 2], np.array([20, 30, 40])
    batch = _send(builder, _decode_plan(rows, lens.tolist()), shape, shared)
    for step in range(1, 9):
        grown = (lens + step).tolist()
        if step == 4:
            builder.stage_again(_decode_plan(rows, (lens + 77).tolist(), repeats=True))
        assert builder.stage_again(_decode_plan(rows, grown, repeats=True)) is batch
        builder.fetch(shape)
        builder.launched()
        assert batch.feed is not None and batch.feed.prefix_lens is not None
        assert batch.token_ids.tolist() == [-1, -1, -1, 0]
        assert batch.feed.token_rows.tolist() == batch.feed.table_rows.tolist() == [3, 0, 2, 4]
        assert batch.positions.tolist() == [*grown, -1]
        assert batch.seq_lens.tolist() == [*(length + 1 for length in grown), 0]
        assert batch.feed.prefix_lens.tolist() == [8, 0, 8, 0]
    whole = _send(builder, _decode_plan([1], [5]), Shape(1, 1, "decode"))
    assert (whole.positions.tolist(), whole.seq_lens.tolist()) == ([5], [6])


def test_what_a_request_asks_for_arrives() -> None:
    """Every parameter lies in the request's row; those of others, and of padding, are untouched."""
    builder = _builder()
    params = SamplingParams(
        max_tokens=9, temperature=0.5, top_k=7, top_p=0.75, min_p=0.25, presence_penalty=0.5,
        frequency_penalty=-1.5, repetition_penalty=2.0, logit_bias={4: 1.5, 299: -2.0},
        min_tokens=6, logprobs=2,
    )  # fmt: skip
    builder.sampling.enter(plan_row(params))
    _send(builder, _plan(1, [5, 6, 7], [1], params), Shape(4, 1, "extend"))
    asked = builder.sampling.asked
    numbers = asked.numbers_WF[1]
    assert numbers[[0, 6, 7, 8, 9, 10, 11]].tolist() == [7, 1, 2, 2, 9, 3, 2]
    assert numbers.view(torch.float32)[1:6].tolist() == [0.75, 0.25, 0.5, -1.5, 2.0]
    assert asked.bias_ids_WB[1, :3].tolist() == [4, 299, 0]
    assert asked.biases_WB[1, :3].tolist() == [1.5, -2.0, 0.0]
    assert asked.ending_ids_WE[1, :3].tolist() == [3, 256, 0]  # 999 is no token
    assert not asked.bias_ids_WB[[0, 2, 3, 4]].any() and not asked.ending_ids_WE[[0, 2, 3, 4]].any()
    assert asked.numbers_WF[[0, 2, 3, 4]].tolist() == [[0] * 11 + [-1]] * 4
    assert builder.sampling.needs_full_W.tolist() == [False, True, False, False, False]
    plain = SamplingParams(max_tokens=9, temperature=0.0, top_k=5, top_p=0.5, seed=1)
    builder.sampling.enter(plan_row(plain))
    _send(builder, _plan(1, [5, 6, 7], [1], plain), Shape(4, 1, "extend"))
    assert numbers[[0, 6, 7, 8, 9, 10, 11]].tolist() == [0, 0, 0, 0, 3, 3, -1]
    assert numbers.view(torch.float32)[1:6].tolist() == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert not builder.sampling.needs_full_W.any()


def plan_row(params: SamplingParams) -> NewRow:
    return _plan(1, [5, 6, 7], [1], params).new_rows[0]


def test_penalty_counts_after_a_late_step_and_a_preemption() -> None:
    """Whatever a row's last request left, one that enters has the counts of its own prompt and of
    what it had generated before it was preempted; min_tokens counts from its prompt's end, and the
    next token comes after both."""
    builder = _builder()
    params = SamplingParams(presence_penalty=1.0, min_tokens=4)
    counts_WC = builder.sampling.asked.counts_WC
    in_prompt = -(2**31)
    _send(builder, _plan(2, [50, 51, 50], [6], params), Shape(4, 1, "extend"))
    assert counts_WC[2].nonzero()[:, 0].tolist() == [50, 51]
    assert counts_WC[2, [50, 51]].tolist() == [in_prompt, in_prompt]
    counts_WC[2, 77] += 1  # a step that was launched before the request's end was seen
    again = _plan(2, [51, 52, 52, 51, 60], [6], params, num_prompt_tokens=2)
    _send(builder, again, Shape(8, 1, "extend"))
    assert counts_WC[2].nonzero()[:, 0].tolist() == [51, 52, 60]
    assert counts_WC[2, [51, 52, 60]].tolist() == [in_prompt + 1, in_prompt + 1, 1]
    assert builder.sampling.asked.numbers_WF[2, [9, 10]].tolist() == [6, 5]
    assert not counts_WC[[0, 1, 3, 4]].any()


def test_changes_are_made_once() -> None:
    """Whatever the turns of older steps still hold, a step without changes makes none: staged
    whole, or again."""
    builder = _builder()
    for row in range(TURNS):
        _send(builder, _plan(row, [5] * 3, [row + 1]), Shape(4, 1, "extend"))
    builder._state.fill_(77)
    before = builder._state.clone()
    shape = Shape(1, 1, "decode")
    for _ in range(TURNS):
        _send(builder, _decode_plan([2], [9]), shape)
        assert torch.equal(builder._state, before)
    for step in range(TURNS):
        builder._words.words[builder.turn, NUM_CHANGES.value] = 40
        builder.stage_again(_decode_plan([2], [10 + step], repeats=True))
        builder.fetch(shape)
        builder.launched()
        assert torch.equal(builder._state, before)


def test_more_changes_than_a_turn_holds() -> None:
    """They are made all the same, before the step."""
    builder = _builder()
    builder._changes.words = builder._changes.words[:, :, :5]
    batch = _send(builder, _plan(2, list(range(50, 59)), [6, 1]), Shape(12, 2, "extend"))
    assert batch.token_ids.tolist() == [*range(50, 59), 0, 0, 0]
    assert builder.block_table_WM[2, :3].tolist() == [6, 1, 0]
    assert (builder.sampling.seeds_W[2], builder.sampling.sample_indices_W[2]) == (-7, 3)
    assert builder.sampling.temperatures_W.tolist() == [0, 0, 0.5, 0, 0]


def test_more_ids_than_a_turn_holds() -> None:
    """Requests with penalties that enter together have their counts however many ids they bring."""
    builder = _builder()
    for turn in builder._count_words:
        turn.words = turn.words[:12]
    plans = [
        _plan(row, [row + 10] * 7, [row + 1], SamplingParams(frequency_penalty=1.0))
        for row in range(3)
    ]
    builder._send_counts([plan.new_rows[0] for plan in plans])
    assert builder.sampling.asked.counts_WC.nonzero().tolist() == [[r, r + 10] for r in range(3)]
