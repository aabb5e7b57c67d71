"""On-policy distillation (GKD, arXiv:2306.13649; Thinking Machines 2025; ROLL's `is_pure_opd`)."""

from torch import Tensor


def teacher_advantages(logprobs: Tensor, teacher_logprobs: Tensor, coef: Tensor) -> Tensor:
    """Return the negative sum over teachers of coef (log pi - log teacher), in expectation minus the reverse KL per
    token.

    logprobs: [M], at the start of the step; teacher_logprobs, coef: [K, M] -> [M]
    """
    return -(coef * (logprobs - teacher_logprobs)).sum(0)
