"""KL estimators (Schulman, Approximating KL Divergence, 2020) and coefficient."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratio in nats above which `k3` is linear, to avoid overflow."""


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return log p - log q: unbiased, high variance, any sign. [M]"""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return (log p - log q)^2 / 2: biased, low variance, unbiased mean gradient. [M]"""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return q/p - 1 - log(q/p): [M], unbiased, nonnegative; linear above `MAX_LOG_RATIO`."""
    delta = ref_logprobs - logprobs
    excess = (delta - MAX_LOG_RATIO).clamp(min=0.0)
    return torch.expm1(delta.clamp(max=MAX_LOG_RATIO)) + math.exp(MAX_LOG_RATIO) * excess - delta


def absolute(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return |log p - log q|. [M]"""
    return (logprobs - ref_logprobs).abs()


KL_PENALTIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"kl": k1, "k2": k2, "k3": k3, "abs": absolute}
"""By `kl_penalty`."""


class KLController:
    """Coefficient of the KL penalty, fixed or adaptive (arXiv:1909.08593, section 2.2)."""

    def __init__(self, coef: float, target: float | None = None, horizon: int = 10_000) -> None:
        self.coef = coef
        self._target = target
        self._horizon = horizon

    def update(self, kl: float, num_samples: int) -> None:
        """Adapt to the mean KL of `num_samples` trajectories, if finite, by a fifth at most."""
        if self._target is None or not math.isfinite(kl):
            return
        error = min(max(kl / self._target - 1.0, -0.2), 0.2)
        self.coef *= 1.0 + error * min(num_samples / self._horizon, 1.0)

    def resume(self, coef: float) -> None:
        """Restore an adaptive coefficient; ignore 0, which can't adapt."""
        if self._target is not None and coef > 0:
            self.coef = coef
