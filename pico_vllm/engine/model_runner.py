"""ModelRunner: executes a StepPlan on one device. copy blocks -> build batch -> forward -> head ->
sample.

`launch` returns a pending result so that a device that works on its own can run ahead; on the CPU
it is done already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pico_vllm.cache.kv_pool import DecodeStep
from pico_vllm.engine.batch_builder import BatchBuilder
from pico_vllm.engine.cpu_graph import CpuGraphs
from pico_vllm.engine.prompt_logprobs import PromptLogprobs
from pico_vllm.forward_batch import ForwardBatch
from pico_vllm.layers.attention import KVStep
from pico_vllm.layers.linear import Residual
from pico_vllm.sampler.sampler import Sampler
from pico_vllm.step import NO_TOKEN, BlockCopies, BlockCopy, StepPlan, StepResult, TokenLogprobs


class KVCache(Protocol):
    """What the three rungs of the ladder share."""

    def for_step(self, batch: ForwardBatch) -> KVStep: ...

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Asked for with a prefix cache only."""
        ...

    def copy_out(self, copies: BlockCopies) -> None:
        """Device to host; asked for with tiers below the device only, as is `copy_in`."""
        ...

    def copy_in(self, copies: BlockCopies) -> None:
        """Host to device."""
        ...


class Model(Protocol):
    vocab_size: int

    def forward(
        self, batch: ForwardBatch, kv: KVStep, wanted: Tensor | None = None
    ) -> Residual: ...

    def logits(self, hidden_NE: Tensor) -> Tensor: ...


class PendingResult(Protocol):
    """A step under way; `result` waits for it."""

    def result(self) -> StepResult: ...


class Runner(Protocol):
    """Executes plans in the order in which they are launched."""

    def launch(self, plan: StepPlan) -> PendingResult: ...

    def wait_for_transfers(self) -> None:
        """Let what was begun of stores and loads end; results need not name those loads."""
        ...

    def close(self) -> None:
        """Let what is under way end, and give back what does not go by itself."""
        ...


class ReadyResult:
    """Of a step that was over when `launch` returned."""

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
        self._prompt_logprobs = PromptLogprobs(
            model,
            batch_builder.row_tokens,
            head_size=model.vocab_size,
            vocab_size=sampler.vocab_size,
        )

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingResult:
        for new in plan.new_rows:
            self._sampler.set_row(new)
            self._prompt_logprobs.start(new)
        if plan.stores:
            self._kv.copy_out(plan.stores)
        if plan.loads:
            self._kv.copy_in(plan.loads)
        loaded = (plan.number,) if plan.loads else ()
        if not len(plan.rows):
            return ReadyResult(StepResult(token_ids=np.zeros(0, np.int64), loaded=loaded))
        if plan.copies:
            self._kv.copy_blocks(plan.copies)
        batch = self._batch_builder.build(plan)
        kv_step = self._kv.for_step(batch)
        if self._graphs is not None and isinstance(kv_step, DecodeStep):
            hidden_TE = self._graphs.forward(batch, kv_step)
            prompt_logprobs = {}
        else:
            # Only the last tokens go through the rest of the last layer, unless all are asked for.
            wants_all = self._prompt_logprobs.are_wanted(plan)
            last = None
            if not wants_all and batch.num_tokens > len(plan.rows):
                last = batch.query_start_loc[1:] - 1
            hidden_TE = self._model.forward(batch, kv_step, last).x_TE
            prompt_logprobs = {}
            if wants_all:
                prompt_logprobs = self._prompt_logprobs.compute(plan, hidden_TE)
                hidden_TE = hidden_TE[batch.query_start_loc[1:].long() - 1]
        token_ids, logprobs = self._sample(plan, hidden_TE)
        self._batch_builder.append(plan, token_ids)
        return ReadyResult(
            StepResult(
                token_ids=token_ids, logprobs=logprobs, prompt_logprobs=prompt_logprobs,
                loaded=loaded,
            )
        )  # fmt: skip

    def wait_for_transfers(self) -> None:
        """They were over when `launch` returned."""

    def close(self) -> None:
        """Nothing is under way between two launches, and memory goes with the objects."""

    def _sample(
        self, plan: StepPlan, hidden_RE: Tensor
    ) -> tuple[np.ndarray, dict[int, TokenLogprobs]]:
        """hidden_RE: of each request's last token in this step."""
        token_ids = np.full(len(plan.rows), NO_TOKEN, np.int64)
        sampled = np.flatnonzero(plan.is_sampled)
        if len(sampled) == 0:
            return token_ids, {}
        if len(sampled) < len(hidden_RE):
            hidden_RE = hidden_RE[torch.from_numpy(sampled).to(hidden_RE.device)]
        positions = (plan.context_lens + plan.query_lens)[sampled].astype(np.int64)
        ids, logprobs = self._sampler.sample(
            self._model.logits(hidden_RE), plan.rows[sampled], positions
        )
        token_ids[sampled] = ids
        return token_ids, {int(sampled[i]): value for i, value in logprobs.items()}
