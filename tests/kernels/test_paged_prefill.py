"""Paged prefill attention: the Triton kernel against its plain twin and dense attention."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compiled import resources_of
from paged import LAYER, PagedCase, dense_attention, paged_case
from pairwise import pairwise
from torch import Tensor

from pico_vllm.kernels import paged_prefill as source
from pico_vllm.kernels.launch import NUM_MULTIPROCESSORS
from pico_vllm.kernels.paged_prefill import (
    FEW_ROUNDS,
    MAX_PROMPT_SPLITS,
    MAX_SPLIT_TOKENS,
    MOST_ROWS_OF_SMALL_TILES,
    MOST_SPLIT_PROGRAMS,
    PrefillConfig,
    PrefillScratch,
    check_head_dim,
    choose_config,
    for_few_tokens,
    paged_prefill,
    paged_prefill_pool_reference,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ALLOWED = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""About twice what rounding the result and the weights to the dtype costs."""
SMALL = PrefillConfig(block_m=32, block_n=16, num_warps=4, num_stages=2)
"""Several tiles and rounds even for a few tokens."""
SMALL_NEW = replace(SMALL, uses_new=True)


def in_splits(num_splits: int, config: PrefillConfig = SMALL) -> PrefillConfig:
    return replace(config, reads_early=True, num_splits=num_splits)


@dataclass
class Step:
    """Requests whose KV lies in the pool, new tokens too, on the device."""

    case: PagedCase
    query_lens: list[int]
    q_THD: Tensor
    k_BGSD: Tensor
    v_BGSD: Tensor
    table: Tensor
    rows: Tensor
    starts: Tensor
    seq_lens: Tensor
    new_kv_TGD: tuple[Tensor, Tensor]
    """Those of this step's tokens once more; NaN for padding."""
    scale: float

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        return (
            self.q_THD, self.k_BGSD, self.v_BGSD, self.table, self.rows, self.starts, self.seq_lens
        )  # fmt: skip

    def run(
        self,
        config: PrefillConfig | None = None,
        scratch: PrefillScratch | None = None,
        *,
        reads_early: bool = False,
    ) -> Tensor:
        # Cut from a wider tensor and full of NaN: neither contiguous nor right by chance.
        num_tokens, num_heads, head_dim = self.q_THD.shape
        wide = torch.full(
            (num_tokens, num_heads + 1, head_dim), float("nan"), dtype=self.q_THD.dtype,
            device=DEVICE,
        )  # fmt: skip
        out = paged_prefill(
            *self.arguments,
            scale=self.scale,
            new_kv_TGD=self.new_kv_TGD,
            out=wide[:, 1:],
            reads_early=reads_early or scratch is not None,
            scratch=scratch,
            config=config,
        )
        assert wide[:, 0].isnan().all()
        return out


def made(
    query_lens: list[int],
    seq_lens: list[int],
    *,
    group: int = 3,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    num_padding: int = 0,
) -> Step:
    """The requests' rows of the block table lie in reverse order, after one that nobody owns."""
    case = paged_case(
        seq_lens, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype
    )
    base = case.k_BGSD._base
    assert base is not None
    pool = base.to(DEVICE)
    table = np.concatenate((np.zeros_like(case.block_table[:1]), case.block_table[::-1]))
    generator = torch.Generator().manual_seed(1)
    num_heads = group * num_kv_heads
    # Cut from a fused projection: not contiguous.
    fused = torch.randn(
        sum(query_lens) + num_padding, num_heads + 2 * num_kv_heads, head_dim, generator=generator
    )
    starts = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
    keys_at = slice(num_heads, num_heads + num_kv_heads)
    values_at = slice(num_heads + num_kv_heads, None)
    fused[:, num_heads:] = float("nan")
    for start, query_len, keys, values in zip(
        starts.tolist(), query_lens, case.keys, case.values, strict=False
    ):
        if len(keys) and query_len:
            fused[start : start + query_len, keys_at] = keys[-query_len:].float()
            fused[start : start + query_len, values_at] = values[-query_len:].float()
    on_device = fused.to(DEVICE, dtype)
    return Step(
        case,
        query_lens,
        on_device[:, :num_heads],
        pool[:, :, LAYER, 0],
        pool[:, :, LAYER, 1],
        torch.from_numpy(table).to(DEVICE),
        torch.arange(len(seq_lens), 0, -1, dtype=torch.int32, device=DEVICE),
        torch.from_numpy(starts).to(DEVICE),
        torch.from_numpy(case.seq_lens).to(DEVICE),
        (on_device[:, keys_at], on_device[:, values_at]),
        head_dim**-0.5,
    )


