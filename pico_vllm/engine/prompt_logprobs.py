"""Log-probabilities of prompt tokens, computed while the prompt is."""

from __future__ import annotations

from collections.abc import Callable
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
        self._counts: dict[int, int] = {}
        """How many alternatives to give, by row, until its prompt is complete."""

    def start(self, new: NewRow) -> None:
        self._counts.pop(new.row, None)
        if new.params.prompt_logprobs is not None:
            self._counts[new.row] = new.params.prompt_logprobs

    def are_wanted(self, plan: StepPlan) -> bool:
        return bool(self._counts) and any(row in self._counts for row in plan.rows.tolist())

    def compute(self, plan: StepPlan, hidden_TE: Tensor) -> dict[int, list[TokenLogprobs]]:
        """By index in the plan, for the rows that asked."""
        if not self.are_wanted(plan):
            return {}
        starts = np.cumsum(plan.query_lens) - plan.query_lens
        found = {}
        for index, row in enumerate(plan.rows.tolist()):
            num_top = self._counts.get(row)
            if num_top is None:
                continue
            if plan.is_sampled[index]:
                del self._counts[row]
            context_len = int(plan.context_lens[index])
            query_len, start = int(plan.query_lens[index]), int(starts[index])
            # The last token of a whole prompt predicts the first generated token, which is not a
            # prompt token.
            count = query_len - int(plan.is_sampled[index])
            targets = self._row_tokens(row, context_len + 1, context_len + 1 + count).tolist()
            values: list[TokenLogprobs] = []
            for first in range(0, count, self._chunk):
                hidden = hidden_TE[start + first : start + min(first + self._chunk, count)]
                logits = self._model.logits(hidden)[:, : self._vocab_size]
                values += token_logprobs(
                    logits.log_softmax(dim=-1), targets[first : first + self._chunk], num_top
                )
            found[index] = values
        return found
