"""Attention of fresh prompts in Gluon: its source on the CPU, its code for sm_90, and the GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled import resources_of
from pairwise import pairwise
from torch import Tensor

from pico_vllm.kernels import hopper_prefill as source
from pico_vllm.kernels.gluon import HAS_GLUON
from pico_vllm.kernels.hopper_prefill import (
    HEAD_DIMS,
    can_take,
    hopper_prefill,
    hopper_prefill_reference,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ALLOWED = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""About twice what rounding the result and the weights to the dtype costs."""
needs_gluon = pytest.mark.skipif(not HAS_GLUON, reason="this Triton has no Gluon")
on_hopper = pytest.mark.skipif(
    not can_take(DEVICE, torch.bfloat16, 2, 1, 128), reason="needs a Hopper and Gluon"
)


@dataclass
class Step:
    """Requests without context, and padding after the last."""

    q_THD: Tensor
    k_TGD: Tensor
    v_TGD: Tensor
    starts: Tensor

    def out(self) -> Tensor:
        """Cut from a wider tensor and full of NaN: neither contiguous nor right by chance."""
        num_tokens, num_heads, head_dim = self.q_THD.shape
        wide = self.q_THD.new_full((num_tokens, num_heads + 1, head_dim), float("nan"))
        return wide[:, 1:]

    def expected(self) -> Tensor:
        return hopper_prefill_reference(
            self.q_THD.float(), self.k_TGD.float(), self.v_TGD.float(), self.starts,
            scale=self.q_THD.shape[2] ** -0.5,
        )  # fmt: skip


def made(
    query_lens: list[int],
    *,
    group: int = 2,
    num_kv_heads: int = 1,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    num_padding: int = 0,
    device: torch.device = DEVICE,
) -> Step:
    """Padding is NaN."""
    num_heads = group * num_kv_heads
    generator = torch.Generator().manual_seed(1)
    # Cut from a fused projection: not contiguous.
    fused = torch.randn(
        sum(query_lens) + num_padding, num_heads + 2 * num_kv_heads, head_dim, generator=generator
    ).to(device, dtype)
    if num_padding:
        fused[-num_padding:] = float("nan")
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(device, torch.int32)
    return Step(*fused.split([num_heads, num_kv_heads, num_kv_heads], 1), starts)


def check(step: Step, run: Callable[..., Tensor] = hopper_prefill) -> Tensor:
    out = step.out()
    scale = step.q_THD.shape[2] ** -0.5
    assert run(step.q_THD, step.k_TGD, step.v_TGD, step.starts, scale=scale, out=out) is out
    allowed = ALLOWED[out.dtype]
    torch.testing.assert_close(out.float(), step.expected(), atol=allowed, rtol=allowed)
    assert out._base is not None and out._base[:, 0].isnan().all()
    return out


def emulated() -> Callable[..., Tensor]:
    from gluon_on_cpu import on_cpu  # needs Gluon

    return on_cpu(source).hopper_prefill


def made_on_cpu(query_lens: list[int], **options: Any) -> Step:
    return made(query_lens, device=torch.device("cpu"), **options)


@needs_gluon
def test_tokens_before_the_first_request_on_cpu() -> None:
    """They are another kernel's: left alone, as keys too."""
    step = made_on_cpu([70, 0, 30, 65], num_padding=5)
    alone = check(made_on_cpu([70, 0, 30, 65], num_padding=5), emulated())
    step.starts = step.starts.clamp(min=70)
    out = step.out()
    scale = step.q_THD.shape[2] ** -0.5
    emulated()(step.q_THD, step.k_TGD, step.v_TGD, step.starts, scale=scale, out=out)
    assert out[:70].isnan().all() and torch.equal(out[70:], alone[70:])


@needs_gluon
@pytest.mark.parametrize("query_lens", [[63, 64, 0, 65], [127, 1, 128, 129], [0, 600, 0]])
def test_source_on_cpu(query_lens: list[int]) -> None:
    """Requests one token shorter and longer than tiles and rounds, empty ones and padding: the
    kernel's source, each wait as late as it may be, equals the reference in fp32."""
    step = made_on_cpu(query_lens, num_padding=70)
    out = check(step, emulated())
    assert not out[sum(query_lens) :].any()


