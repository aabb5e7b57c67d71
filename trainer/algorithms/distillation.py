"""On-policy distillation: teachers' logprobs of the sampled tokens as advantages."""

from torch import Tensor


def teacher_advantages(logprobs: Tensor, teacher_logprobs: Tensor, coef: Tensor) -> Tensor:
    """Return -sum over teachers of coef (log pi - log teacher), whose mean under the policy is minus the reverse KL per
    token (GKD, arXiv:2306.13649; on-policy distillation, Thinking Machines 2025; ROLL's `is_pure_opd`).

    logprobs: [M], of the policy at the start of the step; teacher_logprobs, coef: [K, M] float -> [M] float
    """
    return -(coef * (logprobs - teacher_logprobs)).sum(0)
