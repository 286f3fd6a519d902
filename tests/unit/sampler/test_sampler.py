"""The sampler over whole batches: each row by its own parameters and nobody else's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pico_vllm.sampler.sampler import Sampler, token_logprobs
from pico_vllm.sampling_params import SamplingParams
from pico_vllm.step import BAD_LOGITS, NewRow, TokenLogprobs

V, V_PAD = 60, 64
CPU = torch.device("cpu")


def new_row(row: int, *, stop: tuple[int, ...] = (), **settings: Any) -> NewRow:
    tokens = settings.pop("tokens", [1, 2, 3])
    num_prompt = settings.pop("num_prompt_tokens", len(tokens))
    sample_index = settings.pop("sample_index", 0)
    params = SamplingParams(max_tokens=None, **settings)
    return NewRow(
        row=row,
        token_ids=tokens,
        num_prompt_tokens=num_prompt,
        params=params,
        stop_token_ids=frozenset(stop),
        seed=params.seed or 0,
        sample_index=sample_index,
    )


def sampler_of(*rows: NewRow, vocab_size: int = V) -> Sampler:
    sampler = Sampler(16, vocab_size, CPU)
    for row in rows:
        sampler.set_row(row)
    return sampler


def sample(
    sampler: Sampler, logits: Tensor, rows: list[int], positions: list[int]
) -> tuple[list[int], dict[int, TokenLogprobs]]:
    ids, logprobs = sampler.sample(
        logits.clone(), np.array(rows, np.int32), np.array(positions, np.int64)
    )
    return ids.tolist(), logprobs


def random_logits(rows: int, seed: int = 0, vocab: int = V_PAD) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("temperature", [0.0, -0.0, 5e-324, 1e-45, 1e-8, 9e-6])
def test_greedy(temperature: float) -> None:
    """Greedy and temperatures below 1e-5 take the largest logit, the lowest id on ties, with logits
    up to 60 and masked ones."""
    logits = torch.full((3, V_PAD), -math.inf)
    logits[0, 5], logits[0, 9] = 60.0, 60.0
    logits[1, 0], logits[1, 59] = -60.0, -59.0
    logits[2] = 1.0
    sampler = sampler_of(*(new_row(row, temperature=temperature) for row in range(3)))
    assert sample(sampler, logits, [0, 1, 2], [3, 3, 3])[0] == [5, 59, 0]


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e-2])
def test_small_temperatures(temperature: float) -> None:
    """Small temperatures above the greedy ones overflow nothing and take the clear winner."""
    logits = random_logits(200, 1) * 20
    logits[:, 7] = 300.0
    logits[::2, 8:] = -math.inf
    sampler = sampler_of(new_row(0, temperature=temperature))
    ids, _ = sample(sampler, logits, [0] * 200, list(range(200)))
    assert ids == [7] * 200


def test_frequencies() -> None:
    """Over 30,000 positions a row's tokens have the frequencies of softmax(logits / temperature),
    chi-square below its 0.1 % point."""
    n, temperature = 30_000, 1.7
    row_V = torch.tensor([2.0, 1.0, 0.0, -1.0, 3.0, 0.5])
    sampler = sampler_of(new_row(0, temperature=temperature, seed=77), vocab_size=6)
    ids, _ = sample(sampler, row_V.expand(n, 6), [0] * n, list(range(n)))
    counts = torch.bincount(torch.tensor(ids), minlength=6).double()
    expected = (row_V.double() / temperature).softmax(0) * n
    assert float(((counts - expected) ** 2 / expected).sum()) < 20.52


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_padding_rows_of_the_head(temperature: float) -> None:
    """100,000 samples never give an id past the vocabulary, however large its logit; its
    log-probabilities sum to one over the known ids."""
    n = 100_000
    sampler = sampler_of(new_row(0, temperature=temperature, logprobs=20, seed=1), vocab_size=20)
    logits = torch.randn(32, generator=torch.Generator().manual_seed(2))
    logits[20:] = 1000.0
    sampler._num_logprobs[0] = -1  # 100,000 rows of them would only take time
    ids, _ = sample(sampler, logits.expand(n, 32), [0] * n, list(range(n)))
    assert min(ids) >= 0 and max(ids) < 20
    sampler._num_logprobs[0] = 20
    _, logprobs = sample(sampler, logits[None], [0], [3])
    assert sorted(logprobs[0].token_ids[1:]) == list(range(20))
    assert sum(map(math.exp, logprobs[0].logprobs[1:])) == pytest.approx(1.0, abs=1e-5)


MIXED: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.0},
    {"temperature": 2.0, "seed": 2, "top_k": 5},
    {"temperature": 1.5, "seed": 3, "top_p": 0.6},
    {"temperature": 0.7, "seed": 4, "min_p": 0.2},
    {"temperature": 1.0, "seed": -5, "presence_penalty": 1.0, "frequency_penalty": -0.5},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 1.2, "seed": 6, "logit_bias": {3: 50.0, 4: 49.0}},
    {"temperature": 1.0, "seed": 1, "sample_index": 3},
    {"temperature": 1.0, "seed": 7, "min_tokens": 90, "stop": (5, 6), "top_k": 9, "top_p": 0.8},
    {"temperature": 0.0, "logprobs": 4},
]


def test_each_row_by_its_own_parameters() -> None:
    """Every row of a mixed batch gives what it gives alone, in any order of rows and in any row of
    the state."""
    rng = np.random.default_rng(3)
    logits = random_logits(len(MIXED), 5)
    positions = rng.integers(3, 90, len(MIXED)).tolist()
    alone, alone_logprobs = [], []
    for index, settings in enumerate(MIXED):
        ids, logprobs = sample(
            sampler_of(new_row(0, **settings)), logits[index : index + 1], [0], [positions[index]]
        )
        alone += ids
        alone_logprobs.append(logprobs.get(0))
    for _ in range(8):
        order = rng.permutation(len(MIXED)).tolist()
        rows = rng.permutation(16)[: len(MIXED)].tolist()
        sampler = sampler_of(
            *(new_row(row, **MIXED[index]) for row, index in zip(rows, order, strict=True))
        )
        ids, logprobs = sample(sampler, logits[order], rows, [positions[i] for i in order])
        assert ids == [alone[index] for index in order]
        assert [logprobs.get(i) for i in range(len(order))] == [alone_logprobs[i] for i in order]


def test_a_filter_leaves_its_neighbours_whole() -> None:
    """A neighbour's top-p does not cost an unfiltered row its least likely tokens, though their sum
    is lost in rounding."""
    vocab = 50_000
    logits = torch.full((2, vocab), -12.0)
    logits[:, 0] = 8.0
    sampler = sampler_of(
        new_row(0, temperature=1.0, seed=1),
        new_row(1, temperature=1.0, seed=2, top_p=0.9, top_k=100, min_p=0.1),
        vocab_size=vocab,
    )
    seen: list[Tensor] = []
    original = sampler._sample_random

    def spied(logits_RV: Tensor, rows: Any, positions: Any) -> Tensor:
        ids = original(logits_RV, rows, positions)
        seen.append(logits_RV)
        return ids

    sampler._sample_random = spied  # type: ignore[method-assign]
    sample(sampler, logits, [0, 1], [3, 3])
    assert int(seen[0][0].isfinite().sum()) == vocab
    assert int(seen[0][1].isfinite().sum()) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("whole_row", [False, True])
def test_bad_logits(bad: float, whole_row: bool) -> None:
    """A row that holds NaN or +Inf, or nothing but -Inf, is reported as bad; the others are sampled
    as without it."""
    logits = random_logits(len(MIXED), 6)
    positions = [10] * len(MIXED)
    rows = list(range(len(MIXED)))
    clean, _ = sample(
        sampler_of(*(new_row(i, **settings) for i, settings in enumerate(MIXED))),
        logits,
        rows,
        positions,
    )
    for hit in rows:
        broken = logits.clone()
        broken[hit, slice(None) if whole_row else 30] = bad
        sampler = sampler_of(*(new_row(i, **settings) for i, settings in enumerate(MIXED)))
        ids, logprobs = sample(sampler, broken, rows, positions)
        if whole_row or bad != -math.inf:
            assert ids[hit] == BAD_LOGITS and hit not in logprobs
        else:
            assert 0 <= ids[hit] < V and ids[hit] != 30
        assert ids[:hit] + ids[hit + 1 :] == clean[:hit] + clean[hit + 1 :]


def test_padding_rows_may_hold_anything() -> None:
    """NaN in the head's padding rows ends nobody."""
    logits = random_logits(1, 7)
    logits[0, V:] = math.nan
    assert sample(sampler_of(new_row(0, temperature=0.0)), logits, [0], [3])[0] == [
        int(logits[0, :V].argmax())
    ]


