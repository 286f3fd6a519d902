from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from pico_vllm.bench.arrivals import Arrivals
from pico_vllm.errors import ConfigError


def times_s(num_requests: int, seed: int = 0, **settings: Any) -> np.ndarray:
    return Arrivals(**settings).times_s(num_requests, np.random.default_rng(seed))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_shape(burstiness: float) -> None:
    """Gamma gaps: mean 1 / rate, coefficient of variation 1 / sqrt(burstiness)."""
    gaps_s = np.diff(times_s(40_001, rate_req_s=5.0, burstiness=burstiness))
    assert gaps_s.min() >= 0
    # 40,000 gaps: the mean is known to 1 % at the widest spread, the spread itself a little worse.
    assert gaps_s.mean() == pytest.approx(1 / 5, rel=0.03)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_poisson_gaps_are_exponential() -> None:
    """With the default shape the part of gaps longer than x is exp(-rate x)."""
    gaps_s = np.diff(times_s(40_001, rate_req_s=2.0))
    for x in (0.1, 0.5, 1.0, 2.0):
        assert (gaps_s > x).mean() == pytest.approx(math.exp(-2 * x), abs=0.01)


def test_bursts_arrive_together_at_the_same_mean_rate() -> None:
    """Three at a time, the last burst cut short, bursts three times as rare."""
    times = times_s(30_002, rate_req_s=6.0, burst_size=3)
    assert len(times) == 30_002 and times[0] == 0
    assert np.array_equal(times[:-2].reshape(-1, 3), np.repeat(times[:-2:3], 3).reshape(-1, 3))
    assert times[-1] == times[-2] > times[-3]
    assert len(np.unique(times)) == 10_001
    assert times[-1] / 10_000 == pytest.approx(3 / 6, rel=0.04)


def test_all_at_once() -> None:
    """A burst as large as the run."""
    assert times_s(5, rate_req_s=1.0, burst_size=5).tolist() == [0] * 5
    assert times_s(1, rate_req_s=1.0).tolist() == [0]


def test_rates_share_a_pattern_and_seeds_do_not() -> None:
    """Twice the rate is the same arrivals in half the time."""
    slow, fast = times_s(50, rate_req_s=1.0), times_s(50, rate_req_s=2.0)
    assert slow == pytest.approx(2 * fast) and np.all(np.diff(slow) >= 0)
    assert not np.allclose(times_s(50, seed=1, rate_req_s=1.0), slow)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rate_req_s": 0.0}, "rate is 0 requests a second; it must be above 0"),
        ({"rate_req_s": -2.0}, "rate is -2 requests a second"),
        ({"rate_req_s": math.inf}, "rate is inf requests a second"),
        ({"rate_req_s": math.nan}, "rate is nan requests a second"),
        ({"rate_req_s": 1.0, "burstiness": 0.0}, "burstiness is 0; give one from 0.01 to 1000"),
        ({"rate_req_s": 1.0, "burstiness": math.nan}, "burstiness is nan; give one from 0.01"),
        ({"rate_req_s": 1.0, "burst_size": 0}, "burst_size is 0; give at least 1"),
    ],
)
def test_what_is_no_traffic_is_refused(settings: dict[str, Any], message: str) -> None:
    """The value, the limit and the way out."""
    with pytest.raises(ConfigError) as error:
        Arrivals(**settings)
    assert error.value.message.startswith(message)
