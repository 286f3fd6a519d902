"""RMSNorm, alone and with the residual addition before it."""

from __future__ import annotations

import torch
from torch import Tensor


class RMSNorm:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension, summed in fp32."""

    SMALL_T = 16

    def __init__(self, weight_E: Tensor, eps: float) -> None:
        self.weight_E = weight_E
        self.eps = eps
        self.size = weight_E.shape[0]
        self._weight_2E = torch.cat((weight_E, weight_E))

    def __call__(self, x_TE: Tensor) -> Tensor:
        if x_TE.dtype == torch.bfloat16 and not x_TE.is_cuda and x_TE.shape[0] <= self.SMALL_T:
            # [x, -x] has mean 0, so its LayerNorm is [RMSNorm(x), -RMSNorm(x)]. At one row the two
            # ops take 9 us; rms_norm, six ops inside on the CPU, takes 16 us.
            both = torch.cat((x_TE, -x_TE), -1)
            y_2E = torch.layer_norm(both, (2 * self.size,), self._weight_2E, None, self.eps)
            return y_2E[..., : self.size]
        return torch.rms_norm(x_TE, (self.size,), self.weight_E, self.eps)

    def add(self, residual_TE: Tensor, delta_TE: Tensor) -> tuple[Tensor, Tensor]:
        """(residual + delta, its norm)."""
        new_residual_TE = residual_TE + delta_TE
        return new_residual_TE, self(new_residual_TE)
