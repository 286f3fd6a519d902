from __future__ import annotations

import pytest

from pico_vllm.bench.workload import Workload, check_workloads, read_workloads, select
from pico_vllm.errors import ConfigError

DECODE = Workload(id="d", kind="decode", batch=8, prompt=100, out=28)
MIXED = Workload(id="m", kind="mixed", batch=8, prompt=(10, 30), out=(100, 300))
PREFIX = Workload(id="p", kind="prefix", shared=50, suffix=(4, 8), out=1)


def test_sizes_of_a_workload() -> None:
    """The longest request counts for the window, the middle of the answer for what is read."""
    assert [w.max_total_tokens for w in (DECODE, MIXED, PREFIX)] == [128, 330, 59]
    assert (DECODE.mean_context_tokens, MIXED.mean_context_tokens) == (114.0, 120.0)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (
            {"max_model_len": 127},
            "d needs 128 tokens a request and the window holds 127; raise --max-model-len or",
        ),
        (
            {"max_model_len": 128, "max_num_seqs": 7},
            "d needs 8 requests at once and max_num_seqs is 7; raise --max-num-seqs or",
        ),
        (
            {"max_model_len": 128, "num_kv_tokens": 1023},
            "d needs 1024 tokens of KV at once and the pool holds 1023; raise --num-kv-blocks or",
        ),
    ],
)
def test_a_decode_that_does_not_fit_is_refused(limits: dict[str, int], message: str) -> None:
    """The error names the workload, its need, the limit and the way out."""
    with pytest.raises(ConfigError) as error:
        check_workloads([DECODE], **limits)
    assert error.value.message.startswith(message)


def test_what_fits_or_is_not_known_passes() -> None:
    """Equal is enough; other kinds may wait in line; None refuses nothing."""
    check_workloads([DECODE], max_model_len=128, max_num_seqs=8, num_kv_tokens=1024)
    check_workloads([MIXED, PREFIX], max_model_len=330, max_num_seqs=1, num_kv_tokens=330)
    check_workloads([DECODE, MIXED, PREFIX], max_model_len=None)


def test_the_files_hold_the_workloads_that_engines_are_compared_on() -> None:
    """Their ids, and the choice by id."""
    assert [workload.id for workload in read_workloads("cuda")] == [
        "decode-b1", "decode-b8", "decode-b32", "decode-b128", "decode-b256", "long-b1",
        "long-b16", "prefill-8k", "mixed-256", "prefix-2083", "prefix-144",
    ]  # fmt: skip
    chosen = select(read_workloads("cpu"), "cpu-prefill-512, cpu-decode-b1")
    assert [workload.id for workload in chosen] == ["cpu-prefill-512", "cpu-decode-b1"]
    with pytest.raises(ConfigError, match="no workload decode-b1; there are cpu-decode-b1, "):
        select(read_workloads("cpu"), "decode-b1")
