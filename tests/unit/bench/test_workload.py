from __future__ import annotations

import json
from pathlib import Path

import pytest

from pico_vllm.bench.workload import Workload, check_workloads, read_workloads, select
from pico_vllm.errors import ConfigError

DECODE = Workload(id="d", kind="decode", batch=8, prompt=100, out=28)
MIXED = Workload(id="m", kind="mixed", batch=8, prompt=(10, 30), out=(100, 300))
PREFIX = Workload(id="p", kind="prefix", shared=50, suffix=(4, 8), out=1, requests=2)


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
            {"max_model_len": 128, "num_kv_blocks": 63},
            "d needs 64 blocks of KV at once and the pool holds 63; raise --num-kv-blocks or",
        ),
        (
            {"max_model_len": 128, "num_kv_blocks": 23, "block_size": 50},  # of 128 tokens three
            "d needs 24 blocks of KV at once and the pool holds 23; raise --num-kv-blocks or",
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
    check_workloads([DECODE], max_model_len=128, max_num_seqs=8, num_kv_blocks=64)
    check_workloads([MIXED, PREFIX], max_model_len=330, max_num_seqs=1, num_kv_blocks=21)
    check_workloads([DECODE, MIXED, PREFIX], max_model_len=None)


def test_workloads_of_a_file(tmp_path: Path) -> None:
    """They stand for our own; what is none is refused with its place, its value and a form to
    follow."""
    file = tmp_path / "mine.json"
    good = {"id": "a", "kind": "decode", "batch": 1024, "prompt": [5, 512], "out": 64}
    file.write_text(json.dumps({"workloads": [good], "comment": "ours"}))
    assert read_workloads("cuda", file) == [
        Workload(id="a", kind="decode", batch=1024, prompt=(5, 512), out=64)
    ]
    ttft = {"id": "b", "kind": "ttft", "prompt": 9}
    prefix = {"id": "p", "kind": "prefix", "shared": 4, "requests": 2}
    file.write_text(json.dumps([prefix | {"suffix": 5}]))
    (found,) = read_workloads("cuda", file)
    assert found.max_total_tokens == 10
    cases: list[tuple[object, str]] = [
        ([], "one at least"),
        ([good, good], "no id twice"),
        ([good | {"kind": "decod"}], "id 'a', kind 'decod'; kinds are decode, ttft, "),
        ([good | {"batch": 0}], "a: batch is 0; it takes a number from 1 on"),
        ([good | {"batch": [1, 2]}], r"a: batch is \(1, 2\); it takes a number"),
        ([good | {"batch": True}], "a: batch is True; it takes a number"),
        ([good | {"batchs": 3}], "unexpected keyword argument 'batchs'"),
        ([good | {"prompt": [9, 5]}], r"a: prompt is \(9, 5\); .*two that bound it"),
        ([good | {"prompt": "9"}], "a: prompt is 9; it takes a number"),
        ([good | {"prompt": 0}], "a: requests without a token"),
        ([good | {"prompt": [0, 9]}], "a: requests without a token"),
        ([good | {"shared": 5}], "a: decode takes no shared"),
        ([prefix | {"shared": 0}], "p: requests without a token"),
        ([prefix | {"prompt": 9, "batch": 2}], "p: prefix takes no batch, prompt"),
        ([prefix | {"out": 3}], "p: out is 3; prefix takes 1 alone"),
        ([ttft | {"out": 9}], "b: out is 9; ttft takes 1 alone"),
        ([good | {"out": 1}], "a: out is 1; decode takes a number from 2 on"),
        ([good | {"out": [2, 9]}], r"a: out is \(2, 9\); decode takes a number"),
        ([prefix | {"requests": 1}], "p: requests is 1; prefix takes 2 at least"),
        ([{"kind": "ttft", "prompt": 9}], "missing 1 required keyword-only argument: 'id'"),
        (["none"], "'none' is no object"),
        (None, "NoneType"),
    ]
    file.write_text('{"x": 1}')
    with pytest.raises(ConfigError, match='workloads: an object has them as its "workloads"; see'):
        read_workloads("cuda", file)
    with pytest.raises(ConfigError, match="workloads: No such file or directory; see"):
        read_workloads("cuda", tmp_path / "nobody.json")
    for workloads, message in cases:
        file.write_text(json.dumps({"workloads": workloads}))
        with pytest.raises(ConfigError, match=message) as error:
            read_workloads("cuda", file)
        assert error.value.param == "workloads" and str(file) in error.value.message
    file.write_text("[" * 100_000)
    for missing in (file, tmp_path, tmp_path / "nobody.json"):
        with pytest.raises(
            ConfigError, match=r"does not hold workloads: .* see .* for one that does"
        ):
            read_workloads("cuda", missing)


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
