"""Each kernel of a step by itself, at the sizes of a model, beside its plain twin and torch.

Products, head and decoding attention are called as a step calls them, through the layers and the
cache, so that what is timed is what runs at that size.

Times are of CUDA graphs that hold at least 20 launches. A launch takes the next of several sets of
weights or KV, so that no cache serves it: together they are 256 MiB where that takes no more than
512 sets. What limits a kernel is measured in the same run: reading memory, or a large product.

    T tokens, R requests, E hidden size, F MLP size, H query heads, G KV heads, D head dim,
    N = H + 2 G, V vocabulary, L layers, S block_size, B blocks in pool, M block-table width
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pico_vllm.bench.figures import rounded
from pico_vllm.bench.limits import cuda_ms
from pico_vllm.cache.triton_kv import TritonKV, TritonStep
from pico_vllm.config.model import ModelConfig
from pico_vllm.engine.sampling_rows import WORDS_PER_ROW, SamplingRows
from pico_vllm.errors import ConfigError
from pico_vllm.forward_batch import DeviceFeed, ForwardBatch
from pico_vllm.kernels.candidates import RowScratch
from pico_vllm.kernels.full_sample import full_sample, full_sample_reference
from pico_vllm.kernels.head_sample import HeadScratch, head_sample_reference, sample_logits
from pico_vllm.kernels.hopper_prefill import can_take, hopper_prefill
from pico_vllm.kernels.paged_decode import are_long, paged_decode_reference
from pico_vllm.kernels.paged_prefill import paged_prefill, paged_prefill_pool_reference
from pico_vllm.kernels.rms_norm import rms_norm, rms_norm_reference
from pico_vllm.kernels.rope_store_kv import rope_store_kv, rope_store_kv_reference
from pico_vllm.kernels.silu_mul import silu_mul, silu_mul_reference
from pico_vllm.kernels.small_linear import small_linear_reference
from pico_vllm.layers.linear import DenseWeight, Parts, Residual
from pico_vllm.layers.norm import RMSNorm
from pico_vllm.layers.rope import Rope
from pico_vllm.layers.triton_head import TritonHead
from pico_vllm.layers.triton_linear import TritonLayers
from pico_vllm.sampler.philox import gumbel_noise
from pico_vllm.sampling_params import SamplingParams
from pico_vllm.step import NewRow

PREFILL_TOKENS = 8192
COLD_BYTES = 256 << 20
MAX_SETS = 512
MIN_LAUNCHES = 20
NUM_REPLAYS = 10
MAX_POOL_BYTES = 16 << 30
MAX_ROWS = 1024
"""Requests that decode. No workload has more."""
KERNELS = (
    "qkv", "o", "gate_up", "down", "head", "full_sample", "decode_attention", "prefill_attention",
    "chunk_attention", "rms_norm", "silu_mul", "rope_store_kv",
)  # fmt: skip

Run = Callable[[int], Tensor]
"""Launches on one set and returns what comes out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """One kernel at one size, its tensors made."""

    kernel: str
    rows: int
    """Tokens, or requests that decode."""
    context: int | None = None
    """Tokens that each request's new one attends to, itself included."""
    num_bytes: int
    """Read and written by a launch, at least."""
    flop: int
    num_sets: int
    ours: Run
    twin: Run
    whole: Callable[[Tensor], Tensor] = lambda y: y
    """Turns what `ours` returns into what `twin` returns, where ours leaves a sum to the next
    kernel."""
    has_capturable_twin: bool = True
    """False where it asks the device for numbers: it is then timed launch by launch."""
    torch_name: str | None = None
    torch_run: Run | None = None


