"""BatchBuilder: every tensor of a ForwardBatch against its definition."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from pico_vllm.engine.batch_builder import BatchBuilder
from pico_vllm.sampling_params import SamplingParams
from pico_vllm.step import BAD_LOGITS, NO_TOKEN, NewBlocks, NewRow, StepPlan


def builder(block_size: int = 4) -> BatchBuilder:
    return BatchBuilder(
        max_num_seqs=4, max_model_len=32, block_size=block_size, device=torch.device("cpu")
    )


def new_row(row: int, token_ids: Sequence[int]) -> NewRow:
    return NewRow(
        row=row,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        params=SamplingParams(),
        stop_token_ids=frozenset(),
        seed=0,
        sample_index=0,
    )


def plan(
    rows: list[int],
    context_lens: list[int],
    query_lens: list[int],
    *,
    num_decodes: int = 0,
    new_rows: Sequence[NewRow] = (),
    new_blocks: Sequence[NewBlocks] = (),
) -> StepPlan:
    return StepPlan(
        request_ids=tuple(f"r{row}" for row in rows),
        rows=np.array(rows, np.int32),
        context_lens=np.array(context_lens, np.int32),
        query_lens=np.array(query_lens, np.int32),
        is_sampled=np.ones(len(rows), np.bool_),
        num_decodes=num_decodes,
        new_rows=tuple(new_rows),
        new_blocks=tuple(new_blocks),
    )


def test_a_mixed_step() -> None:
    """A decode row, the second chunk of a prompt and a whole prompt: tokens, positions, slots,
    tables and lengths are those of the definitions."""
    build = builder()
    first = plan(
        [2, 0],
        [0, 0],
        [5, 6],
        new_rows=[new_row(2, [10, 11, 12, 13, 14]), new_row(0, list(range(20, 31)))],
        new_blocks=[
            NewBlocks(row=2, index=0, block_ids=[7, 3]),
            NewBlocks(row=0, index=0, block_ids=[1, 9]),
        ],
    )
    build.build(first)
    build.append(first, np.array([99, NO_TOKEN]))
    batch = build.build(
        plan(
            [2, 0, 3],
            [5, 6, 0],
            [1, 5, 2],
            num_decodes=1,
            new_rows=[new_row(3, [40, 41])],
            new_blocks=[
                NewBlocks(row=0, index=2, block_ids=[5]),
                NewBlocks(row=3, index=0, block_ids=[2]),
            ],
        )
    )
    assert batch.token_ids.tolist() == [99, 26, 27, 28, 29, 30, 40, 41]
    assert batch.positions.tolist() == [5, 6, 7, 8, 9, 10, 0, 1]
    assert batch.slot_mapping.tolist() == [13, 38, 39, 20, 21, 22, 8, 9]
    assert batch.block_table.tolist() == [[7, 3, 0], [1, 9, 5], [2, 0, 0]]
    assert batch.seq_lens.tolist() == [6, 11, 2]
    assert batch.query_start_loc.tolist() == [0, 1, 6, 8]
    assert batch.num_decodes == 1 and batch.num_tokens == 8
    dtypes = (batch.token_ids, batch.positions, batch.slot_mapping)
    assert {tensor.dtype for tensor in dtypes} == {torch.int64}
    tables = (batch.block_table, batch.seq_lens, batch.query_start_loc)
    assert {tensor.dtype for tensor in tables} == {torch.int32}


@pytest.mark.parametrize("block_size", [1, 4, 8, 16])
@pytest.mark.parametrize("length", [15, 16, 17, 31, 32])
def test_slots(block_size: int, length: int) -> None:
    """slot = table[position // block_size] * block_size + position % block_size, also in a table of
    blocks in no order."""
    build = builder(block_size)
    num_blocks = -(-length // block_size)
    table = np.random.default_rng(length).permutation(np.arange(1, num_blocks + 1)).tolist()
    batch = build.build(
        plan(
            [1],
            [0],
            [length],
            new_rows=[new_row(1, list(range(length)))],
            new_blocks=[NewBlocks(row=1, index=0, block_ids=table)],
        )
    )
    assert batch.slot_mapping.tolist() == [
        table[p // block_size] * block_size + p % block_size for p in range(length)
    ]
    assert batch.block_table.tolist() == [table]


def test_a_row_forgets_its_last_request() -> None:
    """A new request in a row starts from an empty block table."""
    build = builder()
    build.build(
        plan(
            [0],
            [0],
            [9],
            new_rows=[new_row(0, list(range(9)))],
            new_blocks=[NewBlocks(row=0, index=0, block_ids=[6, 7, 8])],
        )
    )
    batch = build.build(
        plan(
            [0, 1],
            [0, 0],
            [2, 9],
            new_rows=[new_row(0, [50, 51]), new_row(1, list(range(9)))],
            new_blocks=[
                NewBlocks(row=0, index=0, block_ids=[2]),
                NewBlocks(row=1, index=0, block_ids=[3, 4, 5]),
            ],
        )
    )
    assert batch.block_table.tolist() == [[2, 0, 0], [3, 4, 5]]
    assert batch.token_ids.tolist()[:2] == [50, 51]


def test_batches_do_not_change_afterwards() -> None:
    """A batch keeps its numbers when later steps change the tables."""
    build = builder()
    first = plan(
        [0],
        [0],
        [3],
        new_rows=[new_row(0, [1, 2, 3])],
        new_blocks=[NewBlocks(row=0, index=0, block_ids=[5])],
    )
    batch = build.build(first)
    build.append(first, np.array([4]))
    build.build(
        plan(
            [0],
            [0],
            [2],
            new_rows=[new_row(0, [8, 9])],
            new_blocks=[NewBlocks(row=0, index=0, block_ids=[6])],
        )
    )
    assert batch.token_ids.tolist() == [1, 2, 3]
    assert batch.block_table.tolist() == [[5]]


def test_what_is_no_token_is_not_appended() -> None:
    """Rows that sampled nothing, or whose logits were bad, keep their tokens."""
    build = builder()
    step = plan(
        [0, 1, 2],
        [0, 0, 0],
        [1, 1, 1],
        new_rows=[new_row(row, [row + 1, 77]) for row in range(3)],
        new_blocks=[NewBlocks(row=row, index=0, block_ids=[row + 1]) for row in range(3)],
    )
    build.build(step)
    build.append(step, np.array([NO_TOKEN, BAD_LOGITS, 5]))
    assert [build.row_tokens(row, 0, 2).tolist() for row in range(3)] == [[1, 77], [2, 77], [3, 5]]


def test_the_last_token_of_the_window() -> None:
    """The token sampled at the end of the window has its place, one past what is ever computed."""
    build = builder()
    step = plan(
        [3],
        [0],
        [32],
        new_rows=[new_row(3, list(range(32)))],
        new_blocks=[NewBlocks(row=3, index=0, block_ids=list(range(1, 9)))],
    )
    build.build(step)
    build.append(step, np.array([123]))
    assert build.row_tokens(3, 31, 33).tolist() == [31, 123]
