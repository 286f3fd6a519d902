"""SamplingRows: what each row of the batch state asks of the sampler, on the device as kernels read
it, and on the host what a launch depends on.

W rows of the batch state, the last one for padding
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pico_vllm.kernels import full_sample
from pico_vllm.kernels.candidates import num_columns
from pico_vllm.kernels.full_sample import AskedRows
from pico_vllm.sampling_params import MAX_ENDING_IDS, MAX_LOGIT_BIAS
from pico_vllm.step import NewRow

NUM_NUMBERS = full_sample.NUM_NUMBERS.value
FIELDS = (2, 2, 1, NUM_NUMBERS, MAX_LOGIT_BIAS, MAX_LOGIT_BIAS, MAX_ENDING_IDS)
"""Words a row: seed and sample index of 8 bytes, temperature, numbers, biased ids, biases, ids that
end a request."""
WORDS_PER_ROW = sum(FIELDS)
NUM_FIXED_WORDS = sum(FIELDS[:4])


class SamplingRows:
    """Owner of the penalty counts; the rest lies in the batch state, whose owner sends changes."""

    def __init__(self, words: Tensor, vocab_size: int, device: torch.device) -> None:
        """words: int32, W * WORDS_PER_ROW, zeros."""
        W = len(words) // WORDS_PER_ROW
        self._vocab_size = vocab_size
        fields = words.split([W * size for size in FIELDS])
        self._starts = np.cumsum([0, *(W * size for size in FIELDS[:-1])]).tolist()
        fixed = list(zip(self._starts, FIELDS, strict=True))[:4]
        self._fixed_places = np.concatenate([start + np.arange(size) for start, size in fixed])
        """Of row 0's fixed words; those of row r lie r strides further on."""
        self._fixed_strides = np.concatenate([np.full(size, size) for _, size in fixed])
        seeds, samples, temperatures, numbers, bias_ids, biases, ending_ids = fields
        self.seeds_W = seeds.view(torch.int64)
        self.sample_indices_W = samples.view(torch.int64)
        self.temperatures_W = temperatures.view(torch.float32)
        self.asked = AskedRows(
            numbers.view(W, NUM_NUMBERS),
            bias_ids.view(W, MAX_LOGIT_BIAS),
            biases.view(torch.float32).view(W, MAX_LOGIT_BIAS),
            ending_ids.view(W, MAX_ENDING_IDS),
            torch.zeros((W, num_columns(vocab_size)), dtype=torch.int32, device=device),
        )
        self.asked.numbers_WF[:, full_sample.NUM_LOGPROBS.value] = -1
        self.needs_full_W = np.zeros(W, np.bool_)
        """More than temperature: adjusted, filtered, or with log-probabilities."""
        self.is_greedy_W = np.ones(W, np.bool_)
        self.num_logprobs_W = np.full(W, -1, np.int32)

    def enter(self, new: NewRow) -> None:
        """A request enters the batch: what the host must know to launch its first step."""
        params = new.params
        self.is_greedy_W[new.row] = params.is_greedy
        self.num_logprobs_W[new.row] = -1 if params.logprobs is None else params.logprobs
        is_filtered = not params.is_greedy and (
            0 < params.top_k < self._vocab_size or params.top_p < 1.0 or params.min_p > 0.0
        )
        self.needs_full_W[new.row] = (
            is_filtered
            or has_penalties(new)
            or params.logprobs is not None
            or params.logit_bias is not None
            or (params.min_tokens > 0 and len(new.stop_token_ids) > 0)
        )

    def changes(self, new: NewRow) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Places among the words, and what belongs there: all that a row asks for."""
        params = new.params
        fixed = np.zeros(NUM_FIXED_WORDS, np.int32)
        fixed[:4].view(np.int64)[:] = new.seed, new.sample_index
        fixed[4:5].view(np.float32)[:] = 0.0 if params.is_greedy else params.temperature
        numbers = fixed[5:]
        floats = numbers.view(np.float32)
        floats[full_sample.TOP_P.value] = 1.0
        if not params.is_greedy:
            # From the vocabulary's size on top-k keeps all, as it does at 0 and -1.
            is_on = 0 < params.top_k < self._vocab_size
            numbers[full_sample.TOP_K.value] = params.top_k if is_on else 0
            floats[full_sample.TOP_P.value] = params.top_p
            floats[full_sample.MIN_P.value] = params.min_p
        floats[full_sample.PRESENCE.value] = params.presence_penalty
        floats[full_sample.FREQUENCY.value] = params.frequency_penalty
        floats[full_sample.REPETITION.value] = params.repetition_penalty
        numbers[full_sample.HAS_PENALTIES.value] = has_penalties(new)
        numbers[full_sample.MAY_END_AT.value] = new.num_prompt_tokens + params.min_tokens
        numbers[full_sample.FIRST_SAMPLED.value] = len(new.token_ids)
        numbers[full_sample.NUM_LOGPROBS.value] = self.num_logprobs_W[new.row]
        places, values = [self._fixed_places + new.row * self._fixed_strides], [fixed]
        bias_ids_at, biases_at, ending_ids_at = self._starts[4:]
        if params.logit_bias:
            ids = np.array(list(params.logit_bias), np.int32)
            biases = np.array(list(params.logit_bias.values()), np.float32)
            numbers[full_sample.NUM_BIASES.value] = len(ids)
            first = new.row * MAX_LOGIT_BIAS + np.arange(len(ids))
            places += [bias_ids_at + first, biases_at + first]
            values += [ids, biases.view(np.int32)]
        if params.min_tokens:
            # A configuration may name EOS ids that no tokenizer knows; they never come.
            ids = np.array([i for i in new.stop_token_ids if i < self._vocab_size], np.int32)
            numbers[full_sample.NUM_ENDING_IDS.value] = len(ids)
            places.append(ending_ids_at + new.row * MAX_ENDING_IDS + np.arange(len(ids)))
            values.append(np.sort(ids))
        return np.concatenate(places), np.concatenate(values)


def has_penalties(new: NewRow) -> bool:
    params = new.params
    return bool(params.presence_penalty or params.frequency_penalty) or (
        params.repetition_penalty != 1.0
    )
