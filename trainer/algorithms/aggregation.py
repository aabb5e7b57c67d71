"""Aggregation of M token losses into a scalar, with denominators over the whole batch.

With these denominators, sums over micro-batches, mini-batches and ranks add up exactly to the loss of the batch.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Mode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class MaskedCounts(NamedTuple):
    """Tokens, sequences and groups that are masked out but still count in the loss denominators."""

    tokens: int = 0
    sequences: int = 0
    groups: int = 0


NO_MASKED = MaskedCounts()


def token_weights(sequence: Tensor, mode: Mode, length: int = 1, masked: MaskedCounts = NO_MASKED) -> Tensor:
    """Return weights w with loss = sum(w * token_loss).

    token-mean: 1 / M (DAPO, arXiv:2503.14476). seq-mean-token-sum: 1 / S. seq-mean-token-sum-norm: 1 / (S * length),
    with the same length for all batches (Dr. GRPO, arXiv:2503.20783). seq-mean-token-mean: 1 / (S * tokens of the
    sequence) (GRPO, arXiv:2402.03300). S counts sequences that have a token. M and S include the masked ones.

    sequence: [M] int64, the sequence of each token -> [M] float32
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
