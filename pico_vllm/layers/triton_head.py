"""From the hidden state of each request's last token to its next token.

Up to 64 requests one kernel normalises, multiplies by the head and chooses. Above that cuBLAS makes
the logits, with kernels around it. On a Hopper, where many requests all want the likeliest token,
one kernel multiplies and compares, and logits never come to memory.

    R requests, V rows of the head, W rows of the batch state
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pico_vllm.kernels import hopper_head
from pico_vllm.kernels.head_sample import HeadScratch, head_sample, sample_logits
from pico_vllm.kernels.small_linear import MAX_ROWS
from pico_vllm.layers.linear import Linear, Residual
from pico_vllm.layers.norm import RMSNorm
from pico_vllm.layers.triton_linear import TritonLinear, normed_rows


class TritonHead:
    """The last norm, the head, and the choice."""

    def __init__(
        self,
        norm: RMSNorm,
        head: Linear,
        *,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """vocab_size: ids that are tokens; the head may have more rows. dtype: of the model."""
        self._norm = norm
        self._head = head
        self._vocab_size = vocab_size
        self._scratch = HeadScratch.allocate(device)
        self._takes_many = isinstance(head, TritonLinear) and hopper_head.can_take(
            device, dtype, head.weight.shape[1]
        )

    def is_faster_without_logits(self, num_requests: int) -> bool:
        """Where they all want the likeliest token: choose_likeliest can be called then."""
        return self._takes_many and hopper_head.is_faster(num_requests, self._vocab_size)

    def choose_likeliest(
        self, last: Residual, rows_R: Tensor, last_tokens_W: Tensor, out_R: Tensor
    ) -> None:
        """Arguments as hopper_head takes them."""
        assert isinstance(self._head, TritonLinear)
        hopper_head.hopper_head(
            normed_rows(self._norm, last), self._head.weight.weight_NK,
            vocab_size=self._vocab_size, rows_R=rows_R, last_tokens_W=last_tokens_W,
            scratch=self._scratch, out_R=out_R,
        )  # fmt: skip

    def choose(self, last: Residual, around: Mapping[str, Tensor]) -> Tensor:
        """By temperature alone; also the logits, [R, V] in the model's dtype. around: what
        sample_logits takes beside them."""
        head, norm, x_RE = self._head, self._norm, last.x_TE
        options = {"vocab_size": self._vocab_size, "scratch": self._scratch, **around}
        if isinstance(head, TritonLinear) and len(x_RE) <= MAX_ROWS:
            return head_sample(x_RE, norm.weight_E, norm.eps, head.weight.weight_NK, **options)
        logits_RV = head.normed(norm, last)
        sample_logits(logits_RV, **options)
        return logits_RV
