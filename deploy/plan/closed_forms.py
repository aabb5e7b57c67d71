"""Formulas beside the simulation: least cost of a step, and lag of groups."""

from dataclasses import dataclass
from math import inf
from statistics import fmean

import numpy as np
import numpy.typing as npt

from offbeat.deploy.plan.outcome import Setup, SimulatedRun
from offbeat.deploy.plan.workload import Measures

Floats = npt.NDArray[np.float64]
NUM_DRAWN = 3000
"""Groups drawn for a mean."""
DRAWN_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class ClosedForms:
    """Times in seconds."""

    episode_s: float
    """Mean without waits, at the concurrency of full slots."""
    group_s: float
    """Mean of a group's slowest needed member."""
    train_s: float
    slots_step_s: float
    """batch x mean episode / slots (or agents, if these are fewer)."""
    groups_step_s: float
    """groups per step x mean group / groups in flight, as slots of early members stay empty."""
    engine_step_s: float
    """Turns of a batch / turns per second of the engines."""
    worker_step_s: float
    """Turns of a batch x CPU time of a turn / env workers."""
    env_step_s: float
    """Turns of a batch x env call / concurrent env steps."""
    sync_step_s: float
    """Slowest group of a batch, then training (`max_staleness: 0`)."""

    @property
    def ideal_step_s(self) -> float:
        """Return max(train, batch x mean episode / slots), without limits by groups and staleness."""
        return max(self.train_s, self.slots_step_s)

    @property
    def rollout_step_s(self) -> float:
        """Rollouts alone, with groups."""
        return max(self.slots_step_s, self.groups_step_s, self.engine_step_s, self.worker_step_s, self.env_step_s)


def closed_forms(setup: Setup, measures: Measures, seed: int = 0) -> ClosedForms:
    limits, rng = setup.limits, np.random.default_rng(seed)
    members = limits.group_size + limits.redundancy
    drawn = [measures.workload.draw_groups(rng, DRAWN_AT_ONCE, members) for _ in range(NUM_DRAWN // DRAWN_AT_ONCE)]
    turns, env_s = (np.concatenate(field) for field in zip(*drawn, strict=True))
    count = float(min(setup.running, limits.max_groups_in_flight * members))
    times, busy = turns, count
    for _ in range(8):  # members that have ended leave the engines to the others of their group
        turn_s = _turn_s(busy, measures, float(env_s.sum() / turns.sum()), setup) + measures.worker_s
        times = turns * turn_s + env_s
        slowest = np.sort(times, axis=1)[:, limits.group_size - 1].mean()
        busy = min(count, limits.max_groups_in_flight * members * times.mean() / slowest) if slowest else count
    slowest = np.sort(times, axis=1)[:, limits.group_size - 1]
    batches = slowest[: len(slowest) // limits.groups_per_step * limits.groups_per_step]
    sync_s = batches.reshape(-1, limits.groups_per_step).max(axis=1).mean() if len(batches) else slowest.max()
    played = (limits.groups_per_step + mean_refills(setup, measures)) * members
    lags = setup.publish_lags
    train_s = measures.train_s(setup.batch) + measures.publish_s * lags.count(0) / len(lags) + measures.other_s
    return ClosedForms(
        episode_s=float(times.mean()),
        group_s=float(slowest.mean()),
        train_s=train_s,
        slots_step_s=played * float(times.mean()) / setup.running,
        groups_step_s=played / members * float(slowest.mean()) / limits.max_groups_in_flight,
        engine_step_s=played * float(turns.mean()) / (setup.num_replicas * measures.turn_s.max_rate),
        worker_step_s=played * float(turns.mean()) * measures.worker_s / setup.num_workers,
        env_step_s=played * _env_calls_s(turns, env_s, measures) / (setup.num_workers * (setup.env_steps or inf)),
        sync_step_s=float(sync_s) + train_s + measures.announce_s + measures.serve_s,
    )


def expected_lag(outcome: SimulatedRun, setup: Setup) -> float:
    """Return groups in play and waiting / groups per step, less half a step, plus the learner's busy share and the mean of
    batches that are not published.

    Little's law for groups that start at any time: such a group meets half a step on average, and the version of a
    batch in training is still to come.
    """
    in_system = (outcome.playing_groups + outcome.waiting_groups) / setup.limits.groups_per_step
    return max(in_system - 0.5 + 1 - outcome.learner_idle, 0.0) + fmean(setup.publish_lags)


def mean_refills(setup: Setup, measures: Measures) -> float:
    """Return the groups that a step replaces for lack of learning signal: a geometric number for each that it keeps."""
    kept = setup.limits.groups_per_step
    refills = [setup.max_refills if share == 1 else kept * share / (1 - share) for share in measures.no_signal]
    return fmean(min(each, setup.max_refills) for each in refills) if refills else 0.0


def _env_calls_s(turns: npt.NDArray[np.int64], env_s: Floats, measures: Measures) -> float:
    """Return an episode's mean time in calls of its env."""
    most = env_s if measures.env_call_s is None else turns * measures.env_call_s
    return float(np.minimum(env_s, most).mean())


def _turn_s(playing: float, measures: Measures, env_s: float, setup: Setup) -> float:
    """Return a turn's time at its fixed point of concurrency. env_s: of a turn."""
    low, high = 0.0, playing
    for _ in range(60):  # the curve rises, so the share of turns in generation has one fixed point
        generating = (low + high) / 2
        seconds = measures.turn_s.seconds(generating / setup.num_replicas)
        implied = playing * seconds / (seconds + env_s) if seconds + env_s else 0.0
        low, high = (generating, high) if implied > generating else (low, generating)
    return measures.turn_s.seconds(low / setup.num_replicas)
