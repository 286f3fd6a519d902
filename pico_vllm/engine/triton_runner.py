"""TritonRunner: executes a StepPlan on a device that works on its own. copy blocks -> state and
inputs to the device -> forward and sample -> ids back, as one graph.

`launch` waits for nothing. A step's last kernel writes its ids to pinned memory, where
`PendingStep.result` waits for them to appear; they stay on the device as well, as the next step's
input, so the next step may be launched before they are read. Ids that are there say that all else
of the step is done. Only a step that computes log-probabilities of prompt tokens waits.
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
from pico_vllm.engine.device_batch import TURNS, DeviceBatchBuilder, Shape, kind_of
from pico_vllm.engine.model_runner import PendingResult
from pico_vllm.engine.prompt_logprobs import PromptLogprobs
from pico_vllm.engine.shared_prefixes import SharedPrefix
from pico_vllm.forward_batch import ForwardBatch
from pico_vllm.kernels.candidates import RowScratch
from pico_vllm.kernels.full_sample import full_sample
from pico_vllm.kernels.host_words import publish_ids
from pico_vllm.kernels.launch import compiled_in_parallel
from pico_vllm.kernels.paged_decode import are_long
from pico_vllm.kernels.paged_prefill import are_cut
from pico_vllm.kernels.shared_prefix import MIN_SHARING
from pico_vllm.kernels.token_logprobs import CHOSEN, FIRST_TOP, RANK, num_words, token_logprobs
from pico_vllm.layers.linear import Residual
from pico_vllm.layers.triton_head import TritonHead
from pico_vllm.models.llama import LlamaForCausalLM
from pico_vllm.sampling_params import MAX_LOGPROBS
from pico_vllm.step import NO_TOKEN, BlockCopy, StepPlan, StepResult, TokenLogprobs

logger = logging.getLogger(__name__)

NOT_YET = -3
"""Among a step's ids on the host: still to come. Neither NO_TOKEN nor BAD_LOGITS."""
LOOKS = 512
"""For ids, before the device is asked whether it still works on them: each takes a microsecond."""


@dataclass(frozen=True, slots=True)
class _LogprobWords:
    """Answers of kernels/token_logprobs.py on their way to the host."""

    host: Tensor
    """int32 [R, num_words(MAX_LOGPROBS)]"""
    asked: list[tuple[int, int]]
    """Index in the plan, and how many most likely tokens."""
    end: torch.cuda.Event | None
    """Of the copy; None where it is there at once."""

    def read(self, token_ids: list[int]) -> dict[int, TokenLogprobs]:
        while self.end is not None and not self.end.query():
            time.sleep(0)
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
        is_idle: Callable[[], bool],
        *,
        logprobs: _LogprobWords | None = None,
        prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]] | None = None,
        tiers: TierStreams | None = None,
    ) -> None:
        """host_ids: of the plan's requests, NOT_YET before the step was launched. is_idle: whether
        the device has done all; raises where it has failed."""
        self._plan = plan
        self._host_ids = host_ids
        self._is_idle = is_idle
        self._logprobs = logprobs
        self._prompt_logprobs = prompt_logprobs or {}
        self._tiers = tiers

    def result(self) -> StepResult:
        """Raises RuntimeError where the device failed or ended the step without its ids."""
        num_looks = 0
        # Looks again and again, and lets other threads run in between: side by side on one machine
        # the host's work after it took less than after a wait of the driver's.
        while self._num_missing():
            time.sleep(0)
            num_looks += 1
            if num_looks % LOOKS == 0 and self._is_idle() and self._num_missing():
                raise RuntimeError(
                    f"step {self._plan.number} ended on the device without ids for some of its "
                    f"{len(self._host_ids)} requests"
                )
        token_ids = np.where(self._plan.is_sampled, self._host_ids, NO_TOKEN)
        logprobs = {} if self._logprobs is None else self._logprobs.read(token_ids.tolist())
        return StepResult(
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=self._prompt_logprobs,
            loaded=() if self._tiers is None else self._tiers.take_loaded(),
        )

    def _num_missing(self) -> int:
        """At least: where the last one is missing, the others are not looked at."""
        ids = self._host_ids
        return 1 if ids[-1] == NOT_YET else np.count_nonzero(ids == NOT_YET)