class Timer(Protocol):
    def in_graph_us(self, run: Run, num_sets: int) -> float:
        """Of one launch among many."""
        ...

    def eager_us(self, run: Run) -> float:
        """Of one launch as Python makes it."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    read_bytes_s: float
    matmul_flop_s: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the cases are made for."""

    model: ModelConfig
    rows: Sequence[int]
    contexts: Sequence[int]
    block_size: int
    dtype: torch.dtype
    device: torch.device
    prefill_tokens: int = PREFILL_TOKENS
    cold_bytes: int = COLD_BYTES

    def num_sets(self, num_bytes: int) -> int:
        return max(2, min(MAX_SETS, -(-self.cold_bytes // num_bytes)))

    def random(self, *shape: int) -> Tensor:
        # Small, so that no sum overflows fp16.
        return (torch.randn(shape, device=self.device) * 0.05).to(self.dtype)


class GraphTimer:
    """The best of some replays of a CUDA graph."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def in_graph_us(self, run: Run, num_sets: int) -> float:
        num_launches = max(MIN_LAUNCHES, num_sets)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            for index in range(2):
                run(index % num_sets)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                # Kept, so that each launch writes elsewhere.
                kept = [run(index % num_sets) for index in range(num_launches)]
            times_ms = [cuda_ms(graph.replay) for _ in range(NUM_REPLAYS + 2)]
        del kept
        return min(times_ms[2:]) / num_launches * 1e3

    def eager_us(self, run: Run) -> float:
        with torch.cuda.device(self._device):
            return min(cuda_ms(lambda: run(0)) for _ in range(3)) * 1e3


def time_kernels(
    sizes: Sizes, only: Sequence[str], timer: Timer, limits: Limits
) -> Iterator[dict[str, Any]]:
    """One line a kernel and size, as soon as it is measured.

    Raises:
        ConfigError: there is no memory for a case.
    """
    for case in cases(sizes, only):
        with _room_for(case.kernel, case.rows, case.context):
            us = timer.in_graph_us(case.ours, case.num_sets)
        # What takes longer at its limit.
        is_read = case.num_bytes / limits.read_bytes_s >= case.flop / limits.matmul_flop_s
        rate = (case.num_bytes if is_read else case.flop) / us * 1e6
        limit = limits.read_bytes_s if is_read else limits.matmul_flop_s
        if case.has_capturable_twin:
            twin_us = _try(lambda case=case: timer.in_graph_us(case.twin, case.num_sets))
        else:
            twin_us = _try(lambda case=case: timer.eager_us(case.twin))
        torch_us = None
        if case.torch_run is not None:
            torch_us = _try(
                lambda run=case.torch_run, case=case: timer.in_graph_us(run, case.num_sets)
            )
        figures = {
            "us": us,
            "tb_s": rate / 1e12 if is_read else None,
            "tflop_s": None if is_read else rate / 1e12,
            "pct_of_limit": 100 * rate / limit,
            "twin_us": twin_us,
            "torch_us": torch_us,
        }
        size = f"{case.kernel}-r{case.rows}"
        yield {
            "id": size if case.context is None else f"{size}-c{case.context}",
            "kernel": case.kernel,
            "rows": case.rows,
            "context": case.context,
            **rounded(figures),
            "twin_is_in_graph": case.has_capturable_twin,
            "torch_name": case.torch_name,
            "limit": "read" if is_read else "matmul",
            "num_sets": case.num_sets,
        }
        del case  # before the next is made


@contextmanager
def _room_for(kernel: str, rows: int, context: int | None) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        of_context = "" if context is None else f" and {context} tokens of context"
        raise ConfigError(
            f"{kernel} with {rows} rows{of_context} does not fit into the device's memory; lower "
            "--rows or --context, or name other kernels with --only",
            param="rows",
        ) from None


def _try(measure: Callable[[], float]) -> float | None:
    """None where there is no memory for it: twins keep all scores of an attention."""
    try:
        return measure()
    except torch.OutOfMemoryError:
        return None


def cases(sizes: Sizes, only: Sequence[str]) -> Iterator[KernelCase]:
    """Made one after the other, so that their memory is never needed at once."""
    for kernel, rows, context, make in _makers(sizes):
        if kernel not in only:
            continue
        with _room_for(kernel, rows, context):
            case = make()
        yield case
        del case


Maker = tuple[str, int, int | None, Callable[[], KernelCase]]
"""Kernel, rows, context, and what makes the case."""


def _makers(sizes: Sizes) -> Iterator[Maker]:
    for rows in sizes.rows:
        for kernel in KERNELS[:4]:
            yield kernel, rows, None, partial(linear_case, sizes, kernel, rows)
        yield "head", rows, None, partial(head_case, sizes, rows)
        yield "full_sample", rows, None, partial(full_sample_case, sizes, rows)
    for context, rows in itertools.product(sizes.contexts, sizes.rows):
        make = partial(decode_attention_case, sizes, rows, context)
        yield "decode_attention", rows, context, make
    for kernel, of_prompts in (
        ("prefill_attention", prefill_attention_case),
        ("chunk_attention", chunk_attention_case),
        ("rms_norm", rms_norm_case),
        ("silu_mul", silu_mul_case),
        ("rope_store_kv", rope_store_kv_case),
    ):
        yield kernel, sizes.prefill_tokens, None, partial(of_prompts, sizes)


def linear_case(sizes: Sizes, kernel: str, rows: int) -> KernelCase:
    """As a decoding step runs it: with norm, bias, SiLU or residual, with the next norm where that
    is made along with the sum, or in parts that attention adds up. cuBLAS does the product
    alone."""
    num_out, num_in = _weight_shapes(sizes.model)[kernel]
    num_sets = sizes.num_sets(num_out * num_in * sizes.dtype.itemsize)
    weights = [sizes.random(num_out, num_in) for _ in range(num_sets)]
    x_MK = sizes.random(rows, num_in)
    make = _added_case if kernel in ("o", "down") else _normed_case
    return KernelCase(
        kernel=kernel,
        rows=rows,
        num_bytes=(num_out * num_in + rows * (num_in + num_out)) * sizes.dtype.itemsize,
        flop=2 * rows * num_out * num_in,
        num_sets=num_sets,
        torch_name="cuBLAS",
        torch_run=lambda index: functional.linear(x_MK, weights[index]),
        **make(sizes, kernel, rows, weights),
    )


def _added_case(sizes: Sizes, kernel: str, rows: int, weights: Sequence[Tensor]) -> dict[str, Any]:
    """o or down."""
    num_out, num_in = weights[0].shape
    layers = TritonLayers(sizes.device)
    linears = [layers.linear(DenseWeight(weight), None) for weight in weights]
    norm = RMSNorm(sizes.random(num_out), sizes.model.rms_norm_eps)
    x_MK, residual_MN = sizes.random(rows, num_in), sizes.random(rows, num_out)

    def ours(index: int) -> Tensor:
        added = linears[index].added(x_MK, Residual(residual_MN), norm)
        return added.x_TE if added.normed_TE is None else added.normed_TE

    is_normed = linears[0].added(x_MK, Residual(residual_MN.clone()), norm).normed_TE is not None

    def twin(index: int) -> Tensor:
        sum_MN = small_linear_reference(x_MK, weights[index], residual_MN=residual_MN)
        return rms_norm_reference(sum_MN, norm.weight_E, norm.eps) if is_normed else sum_MN

    return {"ours": ours, "twin": twin}


def _normed_case(sizes: Sizes, kernel: str, rows: int, weights: Sequence[Tensor]) -> dict[str, Any]:
    """qkv or gate_up, of what the product before leaves."""
    num_out, num_in = weights[0].shape
    is_qkv = kernel == "qkv"
    layers = TritonLayers(sizes.device)
    bias = sizes.random(num_out) if is_qkv and sizes.model.qkv_bias else None
    linears = [layers.linear(DenseWeight(weight), bias) for weight in weights]
    norm = RMSNorm(sizes.random(num_in), sizes.model.rms_norm_eps)
    residual = _left_by(sizes, layers, "down" if is_qkv else "o", rows, norm)
    # As for any context: from so many requests on that products are left in parts, none matters.
    leaves_parts = is_qkv and _decode_step(sizes, rows, context=1).adds_parts

    def ours(index: int) -> Tensor:
        if not is_qkv:
            return linears[index].normed_silu_mul(norm, residual)
        if leaves_parts:
            return linears[index].normed_in_parts(norm, residual).parts_SMN
        return linears[index].normed(norm, residual)

    missing_bias = linears[0].normed_in_parts(norm, residual).bias_N if leaves_parts else None

    def whole(y: Tensor) -> Tensor:
        return add_up(Parts(y, missing_bias)) if leaves_parts else y

    def twin(index: int) -> Tensor:
        is_normed = residual.normed_TE is not None
        return small_linear_reference(
            residual.normed_TE if is_normed else residual.x_TE,
            weights[index],
            bias_N=bias,
            norm_K=None if is_normed else norm.weight_E,
            eps=norm.eps,
            has_silu_mul=not is_qkv,
        )

    return {"ours": ours, "whole": whole, "twin": twin}


def _weight_shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    hidden, mlp = model.hidden_size, model.intermediate_size
    attention = model.num_heads * model.head_dim
    return {
        "qkv": (attention + 2 * model.num_kv_heads * model.head_dim, hidden),
        "o": (hidden, attention),
        "gate_up": (2 * mlp, hidden),
        "down": (hidden, mlp),
    }


def _left_by(
    sizes: Sizes, layers: TritonLayers, kernel: Literal["o", "down"], rows: int, norm: RMSNorm
) -> Residual:
    """The residual stream as o or down leave it, normalised where they do that too."""
    num_out, num_in = _weight_shapes(sizes.model)[kernel]
    linear = layers.linear(DenseWeight(sizes.random(num_out, num_in)), None)
    return linear.added(sizes.random(rows, num_in), Residual(sizes.random(rows, num_out)), norm)


def add_up(parts: Parts) -> Tensor:
    """As the kernel behind does: in fp32, rounded once."""
    total_MN = parts.parts_SMN.float().sum(0)
    if parts.bias_N is not None:
        total_MN += parts.bias_N.float()
    return total_MN.to(parts.parts_SMN.dtype)


def head_case(sizes: Sizes, rows: int) -> KernelCase:
    """The likeliest token of each request: norm (unless the last product makes it), head and
    choice. cuBLAS makes the logits alone."""
    model, device = sizes.model, sizes.device
    vocab, hidden = model.vocab_size, model.hidden_size
    num_sets = sizes.num_sets(vocab * hidden * sizes.dtype.itemsize)
    weights = [sizes.random(vocab, hidden) for _ in range(num_sets)]
    layers, norm = TritonLayers(device), RMSNorm(sizes.random(hidden), model.rms_norm_eps)
    last = _left_by(sizes, layers, "down", rows, norm)
    heads = [
        TritonHead(
            norm, layers.linear(DenseWeight(weight), None),
            vocab_size=vocab, dtype=sizes.dtype, device=device,
        )
        for weight in weights
    ]  # fmt: skip
    table_rows = torch.arange(rows, dtype=torch.int32, device=device)
    zeros_W = torch.zeros(rows, dtype=torch.int64, device=device)
    last_tokens_W = torch.zeros_like(zeros_W)
    temperatures_W = torch.zeros(rows, device=device)
    no_noise = torch.zeros((1, vocab), device=device)

    def ours(index: int) -> Tensor:
        head, ids_R = heads[index], torch.empty(rows, dtype=torch.int64, device=device)
        if head.is_faster_without_logits(rows):
            head.choose_likeliest(last, table_rows, last_tokens_W, ids_R)
        else:
            around = {
                "rows_R": table_rows, "positions_R": table_rows, "temperatures_W": temperatures_W,
                "seeds_W": zeros_W, "sample_indices_W": zeros_W, "last_tokens_W": last_tokens_W,
                "out_R": ids_R,
            }  # fmt: skip
            head.choose(last, around)
        return ids_R

    def twin(index: int) -> Tensor:
        logits_RV = small_linear_reference(
            last.x_TE, weights[index], norm_K=norm.weight_E, eps=norm.eps
        )
        return head_sample_reference(logits_RV, no_noise, temperatures_W, vocab_size=vocab)

    return KernelCase(
        kernel="head",
        rows=rows,
        num_bytes=(vocab + rows) * hidden * sizes.dtype.itemsize,
        flop=2 * rows * vocab * hidden,
        num_sets=num_sets,
        ours=ours,
        twin=twin,
        torch_name="cuBLAS",
        torch_run=lambda index: functional.linear(last.x_TE, weights[index]),
    )


def full_sample_case(sizes: Sizes, rows: int) -> KernelCase:
    """The choice from logits, all rows by top-p, every second one among 50 tokens, on top of the
    choice by temperature."""
    vocab, device = sizes.model.vocab_size, sizes.device
    num_bytes = rows * vocab * sizes.dtype.itemsize
    num_sets = sizes.num_sets(num_bytes)
    # Far enough apart for the nucleus to be narrow, as a model's is.
    logits = [sizes.random(rows, vocab) * 60 for _ in range(num_sets)]
    words = torch.zeros(rows * WORDS_PER_ROW, dtype=torch.int32)
    state = words.to(device, copy=True)
    sampling = SamplingRows(state, vocab, device)
    params = [
        SamplingParams(top_p=0.9, top_k=min(50, vocab // 2) if row % 2 else 0)
        for row in range(rows)
    ]
    for row, each in enumerate(params):
        new = NewRow(
            row=row, token_ids=np.zeros(1, np.int32), num_prompt_tokens=1, params=each,
            stop_token_ids=frozenset(), seed=row, sample_index=0,
        )  # fmt: skip
        places, values = sampling.changes(new)
        words[torch.from_numpy(places)] = torch.from_numpy(values)
    state.copy_(words)
    table_rows = torch.arange(rows, dtype=torch.int32, device=device)
    positions = torch.full_like(table_rows, 9)
    common: dict[str, Any] = {
        "vocab_size": vocab,
        "rows_R": table_rows,
        "positions_R": positions,
        "temperatures_W": sampling.temperatures_W,
        "seeds_W": sampling.seeds_W,
        "sample_indices_W": sampling.sample_indices_W,
        "last_tokens_W": torch.zeros(rows, dtype=torch.int64, device=device),
    }
    head_scratch = HeadScratch.allocate(device)
    scratch = RowScratch.allocate(rows, vocab, device)
    noise_RV = gumbel_noise(sampling.seeds_W, sampling.sample_indices_W, positions.long(), vocab)

    def ours(index: int) -> Tensor:
        ids_R = torch.empty(rows, dtype=torch.int64, device=device)
        sample_logits(logits[index], scratch=head_scratch, out_R=ids_R, **common)
        full_sample(logits[index], asked=sampling.asked, scratch=scratch, out_R=ids_R, **common)
        return ids_R

    def twin(index: int) -> Tensor:
        ids = [
            full_sample_reference(
                logits[index][row], noise_RV[row], temperature=each.temperature,
                top_k=each.top_k, top_p=each.top_p,
            )
            for row, each in enumerate(params)
        ]  # fmt: skip
        return torch.tensor(ids, device=device)

    return KernelCase(
        kernel="full_sample",
        rows=rows,
        num_bytes=num_bytes,
        flop=rows * vocab,
        num_sets=num_sets,
        ours=ours,
        twin=twin,
        has_capturable_twin=False,
    )


def decode_attention_case(sizes: Sizes, rows: int, context: int) -> KernelCase:
    """RoPE, store and attention of requests that all have the same length, of qkv as its product
    leaves it. SDPA reads dense KV, and neither rotates nor stores."""
    model, device = sizes.model, sizes.device
    num_heads, num_kv_heads, head_dim = model.num_heads, model.num_kv_heads, model.head_dim
    num_bytes = rows * context * 2 * num_kv_heads * head_dim * sizes.dtype.itemsize
    num_sets = sizes.num_sets(num_bytes)
    num_layers = model.num_layers
    # A set is a layer and a block table: as many layers as the model has, if there is room.
    while num_layers > 1 and num_bytes * -(-num_sets // num_layers) * num_layers > MAX_POOL_BYTES:
        num_layers //= 2
    num_tables = -(-num_sets // num_layers)
    cache = _decode_cache(sizes, rows, context, num_layers=num_layers, num_tables=num_tables)
    batches = [_decode_batch(sizes, rows, context, table) for table in range(num_tables)]
    steps = [cache.for_step(batch) for batch in batches]
    qk_norm = None
    twin_norm: dict[str, Any] = {}
    if model.qk_norm:
        qk_norm = sizes.random(head_dim), sizes.random(head_dim), model.rms_norm_eps
        twin_norm = dict(zip(("q_norm", "k_norm", "eps"), qk_norm, strict=True))
    layers, norm = TritonLayers(device), RMSNorm(sizes.random(model.hidden_size), 1e-5)
    num_out, num_in = _weight_shapes(model)["qkv"]
    bias = sizes.random(num_out) if model.qkv_bias else None
    qkv = layers.linear(DenseWeight(sizes.random(num_out, num_in)), bias)
    residual = _left_by(sizes, layers, "down", rows, norm)
    if steps[0].adds_parts:
        parts = qkv.normed_in_parts(norm, residual)
    else:
        parts = Parts(qkv.normed(norm, residual)[None])
    qkv_RND = add_up(parts).view(rows, -1, head_dim)

    def ours(index: int) -> Tensor:
        return steps[index // num_layers].rotate_and_attend(
            index % num_layers, parts.parts_SMN, parts.bias_N, qk_norm, only_last=False
        )

    def twin(index: int) -> Tensor:
        batch, kv = batches[index // num_layers], cache.layers[index % num_layers]
        rotated = rope_store_kv_reference(
            qkv_RND, *cache.cos_sin, batch.positions, batch.slot_mapping, *kv, **twin_norm
        )
        return paged_decode_reference(
            rotated[:, :num_heads], *kv, batch.block_table, batch.seq_lens, scale=cache.scale
        )

    def dense_kv() -> Tensor:
        shape = (rows, num_kv_heads, context, head_dim)
        return torch.empty(shape, dtype=sizes.dtype, device=device).normal_(std=0.05)

    dense = [(dense_kv(), dense_kv()) for _ in range(num_sets)]
    q_RH1D = sizes.random(rows, num_heads, 1, head_dim)
    return KernelCase(
        kernel="decode_attention",
        rows=rows,
        context=context,
        num_bytes=num_bytes,
        flop=4 * rows * context * num_heads * head_dim,
        num_sets=num_sets,
        ours=ours,
        twin=twin,
        has_capturable_twin=False,
        torch_name="SDPA",
        torch_run=lambda index: functional.scaled_dot_product_attention(
            q_RH1D, *dense[index], scale=cache.scale, enable_gqa=True
        ),
    )


def _decode_cache(
    sizes: Sizes, rows: int, context: int, *, num_layers: int, num_tables: int
) -> TritonKV:
    model = sizes.model
    rope = Rope(model.rope, model.head_dim, context, sizes.device)
    num_blocks = num_tables * rows * -(-context // sizes.block_size)
    cache = TritonKV(
        replace(model, num_layers=num_layers),
        num_device_blocks=num_blocks,
        block_size=sizes.block_size,
        max_num_seqs=rows,
        cos_PD=rope.cos_PD,
        sin_PD=rope.sin_PD,
        dtype=sizes.dtype,
        device=sizes.device,
    )
    cache.device_pool.normal_(std=0.05)
    return cache


def _decode_step(sizes: Sizes, rows: int, context: int) -> TritonStep:
    cache = _decode_cache(sizes, rows, context, num_layers=1, num_tables=1)
    return cache.for_step(_decode_batch(sizes, rows, context, 0))


def _decode_batch(sizes: Sizes, rows: int, context: int, table: int) -> ForwardBatch:
    """Requests of one length, whose blocks, in no order, are those of no other table."""
    block_size, device = sizes.block_size, sizes.device
    blocks_each = -(-context // block_size)
    count = rows * blocks_each
    first = 1 + table * count  # 0 is the null block
    order = torch.randperm(count, generator=torch.Generator().manual_seed(table)) + first
    block_table = order.view(rows, blocks_each).to(device, torch.int32)
    positions = torch.full((rows,), context - 1, dtype=torch.int64, device=device)
    last_slot = (context - 1) % block_size
    table_rows = torch.arange(rows, dtype=torch.int32, device=device)
    zeros_R = torch.zeros(rows, dtype=torch.int64, device=device)
    context_lens = np.full(rows, context - 1, np.int32)
    feed = DeviceFeed(
        token_rows=table_rows,
        table_rows=table_rows,
        last_tokens=zeros_R,
        sample_at=table_rows,
        block_size=block_size,
        is_long=are_long(context_lens),
    )
    return ForwardBatch(
        token_ids=zeros_R,
        positions=positions,
        slot_mapping=block_table[:, -1].long() * block_size + last_slot,
        block_table=block_table,
        seq_lens=(positions + 1).int(),
        query_start_loc=torch.arange(rows + 1, dtype=torch.int32, device=device),
        num_decodes=rows,
        rows=np.arange(rows, dtype=np.int32),
        context_lens=context_lens,
        query_lens=np.ones(rows, np.int32),
        feed=feed,
    )


def prefill_attention_case(sizes: Sizes) -> KernelCase:
    """Attention of one prompt without a context before it, as the engine runs it."""
    return _attention_case(sizes, "prefill_attention", may_be_fresh=True)


def chunk_attention_case(sizes: Sizes) -> KernelCase:
    """The same by the kernel that could also see a context in the pool."""
    return _attention_case(sizes, "chunk_attention", may_be_fresh=False)


def _attention_case(sizes: Sizes, kernel: str, *, may_be_fresh: bool) -> KernelCase:
    model, device, num_tokens = sizes.model, sizes.device, sizes.prefill_tokens
    num_heads, num_kv_heads, head_dim = model.num_heads, model.num_kv_heads, model.head_dim
    num_blocks = -(-num_tokens // sizes.block_size)
    pool = _pool(sizes, num_blocks + 1, 2)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)) + 1
    table = order.view(1, num_blocks).to(device, torch.int32)
    row = torch.zeros(1, dtype=torch.int32, device=device)
    starts = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
    seq_lens = starts[1:]
    q_THD = sizes.random(num_tokens, num_heads, head_dim)
    scale = head_dim**-0.5

    def run(attend: Callable[..., Tensor], index: int, **others: Any) -> Tensor:
        k_BGSD, v_BGSD = pool[:, :, index, 0], pool[:, :, index, 1]
        return attend(q_THD, k_BGSD, v_BGSD, table, row, starts, seq_lens, scale=scale, **others)

    # A fresh prompt's keys and values lie in one piece too.
    blocks = table[0].long()
    new_kv = [
        tuple(
            pool[blocks, :, index, which].transpose(1, 2).flatten(0, 1)[:num_tokens].contiguous()
            for which in range(2)
        )
        for index in range(2)
    ]
    q_1HTD = q_THD.transpose(0, 1).unsqueeze(0).contiguous()
    dense = [
        tuple(sizes.random(1, num_kv_heads, num_tokens, head_dim) for _ in range(2))
        for _ in range(2)
    ]
    num_kv = num_tokens * 2 * num_kv_heads * head_dim
    heads = (num_heads, num_kv_heads, head_dim)
    is_fresh = may_be_fresh and can_take(device, sizes.dtype, *heads)

    def ours(index: int) -> Tensor:
        if is_fresh:
            return hopper_prefill(q_THD, *new_kv[index], starts, scale=scale)
        return run(paged_prefill, index, new_kv_TGD=new_kv[index])

    return KernelCase(
        kernel=kernel,
        rows=num_tokens,
        context=num_tokens,
        num_bytes=(2 * q_THD.numel() + num_kv) * sizes.dtype.itemsize,
        # A token attends to those before it and itself.
        flop=2 * num_heads * head_dim * num_tokens * (num_tokens + 1),
        num_sets=2,
        ours=ours,
        twin=lambda index: run(paged_prefill_pool_reference, index),
        has_capturable_twin=False,
        torch_name="SDPA",
        torch_run=lambda index: functional.scaled_dot_product_attention(
            q_1HTD, *dense[index], is_causal=True, scale=scale, enable_gqa=True
        ),
    )


def rms_norm_case(sizes: Sizes) -> KernelCase:
    shape = (sizes.prefill_tokens, sizes.model.hidden_size)
    num_bytes = 2 * shape[0] * shape[1] * sizes.dtype.itemsize
    num_sets, eps = sizes.num_sets(num_bytes), sizes.model.rms_norm_eps
    inputs = [sizes.random(*shape) for _ in range(num_sets)]
    weight_E = sizes.random(shape[1])
    return KernelCase(
        kernel="rms_norm",
        rows=shape[0],
        num_bytes=num_bytes,
        flop=4 * shape[0] * shape[1],
        num_sets=num_sets,
        ours=lambda index: rms_norm(inputs[index], weight_E, eps),
        twin=lambda index: rms_norm_reference(inputs[index], weight_E, eps),
        torch_name="rms_norm",
        torch_run=lambda index: functional.rms_norm(inputs[index], shape[1:], weight_E, eps),
    )


def silu_mul_case(sizes: Sizes) -> KernelCase:
    num_tokens, mlp = sizes.prefill_tokens, sizes.model.intermediate_size
    num_bytes = 3 * num_tokens * mlp * sizes.dtype.itemsize
    num_sets = sizes.num_sets(num_bytes)
    inputs = [sizes.random(num_tokens, 2 * mlp) for _ in range(num_sets)]

    def torch_run(index: int) -> Tensor:
        gate_TF, up_TF = inputs[index].chunk(2, 1)
        return functional.silu(gate_TF) * up_TF

    return KernelCase(
        kernel="silu_mul",
        rows=num_tokens,
        num_bytes=num_bytes,
        flop=5 * num_tokens * mlp,
        num_sets=num_sets,
        ours=lambda index: silu_mul(inputs[index]),
        twin=lambda index: silu_mul_reference(inputs[index]),
        torch_name="silu, mul",
        torch_run=torch_run,
    )


def rope_store_kv_case(sizes: Sizes) -> KernelCase:
    """torch has no operation that stores into blocks."""
    model, device, num_tokens = sizes.model, sizes.device, sizes.prefill_tokens
    num_all = model.num_heads + 2 * model.num_kv_heads
    # All heads are read, and as many written, keys twice.
    num_moved = 2 * num_all + model.num_kv_heads
    num_bytes = num_tokens * num_moved * model.head_dim * sizes.dtype.itemsize
    num_sets = sizes.num_sets(num_bytes)
    num_blocks = -(-num_tokens // sizes.block_size)
    pool = _pool(sizes, num_blocks + 1, num_sets)
    inputs = [sizes.random(num_tokens, num_all, model.head_dim) for _ in range(num_sets)]
    rope = Rope(model.rope, model.head_dim, num_tokens, device)
    positions = torch.arange(num_tokens, dtype=torch.int32, device=device)
    slots = torch.arange(num_tokens, device=device) + sizes.block_size
    norm: dict[str, Any] = {}
    if model.qk_norm:
        norm = {
            "q_norm": sizes.random(model.head_dim),
            "k_norm": sizes.random(model.head_dim),
            "eps": model.rms_norm_eps,
        }

    def run(store: Callable[..., Tensor], index: int) -> Tensor:
        k_BGSD, v_BGSD = pool[:, :, index, 0], pool[:, :, index, 1]
        return store(
            inputs[index], rope.cos_PD, rope.sin_PD, positions, slots, k_BGSD, v_BGSD, **norm
        )

    return KernelCase(
        kernel="rope_store_kv",
        rows=num_tokens,
        num_bytes=num_bytes,
        flop=3 * num_tokens * num_all * model.head_dim,
        num_sets=num_sets,
        ours=lambda index: run(rope_store_kv, index),
        twin=lambda index: run(rope_store_kv_reference, index),
        has_capturable_twin=False,
    )


def _pool(sizes: Sizes, num_blocks: int, num_layers: int) -> Tensor:
    """[B, G, L, 2, S, D]"""
    model = sizes.model
    shape = (num_blocks, model.num_kv_heads, num_layers, 2, sizes.block_size, model.head_dim)
    return torch.empty(shape, dtype=sizes.dtype, device=sizes.device).normal_(std=0.05)
