"""Counter-based random numbers: the noise of a token depends on the request's seed and place alone.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), with the key =
the 64-bit seed and the counter = (token_id // 4, position, sample_index, 0); the four outputs of
one counter serve four neighbouring ids. Neither batch mates nor steps enter, so a request draws the
same noise alone, in a batch, or after a preemption.

    R requests, V vocabulary
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLY_0, _MULTIPLY_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_LOW_32 = 0xFFFFFFFF
_ROUNDS = 10
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24


def philox_4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """Four uint32 per counter, held in int64. All inputs broadcast; each holds values in [0,
    2**32)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The product wraps to a negative int64 above 2**63; its bits, and so both halves, are still
        # right.
        product_0, product_1 = c0 * _MULTIPLY_0, c2 * _MULTIPLY_1
        high_0, high_1 = (product_0 >> 32) & _LOW_32, (product_1 >> 32) & _LOW_32
        c0, c1, c2, c3 = (
            high_1 ^ c1 ^ k0,
            product_1 & _LOW_32,
            high_0 ^ c3 ^ k1,
            product_0 & _LOW_32,
        )
        k0, k1 = (k0 + _WEYL_0) & _LOW_32, (k1 + _WEYL_1) & _LOW_32
    return c0, c1, c2, c3


def gumbel_noise(
    seeds_R: Tensor, sample_indices_R: Tensor, positions_R: Tensor, vocab_size: int
) -> Tensor:
    """[R, V] fp32 standard Gumbel noise: argmax(logits + noise) samples from softmax(logits).

    seeds int64, any value; sample indices and positions int64 in [0, 2**32).
    """
    groups = torch.arange(-(-vocab_size // 4), device=seeds_R.device)[None, :]
    seed, position, sample = seeds_R[:, None], positions_R[:, None], sample_indices_R[:, None]
    key = (seed & _LOW_32, (seed >> 32) & _LOW_32)
    words = philox_4x32((groups, position, sample, torch.zeros_like(position)), key)
    bits_RV = torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(1)[:, :vocab_size]
    # -log(1 - u) of a uniform u: floats are dense near 0, which is where the large Gumbel values
    # come from.
    uniform_RV = ((bits_RV.to(torch.float32) + 0.5) * 2.0**-32).clamp_(max=_LARGEST_BELOW_ONE)
    return torch.log1p_(uniform_RV.neg_()).neg_().log_().neg_()
