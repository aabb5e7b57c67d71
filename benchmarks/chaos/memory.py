"""Private memory (unique set size) of processes over time, and its growth."""

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from offbeat.benchmarks.chaos.faults import PROCESSES

MIB = 2**20
SETTLING_SHARE = 1 / 3
"""Excluded, while caches fill."""
OTHERS = {
    "train command": "offbeat.deploy.cli.app",
    "Ray's holder": "offbeat.deploy.local.ray_process",
    "GCS": "gcs_server",
    "raylet": "raylet/raylet",
    "learner's host": "ray::LearnerHostActor",
    "log monitor": "log_monitor",
    "dashboard": "dashboard",
    "runtime env agent": "runtime_env",
}
EVERYTHING = "all together"


NUM_PIECES = 12
"""Equal pieces with compared medians."""
T_QUANTILE = 2.201
"""Student's t at 97.5 %, `NUM_PIECES - 1` degrees of freedom."""
MIN_RISE_SHARE = 0.1
"""Of the range; see `Growth.lifted`."""


@dataclass(frozen=True, slots=True)
class Growth:
    per_hour: float
    """Mean difference of successive pieces."""
    error: float
    """Standard error (Ibragimov and Mueller, 2010), valid under autocorrelated noise."""
    late: float
    """Per hour in the second half."""
    lifted: float
    """Growth per hour of both minimum and maximum, less `MIN_RISE_SHARE` of their range: unlike a leak, oscillation
    cancels out.
    """

    def exceeds(self, limit: float) -> bool:
        """Return whether `late` and either measure exceed `limit`."""
        return self.late > limit and (self.per_hour - T_QUANTILE * self.error > limit or self.lifted > limit)


@dataclass
class Series:
    kind: str
    pid: int
    hours: list[float] = field(default_factory=list[float])
    mib: list[float] = field(default_factory=list[float])
    files: list[int] = field(default_factory=list[int])
    """Open file descriptors."""

    def after_settling(self, duration_h: float) -> tuple[Sequence[float], Sequence[float]]:
        first = next((i for i, hours in enumerate(self.hours) if hours >= SETTLING_SHARE * duration_h), len(self.hours))
        return self.hours[first:], self.mib[first:]


def growth(hours: Sequence[float], values: Sequence[float]) -> Growth | None:
    t, y = np.asarray(hours, dtype=np.float64), np.asarray(values, dtype=np.float64)
    edges = np.linspace(t[0], t[-1], NUM_PIECES + 1)
    pieces = [y[piece] for piece in np.split(np.arange(len(t)), np.searchsorted(t, edges[1:-1]))]
    if min(map(len, pieces)) < 3:
        return None
    width, medians = edges[1] - edges[0], np.array([np.median(piece) for piece in pieces])
    steps = np.diff(medians) / width
    middle = NUM_PIECES // 2
    first, second = np.concatenate(pieces[:middle]), np.concatenate(pieces[middle:])
    levels = np.polynomial.Polynomial.fit(t, y, 1)(t)
    rise = min(np.quantile(second, q) - np.quantile(first, q) for q in (0.02, 0.98))
    return Growth(
        per_hour=float(steps.mean()),
        error=float(steps.std(ddof=1)) / math.sqrt(len(steps)),
        late=float((medians[-1] - medians[middle]) / (width * (NUM_PIECES - 1 - middle))),
        lifted=float((rise - MIN_RISE_SHARE * np.ptp(y - levels)) / (width * middle)),
    )


class MemoryLog:
    def __init__(self) -> None:
        self._began = time.monotonic()
        self._series: dict[tuple[int, float], Series] = {}
        self._total = Series(EVERYTHING, 0)

    @property
    def duration_h(self) -> float:
        return self._total.hours[-1] if self._total.hours else 0.0

    def sample(self, roots: Sequence[psutil.Process]) -> None:
        """Measure `roots` and descendants."""
        hours, total, files = (time.monotonic() - self._began) / 3600, 0.0, 0
        for root in roots:
            for process in (root, *root.children(recursive=True)):
                with suppress(psutil.Error):
                    key = (process.pid, process.create_time())
                    mib, count = process.memory_full_info().uss / MIB, process.num_fds()
                    series = self._series.setdefault(key, Series("", process.pid))
                    series.kind = kind_of(process.cmdline())  # Ray renames its workers as they come to work
                    series.hours.append(hours)
                    series.mib.append(mib)
                    series.files.append(count)
                    total, files = total + mib, files + count
        self._total.hours.append(hours)
        self._total.mib.append(total)
        self._total.files.append(files)

    def lasting_series(self) -> list[Series]:
        """Return the sum, and processes alive from settling to the end."""
        first, last = SETTLING_SHARE * self.duration_h, 0.97 * self.duration_h
        lasting = [
            process for process in self._series.values() if process.hours[0] <= first and process.hours[-1] >= last
        ]
        return [self._total, *sorted(lasting, key=lambda process: -process.mib[-1])]


def kind_of(cmdline: Sequence[str]) -> str:
    line = " ".join(cmdline)
    for kind, mark in {**PROCESSES, **OTHERS}.items():
        if mark in line and kind != "raylet of the second node":
            return kind
    return line[:40] or "?"


def draw_memory(path: Path, title: str, series: Sequence[Series], duration_h: float) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), dpi=120, layout="constrained")
    axis = figure.subplots()
    for process in series:
        axis.plot(
            [60 * hours for hours in process.hours],
            process.mib,
            linewidth=1,
            label=f"{process.kind} ({process.mib[-1]:.0f})",
        )
    axis.axvspan(0, 60 * SETTLING_SHARE * duration_h, color="gray", alpha=0.1, label="settling: not in the slopes")
    axis.set_yscale("log")
    axis.set_xlabel("minutes")
    axis.set_ylabel("unique set size, MiB (log)")
    axis.grid(alpha=0.25, which="both")
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
