"""When requests arrive: fixed before the first one runs, so that a slow engine delays none of
them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pico_vllm.errors import ConfigError

MIN_BURSTINESS, MAX_BURSTINESS = 0.01, 1000.0
"""Beyond these a gamma distribution is one crowd, or a clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Bursts of a fixed size whose gaps are gamma-distributed; the mean rate holds whatever the
    shape."""

    rate_req_s: float
    """Requests a second, on average."""
    burstiness: float = 1.0
    """Shape of the gamma distribution: 1 is a Poisson process, less is burstier, more is more
    regular. Counted as vLLM counts it."""
    burst_size: int = 1
    """Requests that arrive at the same moment."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate_req_s) and self.rate_req_s > 0):
            raise ConfigError(
                f"rate is {self.rate_req_s:g} requests a second; it must be above 0 and finite (a "
                "burst of all requests at once: --burst-size as large as --num-requests)",
                param="rate",
            )
        if not MIN_BURSTINESS <= self.burstiness <= MAX_BURSTINESS:
            raise ConfigError(
                f"burstiness is {self.burstiness:g}; give one from {MIN_BURSTINESS:g} to "
                f"{MAX_BURSTINESS:g}, 1 for a Poisson process",
                param="burstiness",
            )
        if self.burst_size < 1:
            raise ConfigError(
                f"burst_size is {self.burst_size}; give at least 1", param="burst_size"
            )

    def times_s(self, num_requests: int, random: np.random.Generator) -> NDArray[np.float64]:
        """In ascending order; the first burst comes at 0.

        Two rates get the same pattern from the same state of `random`, only faster or slower, so
        that rates differ in nothing else.
        """
        num_bursts = -(-num_requests // self.burst_size)
        mean_gap_s = self.burst_size / self.rate_req_s
        gaps_s = random.standard_gamma(self.burstiness, num_bursts - 1) / self.burstiness
        burst_s = np.concatenate(([0.0], np.cumsum(gaps_s * mean_gap_s)))
        return np.repeat(burst_s, self.burst_size)[:num_requests]
