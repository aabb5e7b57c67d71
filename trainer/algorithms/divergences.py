"""Divergences between a teacher's and a student's next-token distributions.

Logprobs of the same outcomes, normalized: [m, K] each -> nats, [m].
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class DivergenceTerms(NamedTuple):
    """Constants of the divergences."""

    js_beta: float = 0.5
    adaptive_alpha: float = 0.5
    skew_lambda: float = 0.1


def forward_kl(teacher: Tensor, student: Tensor, terms: DivergenceTerms) -> Tensor:
    """KL(teacher || student): covers the teacher's modes."""
    del terms
    return _kl(teacher, student)


def reverse_kl(teacher: Tensor, student: Tensor, terms: DivergenceTerms) -> Tensor:
    """KL(student || teacher): seeks a mode (MiniLLM, arXiv:2306.08543)."""
    del terms
    return _kl(student, teacher)


def js_divergence(teacher: Tensor, student: Tensor, terms: DivergenceTerms) -> Tensor:
    """Generalized Jensen-Shannon divergence (GKD, arXiv:2306.13649), beta KL(teacher || m) + (1 - beta) KL(student || m).

    m: beta teacher + (1 - beta) student
    """
    mixture = _mix(teacher, student, terms.js_beta)
    return terms.js_beta * _kl(teacher, mixture) + (1 - terms.js_beta) * _kl(student, mixture)


def adaptive_kl(teacher: Tensor, student: Tensor, terms: DivergenceTerms) -> Tensor:
    """Forward and reverse KL, weighted by the gaps at the teacher's head and tail (arXiv:2404.02657).

    The tail: the least probable outcomes with a sum below `adaptive_alpha`; weights are constants.
    """
    with torch.no_grad():
        probs, order = teacher.exp().sort(dim=-1)
        gap = (probs - student.exp().gather(-1, order)).abs()
        in_tail = probs.cumsum(-1) < terms.adaptive_alpha
        head, tail = (gap * ~in_tail).sum(-1), (gap * in_tail).sum(-1)
        total = head + tail
        share = torch.where(total > 0, head / total, torch.ones_like(total))
    return share * _kl(teacher, student) + (1 - share) * _kl(student, teacher)


def skewed_forward_kl(teacher: Tensor, student: Tensor, terms: DivergenceTerms) -> Tensor:
    """KL(teacher || lambda teacher + (1 - lambda) student) (DistiLLM, arXiv:2402.03898)."""
    return _kl(teacher, _mix(teacher, student, terms.skew_lambda))


def skewed_reverse_kl(teacher: Tensor, student: Tensor, terms: DivergenceTerms) -> Tensor:
    """KL(student || (1 - lambda) teacher + lambda student) (DistiLLM, arXiv:2402.03898)."""
    return _kl(student, _mix(teacher, student, 1 - terms.skew_lambda))


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


def _mix(teacher: Tensor, student: Tensor, share: float) -> Tensor:
    """Return log(share teacher + (1 - share) student)."""
    logs = torch.tensor([share, 1 - share], dtype=teacher.dtype, device=teacher.device).log()
    return torch.logaddexp(teacher + logs[0], student + logs[1])


DIVERGENCES: dict[str, Callable[[Tensor, Tensor, DivergenceTerms], Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "js_divergence": js_divergence,
    "adaptive_kl": adaptive_kl,
    "skewed_forward_kl": skewed_forward_kl,
    "skewed_reverse_kl": skewed_reverse_kl,
}
"""By `distill.kd_objective`."""
