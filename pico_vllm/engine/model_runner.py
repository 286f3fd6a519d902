"""ModelRunner: executes a StepPlan on one device. build batch -> forward -> head -> sample.

`launch` returns a pending result so that a device that works on its own can run ahead; on the CPU
it is done already.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pico_vllm.cache.kv_pool import DecodeStep
from pico_vllm.engine.batch_builder import BatchBuilder
from pico_vllm.engine.cpu_graph import CpuGraphs
from pico_vllm.forward_batch import ForwardBatch
from pico_vllm.layers.attention import KVStep
from pico_vllm.sampler.sampler import Sampler, token_logprobs
from pico_vllm.step import NO_TOKEN, StepPlan, StepResult, TokenLogprobs

LOGITS_CHUNK_BYTES = 8 << 20
"""Most memory for logits at once where a request wants them for its whole prompt. With what is made
of them and what malloc keeps it comes to some 40 MiB; chunks of 64 MiB came to 290."""


class KVCache(Protocol):
    """What the three rungs of the ladder share."""

    def for_step(self, batch: ForwardBatch) -> KVStep: ...


class Model(Protocol):
    vocab_size: int

    def forward(self, batch: ForwardBatch, kv: KVStep) -> Tensor: ...

    def logits(self, hidden_NE: Tensor) -> Tensor: ...


class PendingResult:
    """A step under way; `result` waits for it."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


class ModelRunner:
    def __init__(
        self,
        model: Model,
        kv: KVCache,
        batch_builder: BatchBuilder,
        sampler: Sampler,
        graphs: CpuGraphs | None = None,
    ) -> None:
        self._model = model
        self._kv = kv
        self._batch_builder = batch_builder
        self._sampler = sampler
        self._graphs = graphs
        self._num_prompt_logprobs: dict[int, int | None] = {}
        """By row: how many to give while its prompt is computed; None once it is complete."""

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingResult:
        for new in plan.new_rows:
            self._sampler.set_row(new)
            self._num_prompt_logprobs[new.row] = new.params.prompt_logprobs
        batch = self._batch_builder.build(plan)
        kv_step = self._kv.for_step(batch)
        if self._graphs is not None and isinstance(kv_step, DecodeStep):
            hidden_TE = self._graphs.forward(batch, kv_step)
        else:
            hidden_TE = self._model.forward(batch, kv_step)
        prompt_logprobs = self._prompt_logprobs(plan, hidden_TE)
        token_ids, logprobs = self._sample(plan, hidden_TE)
        self._batch_builder.append(plan, token_ids)
        return PendingResult(
            StepResult(token_ids=token_ids, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
        )

    def _sample(
        self, plan: StepPlan, hidden_TE: Tensor
    ) -> tuple[np.ndarray, dict[int, TokenLogprobs]]:
        token_ids = np.full(len(plan.rows), NO_TOKEN, np.int64)
        sampled = np.flatnonzero(plan.is_sampled)
        if len(sampled) == 0:
            return token_ids, {}
        last_tokens = np.cumsum(plan.query_lens)[sampled] - 1
        if len(last_tokens) < len(hidden_TE):
            hidden_TE = hidden_TE[torch.from_numpy(last_tokens).to(hidden_TE.device)]
        positions = (plan.context_lens + plan.query_lens)[sampled].astype(np.int64)
        ids, logprobs = self._sampler.sample(
            self._model.logits(hidden_TE), plan.rows[sampled], positions
        )
        token_ids[sampled] = ids
        return token_ids, {int(sampled[i]): value for i, value in logprobs.items()}

    def _prompt_logprobs(self, plan: StepPlan, hidden_TE: Tensor) -> dict[int, list[TokenLogprobs]]:
        """Each prompt token is predicted by the hidden state before it; the head runs in chunks of
        rows."""
        chunk = max(1, LOGITS_CHUNK_BYTES // (4 * self._model.vocab_size))
        starts = np.cumsum(plan.query_lens) - plan.query_lens
        found = {}
        for index, row in enumerate(plan.rows.tolist()):
            num_top = self._num_prompt_logprobs[row]
            if num_top is None:
                continue
            if plan.is_sampled[index]:
                self._num_prompt_logprobs[row] = None
            context_len = int(plan.context_lens[index])
            query_len, start = int(plan.query_lens[index]), int(starts[index])
            # The last token of a whole prompt predicts the first generated token, which is not a
            # prompt token.
            count = query_len - int(plan.is_sampled[index])
            targets = self._batch_builder.row_tokens(
                row, context_len + 1, context_len + 1 + count
            ).tolist()
            values: list[TokenLogprobs] = []
            for first in range(0, count, chunk):
                hidden = hidden_TE[start + first : start + min(first + chunk, count)]
                logits = self._model.logits(hidden)[:, : self._sampler.vocab_size]
                values += token_logprobs(
                    logits.log_softmax(dim=-1), targets[first : first + chunk], num_top
                )
            found[index] = values
        return found