@needs_gluon
@pytest.mark.parametrize(
    ("group", "num_kv_heads", "head_dim", "dtype"),
    [(6, 1, 128, torch.bfloat16), (2, 2, 64, torch.float16), (4, 2, 64, torch.bfloat16)],
)
def test_shapes_on_cpu(group: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """Pairs of heads find their KV head, whatever the head dim and dtype."""
    shape = {"group": group, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "dtype": dtype}
    check(made_on_cpu([5, 130], num_padding=3, **shape), emulated())


@needs_gluon
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_neighbours_on_cpu(bad: float) -> None:
    """Keys and values of other requests that are no numbers change no bit."""
    lens = [30, 150, 100]
    step = made_on_cpu(lens)
    out = check(step, emulated())
    for r, start in enumerate([0, 30, 180]):
        mine = slice(start, start + lens[r])
        spoilt = made_on_cpu(lens)
        for x in (spoilt.k_TGD, spoilt.v_TGD):
            kept = x[mine].clone()
            x.fill_(bad)
            x[mine] = kept
        again = emulated()(spoilt.q_THD, spoilt.k_TGD, spoilt.v_TGD, spoilt.starts, scale=128**-0.5)
        assert torch.equal(again[mine], out[mine])


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from pico_vllm.kernels.hopper_prefill import (
    BLOCK_N, HEADS_PER_PROGRAM, NUM_STAGES, TILE_TOKENS, _hopper_prefill_kernel as kernel
)

def compiled(dtype, D):
    rows = {"q_desc": TILE_TOKENS, "k_desc": BLOCK_N, "v_desc": BLOCK_N}
    types = {
        name: f"tensordesc<{dtype}[{n},{D}],"
        f"{gl.NVMMASharedLayout.get_default_for([n, D], gl.bfloat16)!r}>"
        for name, n in rows.items()
    }
    types |= {"query_start_loc_ptr": "*i32", "out_ptr": f"*{dtype}", "scale_log2": "fp32"}
    numbers = ("num_tokens", "num_requests", "stride_ot", "stride_oh")
    types |= {name: "i32" for name in numbers}
    constants = dict(
        PAIRS_PER_KV_HEAD=3, HEADS=HEADS_PER_PROGRAM, D=D, TILE_TOKENS=TILE_TOKENS,
        BLOCK_N=BLOCK_N, NUM_STAGES=NUM_STAGES,
    )
    names = [p.name for p in kernel.params]
    aligned = ("query_start_loc_ptr", "out_ptr", "stride_ot", "stride_oh")
    source = GluonASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs=constants,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})

