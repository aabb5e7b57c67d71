"""Formulas next to the simulation: what a step costs at best, and how far groups lag."""

from dataclasses import dataclass

import numpy as np

from offbeat.deploy.plan.outcome import Outcome, Setup
from offbeat.deploy.plan.workload import Measures

NUM_DRAWN = 2_000
"""Groups drawn for a mean."""


@dataclass(frozen=True, slots=True)
class ClosedForms:
    """Times in seconds."""

    episode_s: float
    """Mean of one that waits for nothing but its turns, at the concurrency of full places."""
    group_s: float
    """Mean of a group's slowest needed member."""
    train_s: float
    places_step_s: float
    """batch x mean episode / places."""
    groups_step_s: float
    """groups per step x mean group / groups in flight: places of a group's early members stay empty."""
    engine_step_s: float
    """Turns of a batch / turns per second of the engines."""
    sync_step_s: float
    """Slowest group of a batch, then training (`max_staleness: 0`)."""

    @property
    def ideal_step_s(self) -> float:
        """max(train, batch x mean episode / places), which neither groups nor the bound are in the way of."""
        return max(self.train_s, self.places_step_s)

    @property
    def rollout_step_s(self) -> float:
        """Rollouts alone, with groups."""
        return max(self.places_step_s, self.groups_step_s, self.engine_step_s)


def closed_forms(setup: Setup, measures: Measures, seed: int = 0) -> ClosedForms:
    limits, rng = setup.limits, np.random.default_rng(seed)
    members = limits.group_size + limits.redundancy
    count = min(setup.places, limits.max_groups_in_flight * members)
    drawn = [measures.workload.draw_group(rng, members) for _ in range(NUM_DRAWN)]
    turn_s = _turn_s(count, measures, drawn, setup)
    times = np.array([[e.turns * turn_s + e.env_s for e in group] for group in drawn])
    turns = float(np.mean([e.turns for group in drawn for e in group]))
    slowest = np.sort(times, axis=1)[:, limits.group_size - 1]
    episode_s, group_s = float(times.mean()), float(slowest.mean())
    batches = slowest[: len(slowest) // limits.groups_per_step * limits.groups_per_step]
    sync_s = batches.reshape(-1, limits.groups_per_step).max(axis=1).mean() if len(batches) else slowest.max()
    played = limits.groups_per_step * members / max(1 - measures.refilled, 1e-9)
    train_s = measures.train_s(setup.batch) + measures.publish_s + measures.other_s
    engine_s = played * turns / (setup.num_replicas * measures.turn_s.max_rate)
    return ClosedForms(
        episode_s=episode_s,
        group_s=group_s,
        train_s=train_s,
        places_step_s=played * episode_s / setup.places,
        groups_step_s=played / members * group_s / limits.max_groups_in_flight,
        engine_step_s=engine_s,
        sync_step_s=float(sync_s) + train_s + measures.announce_s + measures.serve_s,
    )


def expected_lag(outcome: Outcome, setup: Setup) -> float:
    """Return groups in play and waiting / groups per step (Little's law: a step is the time between two versions)."""
    return (outcome.playing_groups + outcome.waiting_groups) / setup.limits.groups_per_step


def _turn_s(playing: int, measures: Measures, drawn: list[list[tuple[int, float]]], setup: Setup) -> float:
    """Return a turn's time at the concurrency to which it leads: the share of an episode that is spent in engines."""
    turns = sum(turns for group in drawn for turns, _ in group)
    env_s = sum(env_s for group in drawn for _, env_s in group) / turns
    low, high = 0.0, float(playing)
    for _ in range(60):  # the curve rises, so the share of turns in generation has one fixed point
        generating = (low + high) / 2
        seconds = measures.turn_s.seconds(generating / setup.num_replicas)
        implied = playing * seconds / (seconds + env_s) if seconds + env_s else 0.0
        low, high = (generating, high) if implied > generating else (low, generating)
    return measures.turn_s.seconds(low / setup.num_replicas)
