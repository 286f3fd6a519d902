"""RMSNorm."""

from __future__ import annotations

import torch
from torch import Tensor


class RMSNorm:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension, summed in fp32.

    On the CPU torch.rms_norm is six ops, each over all of x. In bf16 two shorter ways give the same
    values, rounded once as there: 7 us against 13 for one row of 576, 14 against 19 for 8 rows, 140
    against 248 for 512.
    """

    FEW_ROWS = 4

    def __init__(self, weight_E: Tensor, eps: float) -> None:
        self.size = weight_E.shape[0]
        self.eps = eps
        self.weight_E = weight_E
        self._has_short_ways = weight_E.dtype == torch.bfloat16 and weight_E.device.type == "cpu"
        self._weight_2E = torch.cat((weight_E, weight_E))
        self._signs = torch.tensor([[1.0], [-1.0]], dtype=weight_E.dtype, device=weight_E.device)
        self._scaled_weight_E = weight_E.float() * self.size**0.5

    def __call__(self, x_TE: Tensor) -> Tensor:
        if not self._has_short_ways:
            return torch.rms_norm(x_TE, (self.size,), self.weight_E, self.eps)
        if x_TE.shape[0] <= self.FEW_ROWS:
            # [x, -x] has mean 0, so its LayerNorm is [RMSNorm(x), -RMSNorm(x)].
            both_T2E = (x_TE.unsqueeze(-2) * self._signs).flatten(-2)
            y_T2E = torch.layer_norm(both_T2E, (2 * self.size,), self._weight_2E, None, self.eps)
            return y_T2E[..., : self.size]
        # sqrt(E) moved to the weight: x / sqrt(sum(x^2) + E eps) * (weight sqrt(E)).
        wide_TE = x_TE.float()
        length_T1 = torch.linalg.vector_norm(wide_TE, 2, -1, True)
        inverse_T1 = length_T1.square_().add_(self.size * self.eps).rsqrt_()
        return wide_TE.mul_(inverse_T1).mul_(self._scaled_weight_E).bfloat16()
