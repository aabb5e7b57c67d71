"""Float32 logprobs and entropies without a float32 copy of all logits."""

from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24
"""Logits per GPU chunk."""
CPU_CHUNK_ELEMENTS = 1 << 18
"""1 MB in float32, within the CPU cache."""
MIN_LOGPROB = -1e4
"""Its exponential is 0 in every dtype: logit -inf has gradient 0, not 0 * inf."""


def rows_per_chunk(logits: Tensor) -> int:
    elements = CHUNK_ELEMENTS if logits.is_cuda else CPU_CHUNK_ELEMENTS
    return max(1, elements // logits.shape[1])


class _TokenLogprobs(torch.autograd.Function):
    """Chunked; the backward pass recomputes probabilities."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # entropies often need no gradient
        parts = [
            _forward(chunk, t, row_temperature) for chunk, t, row_temperature in _chunks(logits, targets, temperature)
        ]
        logprobs, entropies = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(logits, targets, entropies)
        ctx.temperature = temperature
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None]:
        logprob_grad, entropy_grad = grads
        logits, targets, entropies = ctx.saved_tensors
        out = torch.empty_like(logits)
        start = 0
        for chunk, target, temperature in _chunks(logits, targets, ctx.temperature):
            rows = slice(start, start := start + len(chunk))
            logp = _log_softmax(chunk, temperature)
            probs = logp.exp()
            # d logprob = onehot - p;  d entropy = -p (log p + entropy)
            grad = torch.zeros_like(logp[:, :1])
            if entropy_grad is not None:
                grad = logp.clamp_(min=MIN_LOGPROB).add_(entropies[rows, None]).mul_(-entropy_grad[rows, None])
            if logprob_grad is not None:
                grad = grad.sub_(logprob_grad[rows, None])
            grad = probs.mul_(grad)
            if logprob_grad is not None:
                grad.scatter_add_(1, target[:, None], logprob_grad[rows, None])
            out[rows] = _divide_(grad, temperature)
        return out, None, None


def _chunks(logits: Tensor, targets: Tensor, temperature: float | Tensor) -> Any:
    rows = rows_per_chunk(logits)
    chunks, chosen = logits.split(rows), targets.split(rows)
    temperatures = temperature[:, None].split(rows) if isinstance(temperature, Tensor) else [temperature] * len(chunks)
    return zip(chunks, chosen, temperatures, strict=True)


def _log_softmax(logits: Tensor, temperature: float | Tensor) -> Tensor:
    values = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.log_softmax(values if _is_one(temperature) else values / temperature, 1)


def _divide_(values: Tensor, temperature: float | Tensor) -> Tensor:
    return values if _is_one(temperature) else values.div_(temperature)


def _is_one(temperature: float | Tensor) -> bool:
    return isinstance(temperature, float) and temperature == 1.0


def _forward(logits: Tensor, targets: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    logp = _log_softmax(logits, temperature)
    chosen = logp.gather(1, targets[:, None])[:, 0]
    probs = logp.exp()
    # A logit of -inf has probability zero and adds nothing to the mean
    return chosen, torch.linalg.vecdot(probs, logp.clamp_(min=MIN_LOGPROB)).neg_()


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """Return the targets' logprobs and entropies under softmax(logits / temperature).

    logits: [M, V]; targets: [M] int64; temperature: scalar or [M] -> [M] nats each, float32 or wider, once
    differentiable.
    """
    return _TokenLogprobs.apply(logits, targets, temperature)
