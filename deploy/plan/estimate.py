"""A setting's expected rates: means over seeds."""

from collections import Counter
from dataclasses import dataclass
from statistics import fmean, stdev

from offbeat.deploy.plan.closed_forms import ClosedForms, closed_forms, expected_lag
from offbeat.deploy.plan.outcome import Setup
from offbeat.deploy.plan.simulation import Simulation
from offbeat.deploy.plan.workload import Measures


@dataclass(frozen=True, slots=True)
class Effort:
    """Size of a simulation."""

    steps: int = 60
    warm_up: int = 10
    seeds: int = 3

    @classmethod
    def for_batch(cls, batch: int, episodes: int = 6_000) -> "Effort":
        """Return steps of about as many episodes, with warm-up."""
        steps = min(max(episodes // batch, 12), 60)
        return cls(steps + steps // 4, steps // 4)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Times in seconds; shares of 1."""

    trajectories_per_s: float
    spread: float
    """Standard deviation of that over seeds."""
    step_s: float
    lag: float
    lags: dict[int, float]
    """Share of trained groups."""
    learner_idle: float
    slots_empty: float
    dropped: dict[str, float]
    """Groups per trained group, by reason."""
    cancelled: float
    """Episodes per trained trajectory."""
    playing_groups: float
    waiting_groups: float
    generating: float
    """Turns in generation; 0 if a turn's time is constant."""
    worker_busy: float
    buffer_busy: float
    expected_lag: float
    """Closed form."""
    closed: ClosedForms


def estimate(setup: Setup, measures: Measures, effort: Effort | None = None, *, seed: int = 0) -> Estimate:
    """Simulate; raises ValueError if no group can start."""
    size = effort or Effort.for_batch(setup.batch)
    outcomes = [Simulation(setup, measures, seed + i).run(size.steps, size.warm_up) for i in range(size.seeds)]
    rates = [outcome.trajectories_per_s for outcome in outcomes]
    trained = size.steps * size.seeds * setup.limits.groups_per_step
    lags, dropped = Counter[int](), Counter[str]()
    for outcome in outcomes:
        lags.update(outcome.lags)
        dropped.update(outcome.dropped)

    def mean(name: str) -> float:
        return fmean(getattr(outcome, name) for outcome in outcomes)

    return Estimate(
        trajectories_per_s=fmean(rates),
        spread=stdev(rates) if len(rates) > 1 else 0.0,
        step_s=mean("step_s"),
        lag=mean("lag"),
        lags={lag: count / lags.total() for lag, count in sorted(lags.items())},
        learner_idle=mean("learner_idle"),
        slots_empty=mean("slots_empty"),
        dropped={reason: count / trained for reason, count in sorted(dropped.items())},
        cancelled=mean("cancelled") / ((size.steps - size.warm_up) * setup.batch),
        playing_groups=mean("playing_groups"),
        waiting_groups=mean("waiting_groups"),
        generating=mean("generating"),
        worker_busy=mean("worker_busy"),
        buffer_busy=mean("buffer_busy"),
        expected_lag=fmean(expected_lag(outcome, setup) for outcome in outcomes),
        closed=closed_forms(setup, measures),
    )
