"""Noise: the published generator, the right distribution, and no dependence on company."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from pico_vllm.sampler.philox import gumbel_noise, philox_4x32

# Known-answer vectors of Random123 for philox4x32-10: counter, key, result.
KNOWN = [
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def tensor(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize(("counter", "key", "wanted"), KNOWN)
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    """Philox4x32-10 gives the published words, alone and broadcast."""
    c0, c1, c2, c3 = map(tensor, counter)
    k0, k1 = map(tensor, key)
    assert tuple(int(word) for word in philox_4x32((c0, c1, c2, c3), (k0, k1))) == wanted
    wide = philox_4x32((c0.expand(3, 2), c1, c2, c3), (k0, k1))
    assert all(word.tolist() == [[value] * 2] * 3 for word, value in zip(wide, wanted, strict=True))


def python_philox(counter: list[int], key: list[int]) -> list[int]:
    """The definition in Python's own integers."""
    for _ in range(10):
        a, b = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (b >> 32) ^ counter[1] ^ key[0],
            b % 2**32,
            (a >> 32) ^ counter[3] ^ key[1],
            a % 2**32,
        ]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


def test_against_python_integers() -> None:
    """For random counters and keys, wrap-around included, the words are those of exact integers."""
    rng = np.random.default_rng(1)
    words = rng.integers(0, 2**32, (200, 6))
    counter = tuple(torch.from_numpy(words[:, i].copy()) for i in range(4))
    key = (torch.from_numpy(words[:, 4].copy()), torch.from_numpy(words[:, 5].copy()))
    ours = torch.stack(philox_4x32(counter, key), 1).tolist()  # type: ignore[arg-type]
    assert ours == [python_philox(row[:4], row[4:]) for row in words.tolist()]


SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 2**32, 42]


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_is_the_definition(seed: int) -> None:
    """Noise of token v is -log(-log(1 - u)) of word v % 4 of the counter (v // 4, position, sample
    index, 0) under the seed's two halves."""
    noise = gumbel_noise(tensor(seed), tensor(3), tensor(7), 10)[0].double()
    bits = seed % 2**64
    for token_id in range(10):
        word = python_philox([token_id // 4, 7, 3, 0], [bits % 2**32, bits >> 32])[token_id % 4]
        wanted = -np.log(-np.log1p(-(word + 0.5) * 2.0**-32))
        assert float(noise[token_id]) == pytest.approx(wanted, abs=1e-4)


def test_every_input_matters() -> None:
    """Seed (high half and sign too), sample index and position each change the noise."""
    rows = [
        *((seed, 0, 0) for seed in SEEDS),
        *((0, sample, 0) for sample in (1, 2, 127)),
        *((0, 0, position) for position in (1, 2, 2**31)),
    ]
    seeds, samples, positions = (tensor(*column) for column in zip(*rows, strict=True))
    noise = gumbel_noise(seeds, samples, positions, 64)
    for a, b in itertools.combinations(noise, 2):
        assert float((a - b).abs().min()) > 0 or int((a == b).sum()) <= 1


def test_noise_does_not_depend_on_company_or_vocabulary() -> None:
    """A row's noise is the same bits alone, in any batch, and for any larger vocabulary."""
    seeds, samples, positions = tensor(5, 6, 7), tensor(0, 1, 0), tensor(9, 9, 8)
    together = gumbel_noise(seeds, samples, positions, 301)
    for row in range(3):
        alone = gumbel_noise(
            seeds[row : row + 1], samples[row : row + 1], positions[row : row + 1], 1000
        )
        assert torch.equal(alone[0, :301], together[row])


def test_noise_is_finite() -> None:
    """No word, the smallest and the largest included, gives an infinite number."""
    noise = gumbel_noise(tensor(*range(64)), tensor(0), tensor(0), 100_000)
    assert bool(noise.isfinite().all())
    bits = torch.tensor([0.0, 2.0**32 - 1])
    uniform = ((bits + 0.5) * 2.0**-32).clamp_(max=1.0 - 2.0**-24)
    assert bool((-(-torch.log1p(-uniform)).log()).isfinite().all())


def test_noise_is_gumbel() -> None:
    """400,000 values follow the Gumbel distribution: Kolmogorov-Smirnov distance below the 0.1 %
    point, mean and variance as they should be, neighbours uncorrelated."""
    noise = gumbel_noise(tensor(*range(40)), tensor(0), tensor(11), 10_000).double().numpy()
    values = np.sort(noise.ravel())
    n = len(values)
    cdf = np.exp(-np.exp(-values))
    distance = max(
        np.abs(cdf - np.arange(1, n + 1) / n).max(), np.abs(cdf - np.arange(n) / n).max()
    )
    assert distance < 1.95 / np.sqrt(n)
    assert values.mean() == pytest.approx(np.euler_gamma, abs=4 * np.sqrt(np.pi**2 / 6 / n))
    assert values.var() == pytest.approx(np.pi**2 / 6, rel=0.02)
    for lag in (1, 2, 3, 4):
        correlation = np.corrcoef(noise[:, :-lag].ravel(), noise[:, lag:].ravel())[0, 1]
        assert abs(correlation) < 4 / np.sqrt(n)


def test_argmax_samples_from_softmax() -> None:
    """argmax of logits plus noise over 40,000 positions has the frequencies of softmax (chi-square
    with 6 degrees of freedom below its 0.1 % point)."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -2.0, 1.5])
    n = 40_000
    positions = torch.arange(n)
    noise = gumbel_noise(torch.full((n,), 1234), torch.zeros(n, dtype=torch.int64), positions, 7)
    counts = torch.bincount((logits + noise).argmax(1), minlength=7).double()
    expected = logits.double().softmax(0) * n
    assert float(((counts - expected) ** 2 / expected).sum()) < 22.46
