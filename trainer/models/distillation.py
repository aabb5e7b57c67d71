"""Teachers' most probable tokens, and the policy's divergence from them, in float32.

Invariant: a policy's distributions exist only in chunks, recomputed in the backward pass.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from offbeat.trainer.algorithms.divergences import DIVERGENCES, DivergenceTerms
from offbeat.trainer.models.logprobs import MIN_LOGPROB, rows_per_chunk


@dataclass(frozen=True, slots=True)
class TopQuery:
    """Request for a model's `k` most probable tokens; 0: all. vocab_size: the policy's."""

    k: int
    temperature: float
    vocab_size: int


@dataclass(frozen=True, slots=True)
class TeacherTokens:
    """A teacher's distributions of M tokens.

    ids: [M, K] int64, the most probable, or None for the whole vocabulary; logprobs: [M, K + 1], the last of all other
    tokens, or [M, V]; weights: [M], 0 where it doesn't teach.
    """

    ids: Tensor | None
    logprobs: Tensor
    weights: Tensor

    def at(self, index: Tensor) -> "TeacherTokens":
        ids = None if self.ids is None else self.ids[index]
        return TeacherTokens(ids, self.logprobs[index], self.weights[index])

    def to(self, device: torch.device) -> "TeacherTokens":
        ids = None if self.ids is None else self.ids.to(device)
        return TeacherTokens(ids, self.logprobs.to(device), self.weights.to(device))


@dataclass(frozen=True, slots=True)
class Distillation:
    """Targets of a divergence. temperature: of the policy; add_tail: compare the sum of other tokens."""

    objective: str
    terms: DivergenceTerms
    temperature: float
    add_tail: bool
    teachers: tuple[TeacherTokens, ...]

    def at(self, index: Tensor) -> "Distillation":
        return replace(self, teachers=tuple(teacher.at(index) for teacher in self.teachers))

    def to(self, device: torch.device) -> "Distillation":
        return replace(self, teachers=tuple(teacher.to(device) for teacher in self.teachers))


def top_logprobs(logits: Tensor, query: TopQuery) -> Tensor:
    """Return the most probable tokens' ids, their logprobs, and that of all others, [2 K + 1, M] float64; for all
    tokens, logprobs [V, M] float32. logits: [M, V]
    """
    logits = logits[:, : query.vocab_size]
    k = query.k if query.k < logits.shape[1] else 0
    parts: list[Tensor] = []
    for chunk in logits.split(rows_per_chunk(logits)):
        logprobs = _log_softmax(chunk, query.temperature)
        if not k:
            parts.append(logprobs.float())
            continue
        values, ids = logprobs.topk(k, dim=1)
        others = logprobs.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)
        parts.append(torch.cat([ids.double(), values.double(), others.double()], 1))
    return torch.cat(parts).T.contiguous()


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, distillation: Distillation) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.distillation = distillation
        out = logits.new_zeros(len(logits), dtype=torch.promote_types(logits.dtype, torch.float32))
        for teacher, rows in _taught_chunks(logits, distillation):
            out.index_add_(0, rows, _of_chunk(logits[rows], teacher.at(rows), distillation).to(out.dtype))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        out = torch.zeros_like(logits)
        for teacher, rows in _taught_chunks(logits, ctx.distillation):
            with torch.enable_grad():
                chunk = logits[rows].detach().requires_grad_()
                values = _of_chunk(chunk, teacher.at(rows), ctx.distillation)
            (gradient,) = torch.autograd.grad(values, chunk, grads[0][rows].to(values.dtype))
            out.index_add_(0, rows, gradient)
        return out, None


def teacher_divergence(logits: Tensor, distillation: Distillation) -> Tensor:
    """Sum weight * divergence over teachers. logits: [M, V] -> [M] nats, float32 or wider, once differentiable."""
    return _Divergence.apply(logits, distillation)


def _taught_chunks(logits: Tensor, distillation: Distillation) -> Iterator[tuple[TeacherTokens, Tensor]]:
    for teacher in distillation.teachers:
        taught = teacher.weights.nonzero()[:, 0]
        for rows in taught.split(rows_per_chunk(logits)) if len(taught) else ():
            yield teacher, rows


def _of_chunk(logits: Tensor, teacher: TeacherTokens, distillation: Distillation) -> Tensor:
    student = _log_softmax(logits, distillation.temperature)
    expected = teacher.logprobs.to(student)
    if teacher.ids is None:  # the policy's vocabulary may be padded further
        expected = pad(expected, (0, student.shape[1] - expected.shape[1]), value=-torch.inf)
    else:
        student, expected = _over_outcomes(student, expected, teacher.ids, add_tail=distillation.add_tail)
    # A logprob of -inf is a probability of zero, and adds nothing
    student, expected = student.clamp(min=MIN_LOGPROB), expected.clamp(min=MIN_LOGPROB)
    values = DIVERGENCES[distillation.objective](expected, student, distillation.terms)
    return values * teacher.weights.to(values)


def _over_outcomes(student: Tensor, expected: Tensor, ids: Tensor, *, add_tail: bool) -> tuple[Tensor, Tensor]:
    """Return logprobs of the chosen tokens, and with `add_tail` of all others. student: [m, V]"""
    chosen = student.gather(1, ids)
    if not add_tail:
        return chosen.log_softmax(1), expected[:, :-1].log_softmax(1)
    others = student.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([chosen, others], 1), expected


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    return (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(1)