code = compiled(sys.argv[1], int(sys.argv[2]))
"""


@needs_gluon
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [("bf16", 128), pytest.param("fp16", 64, marks=pytest.mark.slow)]
)
def test_compiles_for_hopper(dtype: str, head_dim: int, tmp_path: Path) -> None:
    """It becomes code for sm_90 that spills no registers and fits a multiprocessor."""
    shared, usage = resources_of(COMPILE, dtype, head_dim, folder=tmp_path)
    assert shared <= 227 * 1024
    # What a warpgroup spills lies on its stack.
    assert "REG:168 STACK:0 " in usage and " LOCAL:0 " in usage


def test_devices_and_heads_that_are_refused() -> None:
    """Only a Hopper, and pairs of heads of 64 or 128 in 16 bits."""
    assert not can_take(torch.device("cpu"), torch.bfloat16, 12, 2, 128)
    if can_take(DEVICE, torch.bfloat16, 12, 2, 128):
        for dtype, *heads in (
            (torch.float32, 12, 2, 128), (torch.bfloat16, 6, 2, 128), (torch.bfloat16, 12, 5, 128),
            (torch.bfloat16, 12, 2, 96),
        ):  # fmt: skip
            assert not can_take(DEVICE, dtype, *heads)


def test_arguments_that_are_refused() -> None:
    """Each error names what it met."""
    q, k, v = torch.zeros(9, 8, 128, dtype=torch.bfloat16).split([4, 2, 2], 1)
    starts = torch.tensor([0, 9], dtype=torch.int32)
    shifted = torch.zeros(9 * 4 * 128 + 1, dtype=q.dtype)[1:].view(9, 4, 128)
    cases = [
        ((q.float(), k, v, starts), {}, "q is torch.float32 with head_dim 128; bf16 or fp16"),
        ((q[..., :96], k, v, starts), {}, r"head_dim 96; bf16 or fp16 and \(64, 128\)"),
        ((q[:, :3], k, v, starts), {}, "3 query heads are not an even multiple of 2 KV heads"),
        ((q[:, :2], k, v, starts), {}, "2 query heads are not an even multiple of 2 KV heads"),
        ((q, k[:, :0], v, starts), {}, "4 query heads are not an even multiple of 0 KV heads"),
        ((q, k[:8], v, starts), {}, r"k is \[8, 2, 128\] torch.bfloat16, not \[9, 2, 128\]"),
        ((q, k, v.half(), starts), {}, r"v is \[9, 2, 128\] torch.float16, not"),
        ((q, k, v, starts.long()), {}, r"query_start_loc is \[2\] torch.int64"),
        ((q, k, v, starts[:0]), {}, r"query_start_loc is \[0\]"),
        ((q, k, v, starts), {"scale": 0.0}, "scale 0.0 must be above 0"),
        ((q, k, v, starts), {"out": q[:, :2]}, r"out is \[9, 2, 128\]"),
        ((q, k, v.transpose(1, 2).contiguous().transpose(1, 2), starts), {}, "v has strides"),
        ((shifted, k, v, starts), {}, "q has strides .* from address"),
    ]
    for arguments, keywords, message in cases:
        with pytest.raises(ValueError, match=message):
            hopper_prefill(*arguments, **({"scale": 1.0} | keywords))


def test_no_tokens() -> None:
    """A step of nothing is nothing."""
    step = made_on_cpu([0])
    assert hopper_prefill(step.q_THD, step.k_TGD, step.v_TGD, step.starts, scale=1.0).numel() == 0


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    ("query_lens", "num_kv_heads", "shape"),
    pairwise(
        [[1, 63, 64, 65], [127, 0, 128, 129], [700, 1, 385], [2000]],
        [1, 2, 4],
        # What a kernel is compiled for.
        pairwise([2, 4, 6, 8], HEAD_DIMS, list(ALLOWED)),
    ),
)
def test_grid(
    query_lens: list[int], num_kv_heads: int, shape: tuple[int, int, torch.dtype]
) -> None:
    """Lengths around tiles and rounds, every GQA ratio and dtype: pairwise, any two of these
    values meet in a case. Padding is NaN and gives zeros; other requests' NaN changes no bit.
    """
    group, head_dim, dtype = shape
    step = made(
        query_lens, group=group, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype,
        num_padding=90,
    )  # fmt: skip
    out = check(step)
    assert not out[sum(query_lens) :].any()
    mine = slice(0, query_lens[0])
    for x in (step.q_THD, step.k_TGD, step.v_TGD):
        x[mine.stop :] = float("nan")
    again = hopper_prefill(step.q_THD, step.k_TGD, step.v_TGD, step.starts, scale=head_dim**-0.5)
    assert torch.equal(again[mine], out[mine])


@pytest.mark.gpu
@on_hopper
@pytest.mark.memcheck
def test_small() -> None:
    """A few tokens of contiguous tensors, which end where their memory does."""
    step = made([3, 70], group=4, head_dim=64)
    tensors = (x.contiguous() for x in (step.q_THD, step.k_TGD, step.v_TGD))
    out = hopper_prefill(*tensors, step.starts, scale=0.125)
    torch.testing.assert_close(out.float(), step.expected(), atol=1.6e-2, rtol=1.6e-2)


@pytest.mark.gpu
@on_hopper
def test_bits_depend_on_the_request_alone() -> None:
    """Other requests and padding change no bit, nor does another run."""
    alone = made([1000], group=6, num_kv_heads=2)
    out = check(alone)
    tensors = (alone.q_THD, alone.k_TGD, alone.v_TGD)
    padded = [torch.cat((x[5:38], x, x[:50])) for x in tensors]
    starts = torch.tensor([0, 33, 1033], dtype=torch.int32, device=DEVICE)
    for _ in range(20):
        assert torch.equal(check(alone), out)
        among = hopper_prefill(*padded, starts, scale=128**-0.5)
        assert torch.equal(among[33:1033], out)
        assert not among[1033:].any()


@pytest.mark.gpu
@on_hopper
def test_graph_serves_other_lengths() -> None:
    """A graph captured with one step's lengths gives another's results."""
    step = made([40, 1, 7, 0], group=2, num_kv_heads=2, head_dim=64)
    arguments = (step.q_THD, step.k_TGD, step.v_TGD, step.starts)
    hopper_prefill(*arguments, scale=0.125)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = hopper_prefill(*arguments, scale=0.125)
    step.starts.copy_(torch.tensor([0, 20, 21, 28, 46], dtype=torch.int32))
    graph.replay()
    torch.testing.assert_close(out.float(), step.expected(), atol=1.6e-2, rtol=1.6e-2)
