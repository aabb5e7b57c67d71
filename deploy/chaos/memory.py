"""Memory of a run's processes over time, and whether it grows.

Invariant: what is compared is memory that a process has for itself (unique set size): what it shares is nobody's leak.
"""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from deploy.chaos.faults import PROCESSES

MIB = 2**20
SETTLING = 1 / 3
"""Share of the time at the start that is left out: caches fill, pools grow."""
OTHERS = {
    "train command": "deploy.cli",
    "Ray's holder": "deploy.ray_head",
    "GCS": "gcs_server",
    "raylet": "raylet/raylet",
    "learner's host": "ray::LearnerHostActor",
    "log monitor": "log_monitor",
    "dashboard": "dashboard",
    "runtime env agent": "runtime_env",
}
EVERYTHING = "all together"


@dataclass(frozen=True, slots=True)
class Growth:
    """A straight line through measurements."""

    per_hour: float
    error: float
    """Standard error, by Newey and West (measurements near each other are alike)."""

    @property
    def is_there(self) -> bool:
        """Whether it is above zero by more than two standard errors."""
        return self.per_hour > 2 * self.error


@dataclass
class Series:
    """One process over time."""

    kind: str
    pid: int
    hours: list[float] = field(default_factory=list[float])
    mib: list[float] = field(default_factory=list[float])
    files: list[int] = field(default_factory=list[int])
    """Open file descriptors."""

    def settled(self, duration_h: float) -> tuple[Sequence[float], Sequence[float]]:
        """Without the time in which a run of `duration_h` settles."""
        first = next((i for i, hours in enumerate(self.hours) if hours >= SETTLING * duration_h), len(self.hours))
        return self.hours[first:], self.mib[first:]


def growth(hours: Sequence[float], values: Sequence[float]) -> Growth:
    """The slope of a least-squares line per hour, and its standard error. At least three points."""
    t = np.asarray(hours, dtype=np.float64)
    y = np.asarray(values, dtype=np.float64)
    t = t - t.mean()
    spread = float((t**2).sum())
    slope = float((t * y).sum()) / spread
    scores = t * (y - y.mean() - slope * t)
    lags = math.ceil(4 * (len(t) / 100) ** (2 / 9))
    variance = float((scores**2).sum())
    for lag in range(1, min(lags, len(t) - 1) + 1):
        variance += 2 * (1 - lag / (lags + 1)) * float((scores[lag:] * scores[:-lag]).sum())
    return Growth(slope, math.sqrt(max(variance, 0.0) * len(t) / (len(t) - 2)) / spread)


class MemoryLog:
    """Samples of one run."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._series: dict[tuple[int, float], Series] = {}
        self._total = Series(EVERYTHING, 0)

    @property
    def duration_h(self) -> float:
        return self._total.hours[-1] if self._total.hours else 0.0

    def sample(self, roots: Sequence[psutil.Process], bounded: Mapping[str, float] | None = None) -> None:
        """Measure every process below `roots`, and them.

        bounded: of a kind of process, MiB that it holds in what fills up to a bound, which is not counted.
        """
        hours, total, files = (time.monotonic() - self._began) / 3600, 0.0, 0
        for root in roots:
            for process in (root, *root.children(recursive=True)):
                with suppress(psutil.Error):
                    key = (process.pid, process.create_time())
                    mib, count = process.memory_full_info().uss / MIB, process.num_fds()
                    series = self._series.setdefault(key, Series("", process.pid))
                    series.kind = kind_of(process.cmdline())  # Ray renames its workers as they come to work
                    mib -= (bounded or {}).get(series.kind, 0.0)
                    series.hours.append(hours)
                    series.mib.append(mib)
                    series.files.append(count)
                    total, files = total + mib, files + count
        self._total.hours.append(hours)
        self._total.mib.append(total)
        self._total.files.append(files)

    def lasting(self) -> list[Series]:
        """The sum, and the processes that were there from the settling to the end."""
        first, last = SETTLING * self.duration_h, 0.97 * self.duration_h
        lasting = [each for each in self._series.values() if each.hours[0] <= first and each.hours[-1] >= last]
        return [self._total, *sorted(lasting, key=lambda each: -each.mib[-1])]


def kind_of(cmdline: Sequence[str]) -> str:
    """What a process is, for people."""
    line = " ".join(cmdline)
    for kind, mark in {**PROCESSES, **OTHERS}.items():
        if mark in line and kind != "raylet of the second node":
            return kind
    return line[:40] or "?"


def draw_memory(path: Path, title: str, series: Sequence[Series], duration_h: float) -> None:
    """Write a PNG: what each process has for itself over minutes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), dpi=120, layout="constrained")
    axis = figure.subplots()
    for each in series:
        axis.plot(
            [60 * hours for hours in each.hours], each.mib, linewidth=1, label=f"{each.kind} ({each.mib[-1]:.0f})"
        )
    axis.axvspan(0, 60 * SETTLING * duration_h, color="gray", alpha=0.1, label="settling: not in the slopes")
    axis.set_yscale("log")
    axis.set_xlabel("minutes")
    axis.set_ylabel("unique set size, MiB (log)")
    axis.grid(alpha=0.25, which="both")
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle(title)
    figure.savefig(path)
