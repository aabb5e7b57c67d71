"""Measures of a run, from its metrics and recorded batches.

A turn's time is fitted over the run's concurrency, training's time over tokens.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np
import numpy.typing as npt

from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.plan.limits import limits_of
from offbeat.deploy.plan.metric_rows import STEP_PARTS, MetricRow, is_drop, read_rows
from offbeat.deploy.plan.sleep import measured_notes
from offbeat.deploy.plan.workload import MeasuredWorkload, Measures, PlannedEpisode, TurnTimes
from offbeat.services.errors import CodecError
from offbeat.services.messages.types import Trajectory
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.data.step_batch import StepBatch
from offbeat.trainer.trackers.metrics_file import METRICS_FILE, find_newest
from offbeat.trainer.training.batch_log import BatchLog

Floats = npt.NDArray[np.float64]
ANNOUNCE_S = 0.01
"""Assumed time from a publish's return to its announcement."""
WARM_UP_STEPS = 1
NEWEST_BYTES = 128_000_000
"""Of a larger metrics file, its end is measured: some 350,000 records."""
MIN_EPISODE_S = 1e-6
"""Of an episode whose logarithm is taken."""
REPORTED_S = 2
"""Seconds for which a report counts; they come every second."""
FITTED_TO = 4.0
"""Factor beyond the highest measured concurrency for the fitted line."""


class PlanError(Exception):
    """Plan that can't be made."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Measures, and the run's own results."""

    measures: Measures
    trajectories_per_s: float
    step_s: float
    lag: float
    learner_idle: float
    dropped: int
    num_steps: int
    num_episodes: int
    """Recorded."""
    notes: tuple[str, ...] = ()


def read_measures(folder: Path, config: RunConfig) -> Measured:
    """Read a run's folder; raises `PlanError` without steps."""
    path = folder / METRICS_FILE
    try:
        offset = find_newest(path, NEWEST_BYTES)
        rows = list(read_rows(path, offset))
    except OSError as error:
        raise PlanError(f"{path} can't be read: {error.strerror}") from error
    batches, notes = read_batches(folder, config)
    if offset:
        notes = (
            *notes,
            f"measured over the newest {NEWEST_BYTES / 1e6:,.0f} MB of {METRICS_FILE}, from {_first_step(rows)} on",
        )
    groups = [group.trajectories for batch in batches for group in batch.groups]
    num_workers = mean_reporting(rows, "rollout", "worker", default=config.rollout.num_workers)
    steps = limits_of(config).env_steps(config.rollout.num_workers)
    measured = measure(
        rows,
        groups,
        num_replicas=config.actor_infer.num_replicas,
        env_steps=steps and round(steps * num_workers),
        where=str(folder),
    )
    return replace(measured, notes=(*notes, *measured.notes, *measured_notes(config)))


def _first_step(rows: Iterable[MetricRow]) -> str:
    return next((f"step {row.step}" for row in rows if row.source == "learner" and row.step is not None), "no step")


