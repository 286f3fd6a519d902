"""What is done to the logits before a token is chosen, in the order of the functions here.

R requests, V vocabulary; logits are fp32 and changed in place
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MASKED = float("-inf")


@dataclass(slots=True)
class PenaltyCounts:
    """What one request has seen, kept up as it grows."""

    in_prompt_V: Tensor
    """bool"""
    output_counts_V: Tensor
    """fp32: how often each token was generated"""

    @classmethod
    def of(
        cls,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        vocab_size: int,
        device: torch.device,
    ) -> PenaltyCounts:
        in_prompt_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        in_prompt_V[torch.tensor(prompt_ids, dtype=torch.int64, device=device)] = True
        output = torch.tensor(output_ids, dtype=torch.int64, device=device)
        return cls(in_prompt_V, torch.bincount(output, minlength=vocab_size).to(torch.float32))


def apply_penalties(
    logits_V: Tensor, counts: PenaltyCounts, *, presence: float, frequency: float, repetition: float
) -> None:
    """Repetition (prompt and output) first, then frequency and presence (output only)."""
    if repetition != 1.0:
        is_seen_V = counts.in_prompt_V | (counts.output_counts_V > 0)
        penalised_V = torch.where(logits_V > 0, logits_V / repetition, logits_V * repetition)
        torch.where(is_seen_V, penalised_V, logits_V, out=logits_V)
    if frequency:
        logits_V.sub_(counts.output_counts_V, alpha=frequency)
    if presence:
        logits_V.sub_((counts.output_counts_V > 0).to(torch.float32), alpha=presence)


def keep_top_k(logits_RV: Tensor, top_k_R: Tensor) -> None:
    """Keep exactly k tokens of each row, the lower id on ties. k >= V keeps all."""
    vocab_size = logits_RV.shape[1]
    k_R = top_k_R.clamp(max=vocab_size)
    largest_RK = logits_RV.topk(int(k_R.max()), dim=1).values
    threshold_R1 = largest_RK.gather(1, (k_R - 1)[:, None])
    is_above_RV = logits_RV > threshold_R1
    is_tied_RV = logits_RV == threshold_R1
    num_tied_R1 = k_R[:, None] - is_above_RV.sum(dim=1, keepdim=True)
    is_kept_tie_RV = is_tied_RV & (is_tied_RV.cumsum(dim=1) <= num_tied_R1)
    logits_RV.masked_fill_(~(is_above_RV | is_kept_tie_RV), MASKED)


_NUCLEUS_GUESS = 1024
"""Top-p looks among this many tokens first: a nucleus is seldom wider, and a full sort of the
vocabulary is slow."""


def keep_top_p(logits_RV: Tensor, top_p_R: Tensor) -> None:
    """Keep the smallest set of most likely tokens that reaches p, at least one; the lower id on
    ties."""
    vocab_size = logits_RV.shape[1]
    log_total_R1 = logits_RV.logsumexp(dim=1, keepdim=True)
    width = min(_NUCLEUS_GUESS, vocab_size)
    while True:
        sorted_RK, ids_RK = _largest_stable(logits_RV, width)
        probs_RK = (sorted_RK - log_total_R1).exp()
        mass_before_RK = probs_RK.cumsum(dim=1) - probs_RK
        is_kept_RK = mass_before_RK < top_p_R[:, None]
        # A kept token as small as the last one here may have equals with lower ids further out.
        reaches_end = is_kept_RK & (sorted_RK == sorted_RK[:, -1:])
        if width == vocab_size or not bool(reaches_end.any()):
            break
        width = vocab_size
    is_kept_RK[:, 0] = True
    kept_RV = torch.full_like(logits_RV, MASKED)
    kept_RV.scatter_(1, ids_RK, sorted_RK.masked_fill(~is_kept_RK, MASKED))
    logits_RV.copy_(kept_RV)


def _largest_stable(logits_RV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row in falling order, the lower id first among equals."""
    if count == logits_RV.shape[1]:
        values, ids = logits_RV.sort(dim=1, descending=True, stable=True)
        return values, ids
    ids_RK = logits_RV.topk(count, dim=1).indices.sort(dim=1).values
    values_RK, order_RK = logits_RV.gather(1, ids_RK).sort(dim=1, descending=True, stable=True)
    return values_RK, ids_RK.gather(1, order_RK)


def keep_min_p(logits_RV: Tensor, min_p_R: Tensor) -> None:
    """Keep tokens at least min_p times as likely as the most likely one."""
    threshold_R1 = logits_RV.max(dim=1, keepdim=True).values + min_p_R[:, None].log()
    logits_RV.masked_fill_(logits_RV < threshold_R1, MASKED)
