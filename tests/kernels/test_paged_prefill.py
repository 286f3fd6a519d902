"""Paged prefill attention: the Triton kernel against its plain twin and dense attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from paged import LAYER, PagedCase, dense_attention, paged_case
from pairwise import pairwise
from torch import Tensor

from pico_vllm.kernels.paged_prefill import (
    PrefillConfig,
    check_head_dim,
    choose_config,
    paged_prefill,
    paged_prefill_pool_reference,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ALLOWED = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""About twice what rounding the result and the weights to the dtype costs."""
SMALL = PrefillConfig(block_m=32, block_n=16, num_warps=4, num_stages=2)
"""Several tiles and rounds even for a few tokens."""
SMALL_NEW = replace(SMALL, uses_new=True)


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

    def run(self, config: PrefillConfig | None = None) -> Tensor:
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


def check(step: Step, config: PrefillConfig | None = SMALL) -> Tensor:
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
    out = step.run(config)
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


@pytest.mark.parametrize("head_dim", [16, 64])
def test_new_keys_from_one_piece(head_dim: int) -> None:
    """This step's keys, read where they lie in one piece, give the bits that the pool gives: fresh
    prompts, chunks that begin amid a round, single tokens, padding of either kind."""
    query_lens, seq_lens = [5, 37, 40, 16, 1, 4], [5, 37, 63, 48, 40, 0]
    step = made(query_lens, seq_lens, head_dim=head_dim, num_padding=40)
    assert torch.equal(check(step, SMALL_NEW), step.run(SMALL))


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
    check(made(query_lens, seq_lens, num_padding=40, **shape), None)


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
def test_graph_serves_other_lengths() -> None:
    """A graph captured with one step's lengths gives another's results."""
    step = made([40, 1, 7, 0], [60, 30, 7, 0], head_dim=64, dtype=torch.bfloat16, num_padding=16)
    step.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_prefill(*step.arguments, scale=step.scale)
    step.starts.copy_(torch.tensor([0, 20, 21, 28, 50], dtype=torch.int32))
    step.seq_lens.copy_(torch.tensor([60, 29, 7, 0], dtype=torch.int32))
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