def check(
    step: Step, config: PrefillConfig | None = SMALL, scratch: PrefillScratch | None = None
) -> Tensor:
    """The kernel and its twin against dense attention of each request."""
    expected = torch.zeros(step.q_THD.shape, dtype=torch.float64)
    start = 0
    for r, query_len in enumerate(step.query_lens):
        tokens = slice(start, start + query_len)
        if len(step.case.keys[r]):
            expected[tokens] = dense_attention(
                step.q_THD[tokens].cpu(), step.case.keys[r], step.case.values[r], step.scale
            )
        start += query_len
    allowed = ALLOWED[step.q_THD.dtype]
    out = step.run(config, scratch)
    for each in (out, paged_prefill_pool_reference(*step.arguments, scale=step.scale)):
        torch.testing.assert_close(each.cpu().double(), expected, atol=allowed, rtol=allowed)
    return out


@pytest.mark.parametrize("block_size", [1, 8, 16, 64])
def test_chunks_and_decode_rows(block_size: int) -> None:
    """Chunks and single tokens over contexts of one block and one token less or more."""
    lens = [max(block_size - 1, 1), block_size, block_size + 1]
    check(made([5, 1, 20, 1], [lens[0] + 5, lens[1] + 1, lens[2] + 20, 1], block_size=block_size))


@pytest.mark.parametrize(
    ("group", "head_dim"),
    [
        (1, 64),
        pytest.param(6, 80, marks=pytest.mark.memcheck),
        pytest.param(7, 96, marks=pytest.mark.memcheck),
        (8, 16),
    ],
)
def test_shapes(group: int, head_dim: int) -> None:
    """GQA ratios that fill a tile or not, and head dims that are no power of two."""
    check(made([15, 16, 17], [15, 16, 40], group=group, head_dim=head_dim))


@pytest.mark.memcheck
@pytest.mark.parametrize(("second", "num_padding"), [(1, 23), (2, 29), (2, 28), (1, 20)])
def test_padding(second: int, num_padding: int) -> None:
    """Tokens that belong to no request, and those of requests with seq_len 0, give zeros: padding
    that begins or ends where a tile of 10 tokens does, or not."""
    step = made([9, second, 0, 0], [9, 0, 0, 0], num_padding=num_padding)
    out = check(step)
    assert not out[9:].any() and out[:9].all()


@pytest.mark.memcheck
@pytest.mark.parametrize("first", [1, 2, 3])
def test_tokens_of_other_kernels(first: int) -> None:
    """What lies before the first request that has tokens, and behind the last one if that is no
    padding, is left alone: tiles of 10 tokens, and others' that are cut there or not, or all."""
    query_lens, seq_lens = [10, 13, 7, 21], [30, 13, 40, 50]
    step = made(query_lens, seq_lens, num_padding=9)
    whole = check(step)
    start, end = sum(query_lens[:first]), sum(query_lens[:3])
    out = torch.full_like(whole, float("nan"))
    paged_prefill(
        step.q_THD, step.k_BGSD, step.v_BGSD, step.table, step.rows,
        step.starts.clamp(start, end), step.seq_lens,
        scale=step.scale, out=out, has_padding=False, config=SMALL,
    )  # fmt: skip
    assert torch.equal(out[start:end], whole[start:end])
    assert out[:start].isnan().all() and out[end:].isnan().all()
    with pytest.raises(ValueError, match="none may be another kernel's"):
        paged_prefill(
            *step.arguments, scale=step.scale, has_padding=False,
            config=replace(in_splits(2), few_rounds=1),
        )  # fmt: skip


