"""The gated MLP: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from pico_vllm.layers.linear import Linear


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """silu(first half) * second half."""
    # int: in a graph a size is a constant, not one more operation a layer.
    size = int(gate_up_T2F.shape[-1]) // 2
    return functional.silu(gate_up_T2F[..., :size]).mul_(gate_up_T2F[..., size:])


class MLP:
    """Gate and up are one matrix, gate's rows first."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down

    def forward(self, x_TE: Tensor) -> Tensor:
        return self.down(silu_mul(self.gate_up(x_TE)))
