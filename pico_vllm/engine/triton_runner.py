"""TritonRunner: executes a StepPlan on a device that works on its own. state and inputs to the
device -> forward and sample as one graph -> ids back.

`launch` waits for nothing; `PendingIds.result` waits for one event. A step's ids stay on the device
as the next step's input, so the next step may be launched before they are read. Rows with
parameters that the fused tail does not know (filters, penalties, log-probabilities) take the full
sampler, which waits.
"""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import Tensor

from pico_vllm.cache.triton_kv import TritonKV
from pico_vllm.engine.cuda_graph import CudaGraphs, Tail, is_long
from pico_vllm.engine.device_batch import TURNS, DeviceBatchBuilder, Shape
from pico_vllm.engine.model_runner import PendingResult, ReadyResult
from pico_vllm.engine.prompt_logprobs import PromptLogprobs
from pico_vllm.forward_batch import ForwardBatch
from pico_vllm.kernels.head_sample import HeadScratch, head_sample, sample_logits
from pico_vllm.kernels.small_linear import MAX_ROWS
from pico_vllm.layers.triton_linear import TritonLinear
from pico_vllm.models.llama import LlamaForCausalLM
from pico_vllm.sampler.sampler import Sampler
from pico_vllm.sampling_params import SamplingParams
from pico_vllm.step import NO_TOKEN, NewRow, StepPlan, StepResult, TokenLogprobs

logger = logging.getLogger(__name__)


class PendingIds:
    """Ids on their way to the host."""

    def __init__(self, plan: StepPlan, host_ids: Tensor, event: torch.cuda.Event | None) -> None:
        self._plan = plan
        self._host_ids = host_ids
        self._event = event

    def result(self) -> StepResult:
        if self._event is not None:
            self._event.synchronize()
        ids = self._host_ids.numpy()[: len(self._plan.rows)]
        return StepResult(token_ids=np.where(self._plan.is_sampled, ids, NO_TOKEN))


