"""Setting and result of a simulated run."""

import math
from collections import Counter
from dataclasses import dataclass, field
from statistics import fmean

from offbeat.deploy.plan.limits import NO_LIMITS, WorkerLimits
from offbeat.services.buffer.api import BufferLimits
from offbeat.services.buffer.config import Order

MAX_CYCLE = 10_000
"""Steps of a cycle of published weights that are looked at."""


@dataclass(frozen=True, slots=True)
class Setup:
    limits: BufferLimits
    """`group_size` includes the baselines, which a group waits for as for its other members."""
    order: Order
    slots: int
    """Concurrent episodes."""
    num_workers: int = 1
    num_replicas: int = 1
    heartbeat_s: float = 0.5
    """Until a worker learns of cancelled episodes."""
    within: WorkerLimits = NO_LIMITS
    partition: tuple[int, ...] = ()
    """`num_groups_partition`, whose sum is the groups in play."""
    devices_per_engine: int | None = None
    """Of `actor_infer.device_mapping`, which implies `num_replicas`; None: it is not set."""
    publish_every: tuple[int, ...] = (1,)
    """Periods, in steps, of published weights: `model_update_frequency`, `save_steps`, `eval_steps`."""
    max_refills: int = 0
    """Groups without learning signal that a step replaces; further ones are trained."""
    sleeps: bool = False
    """Whether engines sleep, with their turns, from a batch until the learner waits again (`enable_sleep_mode`)."""

    def is_publish_due(self, step: int) -> bool:
        """Return whether the weights after `step` batches are published."""
        return any(step % period == 0 for period in self.publish_every)

    @property
    def least_staleness(self) -> float:
        """Return the least `max_staleness` that validation accepts."""
        return float(self.publish_every[0] - 1)

    @property
    def publish_lags(self) -> list[int]:
        """Return for each step of a cycle the batches since the newest published weights."""
        lags = [0]
        for step in range(1, min(math.lcm(*self.publish_every), MAX_CYCLE)):
            lags.append(0 if self.is_publish_due(step) else lags[-1] + 1)
        return lags

    @property
    def batch(self) -> int:
        """Trajectories that a step trains on."""
        return self.limits.groups_per_step * (self.limits.group_size - self.limits.baselines)

    @property
    def running(self) -> int:
        """Slots whose episodes run at once: the others wait for an agent."""
        return self.slots if self.agents is None else self.num_workers * self.agents

    @property
    def env_steps(self) -> int | None:
        """Concurrent env steps of a worker; None: as many as its slots."""
        return self._within_slots(self.within.env_steps(self.num_workers))

    @property
    def agents(self) -> int | None:
        """Concurrent agents of a worker; None: as many as its slots."""
        return self._within_slots(self.within.num_agents)

    def _within_slots(self, limit: int | None) -> int | None:
        return limit if limit is not None and limit * self.num_workers < self.slots else None


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """Steady state, without the first steps."""

    steps: int
    span_s: float
    trajectories: float
    lags: Counter[int]
    """Trained groups by lag."""
    learner_idle: float
    slots_empty: float
    dropped: Counter[str]
    """Groups by reason."""
    cancelled: int
    playing_groups: float
    waiting_groups: float
    """Complete, not yet in a batch."""
    group_s: float
    """From a group's first claim to its completion."""
    episode_s: float
    generating: float
    """Mean turns in generation."""
    worker_busy: float
    buffer_busy: float
    waits_s: tuple[float, ...]
    """For each batch."""

    @property
    def trajectories_per_s(self) -> float:
        return self.trajectories / self.span_s

    @property
    def step_s(self) -> float:
        return self.span_s / self.steps

    @property
    def lag(self) -> float:
        return sum(lag * count for lag, count in self.lags.items()) / max(self.lags.total(), 1)


@dataclass
class Statistics:
    ends: list[float] = field(default_factory=list[float])
    waits_s: list[float] = field(default_factory=list[float])
    lags: Counter[int] = field(default_factory=Counter[int])
    dropped: Counter[str] = field(default_factory=Counter[str])
    cancelled: int = 0
    group_s: list[float] = field(default_factory=list[float])
    episode_s: list[float] = field(default_factory=list[float])
    began: float = 0.0

    def outcome(self, steps: int, span_s: float, **means: float) -> SimulatedRun:
        return SimulatedRun(
            steps=steps,
            span_s=span_s,
            lags=self.lags,
            learner_idle=sum(self.waits_s) / span_s,
            dropped=self.dropped,
            cancelled=self.cancelled,
            group_s=fmean(self.group_s) if self.group_s else 0.0,
            episode_s=fmean(self.episode_s) if self.episode_s else 0.0,
            waits_s=tuple(self.waits_s),
            **means,
        )
