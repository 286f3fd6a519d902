"""Where one decode step of SmolLM2-135M goes on the CPU, piece by piece, with random weights.

    python benchmarks/kernels/bench_cpu_step.py --rows 1 8 32 --formats int4 bf16 --context 256

Every layer has its own weights and KV, so that each piece runs over all 30 layers as cold as in a
real step. Times are the best of several interleaved rounds: on a shared machine compare the rows of
one run, not runs. "whole step" is measured, not summed: what it lacks to the sum is caches.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pico_vllm.config.model import RopeConfig
from pico_vllm.kernels.cpu.paged_decode import paged_decode, plan_decode
from pico_vllm.kernels.cpu.store_kv import plan_store, store_kv
from pico_vllm.kernels.cpu.tiles import tile_tokens
from pico_vllm.layers.linear import (
    DenseWeight,
    Int4Weight,
    Int8Weight,
    Linear,
    OneDnnWeight,
    silu_mul,
)
from pico_vllm.layers.norm import RMSNorm
from pico_vllm.layers.rope import Rope, apply_rope

L, E, H, G, D, F, V, S = 30, 576, 9, 3, 64, 1536, 49152, 16
LINEARS = {
    "qkv": ((H + 2 * G) * D, E),
    "o": (E, H * D),
    "gate_up": (2 * F, E),
    "down": (E, F),
}


def random_linear(weight_format: str, shape: tuple[int, int]) -> Linear:
    num_out, num_in = shape
    if weight_format == "int4":
        codes = torch.randint(0, 16, shape, dtype=torch.uint8)
        scale = torch.full((num_out, num_in // 32), 0.2 / num_in**0.5)
        return Linear(Int4Weight.pack(codes, scale, -7.5 * scale))
    values = (torch.randn(shape) / num_in**0.5).bfloat16()
    if weight_format == "int8":
        return Linear(Int8Weight.pack(values))
    return Linear((OneDnnWeight if OneDnnWeight.is_available() else DenseWeight).pack(values))


class Step:
    """One decode step for R requests with `context` cached tokens each, in pieces."""

    def __init__(self, weight_format: str, num_rows: int, context: int) -> None:
        self.linears = {
            name: [random_linear(weight_format, shape) for _ in range(L)]
            for name, shape in LINEARS.items()
        }
        head = "int8" if weight_format == "int4" else weight_format
        self.head = random_linear(head, (V, E))
        self.norm = RMSNorm(torch.ones(E, dtype=torch.bfloat16), 1e-5)
        self.rope = Rope(RopeConfig(), D, context + 1)

        num_blocks = -(-(context + 1) // S)
        pool = torch.randn(1 + num_rows * num_blocks, G, L, 2, S, D).bfloat16()
        self.kv = [(pool[:, :, layer, 0], pool[:, :, layer, 1]) for layer in range(L)]
        # A request's prompt lies together, what it generated between the others' blocks.
        table = 1 + np.arange(num_rows * num_blocks, dtype=np.int32).reshape(num_rows, num_blocks)
        table[:, num_blocks // 2 :] = (
            np.sort(table[:, num_blocks // 2 :].ravel()).reshape(-1, num_rows).T
        )
        self.table, self.lens = table, np.full(num_rows, context + 1, np.int32)
        self.slots = torch.from_numpy(table[:, -1].astype(np.int64) * S + context % S)
        self.positions = torch.full((num_rows,), context)

        self.x_TE = torch.randn(num_rows, E).bfloat16()
        self.attended_TE = torch.randn(num_rows, H * D).bfloat16()
        self.gate_up_TF2 = torch.randn(num_rows, 2 * F).bfloat16()
        self.mlp_TF = torch.randn(num_rows, F).bfloat16()
        self.heads_TND = torch.randn(num_rows, H + 2 * G, D).bfloat16()
        self.begin()

    def begin(self) -> None:
        """What a step computes once for all layers."""
        self.cos_sin = self.rope.gather(self.positions, torch.bfloat16)
        self.decode_plan = plan_decode(
            self.table, self.lens, S, tile_tokens=tile_tokens(G, D, 2, S)
        )
        self.store_plan = plan_store(self.slots)

    def pieces(self) -> dict[str, tuple[int, Callable[[], object]]]:
        """Name to (calls a step, function that makes them all)."""
        x_TE = self.x_TE
        inputs = {"qkv": x_TE, "o": self.attended_TE, "gate_up": x_TE, "down": self.mlp_TF}
        found: dict[str, tuple[int, Callable[[], object]]] = {"plans, rope rows": (1, self.begin)}

        def linears(name: str) -> Callable[[], object]:
            return lambda: [linear(inputs[name]) for linear in self.linears[name]]

        for name in LINEARS:
            found[name] = (L, linears(name))
        qk = self.heads_TND[:, : H + G]
        found |= {
            "norms and adds": (
                2 * L,
                lambda: [self.add_norm(self.x_TE, self.x_TE) for _ in range(2 * L)],
            ),
            "rope": (L, lambda: [apply_rope(qk, *self.cos_sin) for _ in range(L)]),
            "store": (
                L,
                lambda: [
                    store_kv(self.heads_TND[:, H:], k, w, self.store_plan) for k, w in self.kv
                ],
            ),
            "attention": (L, lambda: [self.attend(qk[:, :H], layer) for layer in range(L)]),
            "silu_mul": (L, lambda: [silu_mul(self.gate_up_TF2) for _ in range(L)]),
            "head": (1, lambda: self.head(self.x_TE)),
            "whole step": (1, self.run),
        }
        return found

    def add_norm(self, residual_TE: Tensor, delta_TE: Tensor) -> tuple[Tensor, Tensor]:
        new_residual_TE = residual_TE + delta_TE
        return new_residual_TE, self.norm(new_residual_TE)

    def attend(self, q_RHD: Tensor, layer: int) -> Tensor:
        return paged_decode(q_RHD, *self.kv[layer], self.decode_plan, scale=D**-0.5)

    def run(self) -> Tensor:
        self.begin()
        num_rows = self.x_TE.shape[0]
        residual_TE, x_TE = self.add_norm(self.x_TE, self.x_TE)
        for layer in range(L):
            heads = self.linears["qkv"][layer](x_TE).view(num_rows, H + 2 * G, D)
            heads[:, : H + G].copy_(apply_rope(heads[:, : H + G], *self.cos_sin))
            store_kv(heads[:, H:], *self.kv[layer], self.store_plan)
            attended = self.attend(heads[:, :H], layer).view(num_rows, H * D)
            residual_TE, x_TE = self.add_norm(residual_TE, self.linears["o"][layer](attended))
            hidden = silu_mul(self.linears["gate_up"][layer](x_TE))
            residual_TE, x_TE = self.add_norm(residual_TE, self.linears["down"][layer](hidden))
        return self.head(x_TE)


def best_ms(pieces: dict[str, tuple[int, Callable[[], object]]], rounds: int) -> dict[str, float]:
    best = dict.fromkeys(pieces, float("inf"))
    for _ in range(rounds):
        for name, (_, function) in pieces.items():
            start = time.perf_counter()
            function()
            best[name] = min(best[name], (time.perf_counter() - start) * 1e3)
    return best


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--formats", nargs="+", default=["int4", "bf16"])
    parser.add_argument("--context", type=int, default=256, help="cached tokens of each request")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, context {args.context}")
    for weight_format in args.formats:
        for num_rows in args.rows:
            pieces = Step(weight_format, num_rows, args.context).pieces()
            best = best_ms(pieces, args.rounds)
            title = f"{weight_format}, {num_rows} rows"
            print(f"\n{title:20} {'ms a step':>12} {'us a call':>10} {'share':>6}")
            for name, ms in best.items():
                share = ms / best["whole step"]
                print(f"  {name:18} {ms:12.2f} {ms / pieces[name][0] * 1e3:10.1f} {share:6.1%}")


if __name__ == "__main__":
    main()
