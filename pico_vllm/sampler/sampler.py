"""Sampler: from logits to token ids, each row by its own parameters.

    N rows of logits this step, V rows of the head, rows of the batch state in the order of the step

Order: vocabulary mask, logit bias, penalties, min_tokens mask, temperature, top-k, top-p, min-p,
sample. Log-probabilities are those of the model: after the vocabulary mask, before everything else.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pico_vllm.sampler.logits import (
    MASKED,
    PenaltyCounts,
    apply_penalties,
    keep_min_p,
    keep_top_k,
    keep_top_p,
)
from pico_vllm.sampler.philox import gumbel_noise
from pico_vllm.sampling_params import SamplingParams
from pico_vllm.step import BAD_LOGITS, NewRow, TokenLogprobs

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot carry."""


class Sampler:
    """Owns the sampling parameters and the penalty counts of every row of the batch state."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        """vocab_size: ids the tokenizer knows; rows of the head past them are padding and never
        sampled."""
        self.vocab_size = vocab_size
        self._device = device
        self._params: list[SamplingParams] = [SamplingParams()] * max_num_seqs
        self._stop_ids: list[Tensor | None] = [None] * max_num_seqs
        self._bias: list[tuple[Tensor, Tensor] | None] = [None] * max_num_seqs
        self._counts: list[PenaltyCounts | None] = [None] * max_num_seqs
        self._is_greedy = np.ones(max_num_seqs, np.bool_)
        self._is_adjusted = np.zeros(max_num_seqs, np.bool_)
        self._is_special = np.zeros(max_num_seqs, np.bool_)
        """Not just the largest logit: sampled, adjusted, or with log-probabilities."""
        self._num_logprobs = np.full(max_num_seqs, -1, np.int32)
        self._temperature = np.ones(max_num_seqs, np.float32)
        self._top_k = np.full(max_num_seqs, vocab_size, np.int64)
        self._top_p = np.ones(max_num_seqs, np.float32)
        self._min_p = np.zeros(max_num_seqs, np.float32)
        self._seeds = np.zeros(max_num_seqs, np.int64)
        self._sample_indices = np.zeros(max_num_seqs, np.int64)
        self._num_prompt_tokens = np.zeros(max_num_seqs, np.int64)

    def set_row(self, new: NewRow) -> None:
        """Take over the parameters of a request that enters the batch."""
        row, params = new.row, new.params
        self._params[row] = params
        self._is_greedy[row] = params.is_greedy
        self._temperature[row] = params.temperature
        self._top_k[row] = params.top_k if params.top_k > 0 else self.vocab_size
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._seeds[row] = new.seed
        self._sample_indices[row] = new.sample_index
        self._num_prompt_tokens[row] = new.num_prompt_tokens
        self._num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self._bias[row] = self._counts[row] = self._stop_ids[row] = None
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), dtype=torch.int64, device=self._device)
            self._bias[row] = (
                ids,
                torch.tensor(list(params.logit_bias.values()), device=self._device),
            )
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
            n = new.num_prompt_tokens
            self._counts[row] = PenaltyCounts.of(
                new.token_ids[:n], new.token_ids[n:], self.vocab_size, self._device
            )
        if params.min_tokens and new.stop_token_ids:
            self._stop_ids[row] = torch.tensor(sorted(new.stop_token_ids), device=self._device)
        self._is_adjusted[row] = (
            self._bias[row] is not None
            or self._counts[row] is not None
            or self._stop_ids[row] is not None
        )
        self._is_special[row] = (
            not params.is_greedy or self._is_adjusted[row] or params.logprobs is not None
        )

    def sample(
        self, logits_NV: Tensor, rows: NDArray[np.int32], positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], dict[int, TokenLogprobs]]:
        """One token id a row (BAD_LOGITS where the logits are not numbers), and log-probabilities
        where asked.

        logits_NV is fp32 and is changed. positions: place in its request of the token that is
        chosen.
        """
        logits_NV = logits_NV[:, : self.vocab_size]
        if not self._is_special[rows].any():
            return _checked(*_largest(logits_NV)), {}
        asked = np.flatnonzero(self._num_logprobs[rows] >= 0).tolist()
        raw_logprobs = {i: logits_NV[i].log_softmax(dim=-1) for i in asked}
        adjusted = np.flatnonzero(self._is_adjusted[rows]).tolist()
        for i in adjusted:
            self._adjust(logits_NV[i], int(rows[i]), int(positions[i]))
        largest, token_ids = _largest(logits_NV)
        is_random = ~self._is_greedy[rows]
        if is_random.any():
            random = torch.from_numpy(np.flatnonzero(is_random)).to(self._device)
            offset_R1 = torch.from_numpy(largest[is_random, None]).to(self._device)
            sampled_R = self._sample_random(
                logits_NV[random] - offset_R1, rows[is_random], positions[is_random]
            )
            token_ids[is_random] = sampled_R.cpu().numpy()
        token_ids = _checked(largest, token_ids)
        logprobs = {}
        for i, logprobs_V in raw_logprobs.items():
            if token_ids[i] != BAD_LOGITS:
                count = int(self._num_logprobs[rows[i]])
                logprobs[i] = token_logprobs(logprobs_V[None], [int(token_ids[i])], count)[0]
        for i in adjusted:
            counts = self._counts[rows[i]]
            if counts is not None and token_ids[i] >= 0:
                counts.output_counts_V[int(token_ids[i])] += 1.0
        return token_ids, logprobs

    def _adjust(self, logits_V: Tensor, row: int, position: int) -> None:
        params = self._params[row]
        bias = self._bias[row]
        if bias is not None:
            logits_V[bias[0]] += bias[1]
        counts = self._counts[row]
        if counts is not None:
            apply_penalties(
                logits_V,
                counts,
                presence=params.presence_penalty,
                frequency=params.frequency_penalty,
                repetition=params.repetition_penalty,
            )
        stop_ids = self._stop_ids[row]
        # `position` less the prompt is how many tokens the output has so far.
        if stop_ids is not None and position - self._num_prompt_tokens[row] < params.min_tokens:
            logits_V[stop_ids] = MASKED

    def _sample_random(
        self, logits_RV: Tensor, rows: NDArray[np.int32], positions: NDArray[np.int64]
    ) -> Tensor:
        def of_rows(values: NDArray[np.generic]) -> Tensor:
            return torch.from_numpy(values[rows]).to(self._device)

        logits_RV /= of_rows(self._temperature)[:, None]
        for keep, values, is_on in (
            (keep_top_k, self._top_k, self._top_k[rows] < self.vocab_size),
            (keep_top_p, self._top_p, self._top_p[rows] < 1.0),
            (keep_min_p, self._min_p, self._min_p[rows] > 0.0),
        ):
            # A filter never sees the rows of others: rounding could cost them their last tokens.
            if is_on.all():
                keep(logits_RV, of_rows(values))
            elif is_on.any():
                on = torch.from_numpy(np.flatnonzero(is_on)).to(self._device)
                filtered_RV = logits_RV[on]
                keep(filtered_RV, of_rows(values)[on])
                logits_RV[on] = filtered_RV
        noise_RV = gumbel_noise(
            of_rows(self._seeds),
            of_rows(self._sample_indices),
            torch.from_numpy(positions).to(self._device),
            self.vocab_size,
        )
        return (logits_RV + noise_RV).argmax(dim=1)


def _largest(logits_NV: Tensor) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The largest logit of each row (NaN if it holds one) and its lowest id, on the host."""
    if logits_NV.device.type != "cpu":
        largest_N, ids_N = logits_NV.max(dim=1)
        return largest_N.cpu().numpy(), ids_N.cpu().numpy()
    # NumPy's argmax is vectorised: 4 us a row of 49,152 against 58 us for torch.max.
    logits = logits_NV.numpy()
    ids = logits.argmax(axis=1)
    return logits[np.arange(len(ids)), ids], ids


