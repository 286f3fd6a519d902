"""From the moments at which tokens came to latencies, throughput and goodput. No engine, no clock.

TTFT     scheduled arrival to first token: waiting in line counts
ITL      gap between two consecutive tokens of a request, pooled over all requests
TPOT     (end to end - TTFT) / (output tokens - 1), one number a request
goodput  requests a second that meet every stated limit
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from pico_vllm.errors import ConfigError

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """One request's moments, in seconds of one clock. Tokens are appended as they come."""

    arrival_s: float
    """When it was due, not when the engine got to it."""
    num_prompt_tokens: int
    num_output_tokens: int
    """Asked for."""
    token_s: list[float] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return len(self.token_s) == self.num_output_tokens

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.arrival_s

    @property
    def e2e_s(self) -> float:
        return self.token_s[-1] - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """None where one token is the whole answer."""
        if len(self.token_s) < 2:
            return None
        return (self.token_s[-1] - self.token_s[0]) / (len(self.token_s) - 1)

    @property
    def max_itl_s(self) -> float:
        return float(np.diff(self.token_s).max(initial=0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyLimits:
    """What a request must keep to count as good; None states no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    itl_ms: float | None = None
    """For every gap of the request, also the longest."""
    e2e_ms: float | None = None

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            limit = getattr(self, name)
            if limit is not None and not (math.isfinite(limit) and limit > 0):
                option = f"{name.removesuffix('_ms')}_limit_ms"
                raise ConfigError(
                    f"{option} is {limit:g}; a limit must be above 0 and finite, or left out",
                    param=option,
                )

    @property
    def is_stated(self) -> bool:
        return any(getattr(self, name) is not None for name in self.__dataclass_fields__)

    def are_met(self, request: RequestTimes) -> bool:
        """A request that did not get all its tokens meets nothing."""
        if not request.is_complete:
            return False
        measured_s = {
            "ttft_ms": request.ttft_s,
            "tpot_ms": request.tpot_s or 0.0,
            "itl_ms": request.max_itl_s,
            "e2e_ms": request.e2e_s,
        }
        limits_ms = {name: getattr(self, name) for name in measured_s}
        return all(
            limit_ms is None or measured_s[name] * 1e3 <= limit_ms
            for name, limit_ms in limits_ms.items()
        )


def summarize(requests: Sequence[RequestTimes], limits: LatencyLimits) -> dict[str, float | None]:
    """Latencies of the complete requests; throughput and goodput from the first arrival to the last
    token."""
    complete = [request for request in requests if request.is_complete]
    figures: dict[str, float | None] = {
        "num_requests": len(requests),
        "num_failed": len(requests) - len(complete),
        **dict.fromkeys(("duration_s", "req_s", "out_tok_s", "total_tok_s", "goodput_req_s")),
    }
    if complete:
        first_s = min(request.arrival_s for request in requests)
        duration_s = max(request.token_s[-1] for request in complete) - first_s
        num_output = sum(request.num_output_tokens for request in complete)
        num_prompt = sum(request.num_prompt_tokens for request in complete)
        figures |= {
            "duration_s": duration_s,
            "req_s": len(complete) / duration_s,
            "out_tok_s": num_output / duration_s,
            "total_tok_s": (num_prompt + num_output) / duration_s,
        }
        if limits.is_stated:
            figures["goodput_req_s"] = sum(map(limits.are_met, requests)) / duration_s
    itl_s = np.concatenate([[], *(np.diff(request.token_s) for request in complete)])
    tpot_s = [request.tpot_s for request in complete if request.tpot_s is not None]
    for name, values_s in (
        ("ttft", [request.ttft_s for request in complete]),
        ("itl", itl_s),
        ("tpot", tpot_s),
        ("e2e", [request.e2e_s for request in complete]),
    ):
        figures |= distribution_ms(name, values_s)
    return figures


def distribution_ms(name: str, values_s: ArrayLike) -> dict[str, float | None]:
    """Mean and percentiles in milliseconds, interpolated linearly; None of no values."""
    keys = [f"{name}_ms_mean", *(f"{name}_ms_p{each}" for each in PERCENTILES)]
    values_ms = np.asarray(values_s, np.float64) * 1e3
    if not values_ms.size:
        return dict.fromkeys(keys)
    found = [values_ms.mean(), *np.percentile(values_ms, PERCENTILES)]
    return dict(zip(keys, map(float, found), strict=True))
