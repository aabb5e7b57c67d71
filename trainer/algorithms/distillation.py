"""On-policy distillation: a teacher's judgement of each token that the policy sampled, as its advantage."""

from torch import Tensor


def teacher_advantages(logprobs: Tensor, teacher_logprobs: Tensor, coef: Tensor) -> Tensor:
    """-sum over teachers of coef (log pi - log teacher): its mean under the policy is minus the reverse KL per token (GKD,
    arXiv:2306.13649; on-policy distillation, Thinking Machines 2025; ROLL's `is_pure_opd`).

    logprobs: [M], the policy's at the start of the step; teacher_logprobs, coef: [K, M] float -> [M] float
    """
    return -(coef * (logprobs - teacher_logprobs)).sum(0)