def measure(
    rows: Sequence[MetricRow],
    groups: Sequence[Sequence[Trajectory]],
    *,
    num_replicas: int = 1,
    env_steps: int | None = None,
    where: str = "the run",
) -> Measured:
    """Measure a run; raises `PlanError` without steps or episodes.

    num_replicas: where the rows have no engine's records. env_steps: of the run, at once; None: unlimited.
    """
    steps = sorted((row for row in rows if row.source == "learner" and "time/step_s" in row.values), key=_by_time)
    played = [row for row in rows if row.source == "rollout" and row.labels.get("kind", "train") == "train"]
    if len(steps) < WARM_UP_STEPS + 2:
        raise PlanError(f"{where} has {len(steps)} steps in its metrics: a plan needs {WARM_UP_STEPS + 2} at least")
    if not any(row.values.get("episodes") for row in played):
        raise PlanError(f"{where} has no finished episode in its metrics: does its pipeline play envs?")
    counted, before = steps[WARM_UP_STEPS:], steps[WARM_UP_STEPS - 1]
    counted, span_s, gap_notes = _without_gaps(counted, before)
    played = _begun_after(before.time, played)
    turn_s, mean_turn_s = _fit_turns(played, rows, num_replicas)
    reported = [row for row in rows if row.source == "rollout" and row.time >= before.time]
    worker_s = _worker_s(reported)
    env_call_s, wait_s = _env_call_s(played, reported, env_steps) if env_steps else (None, 0.0)
    workload, notes = _workload(groups, played, mean_turn_s + worker_s + wait_s)
    trajectories = _total(counted, "trajectories")
    fixed_s, per_token_s = _fit_training(counted)
    busy = {name: _total(counted, f"time/{name}_s") / len(counted) for name in STEP_PARTS}
    measures = Measures(
        workload=workload,
        turn_s=turn_s,
        train_fixed_s=fixed_s,
        train_per_token_s=per_token_s,
        tokens=_total(counted, "tokens/computed") / max(trajectories, 1.0),
        publish_s=_mean_publish_s(counted),
        announce_s=ANNOUNCE_S,
        serve_s=_mean(rows, "generation", "load_s") + _mean(rows, "generation", "pause_s"),
        other_s=max(span_s / len(counted) - sum(busy.values()), 0.0),
        no_signal=tuple(_no_signal(row.values) for row in counted),
        env_call_s=env_call_s,
        worker_s=worker_s,
    )
    return Measured(
        measures=measures,
        trajectories_per_s=trajectories / span_s,
        step_s=span_s / len(counted),
        lag=_total(counted, "staleness") / len(counted),
        learner_idle=busy["wait"] * len(counted) / span_s,
        dropped=round(sum(value for row in steps for name, value in row.values.items() if is_drop(name))),
        num_steps=len(counted),
        num_episodes=sum(map(len, groups)),
        notes=(*notes, *gap_notes),
    )


def _mean_publish_s(steps: Sequence[MetricRow]) -> float:
    """Return the mean over the steps that published, as `model_update_frequency` leaves others out."""
    seconds = [row.values["time/publish_s"] for row in steps if "time/publish_s" in row.values]
    return fmean(seconds) if seconds else 0.0


def _without_gaps(steps: Sequence[MetricRow], before: MetricRow) -> tuple[list[MetricRow], float, tuple[str, ...]]:
    """Return the steps that no pause, failure or evaluation interrupted, their time, and a note on the others.

    Interrupted: the time that is neither waiting, training nor publishing is beyond the outer fence (Tukey 1977) or the
    median by a whole step.
    """
    ends = np.array([before.time, *(row.time for row in steps)])
    spans = np.diff(ends)
    others = spans - [sum(row.values.get(f"time/{name}_s", 0.0) for name in STEP_PARTS) for row in steps]
    low, middle, high = np.percentile(others, (25, 50, 75))
    whole = others <= middle + max(3 * (high - low), float(np.median(spans)))
    kept, span_s = [row for row, keep in zip(steps, whole, strict=True) if keep], float(spans[whole].sum())
    if len(kept) == len(steps):
        return kept, span_s, ()
    gone = f"{len(steps) - len(kept)} of {len(steps)} steps, {float(spans.sum()) - span_s:.0f} s"
    return kept, span_s, (f"left out for a pause, a failure or an evaluation: {gone}",)


def read_batches(folder: Path, config: AlgorithmConfig) -> tuple[list[StepBatch], tuple[str, ...]]:
    """Read a run's recorded batches, and name what is missing."""
    log, batches = BatchLog(folder), list[StepBatch]()
    versions = log.steps()
    for version in versions:
        with suppress(CodecError):
            batches.append(log.read(version, config).batch)
    unread = len(versions) - len(batches)
    return batches, (f"{unread} recorded batches can't be read, and are left out",) if unread else ()


def _begun_after(time: float, played: Sequence[MetricRow]) -> Sequence[MetricRow]:
    """Return the rows whose episodes began after a time, as engines are slow at first; all if there are none."""
    warm = [row for row in played if row.time - row.values.get("episode_s", 0.0) >= time]
    return warm if any(row.values.get("episodes") for row in warm) else played


