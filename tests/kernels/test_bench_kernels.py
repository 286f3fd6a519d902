"""The cases of `bench kernels`: what is timed side by side computes the same."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pico_vllm.bench import kernels
from pico_vllm.bench.kernels import KERNELS, KernelCase, Limits, Run, Sizes, cases, time_kernels
from pico_vllm.config.model import ModelConfig
from pico_vllm.errors import ConfigError
from pico_vllm.kernels import hopper_decode, hopper_head, hopper_split_k
from pico_vllm.kernels.paged_decode import rope_paged_decode
from pico_vllm.layers.linear import Parts

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def sizes(architecture: str) -> Sizes:
    """A tiny model: Qwen2's has a bias, Qwen3's normalises heads."""
    config: dict[str, Any] = {
        "architectures": [f"{architecture}ForCausalLM"],
        "model_type": architecture.lower(),
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100.0,
        "tie_word_embeddings": True,
    }
    return Sizes(
        ModelConfig.from_hf(config),
        rows=[1, 3],
        contexts=[21],
        block_size=8,
        dtype=torch.float32,
        device=DEVICE,
        prefill_tokens=19,
        cold_bytes=20_000,
    )


@pytest.mark.parametrize(
    ("architecture", "kernel"),
    [
        *(("Qwen2", kernel) for kernel in KERNELS),
        ("Qwen3", "decode_attention"),
        ("Qwen3", "rope_store_kv"),
    ],
)
def test_kernel_and_twin_of_a_case_agree(architecture: str, kernel: str) -> None:
    """On the first set of tensors and on the last, which is another one."""
    torch.manual_seed(0)
    it = sizes(architecture)
    # The interpreter is slow: fewer splits, and of both kernels of a few rows the one with a
    # program for each two outputs once.
    if kernel == "decode_attention":
        it = replace(it, rows=[3])
    elif kernel in KERNELS[:5]:
        it = replace(it, rows=[1, 5])
    found = list(cases(it, [kernel]))
    assert len(found) == (2 if kernel in KERNELS[:6] else 1)
    for case in found:
        outputs = []
        for index in (0, case.num_sets - 1):
            twin = case.twin(index)
            ours = case.whole(case.ours(index))
            torch.testing.assert_close(ours, twin, rtol=2e-4, atol=2e-5)
            outputs.append(twin)
        assert not torch.equal(*outputs)
        if case.torch_run is not None:
            assert case.torch_run(0).numel() >= outputs[0].numel()


def test_cases_are_what_a_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a Hopper has kernels of its own, they are what is timed, each with what the one before
    leaves: qkv in parts, normalised rows, no logits."""
    taken = []

    def split(x_MK: Tensor, weight_NK: Tensor, *, max_splits: int) -> Tensor:
        taken.append(f"split of {len(x_MK)}")
        return hopper_split_k.hopper_split_k_reference(x_MK, weight_NK, max_splits)

    def decode(parts_SRND: Tensor, *around: Any, bias_N: Tensor | None, **options: Any) -> Tensor:
        taken.append(f"decode of {len(parts_SRND)} parts")
        parts = Parts(parts_SRND.flatten(2), bias_N)
        qkv_RND = kernels.add_up(parts).view(parts_SRND.shape[1:])
        return rope_paged_decode(qkv_RND, *around, **options)

    def choose(x_RE: Tensor, head_VE: Tensor, **around: Any) -> None:
        taken.append(f"choice of {len(x_RE)}")
        around["out_R"].copy_((x_RE @ head_VE.T).argmax(1))

    def yes(*sizes: Any) -> bool:
        return True

    for module, name, ours in (
        (hopper_split_k, "hopper_split_k", split),
        (hopper_decode, "hopper_rope_decode", decode),
        (hopper_head, "hopper_head", choose),
    ):
        monkeypatch.setattr(module, name, ours)
        monkeypatch.setattr(module, "can_take", yes)
    monkeypatch.setattr(hopper_head, "is_faster", lambda R, vocab_size: R > 8)
    torch.manual_seed(0)
    model = replace(sizes("Qwen2").model, hidden_size=192, num_heads=12)
    it = replace(sizes("Qwen2"), model=model, rows=[5, 26])
    for case in cases(it, ["qkv", "o", "head", "decode_attention"]):
        taken.clear()
        twin = case.twin(0)
        torch.testing.assert_close(case.whole(case.ours(0)), twin, rtol=2e-4, atol=2e-5)
        is_few = case.rows == 5
        expected = {
            "qkv": "split of 26", "o": "split of 26", "head": "choice of 26",
            "decode_attention": "decode of 3 parts",
        }[case.kernel]  # fmt: skip
        assert taken == ([] if is_few else [expected]), case.kernel


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 32, 100])
@pytest.mark.parametrize("architecture", ["Qwen2", "Qwen3"])
def test_cases_of_a_device_agree(architecture: str, rows: int) -> None:
    """In bf16, at sizes that the kernels of a Hopper take."""
    torch.manual_seed(0)
    tiny = sizes(architecture)
    config = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "vocab_size": 20_000}
    it = replace(
        tiny,
        model=replace(tiny.model, **config),
        rows=[rows],
        contexts=[21, 300],
        block_size=16,
        dtype=torch.bfloat16,
    )
    for case in cases(it, [*KERNELS[:5], "decode_attention"]):
        twin, ours = case.twin(1), case.whole(case.ours(1))
        if case.kernel == "head":
            # Two logits may be as high as each other in bf16.
            assert (ours == twin).float().mean() > 0.9
            continue
        # Both round what is between to bf16, by 2^-9 each: a norm's sum, a product, SiLU.
        torch.testing.assert_close(ours, twin, rtol=3e-2, atol=5e-3)


