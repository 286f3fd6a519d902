"""Head and greedy choice in Gluon: its source on the CPU, its code for sm_90, and the GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled import resources_of
from pairwise import pairwise
from torch import Tensor

from pico_vllm.kernels import hopper_head as source
from pico_vllm.kernels.gluon import HAS_GLUON
from pico_vllm.kernels.head_sample import BAD_LOGITS, HeadScratch, head_sample_reference
from pico_vllm.kernels.hopper_head import BLOCK_K, TILE_TOKENS, can_take, hopper_head, is_faster

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16)
NUM_ROWS = 300
needs_gluon = pytest.mark.skipif(not HAS_GLUON, reason="this Triton has no Gluon")
on_hopper = pytest.mark.skipif(
    not can_take(DEVICE, torch.bfloat16, 64), reason="needs a Hopper and Gluon"
)


def made(
    R: int, V: int, E: int, dtype: torch.dtype = torch.bfloat16, device: torch.device = DEVICE
) -> tuple[Tensor, Tensor]:
    """x is cut from a wider tensor. Numbers are eighths, so that logits are exact and often
    equal."""
    options = {"generator": torch.Generator(device).manual_seed(R + V), "device": device}
    x_RE = torch.randint(-8, 9, (R, E), **options) / 8
    head_VE = torch.randint(-8, 9, (V, E), **options) / 8
    wide = torch.full((R, E + 8), float("nan"), dtype=dtype, device=device)
    wide[:, :E] = x_RE
    return wide[:, :E], head_VE.to(device, dtype)


def expected_ids(x_RE: Tensor, head_VE: Tensor, vocab_size: int) -> Tensor:
    logits_RV = (x_RE.double() @ head_VE.double().T).to(x_RE.dtype)
    greedy_R = torch.zeros(len(x_RE), device=x_RE.device)
    return head_sample_reference(
        logits_RV, torch.zeros_like(logits_RV).float(), greedy_R, vocab_size=vocab_size
    )


def run(
    x_RE: Tensor,
    head_VE: Tensor,
    vocab_size: int,
    launch: Callable[..., None] = hopper_head,
    scratch: HeadScratch | None = None,
) -> Tensor:
    """Also checks what it leaves: ids at the requests' rows alone, and the scratch as it was."""
    R, device = len(x_RE), x_RE.device
    scratch = scratch or HeadScratch.allocate(device)
    fresh = HeadScratch.allocate(device)
    rows_R = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(R))[:R].to(device)
    last_tokens_W = torch.full((NUM_ROWS,), -9, device=device)
    wide = torch.full((R + 1,), -9, device=device)
    launch(
        x_RE, head_VE, vocab_size=vocab_size, rows_R=rows_R.int(), last_tokens_W=last_tokens_W,
        scratch=scratch, out_R=wide[:R],
    )  # fmt: skip
    out_R = wide[:R].clone()
    assert wide[R] == -9
    assert torch.equal(last_tokens_W[rows_R], out_R.clamp(min=0))
    assert (last_tokens_W == -9).sum() == NUM_ROWS - R
    assert torch.equal(scratch.keys, fresh.keys)
    assert torch.equal(scratch.counters, fresh.counters)
    return out_R


def emulated(num_stages: int = 3, num_programs: int = 3) -> Callable[..., None]:
    """Few programs, which take tile after tile."""
    from gluon_on_cpu import on_cpu, written_before  # needs Gluon

    kernel = on_cpu(source)
    names = kernel.hopper_head.__globals__
    names["NUM_MULTIPROCESSORS"] = num_programs
    names["_ordered"] = ordered

    def launch(x_RE: Tensor, head_VE: Tensor, **arguments: Any) -> None:
        requests = next(size for size in (64, 128, 256) if size >= len(x_RE))
        stage_bytes = (requests + TILE_TOKENS) * BLOCK_K * 2
        names["MAX_SHARED_BYTES"] = names["OTHER_BYTES"] + num_stages * stage_bytes
        with written_before(x_RE):
            kernel.hopper_head(x_RE, head_VE, **arguments)

    launch.names = names  # type: ignore[attr-defined]
    return launch


