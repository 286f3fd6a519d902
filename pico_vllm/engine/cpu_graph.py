"""Decode steps on the CPU as TorchScript graphs of the same forward.

At one request a layer's thirty small operations take as long as its weights, and a fifth of that is
Python between them: SmolLM2-135M's forward in 4 bits takes 8.4 ms called from Python, 6.6 ms as a
graph. A graph is traced from `model.forward` itself, one for each number of requests, and computes
the same bits.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
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

Forward = Callable[[ForwardBatch, DecodeStep], Tensor]


class CpuGraphs:
    """Owner of the graphs; captures one when a batch size has come up often enough."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._graphs: dict[tuple[int, bool], Callable[..., Tensor]] = {}
        self._num_uses: Counter[tuple[int, bool]] = Counter()
        self._is_broken = False

    def forward(self, batch: ForwardBatch, step: DecodeStep) -> Tensor:
        key = (batch.num_decodes, step.mask is None)
        graph = self._graphs.get(key)
        if graph is None:
            self._num_uses[key] += 1
            is_due = self._num_uses[key] >= USES_BEFORE_CAPTURE and key[0] <= MAX_REQUESTS
            if self._is_broken or not is_due:
                return self._forward(batch, step)
            return self._capture(key, batch, step)
        return graph(*_inputs(batch, step))

    def _capture(self, key: tuple[int, bool], batch: ForwardBatch, step: DecodeStep) -> Tensor:
        def run(
            token_ids: Tensor,
            positions: Tensor,
            new_rows: Tensor,
            rows: Tensor,
            matrices: list[Tensor],
            mask: Tensor | None = None,
        ) -> Tensor:
            return self._forward(
                replace(batch, token_ids=token_ids, positions=positions),
                replace(step, new_rows=new_rows, rows=rows, matrices=matrices, mask=mask),
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
        return hidden_TE


def _inputs(batch: ForwardBatch, step: DecodeStep) -> tuple[Tensor | list[Tensor], ...]:
    """All that changes from step to step, and the pool, which is too large for a constant."""
    tensors = (batch.token_ids, batch.positions, step.new_rows, step.rows, step.matrices)
    return tensors if step.mask is None else (*tensors, step.mask)
