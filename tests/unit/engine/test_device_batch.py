"""The batch state of a device, on CPU tensors: what is staged, and what padding leaves alone."""

from __future__ import annotations

import numpy as np
import torch

from pico_vllm.engine.device_batch import TURNS, DeviceBatchBuilder, Shape
from pico_vllm.sampling_params import SamplingParams
from pico_vllm.step import NewBlocks, NewRow, StepPlan


def _builder() -> DeviceBatchBuilder:
    return DeviceBatchBuilder(
        max_num_seqs=4, max_model_len=64, max_num_batched_tokens=16, block_size=8,
        device=torch.device("cpu"),
    )  # fmt: skip


def _plan(row: int, tokens: list[int], blocks: list[int]) -> StepPlan:
    new = NewRow(
        row=row, token_ids=np.array(tokens, np.int32), num_prompt_tokens=len(tokens),
        params=SamplingParams(temperature=0.5), stop_token_ids=frozenset(), seed=-7, sample_index=3,
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


def test_a_prompt_and_its_state() -> None:
    """Ids, places, blocks and sampling parameters arrive; the rest of the shape is padding."""
    builder = _builder()
    batch = builder.stage(_plan(2, list(range(50, 59)), [6, 1]), Shape(12, 2, is_decode=False))
    assert batch.feed is not None
    assert batch.token_ids.tolist() == [*range(50, 59), 0, 0, 0]
    assert batch.positions.tolist() == [*range(9), -1, -1, -1]
    assert batch.feed.token_rows.tolist() == [2] * 9 + [4] * 3
    assert batch.seq_lens.tolist() == [9, 0] and batch.query_start_loc.tolist() == [0, 9, 9]
    assert batch.feed.table_rows.tolist() == [2, 4] and batch.feed.sample_at.tolist() == [8, 0]
    assert builder.block_table_WM[2, :3].tolist() == [6, 1, 0]
    assert not builder.block_table_WM[[0, 1, 3, 4]].any()
    assert (builder.seeds_W[2], builder.sample_indices_W[2]) == (-7, 3)
    assert builder.temperatures_W.tolist() == [0, 0, 0.5, 0, 0]


def test_padding_leaves_what_a_step_still_sends() -> None:
    """A step's copy may be under way when a graph is captured on padding: its memory on the host
    keeps its contents, in every turn."""
    builder = _builder()
    shape = Shape(12, 2, is_decode=False)
    for row in range(TURNS):
        builder.stage(_plan(row, [row + 1] * 5, [row + 1]), shape)
        sent = [turn.words.copy() for turn in builder._turns[:TURNS]]
        padded = builder.stage_padding(shape)
        assert padded.positions.tolist() == [-1] * 12
        for turn, before in zip(builder._turns, sent, strict=False):
            assert np.array_equal(turn.words, before)