def test_penalties_follow_the_output() -> None:
    """A token's count grows when it is sampled: with a flat distribution and a large frequency
    penalty each id is taken once before any is taken twice."""
    sampler = sampler_of(new_row(0, temperature=0.0, frequency_penalty=2.0), vocab_size=10)
    ids = [sample(sampler, torch.zeros(1, 10), [0], [3 + step])[0][0] for step in range(20)]
    assert ids == [*range(10), *range(10)]


def test_penalties_know_the_prompt_from_the_output() -> None:
    """A row that comes back with output already made continues with the same counts."""
    logits = torch.tensor([[1.0, 0.9, 0.8, 0.7]])
    fresh = sampler_of(new_row(0, tokens=[0], temperature=0.0, presence_penalty=0.25), vocab_size=4)
    first = [sample(fresh, logits, [0], [1 + step])[0][0] for step in range(4)]
    assert first == [0, 1, 2, 0]
    for num_output in range(1, 4):
        back = sampler_of(
            new_row(
                0,
                tokens=[0, *first[:num_output]],
                num_prompt_tokens=1,
                temperature=0.0,
                presence_penalty=0.25,
            ),
            vocab_size=4,
        )
        rest = [sample(back, logits, [0], [1 + step])[0][0] for step in range(num_output, 4)]
        assert rest == first[num_output:]


