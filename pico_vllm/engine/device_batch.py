"""DeviceBatchBuilder: from a StepPlan to a ForwardBatch whose tensors already lie on the device.

Owner of the batch state on the device: block table, last tokens and what rows ask of the sampler
(engine/sampling_rows.py), one row a running request and one more, of null blocks, for padding. What
changes in it, as a list of single elements, and what a step needs besides, the host leaves in
pinned memory. The step's first kernel makes the changes and fetches the rest to fixed addresses
(kernels/host_words.py), so that a graph captured for a shape finds it there.

A step may run for a request whose end the host has not seen yet, and count one token more in its
row. No harm: the counts of a request that enters are rebuilt from its ids, after all such steps.

Pinned memory is used in turns: a turn is over when the step that used it is known to be done, which
holds as long as at most `TURNS - 1` steps are under way. Padding has memory of its own: a graph may
be captured while a step's words are still to be fetched.

Whose turn it is the kernel counts on the device and the host here, each once a step. Where
something was raised before a step was launched whole, nobody knows how far the device has come with
it: the next step waits for the device and sets its counter.

    T tokens, R requests of a shape, W = max_num_seqs + 1 rows, M block-table width
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pico_vllm.engine.sampling_rows import WORDS_PER_ROW, SamplingRows, has_penalties
from pico_vllm.engine.shared_prefixes import SharedPrefix, SharedPrefixes
from pico_vllm.forward_batch import DeviceFeed, ForwardBatch
from pico_vllm.kernels.host_words import NUM_CHANGES, PIECE, fetch_words
from pico_vllm.kernels.penalty_counts import HEADER_WORDS, rebuild_counts
from pico_vllm.step import NewRow, StepPlan

TURNS = 3
NO_ROWS = np.zeros(0, np.int32)
FEW_TOKENS = 256
"""Of a step, which one kernel attends alike, fresh or not. A first token of Qwen2.5-1.5B on an H200
after 60 / 156 / 256 / 400 fresh tokens by the kernel for those 1.81 / 2.44 / 2.47 / 3.57 ms, so
1.66 / 2.38 / 2.45 / 3.81."""
MAX_CHANGES = 1 << 15
"""Of a turn: the blocks and biases of many requests that enter in one step."""
COUNT_WORDS = 1 << 15
"""Of a turn, at least: ids from which penalty counts are made."""


Kind = Literal["decode", "fresh", "extend", "mixed"]
"""Of a step: all its requests decode; none of them has a context; all are attended alike, by the
kernel that takes any; or some of each, by a kernel for those that decode, one for those behind a
context and one for fresh ones, in this order."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a forward pass is made for. A batch may be smaller: the rest is padding."""

    num_tokens: int
    num_requests: int
    kind: Kind
    is_long: bool = False
    """Decoding, or extending, with long contexts, which attention cuts otherwise."""
    is_shared: bool = False
    """Decoding behind a prefix that many share, which attention reads once."""

    def fields(self) -> list[slice]:
        """Where a step's packed fields lie, in words, the number of its turn and how many changes
        come with it first: each starts at 16 bytes, since kernels are compiled anew for addresses
        that do not."""
        T, R = self.num_tokens, self.num_requests
        is_mixed = self.kind == "mixed"
        of_mixed = R * is_mixed, (R + 1) * is_mixed, (R + 1) * is_mixed
        found, at = [], 0
        for size in (2, T, T, T, R, R, R, R + 1, R * self.is_shared, *of_mixed):
            found.append(slice(at, at + size))
            at += -(-size // PIECE) * PIECE
        return found

    def num_words(self) -> int:
        """From the first field to the last."""
        return -(-self.fields()[-1].stop // PIECE) * PIECE


def kind_of(plan: StepPlan) -> Kind:
    """The kind whose kernels suit the requests of a plan best."""
    num_requests = len(plan.rows)
    if plan.num_decodes == num_requests:
        return "decode"
    if plan.num_tokens <= FEW_TOKENS:
        return "extend"
    fresh = first_fresh(plan)
    if fresh == 0:
        return "fresh"
    return "mixed" if plan.num_decodes or fresh < num_requests else "extend"


def first_fresh(plan: StepPlan) -> int:
    """From this request on nobody has a context."""
    has_context = np.flatnonzero(plan.context_lens)
    return int(has_context[-1]) + 1 if len(has_context) else 0


@dataclass(frozen=True, slots=True)
class _HostFields:
    """Where one turn's fields for one shape lie on the host."""

    token_ids: NDArray[np.int32]
    token_rows: NDArray[np.int32]
    positions: NDArray[np.int32]
    rows: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    sample_at: NDArray[np.int32]
    query_start_loc: NDArray[np.int32]
    prefix_lens: NDArray[np.int32]
    decode_lens: NDArray[np.int32]
    older_starts: NDArray[np.int32]
    fresh_starts: NDArray[np.int32]


@dataclass(slots=True)
class _ForShape:
    """Made once for a shape: where its fields lie on the host, and its batch on the device."""

    batch: ForwardBatch
    turns: dict[int, _HostFields]
    """Made when they first come round."""


@dataclass(frozen=True, slots=True, eq=False)
class _Staged:
    """A plan that was staged, and those that repeat it: but for lengths their fields are equal."""

    made: _ForShape
    shape: Shape
    shared: SharedPrefix | None


@dataclass(slots=True)
class _Pinned:
    tensor: Tensor
    words: NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        self.words = self.tensor.numpy()


class DeviceBatchBuilder:
    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        """vocab_size: ids that the tokenizer knows."""
        self._block_size = block_size
        self._device = device
        self._null_row = max_num_seqs
        W, M = max_num_seqs + 1, -(-max_model_len // block_size)
        # One piece of memory, 8-byte fields first, so that places in it reach all of it.
        self._state = torch.zeros(W * (WORDS_PER_ROW + M), dtype=torch.int32, device=device)
        self._table_at, self._table_width = W * WORDS_PER_ROW, M
        asked, table = self._state.split([self._table_at, W * M])
        self.sampling = SamplingRows(asked, vocab_size, device)
        self.block_table_WM = table.view(W, M)
        self.last_tokens_W = torch.zeros(W, dtype=torch.int64, device=device)
        self.shared_prefixes = SharedPrefixes(W, M, block_size)

        largest = Shape(max_num_batched_tokens, max_num_seqs, "mixed")
        # Rows at 64 bytes: Triton's kernels are told that, and read such rows in wide loads.
        most = -(-largest.num_words() // 16) * 16
        self._device_words = torch.zeros(most, dtype=torch.int32, device=device)
        self._slots = torch.zeros(max_num_batched_tokens, dtype=torch.int64, device=device)
        self._words = self._pinned(TURNS + 1, most)
        """By turn, the last row for padding."""
        self._words.words[:, 0] = range(TURNS + 1)
        self.device_turn = self._device_words[:1]
        """Of the step whose words were fetched last, or TURNS of padding."""
        self._counter, self._padding_counter = (
            torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2)
        )
        self._num_launched = 0
        """Steps so far: what the counter will be once they are done."""
        self._is_begun = False
        """Whether a step was staged of which nobody has said that it was launched."""
        self._staged: _Staged | None = None
        """The last one."""
        self._held: list[_Staged | None] = [None] * TURNS
        """By turn: whose fields its memory holds, but for lengths."""
        self._changes = self._pinned(TURNS, 2, MAX_CHANGES)
        """By turn, places in the state, then what belongs there."""
        num_words = max(COUNT_WORDS, HEADER_WORDS + max_model_len)
        self._count_words = [self._pinned(num_words) for _ in range(TURNS + 1)]
        self._device_count_words = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._tokens: dict[int, NDArray[np.int32]] = {}
        """By row: the ids that a request came with."""
        self._shapes: dict[Shape, _ForShape] = {}

    @property
    def turn(self) -> int:
        """Of pinned memory: that of the step which is staged next, until it is launched."""
        return self._num_launched % TURNS

    def stage(
        self, plan: StepPlan, shape: Shape, shared: SharedPrefix | None = None
    ) -> ForwardBatch:
        """Leave what the plan changes in the state, and what its step needs besides, where `fetch`
        finds it. Nothing is waited for. shared: where the shape is of such."""
        self._begin()
        self._leave_changes(plan)
        self._send_counts([new for new in plan.new_rows if has_penalties(new)])
        # Shapes that have a graph were padded once; others may never come again.
        made = self._for_shape(shape, is_kept=False)
        self._staged = _Staged(made, shape, shared)
        return self._write(plan, self._staged)

    def stage_again(self, plan: StepPlan) -> ForwardBatch:
        """The same for a plan that repeats the one staged last: in its shape, with its prefix."""
        assert plan.repeats and self._staged is not None
        self._begin()
        self._words.words[self.turn, NUM_CHANGES.value] = 0
        return self._write(plan, self._staged)

    def fetch(self, shape: Shape) -> None:
        """Launch the first kernel of a step that was staged, or capture it for all that will be.
        Once a step is launched whole, or a graph of it, `launched` is to be told."""
        fetch_words(
            self._words.tensor[:TURNS], self._changes.tensor, self._counter,
            self._device_words[: shape.num_words()], self._state,
        )  # fmt: skip

    def launched(self) -> None:
        """The staged step was launched: its turn is taken."""
        self._num_launched += 1
        self._is_begun = False

    def stage_padding(self, shape: Shape) -> ForwardBatch:
        """A batch of padding alone: it changes nothing but what belongs to nobody. It is on the
        device when this returns."""
        made = self._for_shape(shape, is_kept=True)
        fields = self._fields_of(made, shape, TURNS)
        self._pad(fields, 0, 0)
        fields.query_start_loc[0] = 0
        words = self._device_words[: shape.num_words()]
        # For the kernel to be there when a graph is captured that begins with it.
        fetch_words(
            self._words.tensor[TURNS:], self._changes.tensor, self._padding_counter, words,
            self._state,
        )  # fmt: skip
        # The same words. Waits, and may: nothing is being served yet, or a new shape costs far
        # more; and comes where launches are not run.
        words.copy_(self._words.tensor[TURNS, : len(words)])
        # For the kernel to be there when the first request with penalties comes.
        self._rebuild_counts(self._count_words[TURNS], [(self._null_row, 0, NO_ROWS)])
        return made.batch

    def keep(self, shape: Shape) -> None:
        """Its batch will be asked for."""
        self._for_shape(shape, is_kept=True)

    def batch_of(self, shape: Shape) -> ForwardBatch:
        """The batch at the addresses of a shape that was padded before, or is kept."""
        return self._shapes[shape].batch

    def row_tokens(self, row: int, start: int, stop: int) -> NDArray[np.int32]:
        """Token ids that the request of a row came with, at positions start to stop."""
        return self._tokens[row][start:stop]

    def _begin(self) -> None:
        if self._is_begun:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._counter.fill_(self._num_launched)
        self._is_begun = True

    def _write(self, plan: StepPlan, staged: _Staged) -> ForwardBatch:
        turn = self.turn
        fields = self._fields_of(staged.made, staged.shape, turn)
        if self._held[turn] is staged:
            num_requests = len(plan.rows)
            fields.positions[:num_requests] = plan.context_lens
            np.add(plan.context_lens, plan.query_lens, out=fields.seq_lens[:num_requests])
        else:
            self._held[turn] = None
            self._fill(fields, plan, staged.shared)
            self._held[turn] = staged
        return staged.made.batch

    def _fill(self, fields: _HostFields, plan: StepPlan, shared: SharedPrefix | None) -> None:
        n, num_requests = plan.num_decodes, len(plan.rows)
        fields.token_ids[:n] = -1
        fields.token_rows[:n] = plan.rows[:n]
        fields.positions[:n] = plan.context_lens[:n]
        at = n
        for index in range(n, num_requests):
            row, start = int(plan.rows[index]), int(plan.context_lens[index])
            stop = at + int(plan.query_lens[index])
            tokens = slice(at, stop)
            fields.token_ids[tokens] = self._tokens[row][start : start + stop - at]
            fields.token_rows[tokens] = row
            fields.positions[tokens] = np.arange(start, start + stop - at)
            at = stop
        fields.rows[:num_requests] = plan.rows
        np.add(plan.context_lens, plan.query_lens, out=fields.seq_lens[:num_requests])
        if shared is not None:
            fields.prefix_lens[:num_requests] = shared.lens
        if at > n:  # with decoding rows alone nobody asks where a request's tokens begin
            ends = fields.query_start_loc
            ends[0] = 0
            np.cumsum(plan.query_lens, out=ends[1 : num_requests + 1])
            np.subtract(ends[1 : num_requests + 1], 1, out=fields.sample_at[:num_requests])
        if at < len(fields.token_ids) or num_requests < len(fields.rows):
            self._pad(fields, at, num_requests)
        if len(fields.decode_lens):
            self._tell_apart(fields, plan)

    def _tell_apart(self, fields: _HostFields, plan: StepPlan) -> None:
        """For each kind of request, all others of the step have no tokens."""
        n, starts = plan.num_decodes, fields.query_start_loc
        fresh_token = starts[first_fresh(plan)]
        fields.decode_lens[:n] = fields.seq_lens[:n]
        fields.decode_lens[n:] = 0
        np.clip(starts, n, fresh_token, out=fields.older_starts)
        np.maximum(starts, fresh_token, out=fields.fresh_starts)

    def _pad(self, fields: _HostFields, num_tokens: int, num_requests: int) -> None:
        fields.token_ids[num_tokens:] = 0
        fields.token_rows[num_tokens:] = self._null_row
        fields.positions[num_tokens:] = -1
        fields.rows[num_requests:] = self._null_row
        fields.seq_lens[num_requests:] = 0
        fields.sample_at[num_requests:] = 0
        fields.query_start_loc[num_requests + 1 :] = num_tokens
        fields.prefix_lens[num_requests:] = 0
        if num_tokens == 0:
            for each in (fields.decode_lens, fields.older_starts, fields.fresh_starts):
                each.fill(0)

    def _leave_changes(self, plan: StepPlan) -> None:
        num_changes = self._words.words[self.turn, NUM_CHANGES.value :]
        num_changes[0] = 0
        if not plan.new_rows and not plan.new_blocks:
            return
        indices: list[NDArray[np.int64]] = []
        values: list[NDArray[np.int32]] = []
        for new in plan.new_rows:
            self._tokens[new.row] = new.token_ids
            index, value = self.sampling.changes(new)
            indices.append(index)
            values.append(value)
        self.shared_prefixes.take(plan.new_blocks)
        for blocks in plan.new_blocks:
            start = self._table_at + blocks.row * self._table_width + blocks.index
            indices.append(np.arange(start, start + len(blocks.block_ids)))
            values.append(np.array(blocks.block_ids, np.int32))
        index, value = np.concatenate(indices), np.concatenate(values)
        changes = self._changes.words[self.turn]
        num_changes[0] = count = min(len(index), changes.shape[1])
        changes[0, :count], changes[1, :count] = index[:count], value[:count]
        if count < len(index):  # the others now, on their own
            places, values_left = (
                torch.from_numpy(each[count:]).to(self._device) for each in (index, value)
            )
            self._state.index_copy_(0, places, values_left)

    def _send_counts(self, new_rows: Sequence[NewRow]) -> None:
        """Make the penalty counts of requests that enter, again after a preemption."""
        turn = self._count_words[self.turn]
        batch: list[tuple[int, int, NDArray[np.int32]]] = []
        room = len(turn.words)
        for new in new_rows:
            size = HEADER_WORDS + len(new.token_ids)
            if size > room:
                self._rebuild_counts(turn, batch)
                if self._device.type == "cuda":
                    # More than a turn holds: its first part must have left.
                    torch.cuda.synchronize(self._device)
                batch, room = [], len(turn.words)
            batch.append((new.row, new.num_prompt_tokens, new.token_ids))
            room -= size
        if batch:
            self._rebuild_counts(turn, batch)

    def _rebuild_counts(
        self, turn: _Pinned, requests: Sequence[tuple[int, int, NDArray[np.int32]]]
    ) -> None:
        """requests: row, tokens of the prompt, all ids."""
        at = HEADER_WORDS * len(requests)
        headers = turn.words[:at].reshape(-1, HEADER_WORDS)
        for header, (row, num_prompt_tokens, token_ids) in zip(headers, requests, strict=True):
            header[:] = row, num_prompt_tokens, len(token_ids), at
            turn.words[at : at + len(token_ids)] = token_ids
            at += len(token_ids)
        sent = self._device_count_words[:at]
        sent.copy_(turn.tensor[:at], non_blocking=True)
        rebuild_counts(self.sampling.asked.counts_WC, sent, len(requests))

    def _for_shape(self, shape: Shape, *, is_kept: bool) -> _ForShape:
        made = self._shapes.get(shape)
        if made is None:
            made = self._make(shape)
            if is_kept:
                self._shapes[shape] = made
        return made

    def _make(self, shape: Shape) -> _ForShape:
        T = shape.num_tokens
        (
            ids, token_rows, positions, rows, seq_lens, sample_at, starts, prefix_lens,
            decode_lens, older_starts, fresh_starts,
        ) = (self._device_words[field] for field in shape.fields()[1:])  # fmt: skip
        if shape.kind == "extend":
            older_starts = starts
        elif shape.kind == "fresh":
            fresh_starts = starts
        batch = ForwardBatch(
            token_ids=ids,
            positions=positions,
            slot_mapping=self._slots[:T],
            block_table=self.block_table_WM,
            seq_lens=seq_lens,
            query_start_loc=starts,
            num_decodes=T if shape.kind == "decode" else 0,
            rows=NO_ROWS,
            context_lens=NO_ROWS,
            query_lens=NO_ROWS,
            feed=DeviceFeed(
                token_rows=token_rows,
                table_rows=rows,
                last_tokens=self.last_tokens_W,
                sample_at=sample_at,
                block_size=self._block_size,
                is_long=shape.is_long,
                prefix_lens=_any(prefix_lens),
                decode_lens=_any(decode_lens),
                older_starts=_any(older_starts),
                fresh_starts=_any(fresh_starts),
            ),
        )
        return _ForShape(batch, {})

    def _fields_of(self, made: _ForShape, shape: Shape, turn: int) -> _HostFields:
        fields = made.turns.get(turn)
        if fields is None:
            words = self._words.words[turn]
            fields = made.turns[turn] = _HostFields(*(words[at] for at in shape.fields()[1:]))
        return fields

    def _pinned(self, *shape: int) -> _Pinned:
        is_pinned = self._device.type == "cuda"
        return _Pinned(torch.zeros(shape, dtype=torch.int32, pin_memory=is_pinned))


def _any(field_of_device: Tensor) -> Tensor | None:
    """None where a shape does not have it."""
    return field_of_device if len(field_of_device) else None
