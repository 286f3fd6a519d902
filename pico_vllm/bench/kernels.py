"""Each kernel of a step by itself, at the sizes of a model, beside its plain twin and torch.

Times are of CUDA graphs that hold at least 20 launches. A launch takes the next of several sets of
weights or KV, so that no cache serves it: together they are 256 MiB where that takes no more than
512 sets. What limits a kernel is measured in the same run: reading memory, or a large product.

    T tokens, R requests, E hidden size, F MLP size, H query heads, G KV heads, D head dim,
    N = H + 2 G, V vocabulary, L layers, S block_size, B blocks in pool, M block-table width
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pico_vllm.bench.limits import cuda_ms
from pico_vllm.config.model import ModelConfig
from pico_vllm.engine.sampling_rows import WORDS_PER_ROW, SamplingRows
from pico_vllm.kernels.candidates import RowScratch
from pico_vllm.kernels.full_sample import full_sample, full_sample_reference
from pico_vllm.kernels.head_sample import (
    HeadScratch,
    head_sample,
    head_sample_reference,
    sample_logits,
)
from pico_vllm.kernels.hopper_prefill import can_take, hopper_prefill
from pico_vllm.kernels.paged_decode import (
    DecodeScratch,
    are_long,
    paged_decode_reference,
    rope_paged_decode,
)
from pico_vllm.kernels.paged_prefill import paged_prefill, paged_prefill_pool_reference
from pico_vllm.kernels.rms_norm import rms_norm, rms_norm_reference
from pico_vllm.kernels.rope_store_kv import rope_store_kv, rope_store_kv_reference
from pico_vllm.kernels.silu_mul import silu_mul, silu_mul_reference
from pico_vllm.kernels.small_linear import small_linear_reference
from pico_vllm.layers.linear import DenseWeight, Residual
from pico_vllm.layers.norm import RMSNorm
from pico_vllm.layers.rope import Rope
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
    has_capturable_twin: bool = True
    """False where it asks the device for numbers: it is then timed launch by launch."""
    torch_name: str | None = None
    torch_run: Run | None = None
    bound: Literal["read", "matmul"] = "read"


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
    """One line a kernel and size, as soon as it is measured."""
    for case in cases(sizes, only):
        us = timer.in_graph_us(case.ours, case.num_sets)
        is_read = case.bound == "read"
        rate = (case.num_bytes if is_read else case.flop) / us * 1e6
        limit = limits.read_bytes_s if is_read else limits.matmul_flop_s
        if case.has_capturable_twin:
            twin_us = _try(lambda case=case: timer.in_graph_us(case.twin, case.num_sets))
        else:
            twin_us = _try(lambda case=case: timer.eager_us(case.twin))
        torch_us = None
        if case.torch_run is not None:
            run = case.torch_run
            torch_us = _try(lambda run=run, case=case: timer.in_graph_us(run, case.num_sets))
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
            **{name: None if v is None else round(v, 3) for name, v in figures.items()},
            "twin_is_in_graph": case.has_capturable_twin,
            "torch_name": case.torch_name,
            "limit": case.bound,
            "num_sets": case.num_sets,
        }


def _try(measure: Callable[[], float]) -> float | None:
    """None where there is no memory for it: twins keep all scores of an attention."""
    try:
        return measure()
    except torch.OutOfMemoryError:
        return None


def cases(sizes: Sizes, only: Sequence[str]) -> Iterator[KernelCase]:
    """Made one after the other, so that their memory is never needed at once."""
    for rows in sizes.rows:
        for kernel in KERNELS[:4]:
            if kernel in only:
                yield linear_case(sizes, kernel, rows)
        if "head" in only:
            yield head_case(sizes, rows)
        if "full_sample" in only:
            yield full_sample_case(sizes, rows)
    if "decode_attention" in only:
        for context, rows in itertools.product(sizes.contexts, sizes.rows):
            yield decode_attention_case(sizes, rows, context)
    for kernel, make in (
        ("prefill_attention", prefill_attention_case),
        ("chunk_attention", chunk_attention_case),
        ("rms_norm", rms_norm_case),
        ("silu_mul", silu_mul_case),
        ("rope_store_kv", rope_store_kv_case),
    ):
        if kernel in only:
            yield make(sizes)


def linear_case(sizes: Sizes, kernel: str, rows: int) -> KernelCase:
    """As the model runs it up to 24 rows, with norm, bias, SiLU or residual; above, where it leaves
    qkv, o and down in parts, these whole. cuBLAS does the product alone."""
    model = sizes.model
    hidden, mlp = model.hidden_size, model.intermediate_size
    attention = model.num_heads * model.head_dim
    num_qkv = attention + 2 * model.num_kv_heads * model.head_dim
    num_out, num_in = {
        "qkv": (num_qkv, hidden),
        "o": (hidden, attention),
        "gate_up": (2 * mlp, hidden),
        "down": (hidden, mlp),
    }[kernel]
    num_bytes = num_out * num_in * sizes.dtype.itemsize
    num_sets = sizes.num_sets(num_bytes)
    weights = [sizes.random(num_out, num_in) for _ in range(num_sets)]
    x_MK, residual_MN = sizes.random(rows, num_in), sizes.random(rows, num_out)
    bias = sizes.random(num_out) if kernel == "qkv" and model.qkv_bias else None
    norm = RMSNorm(sizes.random(num_in), model.rms_norm_eps)
    layers = TritonLayers(sizes.device)
    linears = [layers.linear(DenseWeight(weight), bias) for weight in weights]
    has_norm = kernel in ("qkv", "gate_up")

    def ours(index: int) -> Tensor:
        if kernel == "gate_up":
            return linears[index].normed_silu_mul(norm, Residual(x_MK))
        if has_norm:
            return linears[index].normed(norm, Residual(x_MK))
        return linears[index].added(x_MK, Residual(residual_MN)).x_TE

    def twin(index: int) -> Tensor:
        return small_linear_reference(
            x_MK,
            weights[index],
            bias_N=bias,
            norm_K=norm.weight_E if has_norm else None,
            eps=norm.eps,
            residual_MN=None if has_norm else residual_MN,
            has_silu_mul=kernel == "gate_up",
        )

    return KernelCase(
        kernel=kernel,
        rows=rows,
        num_bytes=num_bytes,
        flop=2 * rows * num_out * num_in,
        num_sets=num_sets,
        ours=ours,
        twin=twin,
        torch_name="cuBLAS",
        torch_run=lambda index: functional.linear(x_MK, weights[index]),
    )


def head_case(sizes: Sizes, rows: int) -> KernelCase:
    """Norm, head and the choice of the highest logit; cuBLAS makes the logits alone."""
    model, device = sizes.model, sizes.device
    vocab, hidden, eps = model.vocab_size, model.hidden_size, model.rms_norm_eps
    num_bytes = vocab * hidden * sizes.dtype.itemsize
    num_sets = sizes.num_sets(num_bytes)
    heads = [sizes.random(vocab, hidden) for _ in range(num_sets)]
    x_RE, norm_E = sizes.random(rows, hidden), sizes.random(hidden)
    table_rows = torch.arange(rows, dtype=torch.int32, device=device)
    zeros_W = torch.zeros(rows, dtype=torch.int64, device=device)
    last_tokens_W = torch.zeros_like(zeros_W)
    temperatures_W = torch.zeros(rows, device=device)
    scratch = HeadScratch.allocate(device)
    no_noise = torch.zeros((1, vocab), device=device)

    def ours(index: int) -> Tensor:
        ids_R = torch.empty(rows, dtype=torch.int64, device=device)
        head_sample(
            x_RE, norm_E, eps, heads[index], vocab_size=vocab, rows_R=table_rows,
            positions_R=table_rows, temperatures_W=temperatures_W, seeds_W=zeros_W,
            sample_indices_W=zeros_W, last_tokens_W=last_tokens_W, scratch=scratch, out_R=ids_R,
        )  # fmt: skip
        return ids_R

    def twin(index: int) -> Tensor:
        logits_RV = small_linear_reference(x_RE, heads[index], norm_K=norm_E, eps=eps)
        return head_sample_reference(logits_RV, no_noise, temperatures_W, vocab_size=vocab)

    return KernelCase(
        kernel="head",
        rows=rows,
        num_bytes=num_bytes,
        flop=2 * rows * vocab * hidden,
        num_sets=num_sets,
        ours=ours,
        twin=twin,
        torch_name="cuBLAS",
        torch_run=lambda index: functional.linear(x_RE, heads[index]),
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
    """RoPE, store and attention of requests that all have the same length. SDPA reads dense KV,
    and neither rotates nor stores."""
    model, device = sizes.model, sizes.device
    num_heads, num_kv_heads, head_dim = model.num_heads, model.num_kv_heads, model.head_dim
    num_all = num_heads + 2 * num_kv_heads
    num_bytes = rows * context * 2 * num_kv_heads * head_dim * sizes.dtype.itemsize
    num_sets = sizes.num_sets(num_bytes)
    blocks_each = -(-context // sizes.block_size)
    num_layers = model.num_layers
    # A set is a layer and a block table: as many layers as the model has, if there is room.
    while num_layers > 1 and num_bytes * -(-num_sets // num_layers) * num_layers > MAX_POOL_BYTES:
        num_layers //= 2
    num_tables = -(-num_sets // num_layers)
    num_blocks = num_tables * rows * blocks_each
    pool = _pool(sizes, num_blocks + 1, num_layers)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)) + 1
    tables = order.view(num_tables, rows, blocks_each).to(device, torch.int32)
    seq_lens = torch.full((rows,), context, dtype=torch.int32, device=device)
    table_rows = torch.arange(rows, dtype=torch.int32, device=device)
    positions = seq_lens - 1
    slots = [
        table[:, -1].long() * sizes.block_size + (context - 1) % sizes.block_size
        for table in tables
    ]
    qkv_RND = sizes.random(rows, num_all, head_dim)
    rope = Rope(model.rope, head_dim, context, device)
    norm: dict[str, Any] = {}
    if model.qk_norm:
        norm = {"eps": model.rms_norm_eps}
        q_norm, k_norm = sizes.random(head_dim), sizes.random(head_dim)
        ours_norm = norm | {"q_norm_D": q_norm, "k_norm_D": k_norm}
        twin_norm = norm | {"q_norm": q_norm, "k_norm": k_norm}
    else:
        ours_norm = twin_norm = norm
    scale = head_dim**-0.5
    scratch = DecodeScratch.allocate(rows, num_heads, num_kv_heads, head_dim, device)
    is_long = are_long(np.full(rows, context - 1, np.int32))

    def layer_and_table(index: int) -> tuple[Tensor, Tensor, int]:
        layer, table = index % num_layers, index // num_layers
        return pool[:, :, layer, 0], pool[:, :, layer, 1], table

    def ours(index: int) -> Tensor:
        k_BGSD, v_BGSD, table = layer_and_table(index)
        return rope_paged_decode(
            qkv_RND, rope.cos_PD, rope.sin_PD, k_BGSD, v_BGSD, tables[table], table_rows, seq_lens,
            scale=scale, scratch=scratch, is_long=is_long, **ours_norm,
        )  # fmt: skip

    def twin(index: int) -> Tensor:
        k_BGSD, v_BGSD, table = layer_and_table(index)
        rotated = rope_store_kv_reference(
            qkv_RND, rope.cos_PD, rope.sin_PD, positions, slots[table], k_BGSD, v_BGSD, **twin_norm
        )
        q_rot = rotated[:, :num_heads]
        return paged_decode_reference(q_rot, k_BGSD, v_BGSD, tables[table], seq_lens, scale=scale)

    dense = [
        (
            sizes.random(rows, num_kv_heads, context, head_dim),
            sizes.random(rows, num_kv_heads, context, head_dim),
        )
        for _ in range(num_sets)
    ]
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
            q_RH1D, *dense[index], scale=scale, enable_gqa=True
        ),
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
        bound="matmul",
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
