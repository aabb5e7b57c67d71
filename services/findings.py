"""Findings of the rules of `services.diagnosis`, and the steps and limits that the rules read."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunFinding:
    name: str
    seen: str
    """Clause with numbers."""
    cause: str
    """Clause: likely cause and remedy."""
    keys: tuple[str, ...]
    """Configuration keys, most likely first."""
    is_warning: bool = True
    """False for hints about speed."""

    def __str__(self) -> str:
        return f"{self.seen}: {self.cause} ({', '.join(self.keys)})"


@dataclass(frozen=True, slots=True)
class DiagnosisLimits:
    mismatch_kl: float = math.inf
    """Between engine and trainer, nats per token."""
    max_grad_norm: float = math.inf
    answer_tokens: int | None = None
    """Longest answer of any env."""
    is_sampling_cut: bool = False
    """Whether `top_p` or `top_k` cut the engine's distribution."""
    masks_episodes: bool = False
    """Whether `max_len_mask` or `error_max_len_clip` leaves episodes out of the loss, and of `shaped_reward`."""
    distills: bool = False
    """Whether teachers give a signal where rewards give none."""
    has_faster_engine: bool = False
    """Whether `hf_infer` would sample this policy faster than its engine."""
    without_effect: frozenset[str] = frozenset()
    """Top-level keys that the run's pipeline refuses, which no finding may advise."""
    trains_by_admission: bool = False
    """`buffer.order: admission`."""


NO_LIMITS = DiagnosisLimits()


@dataclass(frozen=True, slots=True)
class StepWindow:
    """Metrics of successive steps, oldest first."""

    steps: Sequence[Mapping[str, float]]
    first: Mapping[str, float]
    limits: DiagnosisLimits

    def values(self, name: str) -> list[float]:
        return [step[name] for step in self.steps if name in step]

    def sum(self, name: str) -> float:
        return math.fsum(self.values(name))

    def mean(self, name: str, default: float = math.nan) -> float:
        """Return the mean over steps with the metric, else NaN."""
        values = self.values(name)
        return math.fsum(values) / len(values) if values else default

    def share(self, name: str, of: str) -> float:
        whole = self.sum(of)
        return self.sum(name) / whole if whole else math.nan

    def has(self, num_steps: int) -> bool:
        return len(self.steps) >= num_steps
