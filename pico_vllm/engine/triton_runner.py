"""TritonRunner: executes a StepPlan on a device that works on its own. copy blocks -> state and
inputs to the device -> forward and sample as one graph -> ids back.

`launch` waits for nothing; `PendingStep.result` waits for one event. A step's ids stay on the
device as the next step's input, so the next step may be launched before they are read. Only a step
that computes log-probabilities of prompt tokens waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pico_vllm.cache.tiers.streams import TierStreams
from pico_vllm.cache.triton_kv import TritonKV
from pico_vllm.engine.cuda_graph import CudaGraphs, Tail, own_lens
from pico_vllm.engine.device_batch import TURNS, DeviceBatchBuilder, Shape
from pico_vllm.engine.model_runner import PendingResult
from pico_vllm.engine.prompt_logprobs import PromptLogprobs
from pico_vllm.engine.shared_prefixes import SharedPrefix
from pico_vllm.forward_batch import ForwardBatch
from pico_vllm.kernels.candidates import RowScratch
from pico_vllm.kernels.full_sample import full_sample
from pico_vllm.kernels.head_sample import HeadScratch, head_sample, sample_logits
from pico_vllm.kernels.launch import compiled_in_parallel
from pico_vllm.kernels.paged_decode import are_long
from pico_vllm.kernels.shared_prefix import MIN_SHARING
from pico_vllm.kernels.small_linear import MAX_ROWS
from pico_vllm.kernels.token_logprobs import CHOSEN, FIRST_TOP, RANK, num_words, token_logprobs
from pico_vllm.layers.linear import Residual
from pico_vllm.layers.triton_linear import TritonLinear
from pico_vllm.models.llama import LlamaForCausalLM
from pico_vllm.sampling_params import MAX_LOGPROBS
from pico_vllm.step import NO_TOKEN, BlockCopy, StepPlan, StepResult, TokenLogprobs

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Copies:
    """What a step of some size sends to the host, from where to where."""

    ids: Tensor
    host_ids: Tensor
    read_ids: NDArray[np.int64]
    """Those of host_ids."""
    words: Tensor
    host_words: Tensor


@dataclass(frozen=True, slots=True)
class _LogprobWords:
    """Answers of kernels/token_logprobs.py on their way to the host."""

    host: Tensor
    """int32 [R, num_words(MAX_LOGPROBS)]"""
    asked: list[tuple[int, int]]
    """Index in the plan, and how many most likely tokens."""

    def read(self, token_ids: list[int]) -> dict[int, TokenLogprobs]:
        words = self.host.numpy()
        found = {}
        for index, num_top in self.asked:
            if token_ids[index] < 0:
                continue
            of_row = words[index]
            floats = of_row.view(np.float32)
            ids_at = FIRST_TOP.value + MAX_LOGPROBS
            tops = floats[FIRST_TOP.value : FIRST_TOP.value + num_top].tolist()
            found[index] = TokenLogprobs(
                (token_ids[index], *of_row[ids_at : ids_at + num_top].tolist()),
                (float(floats[CHOSEN.value]), *tops),
                int(of_row[RANK.value]),
            )
        return found


class PendingStep:
    """Ids, and log-probabilities where asked for, on their way to the host."""

    def __init__(
        self,
        plan: StepPlan,
        host_ids: NDArray[np.int64],
        logprobs: _LogprobWords | None,
        event: torch.cuda.Event | None,
        prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]],
        tiers: TierStreams | None = None,
    ) -> None:
        self._plan = plan
        self._host_ids = host_ids
        self._logprobs = logprobs
        self._event = event
        self._prompt_logprobs = prompt_logprobs
        self._tiers = tiers

    def result(self) -> StepResult:
        if self._event is not None:
            # Asks again and again, and lets other threads run in between: side by side on one
            # machine the host's work after it took less than after a wait of the driver's.
            while not self._event.query():
                time.sleep(0)
        ids = self._host_ids[: len(self._plan.rows)]
        token_ids = np.where(self._plan.is_sampled, ids, NO_TOKEN)
        logprobs = {} if self._logprobs is None else self._logprobs.read(token_ids.tolist())
        return StepResult(
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=self._prompt_logprobs,
            loaded=() if self._tiers is None else self._tiers.take_loaded(),
        )


class PendingLoads:
    """Of a plan without requests: somebody waits for loads alone."""

    def __init__(self, tiers: TierStreams) -> None:
        self._tiers = tiers

    def result(self) -> StepResult:
        loaded = self._tiers.take_loaded(waits=True)
        return StepResult(token_ids=np.zeros(0, np.int64), loaded=loaded)


class TritonRunner:
    def __init__(
        self,
        model: LlamaForCausalLM,
        kv: TritonKV,
        batch_builder: DeviceBatchBuilder,
        *,
        vocab_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        has_graphs: bool,
        device: torch.device,
        tiers: TierStreams | None = None,
    ) -> None:
        """vocab_size: ids that the tokenizer knows; the head may have more rows. tiers: for plans
        with stores and loads."""
        self._model = model
        self._kv = kv
        self._batch_builder = batch_builder
        self._sampling = batch_builder.sampling
        self._vocab_size = vocab_size
        self._prompt_logprobs = PromptLogprobs(
            model,
            batch_builder.row_tokens,
            head_size=model.vocab_size,
            vocab_size=vocab_size,
        )
        self._device = device
        self._tiers = tiers
        is_cuda = device.type == "cuda"
        self._ids = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        words = (max_num_seqs, num_words(MAX_LOGPROBS))
        self._logprob_words = torch.zeros(words, dtype=torch.int32, device=device)
        self._head_scratch = HeadScratch.allocate(device)
        self._row_scratch = RowScratch.allocate(max_num_seqs, vocab_size, device)
        self._turn = 0
        self._host_ids = torch.zeros((TURNS, max_num_seqs), dtype=torch.int64, pin_memory=is_cuda)
        self._host_words = torch.zeros((TURNS, *words), dtype=torch.int32, pin_memory=is_cuda)
        # Each request copies at most one block, in the step in which it enters.
        self._host_copies = torch.zeros(
            (TURNS, 2 * max_num_seqs), dtype=torch.int32, pin_memory=is_cuda
        )
        self._copy_words = torch.zeros(2 * max_num_seqs, dtype=torch.int32, device=device)
        self._events = [torch.cuda.Event() for _ in range(TURNS)] if is_cuda else None
        self._views: dict[tuple[int, int], _Copies] = {}
        self.graphs: CudaGraphs | None = None
        self._last: tuple[Shape, Tail, SharedPrefix | None] | None = None
        """Of the step before, where it was a graph's."""
        self._uncapturable: set[tuple[Shape | None, Tail]] = set()
        self._came_once: set[tuple[Shape, Tail]] = set()
        if has_graphs:
            self.graphs = CudaGraphs(
                self.run_shape,
                self._prepare,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=max_model_len,
            )

    def launch(self, plan: StepPlan) -> PendingResult:
        if plan.repeats and self._last is not None:
            last_shape, last_tail, last_shared = self._last
            if last_shape.is_long or not are_long(own_lens(plan, last_shared)):  # which grow
                return self._replay(plan, last_shape, last_tail, last_shared)
        if self._tiers is not None:
            self._tiers.launch(plan)
            if not len(plan.rows):
                return PendingLoads(self._tiers)
        if plan.copies:
            self._copy_blocks(plan.copies)
        for new in plan.new_rows:
            self._sampling.enter(new)
            self._prompt_logprobs.start(new)
        wants_prompt = self._prompt_logprobs.are_wanted(plan)
        sampled_rows = plan.rows[plan.is_sampled]
        needs_full = np.count_nonzero(self._sampling.needs_full_W[sampled_rows]) > 0
        tail: Tail = "full" if needs_full else "sample"
        shared = self._find_shared(plan)
        shape = None if wants_prompt else self._shape_for(plan, tail, shared)
        if shape is not None and self._has_graph(shape, tail):
            return self._replay(plan, shape, tail, shared)
        self._last = None
        shape = shape or _exact_shape(plan, shared)
        return self._launch_eagerly(plan, tail, shape, shared, wants_prompt=wants_prompt)

    def _find_shared(self, plan: StepPlan) -> SharedPrefix | None:
        """The prefix that attention is to read once for those that share it, where that pays."""
        if not self._kv.can_share or plan.num_decodes < max(len(plan.rows), MIN_SHARING):
            return None
        shared = self._batch_builder.shared_prefixes.find(plan.rows, plan.context_lens)
        if shared is None or not self._kv.shares(shared.num_requests, shared.num_tokens):
            return None
        return shared

    def _replay(
        self, plan: StepPlan, shape: Shape, tail: Tail, shared: SharedPrefix | None
    ) -> PendingResult:
        assert self.graphs is not None
        batch = self._batch_builder.stage(plan, shape, shared)
        self.graphs.replay(shape, tail)
        self._last = shape, tail, shared
        return self._send(plan, batch, tail, {})

    @torch.inference_mode()
    def _launch_eagerly(
        self,
        plan: StepPlan,
        tail: Tail,
        shape: Shape,
        shared: SharedPrefix | None,
        *,
        wants_prompt: bool,
    ) -> PendingResult:
        batch = self._batch_builder.stage(plan, shape, shared)
        hidden_TE = self._forward(batch, tail, wants_all=wants_prompt)
        prompt_logprobs = self._prompt_logprobs.compute(plan, hidden_TE) if wants_prompt else {}
        return self._send(plan, batch, tail, prompt_logprobs)

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        # The turn that this step's ids will take: the step that had it before is known to be done.
        host = self._host_copies[(self._turn + 1) % TURNS]
        count = len(copies)
        host[:count] = torch.tensor([copy.source for copy in copies], dtype=torch.int32)
        host[count : 2 * count] = torch.tensor([copy.target for copy in copies], dtype=torch.int32)
        sent = self._copy_words[: 2 * count]
        sent.copy_(host[: 2 * count], non_blocking=True)
        self._kv.copy_blocks(sent.view(2, count))

    def wait_for_transfers(self) -> None:
        if self._tiers is not None:
            self._tiers.wait()

    def close(self) -> None:
        """Graphs go before the memory that they refer to."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self.graphs is not None:
            self.graphs.clear()
        if self._tiers is not None:
            self._tiers.close()

    def capture_decodes(self, on_progress: Callable[[int, int], None]) -> None:
        """Compile what steps of any size that has a graph launch, and capture those that decode."""
        assert self.graphs is not None
        shapes = [*self.graphs.decode_shapes(), *self.graphs.extend_shapes()]
        if self._kv.can_share:
            shapes += self.graphs.shared_shapes()
        self.compile(shapes)
        self.graphs.capture_decodes(on_progress)

    def compile(self, shapes: Sequence[Shape]) -> None:
        """The kernels that steps of these shapes launch, on threads, before one of them is."""
        layers = self._model.layers
        self._model.layers = [layers[0], layers[-1]]  # those between launch the same
        try:
            with compiled_in_parallel(self._device):
                for shape in shapes:
                    self.run_padding(shape, "full")
        finally:
            self._model.layers = layers

    def run_shape(self, shape: Shape, tail: Tail) -> None:
        """What a graph holds: forward and tail over the addresses of a shape."""
        self._forward(self._batch_builder.batch_of(shape), tail)

    @torch.inference_mode()
    def run_padding(self, shape: Shape, tail: Tail) -> None:
        """A step of this size that computes nothing of anybody's."""
        batch = self._batch_builder.stage_padding(shape)
        # The null block to itself, for the kernel to be there.
        self._kv.copy_blocks(torch.zeros((2, 1), dtype=torch.int32, device=self._device))
        self._forward(batch, tail)

    def _shape_for(self, plan: StepPlan, tail: Tail, shared: SharedPrefix | None) -> Shape | None:
        """The shape that holds this plan; None where it runs as it is."""
        shape = None if self.graphs is None else self.graphs.shape_of(plan, shared)
        return None if (shape, tail) in self._uncapturable else shape

    def _has_graph(self, shape: Shape, tail: Tail) -> bool:
        """Whether a graph is there. Steps that decode are followed by others: captured now if they
        are new. Prompts of a size may come once, and launching kernel by kernel takes less than a
        capture: so they run when they come first, padded alike, which gives the same bits."""
        assert self.graphs is not None
        if self.graphs.has(shape, tail):
            return True
        if not shape.is_decode and (shape, tail) not in self._came_once:
            self._came_once.add((shape, tail))
            return False
        try:
            self.graphs.capture(shape, tail)
        except torch.OutOfMemoryError:
            self._uncapturable.add((shape, tail))
            logger.warning(
                "graph_out_of_memory shape=%s: such steps run without a graph; lower "
                "gpu_memory_utilization to leave room",
                shape,
            )
            return False
        return True

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
        self._sample(batch, x_RE, tail)
        return x_TE

    def _sample(self, batch: ForwardBatch, x_RE: Tensor, tail: Tail) -> None:
        sampling, feed = self._sampling, batch.feed
        assert feed is not None
        R, vocab_size = len(x_RE), self._vocab_size
        out_R = self._ids[:R]
        requests = {"rows_R": feed.table_rows, "positions_R": batch.seq_lens}
        around = requests | {
            "temperatures_W": sampling.temperatures_W,
            "seeds_W": sampling.seeds_W,
            "sample_indices_W": sampling.sample_indices_W,
            "last_tokens_W": feed.last_tokens,
            "out_R": out_R,
        }
        logits_RV = self._choose(x_RE, around)
        if tail == "sample":
            return
        asked, scratch = sampling.asked, self._row_scratch
        full_sample(logits_RV, vocab_size=vocab_size, asked=asked, scratch=scratch, **around)
        token_logprobs(
            logits_RV, vocab_size=vocab_size, numbers_WF=asked.numbers_WF, chosen_R=out_R,
            scratch=scratch, out_RN=self._logprob_words[:R], **requests,
        )  # fmt: skip

    def _choose(self, x_RE: Tensor, around: Mapping[str, Tensor]) -> Tensor:
        """By temperature alone; also the logits, [R, V] in the model's dtype."""
        head, norm = self._model.head, self._model.norm
        options = {"vocab_size": self._vocab_size, "scratch": self._head_scratch, **around}
        if isinstance(head, TritonLinear) and len(x_RE) <= MAX_ROWS:
            return head_sample(x_RE, norm.weight_E, norm.eps, head.weight.weight_NK, **options)
        logits_RV = head.normed(norm, Residual(x_RE))
        sample_logits(logits_RV, **options)
        return logits_RV

    def _send(
        self,
        plan: StepPlan,
        batch: ForwardBatch,
        tail: Tail,
        prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]],
    ) -> PendingStep:
        self._turn = (self._turn + 1) % TURNS
        copies = self._copies_of(self._turn, batch.seq_lens.shape[0])
        copies.host_ids.copy_(copies.ids, non_blocking=True)
        logprobs = None
        if tail == "full":
            num_top = self._sampling.num_logprobs_W[plan.rows]
            indices = np.flatnonzero(plan.is_sampled & (num_top >= 0))
            if len(indices):
                copies.host_words.copy_(copies.words, non_blocking=True)
                # A tiny vocabulary has fewer tokens than may be asked for.
                counts = num_top[indices].clip(max=self._vocab_size)
                asked = list(zip(indices.tolist(), counts.tolist(), strict=True))
                logprobs = _LogprobWords(copies.host_words, asked)
        event = None
        if self._events is not None:
            event = self._events[self._turn]
            event.record()
        return PendingStep(plan, copies.read_ids, logprobs, event, prompt_logprobs, self._tiers)

    def _copies_of(self, turn: int, R: int) -> _Copies:
        copies = self._views.get((turn, R))
        if copies is None:
            host_ids = self._host_ids[turn, :R]
            copies = self._views[turn, R] = _Copies(
                self._ids[:R],
                host_ids,
                host_ids.numpy(),
                self._logprob_words[:R],
                self._host_words[turn, :R],
            )
        return copies


def _exact_shape(plan: StepPlan, shared: SharedPrefix | None) -> Shape:
    num_requests = len(plan.rows)
    is_decode = plan.num_decodes == num_requests
    has_context = np.flatnonzero(plan.context_lens)
    first_fresh = max(plan.num_decodes, int(has_context[-1]) + 1 if len(has_context) else 0)
    return Shape(
        plan.num_tokens,
        num_requests,
        is_decode=is_decode,
        is_long=are_long(own_lens(plan, shared)[: plan.num_decodes]),
        num_decodes=plan.num_decodes,
        num_fresh=num_requests - first_fresh,
        num_fresh_tokens=int(plan.query_lens[first_fresh:].sum()),
        is_shared=shared is not None,
    )
