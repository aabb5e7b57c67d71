"""Results of TRL's `steps.jsonl` or Offbeat's `metrics.jsonl`."""

import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.benchmarks.peer.cpu_meter import CPU
from offbeat.benchmarks.peer.done import MeasuredWith

WARM_UP_STEPS = 5
"""Excluded from rates."""
REPORT_S = 1.0
"""Longest delay of a replica's first report."""


@dataclass(frozen=True, slots=True)
class PeerStep:
    step: int
    seconds: float
    """Since the policy was first available."""
    success: float
    """Of trained episodes."""
    time: float = 0.0
    """Unix, at its end."""


@dataclass(frozen=True, slots=True)
class PolicySnapshot:
    step: int
    seconds: float
    folder: Path
    success: float | None = None
    """On held-out tasks."""


@dataclass(frozen=True, slots=True)
class SideRun:
    startup_s: float
    """From command to start of `seconds`."""
    steps: tuple[PeerStep, ...]
    snapshots: tuple[PolicySnapshot, ...]
    cpu: tuple[tuple[float, float], ...] = ()
    """(Unix time, CPU seconds)."""
    cpu_by_kind: dict[str, tuple[float, ...]] = field(default_factory=dict[str, tuple[float, ...]])
    """At the times of `cpu`."""
    measured: MeasuredWith | None = None

    def with_successes(self, successes: Sequence[float]) -> "SideRun":
        pairs = zip(self.snapshots, successes, strict=True)
        return replace(self, snapshots=tuple(replace(snapshot, success=success) for snapshot, success in pairs))

    def rate(self, batch: int) -> float:
        """Trained trajectories/s, without warm-up."""
        first = self.steps[min(WARM_UP_STEPS, len(self.steps) - 2)]
        last = self.steps[-1]
        return batch * (last.step - first.step) / (last.seconds - first.seconds)

    def step_s(self) -> float:
        """Median seconds per step."""
        later = self.steps[min(WARM_UP_STEPS, len(self.steps) - 2) :]
        return statistics.median(b.seconds - a.seconds for a, b in itertools.pairwise(later))

    def step_cpu_s(self) -> float | None:
        """Return mean CPU seconds per step, if measured."""
        return self._per_step([used for _, used in self.cpu])

    def step_cpu_s_by_kind(self) -> dict[str, float]:
        """Return mean CPU seconds per step by kind, sorted, at least 1 ms."""
        used_s = {kind: self._per_step(used) or 0.0 for kind, used in self.cpu_by_kind.items()}
        return {kind: spent for kind, spent in sorted(used_s.items(), key=lambda item: -item[1]) if spent >= 0.001}

    def _per_step(self, used: Sequence[float]) -> float | None:
        first, last = self.steps[min(WARM_UP_STEPS, len(self.steps) - 2)], self.steps[-1]
        if len(used) < 2:
            return None
        began, ended = np.interp([first.time, last.time], [time for time, _ in self.cpu], used)
        return float(ended - began) / (last.step - first.step)

    def from_command(self) -> "SideRun":
        """Return the run with `seconds` counted from its command."""
        return replace(
            self,
            steps=tuple(replace(step, seconds=step.seconds + self.startup_s) for step in self.steps),
            snapshots=tuple(replace(each, seconds=each.seconds + self.startup_s) for each in self.snapshots),
        )

    def mean_success(self, horizon_s: float) -> float | None:
        """Return the mean of held-out success over the first `horizon_s`: the area under its curve, over its length.

        Linear between snapshots, 0 before the first one, None without evaluations up to the horizon.
        """
        rated = [(each.seconds, each.success) for each in self.snapshots if each.success is not None]
        if len(rated) < 2 or rated[-1][0] < horizon_s:
            return None
        seconds, successes = np.array(rated).T
        within = np.append(seconds[seconds < horizon_s], horizon_s)
        return float(np.trapezoid(np.interp(within, seconds, successes), within)) / horizon_s

    def seconds_to(self, target: float) -> float | None:
        """Interpolate the time at which held-out success reached `target`, if ever."""
        rated = [snapshot for snapshot in self.snapshots if snapshot.success is not None]
        before: PolicySnapshot | None = None
        for snapshot in rated:
            assert snapshot.success is not None
            if snapshot.success >= target:
                if before is None or before.success is None:
                    return snapshot.seconds
                share = (target - before.success) / (snapshot.success - before.success)
                return before.seconds + share * (snapshot.seconds - before.seconds)
            before = snapshot
        return None


def read_trl(folder: Path) -> SideRun:
    records = _lines(folder / "steps.jsonl")
    steps = tuple(PeerStep(r["step"], r["seconds"], r["success"], r["time"]) for r in records if "step" in r)
    seconds = {0: 0.0} | {step.step: step.seconds for step in steps}
    return SideRun(records[0]["startup_s"], steps, _snapshots(folder / "snapshots", seconds), *_cpu(folder))


def read_offbeat(folder: Path, start: Path) -> SideRun:
    """Read files of `offbeat train`. start: initial policy."""
    records = _lines(folder / "metrics.jsonl")
    began = next(r["values"]["began"] for r in records if r["source"] == "command")
    served = next(r["time"] for r in records if r["source"] == "generation" and r["values"].get("weight_updates"))
    zero = served - REPORT_S
    learner = [r for r in records if r["source"] == "learner" and r["step"] is not None]
    steps = tuple(PeerStep(r["step"], r["time"] - zero, r["values"]["success"], r["time"]) for r in learner)
    seconds = {step.step: step.seconds for step in steps}
    snapshots = (PolicySnapshot(0, 0.0, start), *_snapshots(folder / "checkpoints", seconds))
    return SideRun(zero - began, steps, snapshots, *_cpu(folder.parent))


def _snapshots(folder: Path, seconds: dict[int, float]) -> tuple[PolicySnapshot, ...]:
    folders = [(int(path.name.removeprefix("step-")), path) for path in sorted(folder.glob("step-*"))]
    return tuple(PolicySnapshot(step, seconds[step], path) for step, path in folders if step in seconds)


def _cpu(folder: Path) -> tuple[tuple[tuple[float, float], ...], dict[str, tuple[float, ...]]]:
    path = folder / CPU
    looks = _lines(path) if path.exists() else []
    kinds = {kind for look in looks for kind in look.get("by_kind", {})}
    by_kind = {kind: tuple(look["by_kind"].get(kind, 0.0) for look in looks) for kind in kinds}
    return tuple((look["time"], look["cpu_s"]) for look in looks), by_kind


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