def _workload(
    groups: Sequence[Sequence[Trajectory]], played: Sequence[MetricRow], turn_s: float
) -> tuple[MeasuredWorkload, tuple[str, ...]]:
    """Return recorded groups, weighted to the mean time of all episodes, as groups without signal are not recorded."""
    finished = [row for row in played if row.values.get("episodes") and "episode_s" in row.values]
    num = sum(row.values["episodes"] for row in finished)
    mean_s = sum(row.values["episodes"] * row.values["episode_s"] for row in finished) / max(num, 1.0)
    if not groups:
        turns = max(round(_total(played, "turns") / num), 1)
        note = "no batches are recorded (console.keep_steps, record_batches): all episodes are taken to be alike"
        return MeasuredWorkload([[PlannedEpisode(turns, max(mean_s - turns * turn_s, 0.0))]]), (note,)
    episodes = [[_episode(trajectory, turn_s) for trajectory in group] for group in groups]
    times = np.array([fmean(trajectory.duration_s for trajectory in group) for group in groups])
    return MeasuredWorkload(episodes, tuple(_tilt(times, mean_s)), intraclass_correlation_of(groups)), ()


def _episode(trajectory: Trajectory, turn_s: float) -> PlannedEpisode:
    turns = max(len(trajectory.turns), 1)
    return PlannedEpisode(turns, max(trajectory.duration_s - turns * turn_s, 0.0))


def intraclass_correlation_of(groups: Sequence[Sequence[Trajectory]]) -> float:
    """Return the intraclass correlation of the logarithms of episodes' times, 0 to 1; 1 for fewer than two groups of
    several.

    One-way analysis of variance: Shrout and Fleiss 1979, ICC(1,1).
    """
    logs = [np.log([max(t.duration_s, MIN_EPISODE_S) for t in group]) for group in groups if len(group) > 1]
    sizes, total = np.array([len(each) for each in logs]), sum(map(len, logs))
    if len(logs) < 2:
        return 1.0
    means, mean = np.array([each.mean() for each in logs]), float(np.concatenate(logs).mean())
    between = float(sizes @ (means - mean) ** 2) / (len(logs) - 1)
    within = float(sum(((each - each.mean()) ** 2).sum() for each in logs)) / (total - len(logs))
    size = (total - float(sizes @ sizes) / total) / (len(logs) - 1)
    spread = between + (size - 1) * within
    return min(max((between - within) / spread, 0.0), 1.0) if spread > 0 else 1.0


def _tilt(times: Floats, mean: float) -> list[float]:
    """Return weights (1 in all) of least relative entropy to equal ones under which `times` have a mean, or come
    closest."""
    scale = float(times.std()) or 1.0
    low, high = -20.0 / scale, 20.0 / scale
    weights = np.full(len(times), 1 / len(times))
    for _ in range(60):
        theta = (low + high) / 2
        weights = np.exp(theta * (times - times.mean()) - np.max(theta * (times - times.mean())))
        weights /= weights.sum()
        low, high = (theta, high) if float(weights @ times) < mean else (low, theta)
    return weights.tolist()


def _fit_turns(played: Sequence[MetricRow], rows: Sequence[MetricRow], num_replicas: int) -> tuple[TurnTimes, float]:
    """Fit a turn's time over the turns in generation; return it with its mean.

    These turns are the episodes in play times a turn's share of generation. As both contain the same noise, the
    episodes in play are the instrument.
    """
    playing: dict[int, float] = defaultdict(float)
    for row in rows:
        if row.source == "rollout" and "playing" in row.values:
            playing[int(row.time)] += row.values["playing"]
    kept = [row for row in played if row.values.get("turns") and "generation_s" in row.values]
    if not kept:
        return TurnTimes(((1.0, 0.0),)), 0.0
    turns = np.array([row.values["turns"] for row in kept])
    times = np.array([row.values["generation_s"] for row in kept])
    both = times + np.array([row.values.get("env_s", 0.0) for row in kept])
    replicas = _count_reporting(rows, "generation", "replica")
    episodes = np.array([playing.get(int(row.time), 0.0) / replicas.get(int(row.time), num_replicas) for row in kept])
    counts = episodes * times / np.maximum(both, 1e-9)
    mean_s, mean_count = float(np.average(times, weights=turns)), float(np.average(counts, weights=turns))
    variation = _covariance(episodes, counts, turns)
    slope_s = _covariance(episodes, times, turns) / variation if variation > 0 else 0.0
    slope_s = min(max(slope_s, 0.0), mean_s / mean_count if mean_count > 0 else 0.0)
    fixed_s, highest = mean_s - slope_s * mean_count, max(float(counts.max()), 1.0) * FITTED_TO
    if slope_s * highest < 0.01 * mean_s:
        return TurnTimes(((1.0, mean_s),)), mean_s
    return TurnTimes(((1.0, fixed_s + slope_s), (highest, fixed_s + slope_s * highest))), mean_s