def ordered(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What two of the kernel's instructions do to a number; one that is none has no sign."""
    rounded = x.to(dtype)
    bits = torch.where(rounded.isnan(), 0x7FFF, rounded.view(torch.int16).long())
    return (torch.where(bits < 0, bits ^ 0x7FFF, bits) << 16).int()


@needs_gluon
@pytest.mark.parametrize(
    ("sizes", "num_stages", "dtype"),
    pairwise(
        # Less than a tile and a round, edges in all three, rings longer than a tile, many tiles.
        [(1, 8, 8, 8), (70, 500, 72, 401), (130, 1600, 200, 1600), (65, 200, 520, 193)],
        [2, 4],
        DTYPES,
    ),
)
def test_source_on_cpu(
    sizes: tuple[int, int, int, int], num_stages: int, dtype: torch.dtype
) -> None:
    """Sizes that no tile divides, short and long rings: the kernel's source, each wait as late as
    it may be, chooses the reference's ids, the lowest among equals."""
    R, V, E, vocab_size = sizes
    x_RE, head_VE = made(R, V, E, dtype, CPU)
    found = run(x_RE, head_VE, vocab_size, emulated(num_stages))
    assert torch.equal(found, expected_ids(x_RE, head_VE, vocab_size))


@needs_gluon
@pytest.mark.parametrize("left_out", ["gdc_wait", "warpgroup_mma_wait"])
def test_the_emulation_finds_what_is_left_out(left_out: str) -> None:
    """Without one of the waits the checks above fail."""
    launch = emulated()
    names = launch.names  # type: ignore[attr-defined]
    wait = names["warpgroup_mma_wait"]
    names[left_out] = lambda num_outstanding=0, deps=None: (
        deps and wait(num_outstanding and 99, deps)
    )
    x_RE, head_VE = made(30, 1600, 520, device=CPU)
    with pytest.raises(AssertionError):
        found = run(x_RE, head_VE, 1600, launch)
        assert torch.equal(found, expected_ids(x_RE, head_VE, 1600))


def check_bad_logits(device: torch.device, launch: Callable[..., None]) -> None:
    """NaN and both infinities end their request, wherever they are; the largest numbers do not,
    nor does what lies past the vocabulary."""
    x_RE = torch.zeros(40, 64, dtype=torch.bfloat16, device=device)
    head_VE = torch.ones(900, 64, dtype=torch.bfloat16, device=device)
    head_VE[::7] = -1
    head_VE[800:] = float("nan")
    x_RE[1, 5], x_RE[2, 5], x_RE[3, 5] = float("nan"), float("inf"), float("-inf")
    largest = torch.finfo(torch.bfloat16).max
    x_RE[4, 5], x_RE[5, 5] = largest, -largest
    expected = expected_ids(x_RE, head_VE, 800)
    assert expected[:7].tolist() == [0, *[BAD_LOGITS.value] * 3, 1, 0, 0]
    assert torch.equal(run(x_RE, head_VE, 800, launch), expected)
    head_VE[:] = 0
    head_VE[:, 5] = 1
    x_RE[:, 5] = -largest
    for vocab_size in (1, 200, 192, 800):  # nor does padding win where all are the lowest
        assert (run(x_RE, head_VE, vocab_size, launch) == 0).all()
    for infinity in (float("inf"), float("-inf")):  # at one token alone
        head_VE[:] = 1
        head_VE[777, 3] = infinity
        x_RE[:] = 0
        x_RE[:, 3] = 1
        assert (run(x_RE, head_VE, 900, launch) == BAD_LOGITS.value).all()
        assert (run(x_RE, head_VE, 777, launch) == 0).all()


@needs_gluon
def test_bad_logits_on_cpu() -> None:
    check_bad_logits(CPU, emulated())


def test_where_it_is_faster() -> None:
    """From 5 requests on, and from 129 on where tiles are whole turns of the card; rings fit."""
    for R in (1, 4, 5, 24, 25, 128, 129, 256, 257):
        assert is_faster(R, 151_936) is is_faster(R, 151_665) is (5 <= R <= 256), R
        assert is_faster(R, 128_256) is (5 <= R <= 128), R
    for requests in source.TILE_REQUESTS:
        stage_bytes = (requests + TILE_TOKENS) * BLOCK_K * 2 + 8
        num_bytes = source.num_stages(requests) * stage_bytes + 8 + 4 * requests
        assert source.num_stages(requests) >= 4 and num_bytes <= source.MAX_SHARED_BYTES


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from pico_vllm.kernels import hopper_head as source

dtype, requests = sys.argv[1], int(sys.argv[2])
kernel = source._hopper_head_kernel
sizes = {"x_desc": requests, "main_desc": source.MAIN_TOKENS, "rest_desc": source.REST_TOKENS}
types = {
    name: f"tensordesc<{dtype}[{size}, {source.BLOCK_K}],"
    f"{gl.NVMMASharedLayout.get_default_for([size, source.BLOCK_K], gl.bfloat16)!r}>"
    for name, size in sizes.items()
}
pointers = {
    "rows_ptr": "*i32", "last_tokens_ptr": "*i64", "key_ptr": "*i64", "counter_ptr": "*i32",
    "out_ptr": "*i64",
}
types |= pointers | dict.fromkeys(("num_requests", "vocab_size", "num_tiles"), "i32")
warps = source.num_warps(requests)
names = [p.name for p in kernel.params]
source = GluonASTSource(
    fn=kernel,
    signature={name: types.get(name, "constexpr") for name in names},
    constexprs=dict(ROUNDS=24, STAGES=source.num_stages(requests), WARPS=warps, USE_PDL=True),
    attrs={(names.index(name),): [["tt.divisibility", 16]] for name in pointers},
)
options = {"num_warps": warps, "launch_pdl": True}
code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
"""


@needs_gluon
@pytest.mark.parametrize(
    ("dtype", "requests"),
    [
        ("bf16", 256),
        pytest.param("fp16", 256, marks=pytest.mark.slow),
        pytest.param("bf16", 128, marks=pytest.mark.slow),
        ("fp16", 64),
    ],
)
def test_compiles_for_hopper(dtype: str, requests: int, tmp_path: Path) -> None:
    """It becomes code for sm_90 that spills no registers and fits a multiprocessor."""
    shared, usage = resources_of(COMPILE, dtype, requests, folder=tmp_path)
    assert shared <= source.MAX_SHARED_BYTES
    assert " STACK:0 " in usage and " LOCAL:0 " in usage


def test_what_is_refused() -> None:
    """Only a Hopper, 16 bits, and rows that the copy engine takes; each error names what it met."""
    assert not can_take(CPU, torch.bfloat16, 1536)
    if can_take(DEVICE, torch.bfloat16, 1536):
        assert not can_take(DEVICE, torch.float32, 1536)
        assert not can_take(DEVICE, torch.bfloat16, 1540)
    x, head = torch.zeros(9, 64).bfloat16(), torch.zeros(32, 64).bfloat16()
    shifted = torch.zeros(9 * 64 + 1).bfloat16()[1:].view(9, 64)
    cases: list[tuple[Tensor, Tensor, int, str]] = [
        (x.float(), head.float(), 32, r"x is torch.float32 \(9, 64\)"),
        (x[:, :60], head[:, :60], 32, r"\(9, 60\).*multiples of 8"),
        (x[:0], head, 32, r"\(0, 64\).*1 to 256 requests"),
        (x.new_zeros(257, 64), head, 32, r"\(257, 64\).*1 to 256 requests"),
        (x, head[:, :56], 32, r"the head is \(32, 56\)"),
        (x, head.half(), 32, r"torch.float16, not \(32, 64\) torch.bfloat16"),
        (x, head, 33, "vocab_size 33 is not from 1 to the 32"),
        (shifted, head, 32, "x has strides .* from address"),
        (x, head.T.contiguous().T, 32, "the head has strides"),
    ]
    for x_RE, head_VE, vocab_size, message in cases:
        with pytest.raises(ValueError, match=message):
            run(x_RE, head_VE, vocab_size)
    with pytest.raises(ValueError, match="rows has shape"):
        hopper_head(
            x, head, vocab_size=32, rows_R=torch.zeros(8).int(),
            last_tokens_W=torch.zeros(9).long(), out_R=torch.zeros(9).long(),
            scratch=HeadScratch.allocate(CPU),
        )  # fmt: skip


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    ("R", "sizes", "dtype"),
    pairwise(
        [1, 25, 64, 65, 128, 129, 256],
        [(151936, 1536, 151665), (151936, 1024, 151936), (128256, 4096, 128256), (1000, 72, 999)],
        DTYPES,
    ),
)
def test_grid(R: int, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Real and odd sizes, requests around tiles, ids equal to the reference's, again and again."""
    V, E, vocab_size = sizes
    x_RE, head_VE = made(R, V, E, dtype)
    expected, scratch = expected_ids(x_RE, head_VE, vocab_size), HeadScratch.allocate(DEVICE)
    for _ in range(3):
        assert torch.equal(run(x_RE, head_VE, vocab_size, scratch=scratch), expected)


@pytest.mark.gpu
@on_hopper
@pytest.mark.memcheck
@pytest.mark.parametrize(("R", "V", "E"), [(30, 500, 72), (200, 1000, 200)])
def test_small(R: int, V: int, E: int) -> None:
    """Sizes that no tile divides, of tensors that end where their memory does."""
    x_RE, head_VE = made(R, V, E)
    expected = expected_ids(x_RE, head_VE, V)
    assert torch.equal(run(x_RE.contiguous(), head_VE, V), expected)


@pytest.mark.gpu
@on_hopper
def test_bad_logits() -> None:
    check_bad_logits(DEVICE, hopper_head)


@pytest.mark.gpu
@on_hopper
def test_an_id_does_not_depend_on_the_batch() -> None:
    """Alone or among others, NaN too, in any place."""
    x_RE = torch.randn(256, 1536, device=DEVICE).bfloat16()
    head_VE = torch.randn(151936, 1536, device=DEVICE).bfloat16() / 40
    together = run(x_RE, head_VE, 151936)
    for first, last in ((0, 1), (3, 60), (100, 228)):
        assert torch.equal(run(x_RE[first:last], head_VE, 151936), together[first:last])
    x_RE[1:] = float("nan")
    assert run(x_RE, head_VE, 151936)[0] == together[0]
