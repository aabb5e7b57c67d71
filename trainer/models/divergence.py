"""Full-vocabulary KL to a reference, in float32.

Invariant: distributions exist only in chunks; the reference's logits are recomputed from hidden states.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offbeat.trainer.models.logprobs import rows_per_chunk


@dataclass(frozen=True, slots=True)
class ReferenceStates:
    """Factored logits, hidden @ head.T. hidden: [M, H]; head: [V, H], on the model's device."""

    hidden: Tensor
    head: Tensor


class _FullKL(torch.autograd.Function):
    """d KL / d logits = p (log p - log q - KL) / temperature."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, hidden: Tensor, head: Tensor, temperature: float | Tensor) -> Tensor:
        parts = [(p.exp() * (p - q)).sum(1) for p, q, _, _ in _distributions(logits, hidden, head, temperature)]
        divergence = torch.cat(parts)
        ctx.save_for_backward(logits, hidden, head, divergence)
        ctx.temperature = temperature
        return divergence

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits, hidden, head, divergence = ctx.saved_tensors
        out = torch.empty_like(logits)
        for p, q, rows, row_temperature in _distributions(logits, hidden, head, ctx.temperature):
            gradient = p.exp() * (p - q - divergence[rows, None])
            out[rows] = (gradient * grads[0][rows, None]).div_(row_temperature).to(out.dtype)
        return out, None, None, None


def _distributions(
    logits: Tensor, hidden: Tensor, head: Tensor, temperature: float | Tensor
) -> Iterator[tuple[Tensor, Tensor, slice, float | Tensor]]:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    step = rows_per_chunk(logits)
    for start in range(0, len(logits), step):
        rows = slice(start, start + step)
        row_temperature = temperature[rows, None] if isinstance(temperature, Tensor) else temperature
        reference = (hidden[rows] @ head.T).to(dtype)
        yield (
            (logits[rows].to(dtype) / row_temperature).log_softmax(1),
            (reference / row_temperature).log_softmax(1),
            rows,
            row_temperature,
        )


def full_kl(logits: Tensor, reference: ReferenceStates, temperature: float | Tensor = 1.0) -> Tensor:
    """Sum p (log p - log q) over the vocabulary, p: policy, q: reference.

    logits: [M, V]; temperature: scalar or [M] -> [M] nats, float32 or wider, once differentiable by `logits`.
    """
    if not len(logits):
        return logits.sum(1).float()
    return _FullKL.apply(logits, reference.hidden, reference.head, temperature)
