"""Penalties and filters against plain definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from pico_vllm.sampler.logits import (
    PenaltyCounts,
    apply_penalties,
    keep_min_p,
    keep_top_k,
    keep_top_p,
)


def kept(logits_RV: Tensor) -> list[set[int]]:
    return [set(row.isfinite().nonzero()[:, 0].tolist()) for row in logits_RV]


def in_order(row: np.ndarray) -> np.ndarray:
    """Ids, the most likely first, the lower id first among equals."""
    return np.lexsort((np.arange(len(row)), -row))


def brute_top_k(row: np.ndarray, k: int) -> set[int]:
    return set(in_order(row)[:k].tolist())


def brute_top_p(row: np.ndarray, p: float) -> set[int]:
    exp = np.exp(row.astype(np.float64) - row.max())
    probs = exp / exp.sum()
    total, found = 0.0, set()
    for token_id in in_order(row).tolist():
        found.add(token_id)
        total += probs[token_id]
        if total >= p:
            break
    return found


def brute_min_p(row: np.ndarray, p: float) -> set[int]:
    exp = np.exp(row.astype(np.float64) - row.max())
    return set(np.flatnonzero(exp >= p).tolist())


def random_logits(rows: int, vocab: int, seed: int, *, ties: bool) -> Tensor:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    return (logits * 2).round() / 2 if ties else logits


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab", [1, 2, 7, 100, 3000])
def test_top_k(vocab: int, ties: bool) -> None:
    """Exactly k tokens stay, the lowest ids among equals; the kept logits are unchanged; k at or
    above the vocabulary keeps all."""
    for seed in range(5):
        logits = random_logits(6, vocab, seed, ties=ties)
        k = torch.tensor([1, 2, 3, max(1, vocab // 2), vocab, vocab + 5]).clamp(max=vocab + 5)
        filtered = logits.clone()
        keep_top_k(filtered, k)
        for row in range(6):
            wanted = brute_top_k(logits[row].numpy(), int(k[row]))
            assert kept(filtered)[row] == wanted
            assert len(wanted) == min(int(k[row]), vocab)
            ids = list(wanted)
            assert torch.equal(filtered[row, ids], logits[row, ids])


def test_top_k_of_all_equal() -> None:
    """Among equal logits top-k keeps ids 0 to k - 1."""
    logits = torch.zeros(2, 50)
    keep_top_k(logits, torch.tensor([7, 1]))
    assert kept(logits) == [set(range(7)), {0}]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab", [1, 2, 7, 100, 3000])
def test_top_p(vocab: int, ties: bool) -> None:
    """The smallest set of most likely tokens that reaches p stays, at least one, the lowest ids
    among equals; also where it is wider than the first guess."""
    for seed in range(5):
        logits = random_logits(6, vocab, seed, ties=ties)
        p = torch.tensor([1e-9, 0.1, 0.5, 0.9, 0.99, 0.9999])
        filtered = logits.clone()
        keep_top_p(filtered, p)
        for row in range(6):
            wanted = brute_top_p(logits[row].numpy(), float(p[row]))
            got = kept(filtered)[row]
            # Sums in fp32 may fall on the other side of p by one token; equal sums may not.
            assert len(got ^ wanted) <= (1 if float(p[row]) > 0.9 else 0)
            ids = list(got)
            assert torch.equal(filtered[row, ids], logits[row, ids])


def test_top_p_of_a_flat_row() -> None:
    """A flat distribution over 5,000 tokens keeps the share that p asks for, from the lowest id
    on."""
    logits = torch.zeros(1, 5000)
    keep_top_p(logits, torch.tensor([0.5]))
    (ids,) = kept(logits)
    assert abs(len(ids) - 2500) <= 2 and ids == set(range(len(ids)))


def test_top_p_after_top_k() -> None:
    """Tokens that an earlier filter masked stay masked."""
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0]])
    keep_top_k(logits, torch.tensor([3]))
    keep_top_p(logits, torch.tensor([0.99999]))
    assert kept(logits) == [{0, 1, 2}]


@pytest.mark.parametrize("vocab", [1, 7, 300])
def test_min_p(vocab: int) -> None:
    """Tokens at least min_p as likely as the best stay, the best always; 0 keeps all."""
    logits = random_logits(5, vocab, 1, ties=False)
    p = torch.tensor([0.0, 0.01, 0.3, 0.999, 1.0])
    filtered = logits.clone()
    keep_min_p(filtered, p)
    for row in range(5):
        assert kept(filtered)[row] == brute_min_p(logits[row].numpy(), float(p[row]))


def test_large_and_masked_logits() -> None:
    """Filters give no NaN for logits of +-60 and of minus infinity, and keep the best token."""
    logits = torch.tensor([[60.0, -60.0, -math.inf, 59.0], [-math.inf, -60.0, -math.inf, -60.0]])
    logits = logits - logits.max(dim=1, keepdim=True).values
    for keep, value in ((keep_top_k, 1), (keep_top_p, 1e-9), (keep_min_p, 1.0)):
        filtered = logits.clone()
        keep(filtered, torch.tensor([value, value]))
        assert not bool(filtered.isnan().any())
        assert [0 in kept(filtered)[0], 1 in kept(filtered)[1]] == [True, True]


def counts_of(prompt: list[int], output: list[int], vocab: int) -> PenaltyCounts:
    return PenaltyCounts.of(prompt, output, vocab, torch.device("cpu"))


def test_penalties() -> None:
    """Repetition divides positive and multiplies negative logits of prompt and output, then
    frequency counts and presence marks the output alone."""
    logits = torch.tensor([2.0, -2.0, 2.0, -2.0, 2.0, -2.0])
    counts = counts_of([0, 1, 1, 1], [2, 3, 3, 3], 6)
    apply_penalties(logits, counts, presence=0.5, frequency=0.25, repetition=2.0)
    assert logits.tolist() == pytest.approx(
        [1.0, -4.0, 1.0 - 0.25 - 0.5, -4.0 - 0.75 - 0.5, 2.0, -2.0]
    )


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("presence", 1.5, [1.0, -0.5, -0.5]),
        ("frequency", 1.5, [1.0, -0.5, -2.0]),
        ("repetition", 4.0, [0.25, 0.25, 0.25]),
        ("presence", -1.5, [1.0, 2.5, 2.5]),
    ],
)
def test_each_penalty_alone(name: str, value: float, wanted: list[float]) -> None:
    """Each penalty does its own part: the prompt counts for repetition only, frequency grows with
    each use, presence does not, and negative ones favour."""
    logits = torch.ones(3)
    none = {"presence": 0.0, "frequency": 0.0, "repetition": 1.0}
    apply_penalties(logits, counts_of([0, 0], [1, 2, 2], 3), **(none | {name: value}))
    assert logits.tolist() == wanted


def test_counts_of_an_empty_output() -> None:
    """A request that has said nothing yet has all output counts at zero."""
    counts = counts_of([3, 3], [], 5)
    assert counts.in_prompt_V.tolist() == [False, False, False, True, False]
    assert counts.output_counts_V.tolist() == [0.0] * 5
