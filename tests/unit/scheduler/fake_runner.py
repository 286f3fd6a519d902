"""A runner without a model: each token is a hash of all tokens before it, read back from the blocks
where an earlier step put them. A wrong block, slot, row or length gives a wrong token.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from pico_vllm.request import Request
from pico_vllm.sampling_params import SamplingParams
from pico_vllm.step import NO_TOKEN, StepPlan, StepResult

VOCAB = 1000


def next_token(token_ids: Sequence[int]) -> int:
    """What the fake model says after these tokens."""
    return zlib.crc32(np.array(token_ids, np.int64).tobytes()) % VOCAB


def expected_answer(request: Request) -> list[int]:
    """By the definition: the whole sequence each time, until a stop id or the length."""
    token_ids = list(request.prompt_token_ids)
    answer: list[int] = []
    while len(answer) < request.max_tokens:
        answer.append(next_token(token_ids + answer))
        is_stop = answer[-1] in request.stop_token_ids
        if is_stop and len(answer) > request.params.min_tokens:
            break
    return answer


class FakeRunner:
    """Keeps what a device would keep: a row's tokens and block table, and the tokens by slot."""

    def __init__(self, *, num_blocks: int, block_size: int, keeps_kv: bool = True) -> None:
        self._block_size = block_size
        self._keeps_kv = keeps_kv
        self._cells = np.full((num_blocks + 1) * block_size, -1, np.int64)
        self._tokens: dict[int, list[int]] = {}
        self._tables: dict[int, list[int]] = {}
        self.slots: list[list[int]] = []
        """Of each request of the last step, where its new tokens went."""

    def run(self, plan: StepPlan) -> StepResult:
        for new in plan.new_rows:
            self._tokens[new.row] = list(new.token_ids)
            self._tables[new.row] = []
        for blocks in plan.new_blocks:
            assert blocks.index == len(self._tables[blocks.row]), "a gap in the block table"
            self._tables[blocks.row].extend(blocks.block_ids)
        token_ids = np.full(len(plan.rows), NO_TOKEN, np.int64)
        self.slots = []
        for index, row in enumerate(plan.rows.tolist()):
            context, query = int(plan.context_lens[index]), int(plan.query_lens[index])
            tokens, size = self._tokens[row], self._block_size
            slots = [
                self._tables[row][p // size] * size + p % size
                for p in range(context, context + query)
            ]
            assert min(slots) >= size, "a token in the null block"
            self._cells[slots] = tokens[context : context + query]
            self.slots.append(slots)
            if plan.is_sampled[index]:
                read = [
                    int(self._cells[self._tables[row][p // size] * size + p % size])
                    for p in range(context + query)
                ]
                token_ids[index] = next_token(read)
                tokens.append(int(token_ids[index]))
        return StepResult(token_ids=token_ids)


def make_request(
    number: int,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    stop: Sequence[int] = (),
    min_tokens: int = 0,
    priority: int = 0,
) -> Request:
    return Request(
        request_id=f"r{number}",
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, priority=priority),
        max_tokens=max_tokens,
        stop_token_ids=frozenset(stop),
        seed=0,
    )
