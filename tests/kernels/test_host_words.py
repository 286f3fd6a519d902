"""Words from pinned memory in turns, and ids back: both kernels against their plain twins."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from compiled import resources_of
from torch import Tensor

from pico_vllm.kernels.host_words import (
    BLOCK_C,
    BLOCK_N,
    BLOCK_R,
    EARLY_C,
    fetch_words,
    fetch_words_reference,
    publish_ids,
    publish_ids_reference,
)

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
NOT_YET = -3


def pinned(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if HAS_GPU else tensor


def wait() -> None:
    if HAS_GPU:
        torch.cuda.synchronize()


@pytest.mark.memcheck
@pytest.mark.parametrize("num_turns", [1, 3])
@pytest.mark.parametrize("num_words", [4, 36, BLOCK_N - 4, BLOCK_N, BLOCK_N + 4, 2 * BLOCK_N + 52])
@pytest.mark.parametrize("spare", [0, 5])
def test_words_come_in_turns(num_turns: int, num_words: int, spare: int) -> None:
    """Each fetch brings the row after that of the one before, the first one after the last, and
    counts once; what lies behind the words stays. Rows may begin anywhere."""
    host = pinned(torch.randint(-9, 9, (num_turns, num_words + spare), dtype=torch.int32))
    changes, state = no_changes(num_turns)
    counters = [torch.zeros(1, dtype=torch.int64, device=DEVICE) for _ in range(2)]
    for step in range(2 * num_turns + 1):
        host += 100  # what the host has written since
        host[:, 1] = 0
        found, wanted = (
            torch.full((num_words + 8,), 7, dtype=torch.int32, device=DEVICE) for _ in range(2)
        )
        fetch_words(host, changes, counters[0], found[:num_words], state)
        fetch_words_reference(host, changes, counters[1], wanted[:num_words], state)
        wait()
        assert torch.equal(found, wanted)
        assert found[:num_words].tolist() == host[step % num_turns, :num_words].tolist()
        assert counters[0].tolist() == counters[1].tolist() == [step + 1]
    assert not state.any()


def no_changes(num_turns: int) -> tuple[Tensor, Tensor]:
    """Places that do not exist, which nobody may look at where no change is counted, and a
    state."""
    changes = torch.full((num_turns, 2, 4), 2**31 - 1, dtype=torch.int32)
    return pinned(changes), torch.zeros(8, dtype=torch.int32, device=DEVICE)


@pytest.mark.memcheck
@pytest.mark.parametrize("num_changes", [1, 3, EARLY_C, EARLY_C + 1, EARLY_C + BLOCK_C + 1])
def test_changes_come_in_turns(num_changes: int) -> None:
    """Each fetch makes the changes of its turn and no others, in places far apart."""
    capacity, size = num_changes + 3, 5 * num_changes
    changes = torch.full((3, 2, capacity), 2**31 - 1, dtype=torch.int32)
    for turn in range(3):
        changes[turn, 0, :num_changes] = torch.randperm(size)[:num_changes]
        changes[turn, 1, :num_changes] = torch.arange(num_changes) + 1000 * (turn + 1)
    changes, host = pinned(changes), pinned(torch.zeros((3, 4), dtype=torch.int32))
    counters = [torch.zeros(1, dtype=torch.int64, device=DEVICE) for _ in range(2)]
    words = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    found, wanted = (torch.full((size,), -1, dtype=torch.int32, device=DEVICE) for _ in range(2))
    for count in (num_changes, 0, num_changes - 1, num_changes):
        host[:, 1] = count
        fetch_words(host, changes, counters[0], words, found)
        fetch_words_reference(host, changes, counters[1], words, wanted)
        wait()
        assert torch.equal(found, wanted)
    assert int((found >= 0).sum()) >= num_changes


def test_a_counter_beyond_two_to_the_31() -> None:
    """A server that has run for weeks goes on with the next row."""
    host = pinned(torch.arange(12, dtype=torch.int32).view(3, 4))
    host[:, 1] = 0
    changes, state = no_changes(3)
    counter = torch.tensor([2**31 + 5], device=DEVICE)
    words = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    for step in range(2):
        fetch_words(host, changes, counter, words, state)
        assert words.tolist() == host[(2**31 + 5 + step) % 3].tolist()


@pytest.mark.memcheck
@pytest.mark.parametrize("num_ids", [1, 3, BLOCK_R, BLOCK_R + 1])
@pytest.mark.parametrize("spare", [0, 5])
def test_ids_go_to_the_row_of_their_turn(num_ids: int, spare: int) -> None:
    """Every id arrives, beyond 32 bits too, and no other place changes."""
    found, wanted = (
        pinned(torch.full((4, num_ids + spare), NOT_YET, dtype=torch.int64)) for _ in range(2)
    )
    for turn in (2, 0, 3, 1):
        words = torch.tensor([turn, 99], dtype=torch.int32, device=DEVICE)
        ids = torch.arange(num_ids, device=DEVICE) * 2**33 + turn - 2
        publish_ids(ids, words[:1], found)
        publish_ids_reference(ids, words[:1], wanted)
        wait()
        assert torch.equal(found, wanted)
        assert found[turn, :num_ids].tolist() == ids.tolist()


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pico_vllm.kernels import host_words

def compiled(kernel, types, **constexprs):
    names = [p.name for p in kernel.params]
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs=constexprs,
        attrs={
            (names.index(name),): [["tt.divisibility", 16]]
            for name in types
            if not name.startswith("num")
        },
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32))

shared = {"host_stride": "i32"}
fetch = {"host_ptr": "*i32", "changes_ptr": "*i32", "counter_ptr": "*i64", "words_ptr": "*i32"}
fetch |= {"state_ptr": "*i32", "changes_stride": "i32"}
fetch |= {"num_turns": "i32", "num_pieces": "i32", "capacity": "i32"}
code = compiled(
    host_words._fetch_words_kernel, fetch | shared, PIECE=4, BLOCK_N=8192, EARLY_C=256,
    BLOCK_C=2048, USE_PDL=True,
)
assert "ld.volatile.global.v4" in code.asm["ptx"], code.asm["ptx"]
publish = {"host_ptr": "*i64", "ids_ptr": "*i64", "turn_ptr": "*i32", "num_ids": "i32"}
code = compiled(host_words._publish_ids_kernel, publish | shared, BLOCK_R=1024, USE_PDL=True)
assert "st.global.wt" in code.asm["ptx"], code.asm["ptx"]
"""