class TritonRunner:
    def __init__(
        self,
        model: LlamaForCausalLM,
        kv: TritonKV,
        batch_builder: DeviceBatchBuilder,
        sampler: Sampler,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        has_graphs: bool,
        device: torch.device,
    ) -> None:
        self._model = model
        self._kv = kv
        self._batch_builder = batch_builder
        self._sampler = sampler
        self._prompt_logprobs = PromptLogprobs(
            model,
            batch_builder.row_tokens,
            head_size=model.vocab_size,
            vocab_size=sampler.vocab_size,
        )
        self._device = device
        is_cuda = device.type == "cuda"
        self._ids = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._hidden = torch.empty(
            (max_num_seqs, model.hidden_size), dtype=model.dtype, device=device
        )
        self._head_scratch = HeadScratch.allocate(device)
        self._turn = 0
        host_ids = torch.zeros((TURNS, max_num_seqs), dtype=torch.int64, pin_memory=is_cuda)
        self._host_ids = list(host_ids)
        self._events = [torch.cuda.Event() for _ in range(TURNS)] if is_cuda else None
        self._views: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.graphs: CudaGraphs | None = None
        self._uncapturable: set[tuple[Shape, Tail]] = set()
        if has_graphs:
            self.graphs = CudaGraphs(
                self.run_shape,
                self._prepare,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
            )

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingResult:
        for new in plan.new_rows:
            self._sampler.set_row(new)
            self._prompt_logprobs.start(new)
        wants_prompt = self._prompt_logprobs.are_wanted(plan)
        is_special = wants_prompt or self._sampler.needs_logits(plan.rows)
        tail: Tail = "hidden" if is_special else "sample"
        shape = None if wants_prompt else self._graph_for(plan, tail)
        if shape is not None:
            assert self.graphs is not None
            batch = self._batch_builder.stage(plan, shape)
            self.graphs.replay(shape, tail)
            hidden_TE = None
        else:
            batch = self._batch_builder.stage(plan, _exact_shape(plan))
            hidden_TE = self._forward(batch, tail, wants_all=wants_prompt)
        if tail == "sample":
            return self._send_ids(plan, batch)
        return self._sample_fully(plan, hidden_TE)

    def close(self) -> None:
        """Graphs go before the memory that they refer to."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self.graphs is not None:
            self.graphs.clear()

    def run_shape(self, shape: Shape, tail: Tail) -> None:
        """What a graph holds: forward and tail over the addresses of a shape."""
        self._forward(self._batch_builder.batch_of(shape), tail)

    @torch.inference_mode()
    def run_padding(self, shape: Shape) -> None:
        """A step of this size that computes nothing of anybody's."""
        batch = self._batch_builder.stage_padding(shape)
        self._forward(batch, "sample")

    @torch.inference_mode()
    def run_full_sampler(self, sampler: Sampler) -> None:
        """With every filter and log-probabilities in every row."""
        num_rows = self._hidden.shape[0]
        params = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.1, logprobs=20)
        for row in range(num_rows):
            sampler.set_row(
                NewRow(
                    row=row, token_ids=[0], num_prompt_tokens=1, params=params,
                    stop_token_ids=frozenset(), seed=row, sample_index=0,
                )
            )  # fmt: skip
        rows = np.arange(num_rows, dtype=np.int32)
        logits_RV = self._model.logits(self._hidden.zero_())
        sampler.sample(logits_RV, rows, rows.astype(np.int64))

    def _graph_for(self, plan: StepPlan, tail: Tail) -> Shape | None:
        """The shape whose graph takes this plan, captured now if it is new."""
        graphs = self.graphs
        shape = None if graphs is None else graphs.shape_of(plan)
        if graphs is None or shape is None or (shape, tail) in self._uncapturable:
            return None
        if not graphs.has(shape, tail):
            try:
                graphs.capture(shape, tail)
            except torch.OutOfMemoryError:
                self._uncapturable.add((shape, tail))
                logger.warning(
                    "graph_out_of_memory shape=%s: such steps run without a graph; lower "
                    "gpu_memory_utilization to leave room",
                    shape,
                )
                return None
        return shape

    @torch.inference_mode()
    def _prepare(self, shape: Shape, tail: Tail) -> None:
        self._batch_builder.stage_padding(shape)
        self.run_shape(shape, tail)

    def _forward(self, batch: ForwardBatch, tail: Tail, *, wants_all: bool = False) -> Tensor:
        """The last tokens' hidden states go through the tail; returned, of all tokens if wanted."""
        assert batch.feed is not None
        is_decode = batch.num_decodes == batch.num_tokens
        sample_at = None if is_decode else batch.feed.sample_at
        kv_step = self._kv.for_step(batch)
        if wants_all:
            x_TE = self._model.forward(batch, kv_step)
            x_RE = x_TE if sample_at is None else x_TE.index_select(0, sample_at)
        else:
            x_TE = x_RE = self._model.forward(batch, kv_step, sample_at)
        if tail == "hidden":
            self._hidden[: len(x_RE)].copy_(x_RE)
        else:
            self._sample_fused(batch, x_RE)
        return x_TE

    def _sample_fused(self, batch: ForwardBatch, x_RE: Tensor) -> None:
        model, builder, feed = self._model, self._batch_builder, batch.feed
        assert feed is not None
        around = {
            "vocab_size": self._sampler.vocab_size,
            "rows_R": feed.table_rows,
            "positions_R": batch.seq_lens,
            "temperatures_W": builder.temperatures_W,
            "seeds_W": builder.seeds_W,
            "sample_indices_W": builder.sample_indices_W,
            "last_tokens_W": feed.last_tokens,
            "scratch": self._head_scratch,
            "out_R": self._ids[: len(x_RE)],
        }
        head = model.head
        if isinstance(head, TritonLinear) and len(x_RE) <= MAX_ROWS:
            head_VE = head.weight.weight_NK
            head_sample(x_RE, model.norm.weight_E, model.norm.eps, head_VE, **around)
        else:
            sample_logits(head.normed(model.norm, x_RE), **around)

    def _send_ids(self, plan: StepPlan, batch: ForwardBatch) -> PendingIds:
        self._turn = (self._turn + 1) % TURNS
        key = (self._turn, batch.seq_lens.shape[0])
        views = self._views.get(key)
        if views is None:
            views = self._views[key] = (self._host_ids[key[0]][: key[1]], self._ids[: key[1]])
        views[0].copy_(views[1], non_blocking=True)
        event = None
        if self._events is not None:
            event = self._events[self._turn]
            event.record()
        return PendingIds(plan, views[0], event)

    def _sample_fully(self, plan: StepPlan, hidden_TE: Tensor | None) -> ReadyResult:
        prompt_logprobs = {}
        if hidden_TE is not None:
            prompt_logprobs = self._prompt_logprobs.compute(plan, hidden_TE)
        token_ids = np.full(len(plan.rows), NO_TOKEN, np.int64)
        logprobs: dict[int, TokenLogprobs] = {}
        sampled = np.flatnonzero(plan.is_sampled)
        if len(sampled):
            x_RE = self._hidden[torch.from_numpy(sampled).to(self._device)]
            positions = (plan.context_lens + plan.query_lens)[sampled].astype(np.int64)
            rows = plan.rows[sampled]
            ids, found = self._sampler.sample(self._model.logits(x_RE), rows, positions)
            token_ids[sampled] = ids
            logprobs = {int(sampled[i]): value for i, value in found.items()}
            on_device = torch.from_numpy(np.maximum(ids, 0)).to(self._device)
            at = torch.from_numpy(rows.astype(np.int64)).to(self._device)
            self._batch_builder.last_tokens_W.index_copy_(0, at, on_device)
        return ReadyResult(
            StepResult(token_ids=token_ids, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
        )


def _exact_shape(plan: StepPlan) -> Shape:
    num_requests = len(plan.rows)
    is_decode = plan.num_decodes == num_requests
    return Shape(
        plan.num_tokens,
        num_requests,
        is_decode=is_decode,
        is_long=plan.num_decodes > 0 and is_long(plan),
        num_decodes=plan.num_decodes,
    )