def test_a_row_forgets_its_last_request() -> None:
    """Parameters of the request that had a row before leave no trace."""
    logits = random_logits(1, 8)
    sampler = sampler_of(
        new_row(
            0,
            temperature=1.0,
            top_k=1,
            logit_bias={2: 100.0},
            repetition_penalty=9.0,
            min_tokens=9,
            stop=(int(logits[0, :V].argmax()),),
            logprobs=3,
        )
    )
    sample(sampler, logits, [0], [3])
    sampler.set_row(new_row(0, temperature=0.0))
    ids, logprobs = sample(sampler, logits, [0], [4])
    assert (ids, logprobs) == ([int(logits[0, :V].argmax())], {})


def test_min_tokens() -> None:
    """Stop ids are masked while the output has fewer than min_tokens tokens."""
    logits = torch.zeros(1, V_PAD)
    logits[0, 9] = 5.0
    logits[0, 4] = 1.0
    sampler = sampler_of(new_row(0, temperature=0.0, min_tokens=3, stop=(9,)))
    ids = [sample(sampler, logits, [0], [3 + n])[0][0] for n in range(5)]
    assert ids == [4, 4, 4, 9, 9]


def test_logprobs_are_those_of_the_model() -> None:
    """Log-probabilities ignore bias, penalties, temperature and filters; the chosen token comes
    first with its rank, then the most likely ones."""
    logits = random_logits(1, 9)
    wanted = logits[0, :V].log_softmax(-1)
    order = wanted.argsort(descending=True).tolist()
    sampler = sampler_of(
        new_row(
            0, temperature=0.5, top_k=1, logprobs=3, logit_bias={order[40]: 100.0}, seed=1,
            presence_penalty=1.0,
        )
    )  # fmt: skip
    ids, logprobs = sample(sampler, logits, [0], [3])
    assert ids == [order[40]]
    assert logprobs[0].token_ids == (order[40], *order[:3])
    assert logprobs[0].rank == 41
    assert list(logprobs[0].logprobs) == pytest.approx(
        wanted[[order[40], *order[:3]]].tolist(), abs=1e-6
    )


@pytest.mark.parametrize("num_top", [0, 1, 5, V, V + 5])
def test_token_logprobs(num_top: int) -> None:
    """Of each row: the token, the top ones in order, never more than there are, rank from 1."""
    logprobs = random_logits(4, 10, V).log_softmax(-1)
    found = token_logprobs(logprobs, [0, 1, 2, 59], num_top)
    for row, token_id in enumerate([0, 1, 2, 59]):
        order = logprobs[row].argsort(descending=True, stable=True).tolist()
        assert found[row].token_ids == (token_id, *order[:num_top])
        assert found[row].rank == order.index(token_id) + 1
        ids = list(found[row].token_ids)
        assert list(found[row].logprobs) == logprobs[row, ids].tolist()


def test_minus_infinity_is_clamped() -> None:
    """Minus infinity becomes -9999.0 and nothing else changes."""
    logprobs = torch.tensor([[0.0, -math.inf, -math.inf]])
    (found,) = token_logprobs(logprobs, [1], 3)
    assert found.logprobs == (-9999.0, 0.0, -9999.0, -9999.0)
    assert found.rank == 2