def _checked(largest: NDArray[np.float32], token_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """BAD_LOGITS where the largest logit is no number: then the row holds NaN or infinity."""
    is_bad = ~np.isfinite(largest)
    if is_bad.any():
        token_ids[is_bad] = BAD_LOGITS
    return token_ids


def token_logprobs(
    logprobs_NV: Tensor, token_ids: Sequence[int], num_top: int
) -> list[TokenLogprobs]:
    """Of one token a row: itself, its rank, and the `num_top` most likely ones."""
    ids_N = torch.tensor(token_ids, dtype=torch.int64, device=logprobs_NV.device)
    chosen_N1 = logprobs_NV.gather(1, ids_N[:, None])
    # Row by row: a sum over bools makes int64 of them first, twice the memory of the logits.
    rows = zip(logprobs_NV, chosen_N1, strict=True)
    num_larger = [torch.count_nonzero(row_V > chosen_1) for row_V, chosen_1 in rows]
    ranks = (torch.stack(num_larger) + 1).tolist()
    chosen = chosen_N1.clamp(min=LOWEST_LOGPROB)[:, 0].tolist()
    top = logprobs_NV.topk(min(num_top, logprobs_NV.shape[1]), dim=1)
    top_ids, top_values = top.indices.tolist(), top.values.clamp(min=LOWEST_LOGPROB).tolist()
    return [
        TokenLogprobs((token_id, *top_ids[i]), (chosen[i], *top_values[i]), ranks[i])
        for i, token_id in enumerate(token_ids)
    ]
