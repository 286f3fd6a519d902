from __future__ import annotations

import math

import pytest

from pico_vllm.bench.metrics import LatencyLimits, RequestTimes, distribution_ms, summarize
from pico_vllm.errors import ConfigError

NO_LIMITS = LatencyLimits()


def request(arrival_s: float, *token_s: float, prompt: int = 10, asked: int = 0) -> RequestTimes:
    return RequestTimes(
        arrival_s=arrival_s,
        num_prompt_tokens=prompt,
        num_output_tokens=asked or len(token_s),
        token_s=list(token_s),
    )


# TTFT 1.0, gaps 0.1 and 0.3, TPOT 0.2, end to end 1.4.
FIRST = request(2.0, 3.0, 3.1, 3.4)
# TTFT 0.5, no gap, no TPOT, end to end 0.5.
SECOND = request(4.0, 4.5, prompt=30)
# TTFT 2.0, gap 0.5, TPOT 0.5, end to end 2.5.
THIRD = request(4.5, 6.5, 7.0, prompt=20)


def test_one_request() -> None:
    """TTFT counts from the arrival, TPOT is the mean of the gaps, a single token has none."""
    assert (FIRST.ttft_s, FIRST.e2e_s) == (1.0, pytest.approx(1.4))
    assert FIRST.tpot_s == pytest.approx(0.2) and FIRST.max_itl_s == pytest.approx(0.3)
    assert (SECOND.ttft_s, SECOND.tpot_s, SECOND.max_itl_s) == (0.5, None, 0.0)


def test_a_run_by_hand() -> None:
    """Every figure of three requests, from the first arrival at 2 s to the last token at 7 s."""
    figures = summarize([FIRST, SECOND, THIRD], NO_LIMITS)
    assert figures == pytest.approx(
        {
            "num_requests": 3,
            "num_failed": 0,
            "duration_s": 5.0,
            "req_s": 3 / 5,
            "out_tok_s": 6 / 5,
            "total_tok_s": 66 / 5,
            "goodput_req_s": None,
            # 500, 1000, 2000
            "ttft_ms_mean": 3500 / 3,
            "ttft_ms_p50": 1000.0,
            "ttft_ms_p90": 1800.0,
            "ttft_ms_p99": 1980.0,
            # 100, 300, 500: pooled, a request with more tokens counts for more
            "itl_ms_mean": 300.0,
            "itl_ms_p50": 300.0,
            "itl_ms_p90": 460.0,
            "itl_ms_p99": 496.0,
            # 200, 500
            "tpot_ms_mean": 350.0,
            "tpot_ms_p50": 350.0,
            "tpot_ms_p90": 470.0,
            "tpot_ms_p99": 497.0,
            # 500, 1400, 2500
            "e2e_ms_mean": 4400 / 3,
            "e2e_ms_p50": 1400.0,
            "e2e_ms_p90": 2280.0,
            "e2e_ms_p99": 2478.0,
        }
    )


@pytest.mark.parametrize(
    ("limits", "num_good"),
    [
        ({"ttft_ms": 1000.0}, 2),
        ({"ttft_ms": 999.0}, 1),
        ({"tpot_ms": 201.0}, 2),
        ({"tpot_ms": 199.0}, 1),
        ({"itl_ms": 301.0}, 2),
        ({"itl_ms": 299.0}, 1),
        ({"e2e_ms": 2600.0}, 3),
        ({"e2e_ms": 1401.0}, 2),
        ({"ttft_ms": 1500.0, "itl_ms": 299.0}, 1),
        ({"ttft_ms": 900.0, "tpot_ms": 600.0, "itl_ms": 600.0, "e2e_ms": 600.0}, 1),
        ({"ttft_ms": 1.0}, 0),
    ],
)
def test_goodput_counts_who_meets_every_limit(limits: dict[str, float], num_good: int) -> None:
    """A limit is met when it is reached; an ITL limit holds for the longest gap."""
    figures = summarize([FIRST, SECOND, THIRD], LatencyLimits(**limits))
    assert figures["goodput_req_s"] == pytest.approx(num_good / 5)


def test_a_request_without_all_its_tokens_counts_as_failed() -> None:
    """It is in no latency and no throughput, and is never good."""
    cut = request(2.5, 2.6, 2.7, asked=3)
    lost = request(2.5, asked=3)
    figures = summarize([FIRST, cut, lost], LatencyLimits(ttft_ms=5000.0))
    assert (figures["num_requests"], figures["num_failed"]) == (3, 2)
    assert figures["ttft_ms_p50"] == 1000.0 and figures["e2e_ms_p99"] == pytest.approx(1400.0)
    assert figures["out_tok_s"] == pytest.approx(3 / 1.4)
    assert figures["goodput_req_s"] == pytest.approx(1 / 1.4)


def test_nothing_to_count_is_none_and_not_zero() -> None:
    """Neither a run in which all failed nor answers of one token make up figures."""
    failed = summarize([request(0.0, asked=2)], LatencyLimits(ttft_ms=1.0))
    assert failed["num_failed"] == 1
    assert all(v is None for k, v in failed.items() if not k.startswith("num_"))
    single = summarize([SECOND], NO_LIMITS)
    assert single["itl_ms_p99"] is None and single["tpot_ms_mean"] is None
    assert single["ttft_ms_p99"] == 500.0


def test_percentiles_of_a_hundred() -> None:
    """Interpolated between ranks: 1 to 101 ms has its p90 at 91 and its p99 at 100."""
    found = distribution_ms("x", [each / 1e3 for each in range(1, 102)])
    assert found == pytest.approx(
        {"x_ms_mean": 51.0, "x_ms_p50": 51.0, "x_ms_p90": 91.0, "x_ms_p99": 100.0}
    )


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan, math.inf])
def test_a_limit_that_is_none(limit: float) -> None:
    """The option is named with its value and the way out."""
    with pytest.raises(ConfigError, match=r"itl_limit_ms is .*; a limit must be above 0") as error:
        LatencyLimits(itl_ms=limit)
    assert error.value.param == "itl_limit_ms"
