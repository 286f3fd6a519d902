"""The gated MLP with the norm before it and the residual around it."""

from __future__ import annotations

from torch import Tensor

from pico_vllm.layers.linear import Linear, Norm


class MLP:
    """x + down(silu(gate(norm(x))) * up(norm(x))). Gate and up are one matrix, gate's rows
    first."""

    def __init__(self, norm: Norm, gate_up: Linear, down: Linear) -> None:
        self.norm = norm
        self.gate_up = gate_up
        self.down = down

    def forward(self, x_TE: Tensor) -> Tensor:
        return self.down.added(self.gate_up.normed_silu_mul(self.norm, x_TE), x_TE)
