"""Weights of token losses; sums over micro-batches, mini-batches and ranks add up to the batch's loss."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Mode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class MaskedCounts(NamedTuple):
    """Masked parts of denominators."""

    tokens: int = 0
    sequences: int = 0
    """With tokens in the loss."""
    groups: int = 0
    episodes: int = 0
    """All, those without tokens and those left out of the loss included."""


NO_MASKED = MaskedCounts()


def token_weights(sequence: Tensor, mode: Mode, length: int = 1, masked: MaskedCounts = NO_MASKED) -> Tensor:
    """Return weights [M] with loss = sum(w * token_loss).

    token-mean: 1 / M (DAPO, arXiv:2503.14476). seq-mean-token-sum: 1 / S. seq-mean-token-sum-norm: 1 / (S * length)
    (Dr. GRPO, arXiv:2503.20783). seq-mean-token-mean: 1 / (S * tokens of the sequence) (GRPO, arXiv:2402.03300). S:
    sequences with tokens; M and S include masked ones.

    sequence: [M]
    """
    num_tokens = len(sequence)
    if not num_tokens:
        return torch.zeros(0, device=sequence.device)
    if mode == "token-mean":
        return torch.full((num_tokens,), 1.0 / (num_tokens + masked.tokens), device=sequence.device)
    _, inverse, counts = torch.unique(sequence, return_inverse=True, return_counts=True)
    per_sequence = torch.full((len(counts),), 1.0 / (len(counts) + masked.sequences), device=sequence.device)
    if mode == "seq-mean-token-mean":
        per_sequence = per_sequence / counts
    if mode == "seq-mean-token-sum-norm":
        per_sequence = per_sequence / length
    return per_sequence[inverse]
