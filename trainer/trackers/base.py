"""Interface of a tracker: receives a run's rows in the order of `metrics.jsonl`.

Invariant: no row is sent twice and steps never decrease, except for steps that a resumed learner repeats and rows that a
killed tracker had not yet confirmed; `Row.number` identifies those.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal

Values = Mapping[str, float | None]
Ending = Literal["finished", "stopped", "died"]
"""How a learner ended: all steps trained, stopped on request, or failed or killed."""


@dataclass(frozen=True, slots=True)
class Row:
    """Measurements of one component at one step."""

    number: int
    """Line in `metrics.jsonl`, from 1: grows over all lives of the run."""
    step: int
    """The learner's step; for a row without one, the newest so far."""
    time: float
    """Unix time, s."""
    values: Mapping[str, float]
    """`learner/reward`, `eval/sampled/success`, ...; all finite."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run that a tracker receives."""

    name: str
    """`exp_name`."""
    key: str
    """16 letters and digits, the same after a resume."""
    resumed: bool
    """True if an earlier tracker process used this key."""
    resumed_step: int
    """Step from which the learner resumes; later steps are trained again."""
    folder: Path
    """The tracker's own subfolder of the run's folder."""
    config: Mapping[str, Any]
    """The learner's configuration, without secrets."""


class Tracker(ABC):
    """Receives a run's metrics. Any method may raise or block: rows that fail are sent again."""

    place: str = ""
    """URL or folder at which the run can be viewed, if known."""

    def __init__(self, run: TrackedRun) -> None:
        """Open the run. Subclasses take `tracker_kwargs` as keyword arguments."""
        del run

    @abstractmethod
    def write(self, row: Row) -> None:
        """Log one row."""

    def flush(self) -> None:  # noqa: B027
        """Make written rows durable. Called when no more rows are waiting; flushed rows are not sent again."""

    def close(self, ending: Ending) -> None:  # noqa: B027
        """Close the run. A later learner may resume it."""


def make_row(
    number: int, newest: int, time: float, source: str, step: int | None, labels: Mapping[str, str], values: Values
) -> Row:
    """Convert a metric record to a row. newest: step for a record without one."""
    parts = [source]
    if source == "eval":
        parts.append(labels.get("sampling", "sampled"))
    elif "kind" in labels:
        parts.append(labels["kind"])
    finite = {
        "/".join([*parts, name]): value for name, value in values.items() if value is not None and isfinite(value)
    }
    return Row(number, newest if step is None else step, time, finite)