@pytest.mark.parametrize("head_dim", [16, 64])
def test_new_keys_from_one_piece(head_dim: int) -> None:
    """This step's keys, read where they lie in one piece, give the bits that the pool gives: fresh
    prompts, chunks that begin amid a round, single tokens, padding of either kind."""
    query_lens, seq_lens = [5, 37, 40, 16, 1, 4], [5, 37, 63, 48, 40, 0]
    step = made(query_lens, seq_lens, head_dim=head_dim, num_padding=40)
    assert torch.equal(check(step, SMALL_NEW), step.run(SMALL))


GUARD = 8


class Guarded:
    """A scratch just large enough, all NaN, with what nobody may touch on both sides of it."""

    def __init__(self, step: Step, num_splits: int) -> None:
        num_tokens, self.num_heads, head_dim = step.q_THD.shape
        num_sums = num_splits * num_tokens * self.num_heads
        self._all = [
            torch.full((size + 2 * GUARD,), float("nan"), device=DEVICE)
            for size in (num_sums * head_dim, num_sums * 2)
        ]
        used = torch.full((num_tokens + 2 * GUARD,), -1, dtype=torch.int32, device=DEVICE)
        self.scratch = PrefillScratch(*(x[GUARD:-GUARD] for x in (*self._all, used)))
        self._used = used

    def check(self, num_used: list[int]) -> None:
        """num_used: splits of each token that have keys."""
        assert self._used.tolist() == [-1] * GUARD + num_used + [-1] * GUARD
        num_rows = sum(used for used in num_used if used > 1) * self.num_heads
        head_dim = self.scratch.partials.numel() * 2 // self.scratch.stats.numel()
        for x, width in zip(self._all, (head_dim, 2), strict=True):
            assert x[:GUARD].isnan().all() and x[-GUARD:].isnan().all()
            assert (~x.isnan()).sum() == num_rows * width