def test_torch_beside_ours_is_the_same_work() -> None:
    """The operations of torch that need no other layout give the twin's answer."""
    torch.manual_seed(0)
    for case in cases(sizes("Qwen2"), ["rms_norm", "silu_mul"]):
        assert case.torch_run is not None
        torch.testing.assert_close(case.torch_run(1), case.twin(1), rtol=1e-5, atol=1e-6)


class FakeTimer:
    """20 us in a graph, 50 one by one."""

    def in_graph_us(self, run: Run, num_sets: int) -> float:
        return 20.0

    def eager_us(self, run: Run) -> float:
        return 50.0


def test_lines_hold_rates_and_the_part_of_the_limit() -> None:
    """Bytes over time for what reads, operations over time for a long prompt's attention."""
    limits = Limits(read_bytes_s=5e9, matmul_flop_s=1e10)
    lines = {
        line["id"]: line
        for line in time_kernels(
            sizes("Qwen2"), ["o", "decode_attention", "prefill_attention"], FakeTimer(), limits
        )
    }
    assert list(lines) == [
        "o-r1", "o-r3", "decode_attention-r1-c21", "decode_attention-r3-c21",
        "prefill_attention-r19-c19",
    ]  # fmt: skip
    # 64 x 64 fp32, and as many in and out, in 20 us are 0.84 GB/s.
    assert lines["o-r1"]["pct_of_limit"] == pytest.approx(16.896)
    assert lines["o-r1"]["limit"] == "read"
    assert (lines["o-r1"]["twin_us"], lines["o-r1"]["twin_is_in_graph"]) == (20.0, True)
    assert (lines["o-r1"]["torch_us"], lines["o-r1"]["torch_name"]) == (20.0, "cuBLAS")
    decode = lines["decode_attention-r3-c21"]
    # 3 requests, 21 tokens, K and V of 2 heads of 16 fp32 are 16,128 bytes.
    assert decode["pct_of_limit"] == pytest.approx(100 * 16_128 / 20e-6 / 5e9, abs=1e-3)
    assert (decode["twin_us"], decode["twin_is_in_graph"]) == (50.0, False)
    prefill = lines["prefill_attention-r19-c19"]
    # 19 x 20 / 2 pairs, 4 heads, a product and a sum for scores and for values, 16 wide.
    assert prefill["pct_of_limit"] == pytest.approx(100 * 190 * 4 * 4 * 16 / 20e-6 / 1e10, abs=1e-3)
    assert prefill["limit"] == "matmul"
    assert prefill["tb_s"] is None and decode["tflop_s"] is None


def test_sets_are_as_many_as_no_cache_holds() -> None:
    """At least two, at most 512, together 256 MiB between."""
    it = replace(sizes("Qwen2"), cold_bytes=kernels.COLD_BYTES)
    assert [it.num_sets(n) for n in (1 << 30, 100 << 20, 4 << 20, 1 << 10)] == [2, 3, 64, 512]


def test_a_twin_without_room_has_no_figure() -> None:
    """The rest of the line stands."""

    class SmallTimer(FakeTimer):
        def eager_us(self, run: Run) -> float:
            raise torch.OutOfMemoryError("no room")

    case = next(cases(sizes("Qwen2"), ["rope_store_kv"]))
    assert isinstance(case, KernelCase) and not case.has_capturable_twin
    (line,) = time_kernels(sizes("Qwen2"), ["rope_store_kv"], SmallTimer(), Limits(1e9, 1e9))
    assert (line["us"], line["twin_us"], line["torch_us"]) == (20.0, None, None)


def test_a_kernel_without_room_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured before stands; the error says what did not fit, and what would."""

    class SmallTimer(FakeTimer):
        def in_graph_us(self, run: Run, num_sets: int) -> float:
            raise torch.OutOfMemoryError("no room")

    def no_room(*sizes: Any) -> KernelCase:
        raise torch.OutOfMemoryError("no room")

    limits = Limits(1e9, 1e9)
    message = "silu_mul with 19 rows does not fit into the device's memory; lower --rows"
    with pytest.raises(ConfigError, match=message):
        list(time_kernels(sizes("Qwen2"), ["silu_mul"], SmallTimer(), limits))
    monkeypatch.setattr(kernels, "decode_attention_case", no_room)
    lines = time_kernels(sizes("Qwen2"), ["o", "decode_attention"], FakeTimer(), limits)
    assert [next(lines)["id"], next(lines)["id"]] == ["o-r1", "o-r3"]
    with pytest.raises(ConfigError, match="with 1 rows and 21 tokens of context does not fit"):
        next(lines)


def test_one_case_at_a_time_has_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A case is gone before the next is made."""
    made: list[Any] = []

    def case_of(*of: Any) -> KernelCase:
        assert all(each() is None for each in made)
        case = rms_norm_case(sizes("Qwen2"))
        # A KernelCase takes no weak references; its functions, which have the tensors, do.
        made.extend(weakref.ref(run) for run in (case.ours, case.torch_run))
        return case

    rms_norm_case = kernels.rms_norm_case
    for name in ("linear_case", "decode_attention_case", "silu_mul_case"):
        monkeypatch.setattr(kernels, name, case_of)
    only = ["o", "decode_attention", "silu_mul"]
    lines = list(time_kernels(sizes("Qwen2"), only, FakeTimer(), Limits(1e9, 1e9)))
    assert len(lines) == 5 and len(made) == 10


@pytest.mark.gpu
def test_graphs_time_less_than_launches() -> None:
    """A launch in a graph costs no Python."""
    timer = kernels.GraphTimer(DEVICE)
    (case,) = cases(sizes("Qwen2"), ["rms_norm"])
    assert 0 < timer.in_graph_us(case.ours, case.num_sets) < timer.eager_us(case.ours)
