"""Log-probabilities of prompt tokens, computed while the prompt is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pico_vllm.sampler.sampler import token_logprobs
from pico_vllm.step import NewRow, StepPlan, TokenLogprobs

LOGITS_CHUNK_BYTES = 8 << 20
"""Most memory for logits at once where a request wants them for its whole prompt. With what is made
of them and what malloc keeps it comes to some 40 MiB; chunks of 64 MiB came to 290."""

RowTokens = Callable[[int, int, int], NDArray[np.integer]]


class Head(Protocol):
    def logits(self, hidden_NE: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class _Wanted:
    num_top: int
    """How many alternatives to give."""
    positions: range
    """Of the prompt tokens that it is about."""


class PromptLogprobs:
    """Knows which rows want them. Each prompt token is predicted by the hidden state before it; the
    head runs in chunks of rows."""

    def __init__(
        self, model: Head, row_tokens: RowTokens, *, head_size: int, vocab_size: int
    ) -> None:
        """head_size: rows of the head. vocab_size: ids that the tokenizer knows."""
        self._model = model
        self._row_tokens = row_tokens
        self._chunk = max(1, LOGITS_CHUNK_BYTES // (4 * head_size))
        self._vocab_size = vocab_size
        self._wanted: dict[int, _Wanted] = {}
        """By row, until its prompt is complete."""

    def start(self, new: NewRow) -> None:
        self._wanted.pop(new.row, None)
        # What was given before a preemption is not given again; the first token has none.
        first = new.num_prompt_logprobs + 1
        if new.params.prompt_logprobs is not None and first < new.num_prompt_tokens:
            self._wanted[new.row] = _Wanted(
                new.params.prompt_logprobs, range(first, new.num_prompt_tokens)
            )

    def are_wanted(self, plan: StepPlan) -> bool:
        return bool(self._wanted) and any(row in self._wanted for row in plan.rows.tolist())

    def compute(self, plan: StepPlan, hidden_TE: Tensor) -> dict[int, list[TokenLogprobs]]:
        """By index in the plan, for the rows that asked."""
        if not self.are_wanted(plan):
            return {}
        starts = np.cumsum(plan.query_lens) - plan.query_lens
        found = {}
        for index, row in enumerate(plan.rows.tolist()):
            wanted = self._wanted.get(row)
            if wanted is None:
                continue
            context_len = int(plan.context_lens[index])
            seq_len = context_len + int(plan.query_lens[index])
            if seq_len >= wanted.positions.stop:
                del self._wanted[row]
            # The token at a position predicts the next one; that after the prompt is an output.
            stop = min(seq_len + 1, wanted.positions.stop)
            values: list[TokenLogprobs] = []
            for first in range(max(context_len + 1, wanted.positions.start), stop, self._chunk):
                targets = self._row_tokens(row, first, min(first + self._chunk, stop)).tolist()
                at = int(starts[index]) + first - 1 - context_len
                logits = self._model.logits(hidden_TE[at : at + len(targets)])
                values += token_logprobs(
                    logits[:, : self._vocab_size].log_softmax(dim=-1), targets, wanted.num_top
                )
            found[index] = values
        return found
