"""Which shapes there are; capturing needs a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest

from pico_vllm.engine.cuda_graph import CudaGraphs, Tail, decode_sizes
from pico_vllm.engine.shared_prefixes import SharedPrefix
from pico_vllm.step import StepPlan


def nothing(*_: Any) -> None:
    pass


def graphs(max_num_seqs: int, max_model_len: int, budget: int = 8192) -> CudaGraphs:
    return CudaGraphs(
        nothing,
        nothing,
        lambda shape: get_args(Tail),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
    )


def decode_plan(num_requests: int, context: int) -> StepPlan:
    ones = np.ones(num_requests, np.int32)
    return StepPlan(
        request_ids=tuple(map(str, range(num_requests))),
        rows=np.arange(num_requests, dtype=np.int32),
        context_lens=ones * context,
        query_lens=ones,
        is_sampled=ones.astype(np.bool_),
        num_decodes=num_requests,
    )


@pytest.mark.parametrize("max_num_seqs", [1, 7, 40, 300])
@pytest.mark.parametrize("max_model_len", [64, 399, 400, 2047, 2048, 40_000])
def test_shapes_at_start_are_those_that_decoding_needs(
    max_num_seqs: int, max_model_len: int
) -> None:
    """No step that decodes within the window has a shape that was left out, and none is made that
    cannot come up."""
    made = graphs(max_num_seqs, max_model_len)
    contexts = sorted({1, 399, 400, 2047, 2048, max_model_len})
    needed = {
        made.shape_of(decode_plan(num_requests, context))
        for num_requests in range(1, max_num_seqs + 1)
        for context in contexts
        if context <= max_model_len
    }
    shapes = made.decode_shapes()
    assert len(shapes) == len(set(shapes))
    assert set(shapes) == needed
    assert [shape.num_requests for shape in shapes] == sorted(
        (shape.num_requests for shape in shapes), reverse=True
    )


def test_what_is_long_behind_a_shared_prefix() -> None:
    """Shapes with a shared prefix are cut by what each request has behind it."""
    made, plan = graphs(40, 4096), decode_plan(36, 2500)
    lens = np.full(36, 2400, np.int32)
    shape = made.shape_of(plan, SharedPrefix(lens, 36, 2400))
    assert shape is not None and shape.is_shared and not shape.is_long
    plain = made.shape_of(plan)
    assert plain is not None and plain.is_long and not plain.is_shared
    assert set(made.decode_shapes()) >= {plain}
    assert {shape, replace(plain, is_shared=True)} <= set(made.shared_shapes())


def test_a_batch_beyond_all_sizes_has_no_shape() -> None:
    made = graphs(8, 4096)
    assert decode_sizes(8) == [1, 2, 4, 8]
    assert made.shape_of(decode_plan(9, 5)) is None


def test_few_tokens_behind_a_context_get_little_padding() -> None:
    """Less than 8 tokens of it where 16 to 64 are new."""
    made = graphs(256, 4096)
    for num_tokens in range(16, 65):
        plan = replace(
            decode_plan(1, 2083), query_lens=np.array([num_tokens], np.int32), num_decodes=0
        )
        shape = made.shape_of(plan)
        assert shape is not None and shape.num_requests == 1 and shape.num_fresh == 0
        assert num_tokens <= shape.num_tokens < num_tokens + 8


@pytest.mark.parametrize("budget", [8, 100, 8192])
def test_extends_of_each_number_of_requests_fit_the_budget(budget: int) -> None:
    shapes = graphs(256, 4096, budget).extend_shapes()
    assert [s.num_requests for s in shapes] == [
        size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if budget >= 16 and size <= budget
    ]
    assert all(s.num_requests <= s.num_tokens <= budget and not s.is_decode for s in shapes)
