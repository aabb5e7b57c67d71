"""Log-probabilities and entropies of sampled tokens from logits, in float32, without float32 copies of all logits."""

from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24
"""Logits that are held in float32 at a time."""


class _TokenLogprobs(torch.autograd.Function):
    """Keeps the logits as they came and one normaliser a row; the backward pass makes probabilities again by chunks."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
        parts = [_forward(chunk, t, heat) for chunk, t, heat in _chunks(logits, targets, temperature)]
        logprobs, entropies, normalisers = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(logits, targets, entropies, normalisers)
        ctx.temperature = temperature
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, entropies, normalisers = ctx.saved_tensors
        out = torch.empty_like(logits)
        start = 0
        for chunk, target, temperature in _chunks(logits, targets, ctx.temperature):
            rows = slice(start, start := start + len(chunk))
            logp = _scaled(chunk, temperature).sub_(normalisers[rows, None])
            probs = logp.exp()
            # d logprob = onehot - p;  d entropy = -p (log p + entropy)
            grad = logp.add_(entropies[rows, None]).mul_(-grads[1][rows, None]).sub_(grads[0][rows, None]).mul_(probs)
            grad.scatter_add_(1, target[:, None], grads[0][rows, None])
            out[rows] = grad.div_(temperature)
        return out, None, None


def _chunks(logits: Tensor, targets: Tensor, temperature: float | Tensor) -> Any:
    """Rows of logits, their targets, and their temperature: one for all, or [rows, 1]."""
    rows = max(1, CHUNK_ELEMENTS // logits.shape[1])
    pieces, chosen = logits.split(rows), targets.split(rows)
    heats = temperature[:, None].split(rows) if isinstance(temperature, Tensor) else [temperature] * len(pieces)
    return zip(pieces, chosen, heats, strict=True)


def _scaled(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """A new tensor of at least float32."""
    kind = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(kind, copy=True).div_(temperature)


def _forward(logits: Tensor, targets: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scaled = _scaled(logits, temperature)
    normaliser = scaled.logsumexp(1)
    chosen = scaled.gather(1, targets[:, None])[:, 0] - normaliser
    probs = scaled.sub(normaliser[:, None]).exp_()
    # A logit of -inf has probability zero and adds nothing to the mean
    expected = torch.where(probs > 0, probs * scaled, 0).sum(1)
    return chosen, normaliser - expected, normaliser


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """What the sampling distribution softmax(logits / temperature) says of each target.

    logits: [M, V]; targets: [M] int64; temperature: one for all, or [M] -> log-probabilities [M] and entropies [M] in nats,
    float32 or wider, both differentiable once.
    """
    return _TokenLogprobs.apply(logits, targets, temperature)
