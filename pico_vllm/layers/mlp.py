"""The gated MLP with the norm before it and the residual around it."""

from __future__ import annotations

from pico_vllm.layers.linear import Linear, Norm, Residual


class MLP:
    """x + down(silu(gate(norm(x))) * up(norm(x))). Gate and up are one matrix, gate's rows
    first."""

    def __init__(self, norm: Norm, gate_up: Linear, down: Linear) -> None:
        self.norm = norm
        self.gate_up = gate_up
        self.down = down

    def forward(self, residual: Residual, next_norm: Norm | None = None) -> Residual:
        hidden_TF = self.gate_up.normed_silu_mul(self.norm, residual)
        return self.down.added(hidden_TF, residual, next_norm)
