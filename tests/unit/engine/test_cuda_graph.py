"""Which shapes there are; capturing needs a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest

from pico_vllm.engine.cuda_graph import CudaGraphs, Tail, decode_sizes
from pico_vllm.engine.device_batch import Shape
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
        assert shape is not None and shape.num_requests == 1 and shape.kind == "extend"
        assert num_tokens <= shape.num_tokens < num_tokens + 8


@pytest.mark.parametrize("budget", [8, 100, 8192])
def test_extends_of_each_number_of_requests_fit_the_budget(budget: int) -> None:
    shapes = graphs(256, 4096, budget).extend_shapes()
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size <= budget]
    assert [s.num_requests for s in shapes if not s.is_long] == sizes
    assert [s.num_requests for s in shapes if s.is_long] == sizes
    assert all(s.num_requests <= s.num_tokens <= budget and s.kind == "extend" for s in shapes)


def mixed_plan(num_decodes: int, older: list[int], fresh: list[int]) -> StepPlan:
    """older, fresh: new tokens of each."""
    query_lens = [1] * num_decodes + older + fresh
    return replace(
        decode_plan(len(query_lens), 5),
        context_lens=np.array([5] * (num_decodes + len(older)) + [0] * len(fresh), np.int32),
        query_lens=np.array(query_lens, np.int32),
        num_decodes=num_decodes,
    )


@pytest.mark.parametrize(
    ("plan", "small", "large"),
    [
        (mixed_plan(0, [], [9, 9]), "extend", "fresh"),
        (mixed_plan(0, [9, 9], []), "extend", "extend"),
        (mixed_plan(0, [9], [9]), "extend", "mixed"),
        (mixed_plan(1, [9], []), "extend", "mixed"),
        (mixed_plan(1, [], [9]), "extend", "mixed"),
    ],
)
def test_kinds(plan: StepPlan, small: str, large: str) -> None:
    """Each kind of request has its own kernel in large steps alone; fresh ones alone have theirs
    unless they are few tokens."""
    shape = graphs(256, 4096).shape_of(plan)
    assert shape == Shape(24 if plan.num_tokens > 16 else 16, 2, small)
    query_lens = plan.query_lens.copy()
    query_lens[-1] += 256
    shape = graphs(256, 4096).shape_of(replace(plan, query_lens=query_lens))
    assert shape == Shape(288, 2, "fresh" if large == "fresh" else "extend")
    query_lens[-1] += 4744
    shape = graphs(256, 9000).shape_of(replace(plan, query_lens=query_lens))
    assert shape == Shape(5120, 16, large)


def test_keys_of_few_tokens_are_cut_where_they_are_many() -> None:
    """By the longest context; not of steps that have no splits, nor where each kind of request has
    its own kernel."""
    made = graphs(256, 9000)
    for context, new, is_long in (
        (464, 48, False), (465, 48, True), (2083, 511, True), (2083, 512, False),
        (2083, 4500, False),
    ):  # fmt: skip
        plan = replace(
            decode_plan(2, 5),
            context_lens=np.array([5, context], np.int32),
            query_lens=np.array([1, new], np.int32),
            num_decodes=1,
        )
        shape = made.shape_of(plan)
        assert shape is not None and shape.is_long is is_long, (context, new)


def test_large_steps() -> None:
    """All up to a budget have a shape; none of them a sixteenth of padding."""
    made = graphs(256, 9000, 8448)
    assert graphs(256, 9000, 8400).shape_of(mixed_plan(1, [8399], [])) == Shape(8400, 16, "mixed")
    assert graphs(256, 9000, 12288).shape_of(mixed_plan(1, [12287], [])) is not None
    assert graphs(256, 9000, 16384).shape_of(mixed_plan(1, [12288], [])) is None
    sizes = {made.shape_of(mixed_plan(1, [num_tokens - 1], [])) for num_tokens in range(4097, 8449)}
    assert None not in sizes and len(sizes) == 17
    for num_tokens in (4097, 6000, 8192, 8448):
        shape = made.shape_of(mixed_plan(1, [num_tokens - 1], []))
        assert shape is not None and num_tokens <= shape.num_tokens < num_tokens * 17 / 16
    assert made.shape_of(mixed_plan(1, [8448], [])) is None
    assert {made.shape_of(mixed_plan(n, [5000], [])).num_requests for n in range(256)} == {
        1,
        16,
        256,
    }
    assert made.shape_of(mixed_plan(0, [], [8192])) == Shape(8192, 1, "fresh")
