"""Distillation from teachers' distributions (`pipeline: distill`)."""

from typing import Annotated, Literal

from pydantic import Field

from offbeat.trainer.config.conditions import SET, ConditionalConfig, OnlyWith

Objective = Literal[
    "forward_kl", "reverse_kl", "js_divergence", "adaptive_kl", "skewed_forward_kl", "skewed_reverse_kl"
]


class DistillConfig(ConditionalConfig):
    """Loss `distill_loss_weight` * KD + (1 - `distill_loss_weight`) * negative log-likelihood of the rows."""

    kd_objective: Objective = "forward_kl"
    """Divergence between the teacher's and the policy's distribution of a token: `forward_kl`, KL(teacher || policy);
    `reverse_kl`; `js_divergence` (GKD, arXiv:2306.13649); `adaptive_kl` (2404.02657); `skewed_forward_kl`,
    `skewed_reverse_kl` (DistiLLM, 2402.03898).
    """
    distill_loss_weight: float = Field(default=0.5, gt=0, le=1)
    """Weight of KD; 1 learns from teachers alone."""
    kd_temperature: float = Field(default=1.0, gt=0)
    """Divisor of the policy's logits in KD."""
    teacher_temperature: float = Field(default=1.0, gt=0)
    """Divisor of the teachers' logits."""
    js_beta: Annotated[float, OnlyWith(kd_objective=("js_divergence",))] = Field(default=0.5, gt=0, lt=1)
    """Teacher's share of the mixture; near 0 the forward, near 1 the reverse KL, up to scale. TRL's `beta`."""
    adaptive_kl_alpha: Annotated[float, OnlyWith(kd_objective=("adaptive_kl",))] = Field(default=0.5, gt=0, lt=1)
    """Probability of the teacher's tail."""
    skew_lambda: Annotated[float, OnlyWith(kd_objective=("skewed_forward_kl", "skewed_reverse_kl"))] = Field(
        default=0.1, gt=0, lt=1
    )
    """Share of the first distribution in the second of the KL."""
    logits_topk: int = Field(default=64, ge=0)
    """Compared tokens, the teacher's most probable; 0: the whole vocabulary."""
    add_tail: Annotated[bool, OnlyWith(logits_topk=SET)] = True
    """All other tokens are one more outcome; false: normalize over the compared tokens."""
    distill_on_prompt: bool = False
    """KD on tokens of prompts, too."""
    lmbda: float = Field(default=0.0, ge=0, le=1)
    """Share of rows whose last response the policy samples (GKD), without a likelihood term. TRL's `lmbda`."""
