"""Decode steps on the CPU as TorchScript graphs of the same forward.

At one request a layer's thirty small operations take as long as its weights, and a fifth of that is
Python between them: SmolLM2-135M's forward in 4 bits takes 8.4 ms called from Python, 6.6 ms as a
graph. A graph is traced from `model.forward` itself, one for each number of requests and shape of
their attention, and computes the same bits.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from pico_vllm.cache.kv_pool import DecodeStep
from pico_vllm.forward_batch import ForwardBatch

logger = logging.getLogger(__name__)

MAX_REQUESTS = 16
"""Above this the weights take so long that Python between the operations does not matter."""
USES_BEFORE_CAPTURE = 16
"""Capturing takes about 0.4 s: the time that a graph saves in some 250 steps."""
MAX_TILES = 4
"""Above this attention takes so long that Python between the operations does not matter."""
MAX_GRAPHS = 32
"""The one unused for longest makes room for another."""

Forward = Callable[[ForwardBatch, DecodeStep], Tensor]
Key = tuple[int, tuple[object, ...]]
"""Number of requests, shape of their attention."""


class CpuGraphs:
    """Owner of the graphs; captures one when a batch size has come up often enough."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._graphs: OrderedDict[Key, Callable[..., Tensor]] = OrderedDict()
        self._num_uses: Counter[Key] = Counter()
        self._is_broken = False

    def forward(self, batch: ForwardBatch, step: DecodeStep) -> Tensor:
        num_requests, tiles = batch.num_decodes, step.tiles
        if self._is_broken or num_requests > MAX_REQUESTS or len(tiles.tiles) > MAX_TILES:
            return self._forward(batch, step)
        key = (num_requests, tiles.shape)
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            return graph(*_inputs(batch, step))
        self._num_uses[key] += 1
        if self._num_uses[key] < USES_BEFORE_CAPTURE:
            return self._forward(batch, step)
        return self._capture(key, batch, step)

    def _capture(self, key: Key, batch: ForwardBatch, step: DecodeStep) -> Tensor:
        def run(
            token_ids: Tensor,
            positions: Tensor,
            new_rows: Tensor,
            matrices: list[Tensor],
            attention: list[Tensor],
        ) -> Tensor:
            tiles = step.tiles.with_tensors(attention)
            return self._forward(
                replace(batch, token_ids=token_ids, positions=positions),
                replace(step, new_rows=new_rows, matrices=matrices, tiles=tiles),
            )

        inputs = _inputs(batch, step)
        try:
            with warnings.catch_warnings():
                # The number of requests is meant to be a constant of the graph.
                warnings.simplefilter("ignore")
                graph = torch.jit.trace(run, inputs, check_trace=False)
            # The first two calls compile; both write the same KV again.
            for _ in range(2):
                hidden_TE: Tensor = graph(*inputs)
        except (RuntimeError, TypeError, ValueError) as error:
            self._is_broken = True
            logger.warning("cpu_graph_failed, steps run op by op: %s", str(error).splitlines()[0])
            return self._forward(batch, step)
        self._graphs[key] = graph
        if len(self._graphs) > MAX_GRAPHS:
            dropped, _ = self._graphs.popitem(last=False)
            del self._num_uses[dropped]
        return hidden_TE


def _inputs(batch: ForwardBatch, step: DecodeStep) -> tuple[Tensor | list[Tensor], ...]:
    """All that changes from step to step, and the pool, which is too large for a constant."""
    attention = step.tiles.tensors()
    return batch.token_ids, batch.positions, step.new_rows, step.matrices, attention
