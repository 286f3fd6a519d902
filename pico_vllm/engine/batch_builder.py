"""BatchBuilder: from a StepPlan to a ForwardBatch, through NumPy tables with one row a running
request.

Owner of each row's token ids and block table. They change only by what a step adds: rows and blocks
named in the plan, and the token that the step itself sampled.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from pico_vllm.forward_batch import ForwardBatch
from pico_vllm.step import NO_TOKEN, StepPlan


class BatchBuilder:
    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device
    ) -> None:
        self._block_size = block_size
        self._device = device
        self._token_ids = np.zeros((max_num_seqs, max_model_len + 1), np.int64)
        max_blocks = -(-max_model_len // block_size)
        self._block_table = np.zeros((max_num_seqs, max_blocks), np.int32)

    def build(self, plan: StepPlan) -> ForwardBatch:
        for new in plan.new_rows:
            self._token_ids[new.row, : len(new.token_ids)] = new.token_ids
            self._block_table[new.row] = 0
        for blocks in plan.new_blocks:
            self._block_table[blocks.row, blocks.index : blocks.index + len(blocks.block_ids)] = (
                blocks.block_ids
            )

        query_lens, context_lens = plan.query_lens, plan.context_lens
        seq_lens = context_lens + query_lens
        if plan.num_decodes == len(plan.rows):
            # One token each: what follows is then what these already are.
            query_start_loc = np.arange(len(plan.rows) + 1, dtype=np.int32)
            row_of_token, positions = plan.rows, context_lens.astype(np.int64)
        else:
            query_start_loc = np.zeros(len(query_lens) + 1, np.int32)
            np.cumsum(query_lens, out=query_start_loc[1:])
            row_of_token = np.repeat(plan.rows, query_lens)
            first_position = np.repeat(context_lens - query_start_loc[:-1], query_lens)
            positions = (np.arange(query_start_loc[-1]) + first_position).astype(np.int64)
        block_of_token = self._block_table[row_of_token, positions // self._block_size].astype(
            np.int64
        )
        width = -(-int(seq_lens.max()) // self._block_size)
        return ForwardBatch(
            token_ids=self._to_device(self._token_ids[row_of_token, positions]),
            positions=self._to_device(positions),
            slot_mapping=self._to_device(
                block_of_token * self._block_size + positions % self._block_size
            ),
            block_table=self._to_device(self._block_table[plan.rows, :width]),
            seq_lens=self._to_device(seq_lens),
            query_start_loc=self._to_device(query_start_loc),
            num_decodes=plan.num_decodes,
            rows=plan.rows,
            context_lens=context_lens,
            query_lens=query_lens,
        )

    def append(self, plan: StepPlan, token_ids: NDArray[np.int64]) -> None:
        """Put what each request sampled after its tokens, as the next step's input."""
        has_token = token_ids > NO_TOKEN
        at = (plan.context_lens + plan.query_lens)[has_token]
        self._token_ids[plan.rows[has_token], at] = token_ids[has_token]

    def row_tokens(self, row: int, start: int, stop: int) -> NDArray[np.int64]:
        """Token ids of one row at positions start to stop."""
        return self._token_ids[row, start:stop]

    def _to_device(self, array: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
