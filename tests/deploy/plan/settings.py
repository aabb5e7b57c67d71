"""Settings and measures that tests simulate."""

from typing import Any

from offbeat.deploy.plan.distributions import ValueDistribution
from offbeat.deploy.plan.outcome import Setup
from offbeat.deploy.plan.workload import AssumedWorkload, Measures, TurnTimes
from offbeat.services.buffer.api import BufferLimits


def setup_with(
    *, order: str = "completion", slots: int = 64, num_replicas: int = 1, max_refills: int = 0, **limits: Any
) -> Setup:
    """Batches of four groups of four; 16 groups in play."""
    values: dict[str, Any] = {
        "group_size": 4,
        "redundancy": 0,
        "groups_per_step": 4,
        "max_staleness": 1.0,
        "max_groups_in_flight": 16,
        "total_groups": 1 << 40,
        "max_attempts": 3,
        "worker_timeout_s": 60.0,
        "stale_policy": "drop",
    }
    limits_of_run = BufferLimits(**(values | limits))
    return Setup(limits_of_run, order, slots, num_replicas=num_replicas, max_refills=max_refills)  # type: ignore[arg-type]


def measures_of(
    turns: str = "4", env_s: str = "0.25", *, turn_s: str = "0", train_s: float = 0.5, **more: Any
) -> Measures:
    workload = AssumedWorkload(ValueDistribution.parse(turns), ValueDistribution.parse(env_s))
    return Measures(workload, TurnTimes.parse(turn_s), train_s, 0.0, tokens=100.0, **more)