@pytest.mark.memcheck
@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "num_splits", "num_used"),
    [
        # A context of whole blocks and rounds, no context, and padding of both kinds.
        ([5, 12, 0, 0], [101, 12, 0, 0], 3, [3] * 5 + [1] * (12 + 6)),
        # Less than a round, a round with the token itself, one more, and a request of length 0.
        ([1, 1, 1, 3], [12, 16, 33, 0], 2, [1, 1, 2, 1, 1, 1] + [1] * 6),
        # A long one and a short one, and more splits than rounds.
        ([11, 2], [123, 17], 9, [7] * 11 + [1] * 2 + [1] * 6),
        # The last split has two rounds with a mask, and the one before them. Of the first tile the
        # second token is the one that makes a round whole.
        ([20], [114], 4, [3] * 10 + [4] * 10 + [1] * 6),
    ],
)  # fmt: skip
def test_splits(
    query_lens: list[int], seq_lens: list[int], num_splits: int, num_used: list[int]
) -> None:
    """Keys cut into splits give the same, and the same bits again; what fits into one split gives
    the bits that it gives uncut. Nothing but the splits in use is written to the scratch."""
    step = made(query_lens, seq_lens, num_padding=6)
    guarded, config = Guarded(step, num_splits), in_splits(num_splits)
    out = check(step, config, guarded.scratch)
    guarded.check(num_used)
    assert torch.equal(step.run(config, guarded.scratch), out)
    uncut, is_whole = step.run(SMALL), torch.tensor(num_used) == 1
    assert torch.equal(out[is_whole], uncut[is_whole])
    assert torch.equal(step.run(replace(SMALL, reads_early=True)), uncut)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="looks into the interpreter")
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(("query_len", "seq_len"), [(5, 101), (40, 104), (47, 90), (12, 12)])
def test_this_steps_keys_are_read_after_waiting(
    query_len: int, seq_len: int, num_splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a program waits for the kernel before, this step's tokens have no keys in the pool; it
    may read those of older ones."""
    step = made([query_len], [seq_len])
    config = in_splits(num_splits)
    wanted = check(step, config, Guarded(step, num_splits).scratch)
    positions = torch.arange(seq_len - query_len, seq_len)
    row = int(step.rows[0])
    block_size = step.k_BGSD.shape[2]
    at = (step.table[row, positions // block_size].long(), slice(None), positions % block_size)
    pools = (step.k_BGSD, step.v_BGSD)
    kept = [pool[at].clone() for pool in pools]

    def begin(*_: Any) -> None:
        for pool in pools:
            pool[at] = float("nan")

    def wait(*_: Any) -> None:
        for pool, values in zip(pools, kept, strict=True):
            pool[at] = values

    monkeypatch.setattr(source, "let_next_start", begin)
    monkeypatch.setattr(source, "wait_for_inputs", wait)
    assert torch.equal(step.run(config, Guarded(step, num_splits).scratch), wanted)


def test_splits_by_default() -> None:
    """With a scratch, few tokens are cut as for_few_tokens says, others not at all."""
    config = for_few_tokens(choose_config(3, 6, 32, torch.float32), 3, 6, 2, is_cut=True)
    assert FEW_ROUNDS * config.block_n == 256
    for num_keys, num_used in ((300, 9), (256, 1)):
        step = made([3], [num_keys])
        guarded = Guarded(step, config.num_splits)
        check(step, None, guarded.scratch)
        guarded.check([num_used] * 3)
    many = made([MAX_SPLIT_TOKENS + 1], [MAX_SPLIT_TOKENS + 1], group=1, num_kv_heads=1)
    unused = Guarded(many, 1)
    many.run(None, unused.scratch)
    unused.check([-1] * (MAX_SPLIT_TOKENS + 1))


def test_splits_of_any_launch_fit_the_scratch() -> None:
    """Splits stay few enough for the scratch, and for all programs to run at once."""
    scratch = PrefillScratch.allocate(1, torch.device("cpu"))
    for num_heads, num_kv_heads in ((12, 2), (16, 8), (32, 8), (14, 2), (9, 3), (1, 1), (64, 1)):
        for num_tokens in range(1, 2 * MAX_SPLIT_TOKENS):
            for dtype in (torch.bfloat16, torch.float32):
                if dtype == torch.float32 and num_heads == 64:
                    continue  # does not fit its tile
                for has_new in (False, True):
                    config = choose_config(num_tokens, num_heads, 128, dtype, has_new=has_new)
                    sizes = num_tokens, num_heads, num_kv_heads
                    whole = for_few_tokens(config, *sizes, is_cut=False)
                    assert whole in (config, replace(config, reads_early=True))
                    cut = for_few_tokens(config, *sizes, is_cut=True)
                    if cut.num_splits == 1:
                        assert cut == whole
                        continue
                    assert cut.num_splits <= MAX_PROMPT_SPLITS and num_tokens <= MAX_SPLIT_TOKENS
                    assert cut.reads_early and not cut.uses_new, (
                        "whose keys of one piece are not cut"
                    )
                    sums = cut.num_splits * num_tokens * num_heads
                    assert sums <= scratch.partials.numel() and 2 * sums <= scratch.stats.numel()
                    assert num_tokens <= scratch.num_used.numel()
                    tile_tokens = cut.block_m // (num_heads // num_kv_heads)
                    num_tiles = -(-num_tokens // tile_tokens)
                    assert num_tiles * num_kv_heads * cut.num_splits <= MOST_SPLIT_PROGRAMS
    forty_eight = choose_config(48, 12, 128, torch.bfloat16), 48, 12, 2
    assert for_few_tokens(*forty_eight, is_cut=True).num_splits == MOST_SPLIT_PROGRAMS // 10


COMPILE = """
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pico_vllm.kernels.paged_prefill import (
    _paged_prefill_kernel as kernel, choose_config, for_few_tokens
)

config = for_few_tokens(choose_config(48, 12, 128, torch.bfloat16), 48, 12, 2, is_cut=True)
pointers = ("q_ptr", "k_ptr", "v_ptr", "out_ptr")
types = {name: "*bf16" for name in pointers}
types |= {name: "*i32" for name in ("table_ptr", "query_start_loc_ptr", "num_used_ptr")}
types |= {"partial_ptr": "*fp32", "stats_ptr": "*fp32"}
types |= {f"stride_{name}": "i32" for name in ("qt", "qh", "b", "g", "s", "w", "ot", "oh")}
aligned = [*types]
types |= {"rows_ptr": "*i32", "seq_lens_ptr": "*i32", "scale_log2": "fp32"}
types |= {f"num_{name}": "i32" for name in ("tokens", "requests", "splits")}
names = [p.name for p in kernel.params]
source = ASTSource(
    fn=kernel,
    signature={name: types.get(name, "constexpr") for name in names},
    constexprs=dict(
        k_new=None, v_new=None, NUM_KV_HEADS=2, GROUP=6, D=128, D_PAD=128, S=16,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, FEW_ROUNDS=config.few_rounds,
        HAS_NEW=False, READS_EARLY=True, HAS_SPLITS=True, PRECISION="tf32", USE_PDL=True,
    ),
    attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
)
options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "launch_pdl": True}
code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
assert config.num_warps == 4
"""


def test_programs_of_splits_share_a_multiprocessor(tmp_path: Path) -> None:
    """Compiled for sm_90, as many as MOST_SPLIT_PROGRAMS asks for have room at once, and none
    spills registers."""
    shared, usage = resources_of(COMPILE, folder=tmp_path)
    each = MOST_SPLIT_PROGRAMS // NUM_MULTIPROCESSORS
    registers = int(re.findall(r"REG:(\d+)", usage)[0])
    assert each * (shared + 1024) <= 228 * 1024
    assert each * 128 * registers <= 65536 and "STACK:0 " in usage and " LOCAL:0 " in usage


def test_whole_equals_chunked() -> None:
    """A prompt gives the same whatever chunks it comes in."""
    whole = made([50], [50])
    out = check(whole)
    for size in (7, 32):
        for start in range(0, 50, size):
            end = min(start + size, 50)
            arguments = (*whole.arguments[1:5], torch.tensor([0, end - start], dtype=torch.int32))
            lens = torch.tensor([end], dtype=torch.int32, device=DEVICE)
            chunk = paged_prefill(
                whole.q_THD[start:end], *(x.to(DEVICE) for x in arguments), lens,
                scale=whole.scale, config=SMALL,
            )  # fmt: skip
            torch.testing.assert_close(chunk, out[start:end], atol=1e-6, rtol=0)


@pytest.mark.memcheck
def test_default_config() -> None:
    """The config chosen from the shapes gives the same answer."""
    check(made([30, 3], [70, 3], head_dim=64), None)


@pytest.mark.parametrize("head_dim", [0, 12, 264])
def test_head_dims_that_are_refused(head_dim: int) -> None:
    """The error names the head dim and what is supported."""
    with pytest.raises(ValueError, match=f"{head_dim} is not supported.*multiple of 8 up to 256"):
        check_head_dim(head_dim)


def test_arguments_that_are_refused() -> None:
    """Each error names what it met."""
    step = made([4], [4])
    q, k, v, *ids = step.arguments
    cases = [
        ((q[:, :5], k, v, *ids), {}, "5 query heads are not a multiple of 2"),
        ((q.half(), k, v, *ids), {}, "torch.float16, the pool 32 and torch.float32"),
        ((q, k, v[:, :1], *ids), {}, "they must be alike"),
        ((q, k, v, ids[0].long(), *ids[1:]), {}, "block_table is torch.int64"),
        ((q, k, v, ids[0], ids[1], ids[1], ids[3]), {}, "1 rows need as many seq_lens"),
        ((q, k, v, *ids), {"scale": 0.0}, "scale 0.0 must be above 0"),
        ((q, k, v, *ids), {"out": q[:, :4]}, r"out is \[4, 4, 32\]"),
        (
            (q, k, v, *ids),
            {"config": PrefillConfig(block_m=2, block_n=16, num_warps=4, num_stages=1)},
            "3 query heads a KV head exceed the tile's 2 rows",
        ),
        ((q, k, v, *ids), {"config": SMALL_NEW}, "wants this step's keys"),
        (
            (q, k, v, *ids),
            {"config": SMALL_NEW, "new_kv_TGD": (q[:, :2], q[:, :1])},
            r"are \[4, 1, 32\] torch.float32, not \[4, 2, 32\]",
        ),
        ((q, k, v, *ids), {"config": in_splits(2)}, "2 splits need a scratch"),
        ((q, k, v, *ids), {"config": in_splits(33)}, "at most 32 splits"),
        ((q, k, v, *ids), {"config": replace(SMALL, num_splits=2)}, "which read early"),
        (
            (q, k, v, *ids),
            {"config": in_splits(2, SMALL_NEW), "new_kv_TGD": step.new_kv_TGD},
            "from the pool alone",
        ),
        (
            (q, k, v, *ids),
            {"config": in_splits(3), "scratch": Guarded(step, 2).scratch},
            "holds 1536 partial sums.*need 2304",
        ),
    ]
    for arguments, keywords, message in cases:
        with pytest.raises(ValueError, match=message):
            paged_prefill(*arguments, **({"scale": 1.0} | keywords))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "head_dim", "block_size", "group"),
    pairwise(list(ALLOWED), [64, 80, 96, 128, 256], [8, 16, 32, 64], range(1, 9)),
)
def test_grid(dtype: torch.dtype, head_dim: int, block_size: int, group: int) -> None:
    """Every head dim, block size, GQA ratio and dtype, fresh, chunked, padded and decoding:
    pairwise, any two of these values meet in a case."""
    shape = {"group": group, "head_dim": head_dim, "block_size": block_size, "dtype": dtype}
    S = block_size
    query_lens = [S - 1, S, S + 1, 1, 150, 0]
    seq_lens = [S - 1, 2 * S, 3 * S + 1, 4 * S, 333, 0]
    step = made(query_lens, seq_lens, num_padding=40, **shape)
    check(step, None)
    cut = in_splits(5, choose_config(400, 2 * group, head_dim, dtype))
    check(step, cut, Guarded(step, 5).scratch)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 28, 48, MAX_SPLIT_TOKENS])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(12, 2), (16, 8), (32, 8)])
def test_splits_of_a_launch(num_tokens: int, num_heads: int, num_kv_heads: int) -> None:
    """Few tokens behind contexts of any length equal the twin in fp32, and again in the same
    bits."""
    scratch = PrefillScratch.allocate(128, DEVICE)
    for x in (scratch.partials, scratch.stats):
        x.fill_(float("nan"))
    rest = num_tokens - num_tokens // 2
    for query_lens, contexts in (
        ([num_tokens], [2083]),
        ([num_tokens], [0]),
        ([num_tokens // 2, rest, 0, 0], [8192, 144, 0, 0]),
        ([num_tokens // 2, rest], [16, 640]),
    ):
        seq_lens = [x + y for x, y in zip(query_lens, contexts, strict=True)]
        step = made(
            query_lens, seq_lens, group=num_heads // num_kv_heads, num_kv_heads=num_kv_heads,
            head_dim=128, dtype=torch.bfloat16, num_padding=MAX_SPLIT_TOKENS - num_tokens,
        )  # fmt: skip
        in_fp32 = (x.float() if x.is_floating_point() else x for x in step.arguments)
        expected = paged_prefill_pool_reference(*in_fp32, scale=step.scale)
        out = step.run(None, scratch)
        torch.testing.assert_close(out.float(), expected, atol=1.6e-2, rtol=1.6e-2)
        assert torch.equal(step.run(None, scratch), out)
        whole = step.run(None, reads_early=True)
        torch.testing.assert_close(whole.float(), expected, atol=1.6e-2, rtol=1.6e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(ALLOWED))
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_long_prompts(dtype: torch.dtype, head_dim: int) -> None:
    """Prompts long enough for the large tiles equal the twin in fp32."""
    step = made([3000, 1, 500], [3000, 2000, 2500], group=6, head_dim=head_dim, dtype=dtype)
    in_fp32 = (x.float() if x.is_floating_point() else x for x in step.arguments)
    expected = paged_prefill_pool_reference(*in_fp32, scale=step.scale)
    allowed = ALLOWED[dtype]
    for has_new in (False, True):
        config = choose_config(3501, 12, head_dim, dtype, has_new=has_new)
        torch.testing.assert_close(step.run(config).float(), expected, atol=allowed, rtol=allowed)


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "num_tokens"), [(64, 1000), (128, 1000), (128, 4000)])
def test_bits_depend_on_the_request_alone(head_dim: int, num_tokens: int) -> None:
    """Other requests, chunking and graph padding change no bit of a token's result, whether this
    step's keys come from the pool or not."""
    shape = {"group": 6, "head_dim": head_dim, "dtype": torch.bfloat16}
    config = choose_config(num_tokens, 12, head_dim, torch.bfloat16, has_new=True)
    whole = made([1000], [1000], **shape)
    out = whole.run(config)
    q, k, v, table, rows, _, _ = whole.arguments
    k_new, v_new = whole.new_kv_TGD
    for start, end in ((0, 300), (300, 999), (999, 1000)):
        padded, *new_kv = (torch.cat((x[5:33], x[start:end], x[:50])) for x in (q, k_new, v_new))
        chunk = paged_prefill(
            padded, k, v, table, rows.expand(2).contiguous(),
            torch.tensor([0, 28, 28 + end - start], dtype=torch.int32, device=DEVICE),
            torch.tensor([33, end], dtype=torch.int32, device=DEVICE),
            scale=whole.scale, new_kv_TGD=tuple(new_kv), config=config,
        )  # fmt: skip
        assert torch.equal(chunk[:28], out[5:33])
        assert torch.equal(chunk[28 : 28 + end - start], out[start:end])
        assert not chunk[28 + end - start :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("has_splits", [False, True])
def test_graph_serves_other_lengths(has_splits: bool) -> None:
    """A graph captured with one step's lengths gives another's results."""
    step = made([40, 1, 7, 0], [60, 130, 7, 0], head_dim=64, dtype=torch.bfloat16, num_padding=16)
    scratch = PrefillScratch.allocate(64, DEVICE) if has_splits else None
    step.run(None, scratch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_prefill(*step.arguments, scale=step.scale, scratch=scratch)
    step.starts.copy_(torch.tensor([0, 20, 21, 28, 50], dtype=torch.int32))
    step.seq_lens.copy_(torch.tensor([60, 129, 7, 0], dtype=torch.int32))
    graph.replay()
    expected = paged_prefill_pool_reference(*step.arguments, scale=step.scale)
    torch.testing.assert_close(out, expected, atol=1.6e-2, rtol=1.6e-2)


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31() -> None:
    """A pool of more than 2^31 elements is addressed to its end."""
    num_blocks, shape = 70_000, (2, 8, 2, 16, 64)
    pool = torch.empty((num_blocks, *shape), dtype=torch.bfloat16, device=DEVICE)
    assert pool.numel() > 2**31
    pool[-4:].normal_()
    k_BGSD, v_BGSD = pool[:, :, 7, 0], pool[:, :, 7, 1]
    table = torch.tensor([[1, 3, 0]], dtype=torch.int32, device=DEVICE)
    starts, seq_lens = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 35], [40]))
    rows = torch.zeros_like(seq_lens)
    q_THD = torch.randn(35, 4, 64, device=DEVICE).bfloat16()
    out = paged_prefill(
        q_THD, k_BGSD, v_BGSD, table + (num_blocks - 4), rows, starts, seq_lens, scale=0.125
    )
    expected = paged_prefill_pool_reference(
        q_THD.float(), k_BGSD[-4:].float(), v_BGSD[-4:].float(), table, rows, starts, seq_lens,
        scale=0.125,
    )  # fmt: skip
    torch.testing.assert_close(out.float(), expected, atol=1.6e-2, rtol=1.6e-2)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [(12, 2), (16, 8), (32, 8), (64, 8), (40, 8)]
)
def test_the_most_tokens_of_small_tiles_are_not_cut(num_heads: int, num_kv_heads: int) -> None:
    """By which a start compiles that kernel."""
    num_tokens = (MOST_ROWS_OF_SMALL_TILES - 1) // num_heads
    for has_new in (False, True):
        config = choose_config(num_tokens, num_heads, 128, torch.bfloat16, has_new=has_new)
        assert config.block_m == 64 and not config.uses_new
        few = for_few_tokens(config, num_tokens, num_heads, num_kv_heads, is_cut=True)
        assert few.num_splits == 1