class PendingTransfers:
    """Of a plan without requests: its stores, and loads that somebody waits for."""

    def __init__(self, plan: StepPlan, tiers: TierStreams) -> None:
        self._plan = plan
        self._tiers = tiers

    def result(self) -> StepResult:
        if self._plan.stores:
            # No step comes behind them whose end would be theirs.
            self._tiers.wait_for_stores()
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
        self._head = TritonHead(
            model.norm, model.head, vocab_size=vocab_size, dtype=model.dtype, device=device
        )
        self._row_scratch = RowScratch.allocate(max_num_seqs, vocab_size, device)
        # By turn, the last row for padding.
        ids = (TURNS + 1, max_num_seqs)
        self._host_ids = torch.zeros(ids, dtype=torch.int64, pin_memory=is_cuda)
        self._read_ids = self._host_ids.numpy()
        self._host_words = torch.zeros((TURNS, *words), dtype=torch.int32, pin_memory=is_cuda)
        # Each request copies at most one block, in the step in which it enters.
        self._host_copies = torch.zeros(
            (TURNS, 2 * max_num_seqs), dtype=torch.int32, pin_memory=is_cuda
        )
        self._copy_words = torch.zeros(2 * max_num_seqs, dtype=torch.int32, device=device)
        self._events = [torch.cuda.Event() for _ in range(TURNS)] if is_cuda else None
        self.graphs: CudaGraphs | None = None
        self._last: tuple[Shape, Tail, SharedPrefix | None] | None = None
        """Of the step before, where it was a graph's."""
        self._uncapturable: set[tuple[Shape | None, Tail]] = set()
        self._came_once: set[tuple[Shape, Tail]] = set()
        """Those that were launched kernel by kernel."""
        if has_graphs:
            self.graphs = CudaGraphs(
                self.run_shape,
                self._prepare,
                lambda shape: self._tails_of(shape.num_requests),
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=max_model_len,
            )

    def launch(self, plan: StepPlan) -> PendingResult:
        if plan.repeats and self._last is not None:
            last_shape, last_tail, last_shared = self._last
            if last_shape.is_long or not are_long(own_lens(plan, last_shared)):  # which grow
                self._batch_builder.stage_again(plan)
                return self._replay(plan, last_shape, last_tail)
        self._last = None
        if self._tiers is not None:
            self._tiers.launch(plan)
            if not len(plan.rows):
                return PendingTransfers(plan, self._tiers)
        for new in plan.new_rows:
            self._sampling.enter(new)
            self._prompt_logprobs.start(new)
        wants_prompt = self._prompt_logprobs.are_wanted(plan)
        sampled_rows = plan.rows[plan.is_sampled]
        tail = self._tail_of(sampled_rows, len(plan.rows))
        shared = self._find_shared(plan)
        shape = None if wants_prompt else self._shape_for(plan, tail, shared)
        if shape is not None and self._has_graph(shape, tail):
            self._stage(plan, shape, shared)
            pending = self._replay(plan, shape, tail)
            self._last = shape, tail, shared
            return pending
        pending = self._launch_eagerly(
            plan, tail, shape or _exact_shape(plan, shared), shared, wants_prompt=wants_prompt
        )
        if shape is not None:
            self._came_once.add((shape, tail))
        return pending

    def _tail_of(self, sampled_rows: NDArray[np.int32], num_requests: int) -> Tail:
        if np.count_nonzero(self._sampling.needs_full_W[sampled_rows]):
            return "full"
        if np.count_nonzero(self._sampling.is_greedy_W[sampled_rows]) < len(sampled_rows):
            return "sample"
        return self._tails_of(num_requests)[0]

    def _tails_of(self, num_requests: int) -> tuple[Tail, ...]:
        """That steps of so many requests may have, the simplest first."""
        if self._head.is_faster_without_logits(num_requests):
            return "greedy", "sample", "full"
        return "sample", "full"

    def _find_shared(self, plan: StepPlan) -> SharedPrefix | None:
        """The prefix that attention is to read once for those that share it, where that pays."""
        if not self._kv.can_share or plan.num_decodes < max(len(plan.rows), MIN_SHARING):
            return None
        shared = self._batch_builder.shared_prefixes.find(plan.rows, plan.context_lens)
        if shared is None or not self._kv.shares(shared.num_requests, shared.num_tokens):
            return None
        return shared

    def _stage(self, plan: StepPlan, shape: Shape, shared: SharedPrefix | None) -> ForwardBatch:
        batch = self._batch_builder.stage(plan, shape, shared)
        if plan.copies:
            self._copy_blocks(plan.copies)
        return batch

    def _replay(self, plan: StepPlan, shape: Shape, tail: Tail) -> PendingResult:
        """Of a plan that was staged."""
        assert self.graphs is not None
        host_ids = self._expect_ids(plan)
        self.graphs.replay(shape, tail)
        return self._launched(plan, host_ids, tail, {})

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
        batch = self._stage(plan, shape, shared)
        host_ids = self._expect_ids(plan)
        self._batch_builder.fetch(shape)
        hidden_TE = self._forward(batch, tail, wants_all=wants_prompt)
        prompt_logprobs = self._prompt_logprobs.compute(plan, hidden_TE) if wants_prompt else {}
        return self._launched(plan, host_ids, tail, prompt_logprobs)

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        words = 2 * len(copies)
        host = self._host_copies[self._batch_builder.turn, :words]
        sources, targets = [copy.source for copy in copies], [copy.target for copy in copies]
        host.numpy()[:] = sources + targets
        sent = self._copy_words[:words]
        sent.copy_(host, non_blocking=True)
        self._kv.copy_blocks(sent.view(2, -1))

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
                    for tail in self._tails_of(shape.num_requests):
                        if tail != "sample":  # which the full one holds
                            self.run_padding(shape, tail)
        finally:
            self._model.layers = layers

    def run_shape(self, shape: Shape, tail: Tail) -> None:
        """What a graph holds: words to the addresses of a shape, forward and tail over those."""
        self._batch_builder.fetch(shape)
        self._forward(self._batch_builder.batch_of(shape), tail)

    @torch.inference_mode()
    def run_padding(self, shape: Shape, tail: Tail) -> None:
        """A step of this size that computes nothing of anybody's."""
        # The null block to itself, for the kernel to be there.
        self._kv.copy_blocks(torch.zeros((2, 1), dtype=torch.int32, device=self._device))
        self._forward(self._batch_builder.stage_padding(shape), tail)

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
        if shape.kind != "decode" and (shape, tail) not in self._came_once:
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
        if (shape, tail) in self._came_once:  # that step has seen to all else
            self._batch_builder.keep(shape)
        else:
            self._forward(self._batch_builder.stage_padding(shape), tail)

    def _forward(self, batch: ForwardBatch, tail: Tail, *, wants_all: bool = False) -> Tensor:
        """The last tokens' hidden states go through the tail; returned, of all tokens if wanted."""
        assert batch.feed is not None
        is_decode = batch.num_decodes == batch.num_tokens
        sample_at = None if is_decode else batch.feed.sample_at
        kv_step = self._kv.for_step(batch)
        if wants_all:
            x_TE = self._model.forward(batch, kv_step).x_TE
            last = Residual(x_TE if sample_at is None else x_TE.index_select(0, sample_at))
        else:
            last = self._model.forward(batch, kv_step, sample_at)
            x_TE = last.x_TE
        self._sample(batch, last, tail)
        ids_R = self._ids[: len(last.x_TE)]
        publish_ids(ids_R, self._batch_builder.device_turn, self._host_ids)
        return x_TE

    def _sample(self, batch: ForwardBatch, last: Residual, tail: Tail) -> None:
        """last: of each request's last token."""
        sampling, feed = self._sampling, batch.feed
        assert feed is not None
        R, vocab_size = len(last.x_TE), self._vocab_size
        out_R = self._ids[:R]
        if tail == "greedy":
            self._head.choose_likeliest(last, feed.table_rows, feed.last_tokens, out_R)
            return
        requests = {"rows_R": feed.table_rows, "positions_R": batch.seq_lens}
        around = requests | {
            "temperatures_W": sampling.temperatures_W,
            "seeds_W": sampling.seeds_W,
            "sample_indices_W": sampling.sample_indices_W,
            "last_tokens_W": feed.last_tokens,
            "out_R": out_R,
        }
        logits_RV = self._head.choose(last, around)
        if tail == "sample":
            return
        asked, scratch = sampling.asked, self._row_scratch
        full_sample(logits_RV, vocab_size=vocab_size, asked=asked, scratch=scratch, **around)
        token_logprobs(
            logits_RV, vocab_size=vocab_size, numbers_WF=asked.numbers_WF, chosen_R=out_R,
            scratch=scratch, out_RN=self._logprob_words[:R], **requests,
        )  # fmt: skip

    def _expect_ids(self, plan: StepPlan) -> NDArray[np.int64]:
        """Where the ids of a step that is to be launched will appear."""
        host_ids = self._read_ids[self._batch_builder.turn, : len(plan.rows)]
        host_ids.fill(NOT_YET)
        return host_ids

    def _launched(
        self,
        plan: StepPlan,
        host_ids: NDArray[np.int64],
        tail: Tail,
        prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]],
    ) -> PendingStep:
        logprobs = self._send_logprobs(plan) if tail == "full" else None
        self._batch_builder.launched()
        return PendingStep(
            plan,
            host_ids,
            self._is_idle,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            tiers=self._tiers,
        )

    def _send_logprobs(self, plan: StepPlan) -> _LogprobWords | None:
        num_top = self._sampling.num_logprobs_W[plan.rows]
        indices = np.flatnonzero(plan.is_sampled & (num_top >= 0))
        if not len(indices):
            return None
        turn, num_requests = self._batch_builder.turn, len(plan.rows)
        host_words = self._host_words[turn, :num_requests]
        host_words.copy_(self._logprob_words[:num_requests], non_blocking=True)
        # A tiny vocabulary has fewer tokens than may be asked for.
        counts = num_top[indices].clip(max=self._vocab_size)
        asked = list(zip(indices.tolist(), counts.tolist(), strict=True))
        end = None
        if self._events is not None:
            end = self._events[turn]
            end.record()
        return _LogprobWords(host_words, asked, end)

    def _is_idle(self) -> bool:
        if self._device.type != "cuda":
            return True
        return torch.cuda.current_stream(self._device).query()


def _exact_shape(plan: StepPlan, shared: SharedPrefix | None) -> Shape:
    kind, is_long = kind_of(plan), False
    if kind == "decode":
        is_long = are_long(own_lens(plan, shared))
    elif kind == "extend":
        is_long = are_cut(plan.num_tokens, plan.context_lens + plan.query_lens)
    return Shape(
        plan.num_tokens, len(plan.rows), kind, is_long=is_long, is_shared=shared is not None
    )