def mean_reporting(rows: Iterable[MetricRow], source: str, label: str, *, default: int) -> float:
    """Return the mean number of components; `default`, that of the configuration, without records.

    Live settings change it.
    """
    counts = _count_reporting(rows, source, label)
    return fmean(counts.values()) if counts else default


def _count_reporting(rows: Iterable[MetricRow], source: str, label: str) -> dict[int, int]:
    """Return second -> components that reported in it or shortly before."""
    bits: dict[str, int] = {}
    seen: dict[int, int] = defaultdict(int)
    for row in rows:
        if row.source == source and label in row.labels:
            bit = bits.setdefault(row.labels[label], 1 << len(bits))
            for second in range(int(row.time), int(row.time) + REPORTED_S):
                seen[second] |= bit
    return {second: each.bit_count() for second, each in seen.items()}


def _worker_s(rows: Sequence[MetricRow]) -> float:
    """Return a worker's CPU time of a turn, beyond what it spends while nothing is sampled; 0 if it was not recorded."""
    turns: dict[str, float] = defaultdict(float)
    reports: list[tuple[float, float]] = []
    for row in sorted(rows, key=_by_time):
        worker = row.labels.get("worker", "")
        turns[worker] += row.values.get("turns", 0.0)
        if "cpu_s" in row.values:  # the last record of a report
            reports.append((turns.pop(worker), row.values["cpu_s"]))
    return _fit_line(*np.array(reports).T)[1] if reports else 0.0


def _env_call_s(
    played: Sequence[MetricRow], reported: Sequence[MetricRow], env_steps: int
) -> tuple[float | None, float]:
    """Return the time of a turn in calls of its env, resets included, and the wait for a free thread in it.

    No more than `env_steps` can have run at once: what the calls took beyond is wait.
    """
    kept = [row.values for row in played if row.values.get("turns") and "env_s" in row.values]
    span_s = max((row.time for row in reported), default=0.0) - min((row.time for row in reported), default=0.0)
    turns_per_s = _total(reported, "turns") / span_s if span_s else 0.0
    if not kept or not turns_per_s:
        return None, 0.0
    in_calls = sum(row["env_s"] * (row["turns"] + row.get("episodes", 0.0)) for row in kept)
    call_s = in_calls / sum(row["turns"] for row in kept)
    served_s = min(call_s, env_steps / turns_per_s)
    return served_s, call_s - served_s


def _no_signal(values: Mapping[str, float]) -> float:
    """Return the share of a step's groups without learning signal, those that it replaced among them."""
    refilled = values.get("groups_dropped/no_signal", 0.0)
    return (refilled + values.get("groups_without_signal", 0.0)) / max(refilled + values.get("groups", 0.0), 1.0)


def _fit_training(steps: Sequence[MetricRow]) -> tuple[float, float]:
    """Return seconds of a step and of a token."""
    times = np.array([row.values.get("time/train_s", 0.0) for row in steps])
    return _fit_line(np.array([row.values.get("tokens/computed", 0.0) for row in steps]), times)


def _fit_line(x: Floats, y: Floats) -> tuple[float, float]:
    """Return offset and slope, nonnegative, by least squares."""
    equal = np.ones(len(x))
    variation, mean_x, mean_y = _covariance(x, x, equal), float(x.mean()), float(y.mean())
    slope = _covariance(x, y, equal) / variation if variation > 0 else 0.0
    slope = min(max(slope, 0.0), mean_y / mean_x if mean_x > 0 else 0.0)
    return mean_y - slope * mean_x, slope


def _covariance(x: Floats, y: Floats, weights: Floats) -> float:
    mean_x, mean_y = np.average(x, weights=weights), np.average(y, weights=weights)
    return float(np.average((x - mean_x) * (y - mean_y), weights=weights))


def _by_time(row: MetricRow) -> float:
    return row.time


def _total(rows: Iterable[MetricRow], name: str) -> float:
    return sum(row.values.get(name, 0.0) for row in rows)


def _mean(rows: Iterable[MetricRow], source: str, name: str) -> float:
    values = [row.values[name] for row in rows if row.source == source and name in row.values]
    return sum(values) / len(values) if values else 0.0
