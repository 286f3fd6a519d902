"""Waiting for the ids of a step that was launched, on memory that somebody else writes to."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from pico_vllm.engine import triton_runner
from pico_vllm.engine.triton_runner import NOT_YET, PendingStep, PendingTransfers
from pico_vllm.step import BAD_LOGITS, NO_COPIES, NO_TOKEN, BlockCopies, StepPlan


@pytest.fixture(autouse=True)
def few_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_runner, "LOOKS", 3)


def _pending(ids: NDArray[np.int64], is_idle: Callable[[], bool]) -> PendingStep:
    ones = np.ones(len(ids), np.int32)
    plan = StepPlan(
        request_ids=tuple(map(str, range(len(ids)))), rows=np.arange(len(ids), dtype=np.int32),
        context_lens=ones, query_lens=ones, is_sampled=np.arange(len(ids)) != 1,
        num_decodes=len(ids), number=7,
    )  # fmt: skip
    return PendingStep(plan, ids, is_idle)


@pytest.mark.parametrize("last", range(4))
def test_all_ids_are_waited_for(last: int) -> None:
    """Whichever comes last; nothing is asked where they are there, and a row that samples nothing
    is waited for and gives none."""
    ids = np.full(4, NOT_YET, np.int64)
    coming = [*(index for index in range(4) if index != last), last]
    wanted = [11, 5, BAD_LOGITS, 2**40]

    def is_idle() -> bool:
        at = coming.pop(0)
        ids[at] = wanted[at]
        return not coming

    pending = _pending(ids, is_idle)
    assert pending.result().token_ids.tolist() == [11, NO_TOKEN, BAD_LOGITS, 2**40]
    assert not coming
    assert pending.result().token_ids.tolist() == [11, NO_TOKEN, BAD_LOGITS, 2**40]


@pytest.mark.parametrize("missing", [0, 2])
def test_a_step_that_ended_without_ids(missing: int) -> None:
    """An idle device brings nothing more: that is an error, and no endless wait."""
    ids = np.array([4, 5, 6])
    ids[missing] = NOT_YET
    answers = [False, True]
    with pytest.raises(RuntimeError, match="step 7 ended on the device without ids"):
        _pending(ids, lambda: answers.pop(0)).result()
    assert not answers


def test_a_device_that_failed() -> None:
    """What the driver says of it is passed on."""

    def fail() -> bool:
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        _pending(np.array([NOT_YET]), fail).result()


class _Streams:
    """Tiers whose copies take until they are waited for."""

    def __init__(self) -> None:
        self.waited_for: list[str] = []

    def wait_for_stores(self) -> None:
        self.waited_for.append("stores")

    def take_loaded(self, *, waits: bool = False) -> tuple[int, ...]:
        self.waited_for += ["loads"] * waits
        return (3,)


@pytest.mark.parametrize("stores", [NO_COPIES, BlockCopies([1], [2])])
def test_stores_without_a_step_are_over_when_there_is_a_result(stores: BlockCopies) -> None:
    """Whoever has the result reads their host memory."""
    none = np.zeros(0, np.int32)
    plan = StepPlan(
        request_ids=(), rows=none, context_lens=none, query_lens=none,
        is_sampled=none.astype(np.bool_), num_decodes=0, stores=stores,
    )  # fmt: skip
    streams = _Streams()
    result = PendingTransfers(plan, streams).result()  # type: ignore[arg-type]
    assert streams.waited_for == ["stores", "loads"][not stores :]
    assert result.loaded == (3,) and len(result.token_ids) == 0
