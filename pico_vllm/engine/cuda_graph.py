"""CUDA graphs of the model's forward pass, one for each shape of a batch, with a sampler's tail.

An eager step costs the host 14 to 38 ms in 28 layers' launches; a graph's replay costs 5 us
whatever its length. Shapes are dense, so that padding stays small. A batch without a shape runs as
it is, operation by operation: very large ones, where the GPU hides the launches.

All graphs share one pool of memory: they never run at the same time, and what they hand out lies
outside it.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from pico_vllm.engine.device_batch import Kind, Shape, kind_of
from pico_vllm.engine.shared_prefixes import SharedPrefix
from pico_vllm.kernels.paged_decode import are_long, can_be_long
from pico_vllm.kernels.paged_prefill import MAX_SPLIT_TOKENS, are_cut
from pico_vllm.kernels.shared_prefix import MIN_SHARING
from pico_vllm.step import StepPlan

logger = logging.getLogger(__name__)

Tail = Literal["greedy", "sample", "full"]
"""What follows the forward pass: the likeliest ids, ids by temperature, or all that a request can
ask for."""
EXTEND_TOKENS = (
    *range(16, 64, 8), *range(64, 512, 32), *range(512, 1024, 64), *range(1024, 4096, 128),
    *range(4096, 12289, 256),
)  # fmt: skip
"""Padding is computed like tokens: less than 8 of them where 16 to 64 are new, as behind many a
cached prefix; at most an eighth from 256 on, and a sixteenth from 2,048 on. The most that a step
may have is a size as well, where it is not above these."""
MAX_EXTEND_TOKENS = EXTEND_TOKENS[-1]
MAX_ALIKE_TOKENS = 4096
"""In larger steps each kind of request is attended by its own kernel."""
LARGE_STEP_REQUESTS = (1, 16, 256)
"""Sizes for larger steps: the fewer graphs, the sooner each of them is there. 190 padded requests
cost such a step of Qwen2.5-1.5B 0.25 of 31 ms on an H200."""


def decode_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, then every 8 to 256, then every 32; the last one is max_num_seqs itself."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, max_num_seqs + 32, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def extend_request_sizes(max_num_seqs: int) -> list[int]:
    """Requests of an extend cost little, so few sizes serve."""
    sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def own_lens(plan: StepPlan, shared: SharedPrefix | None) -> NDArray[np.int32]:
    """Of each request, the context that is attended for it alone."""
    return plan.context_lens if shared is None else plan.context_lens - shared.lens


class CudaGraphs:
    """Owner of the graphs and their memory."""

    def __init__(
        self,
        run: Callable[[Shape, Tail], None],
        prepare: Callable[[Shape, Tail], None],
        tails_of: Callable[[Shape], tuple[Tail, ...]],
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> None:
        """run: the work of a shape on what lies at its addresses. prepare: the same once on padding
        alone, or whatever it takes for all that is made on first use to be there before capture.
        tails_of: those that steps of a shape may have."""
        self._run = run
        self._prepare = prepare
        self._tails_of = tails_of
        self._decode_sizes = decode_sizes(max_num_seqs)
        self._max_model_len = max_model_len
        self._request_sizes = extend_request_sizes(max_num_seqs)
        self._large_step_sizes = [size for size in LARGE_STEP_REQUESTS if size < max_num_seqs] + [
            max_num_seqs
        ]
        most = min(MAX_EXTEND_TOKENS, max_num_batched_tokens)
        self._token_sizes = [size for size in EXTEND_TOKENS if size < most] + [most]
        self._graphs: dict[tuple[Shape, Tail], torch.cuda.CUDAGraph] = {}
        self._pool: tuple[int, int] | None = None
        self._stream: torch.cuda.Stream | None = None
        """That captures, from the first one on."""

    def shape_of(self, plan: StepPlan, shared: SharedPrefix | None = None) -> Shape | None:
        """The smallest shape that holds a plan; None where it runs as it is. shared: what attention
        is to read once, of a plan whose requests all decode."""
        num_requests = len(plan.rows)
        if plan.num_decodes == num_requests:
            size = _at_least(self._decode_sizes, num_requests)
            if size is None:
                return None
            return Shape(
                size, size, "decode", is_long=are_long(own_lens(plan, shared)),
                is_shared=shared is not None,
            )  # fmt: skip
        tokens = _at_least(self._token_sizes, plan.num_tokens)
        if tokens is None:
            return None
        is_large = tokens > MAX_ALIKE_TOKENS
        requests = _at_least(
            self._large_step_sizes if is_large else self._request_sizes, num_requests
        )
        if requests is None:
            return None
        kind: Kind = kind_of(plan)
        if kind == "mixed" and not is_large:
            # Decoding requests are extended by one token like the others.
            kind = "extend"
        is_long = kind == "extend" and are_cut(tokens, plan.context_lens + plan.query_lens)
        return Shape(tokens, requests, kind, is_long=is_long)

    def has(self, shape: Shape, tail: Tail) -> bool:
        return (shape, tail) in self._graphs

    @torch.inference_mode()
    def capture(self, shape: Shape, tail: Tail) -> None:
        """Must be called before the inputs of a step are staged: padding takes their place. The
        device goes on with what was launched before."""
        self._prepare(shape, tail)
        self._stream = self._stream or torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph would wait for the device, and give back memory that steps want again.
        with torch.cuda.stream(self._stream):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                self._run(shape, tail)
            finally:
                graph.capture_end()
        if self._pool is None:
            self._pool = graph.pool()
        self._graphs[shape, tail] = graph
        logger.debug("graph_captured shape=%s tail=%s", shape, tail)

    def shared_shapes(self) -> list[Shape]:
        """Those that decode behind a shared prefix: few of them ever come."""
        return [
            replace(shape, is_shared=True)
            for shape in self.decode_shapes()
            if shape.num_requests >= MIN_SHARING
        ]

    def decode_shapes(self) -> list[Shape]:
        """All of them, the largest first: in its memory the smaller ones have room."""
        return [
            Shape(size, size, "decode", is_long=is_long)
            for size in self._decode_sizes[::-1]
            for is_long in (False, True)
            if not is_long or can_be_long(size, self._max_model_len)
        ]

    def extend_shapes(self) -> list[Shape]:
        """For each number of requests, with tokens as few as that allows."""
        sizes = [(_at_least(self._token_sizes, size), size) for size in self._request_sizes]
        return [
            Shape(tokens, size, "extend", is_long=is_long)
            for tokens, size in sizes
            for is_long in (False, True)
            if tokens is not None and (not is_long or tokens <= MAX_SPLIT_TOKENS)
        ]

    def capture_decodes(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        graphs = [(shape, tail) for shape in self.decode_shapes() for tail in self._tails_of(shape)]
        for index, (shape, tail) in enumerate(graphs):
            self.capture(shape, tail)
            if on_progress is not None:
                on_progress(index + 1, len(graphs))

    def replay(self, shape: Shape, tail: Tail) -> None:
        self._graphs[shape, tail].replay()

    def clear(self) -> None:
        """Before the memory that graphs refer to goes away."""
        self._graphs.clear()
        self._pool = None


def _at_least(sizes: list[int], wanted: int) -> int | None:
    index = bisect.bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else None