def test_code_for_hopper_passes_by_the_caches(tmp_path: Path) -> None:
    """Words are read from where the host wrote them, 16 bytes at a time, and ids written through:
    Triton drops some modifiers of loads and stores without a word."""
    resources_of(COMPILE, folder=tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("num_ids", [1, 256])
def test_a_graph_fetches_and_publishes(num_ids: int) -> None:
    """Replayed a thousand times, the host seeing each step's ids by looking at memory alone and
    writing the next step's words behind them, every step has its own words, in its own row, and
    finds the state changed by the last step that changes it."""
    num_words = 4 + -(-num_ids // 4) * 4
    host = pinned(torch.zeros((3, num_words), dtype=torch.int32))
    host_ids = pinned(torch.full((3, num_ids), NOT_YET, dtype=torch.int64))
    words, ids = host.numpy(), host_ids.numpy()
    words[:, 0] = range(3)
    changes = pinned(torch.zeros((3, 2, 2), dtype=torch.int32))
    state = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    counter = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    there = torch.zeros(num_words, dtype=torch.int32, device=DEVICE)
    out = torch.zeros(num_ids, dtype=torch.int64, device=DEVICE)

    def step() -> None:
        fetch_words(host, changes, counter, there, state)
        torch.mul(there[4 : 4 + num_ids], 2, out=out)
        out.add_(state[1])
        publish_ids(out, there[:1], host_ids)

    step()
    torch.cuda.synchronize()
    counter.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for number in range(1000):
        turn = number % 3
        words[turn, 1] = 1 if number % 2 else 0
        changes[turn] = torch.tensor([[1], [number]])
        words[turn, 4 : 4 + num_ids] = range(number, number + num_ids)
        ids[turn] = NOT_YET
        graph.replay()
        end = time.monotonic() + 10
        while (ids[turn] == NOT_YET).any():
            assert time.monotonic() < end, "the ids do not come"
        changed = number if number % 2 else max(number - 1, 0)
        first = 2 * number + changed
        assert ids[turn].tolist() == list(range(first, first + 2 * num_ids, 2))


def test_arguments_that_are_refused() -> None:
    """Each error names what it met."""
    host = torch.zeros((3, 8), dtype=torch.int32)
    words = torch.zeros(8, dtype=torch.int32, device=DEVICE)
    counter = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    changes, state = no_changes(3)
    fetched = {"host_UN": host, "changes_U2C": changes, "counter": counter, "words_N": words}
    fetched["state_S"] = state
    for wrong, message in (
        ({"host_UN": host.long()}, "host is torch.int64"),
        ({"host_UN": host.T, "words_N": words[:4]}, r"host is .* strides \(1, 8\)"),
        ({"words_N": words[::2]}, r"words is .* strides \(2,\)"),
        ({"words_N": words[:6]}, "6 words .* multiple of 4"),
        ({"host_UN": host[:, :4]}, r"8 words of \[3, 4\]"),
        ({"changes_U2C": changes[:2]}, r"changes are \[2, 2, 4\]; .* 3 turns"),
        ({"changes_U2C": changes[:, :1]}, r"changes are \[3, 1, 4\]"),
        ({"changes_U2C": changes.long()}, "changes is torch.int64"),
        ({"state_S": state.long()}, "state is torch.int64"),
        ({"counter": counter.int()}, r"counter is \[1\] torch.int32"),
    ):
        with pytest.raises(ValueError, match=message):
            fetch_words(**fetched | wrong)
    host_ids = torch.zeros((3, 4), dtype=torch.int64)
    ids, turn = host_ids[0].to(DEVICE), words[:1]
    for published, message in (
        ((ids.int(), turn, host_ids), "ids is torch.int32"),
        ((ids, turn, host_ids.T), r"host is .* strides \(1, 4\)"),
        ((ids, turn, host_ids[:, :3]), r"4 ids .* row of \[3, 3\]"),
        ((ids, turn.long(), host_ids), r"turn is \[1\] torch.int64"),
    ):
        with pytest.raises(ValueError, match=message):
            publish_ids(*published)
