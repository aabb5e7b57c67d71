"""Interface of a tracker of `metrics.jsonl` rows, in order.

Invariant: steps never decrease and no row is sent twice, except steps that a resumed learner repeats and rows
unconfirmed by a killed tracker; `Row.number` identifies rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal

Values = Mapping[str, float | None]
Ending = Literal["finished", "stopped", "died"]
"""Learner's end: all steps trained, stopped on request, or failed or killed."""


@dataclass(frozen=True, slots=True)
class Row:
    """Measurements of a component at a step."""

    number: int
    """Line in `metrics.jsonl`, from 1, increasing across resumes."""
    step: int
    """The learner's step, or the newest so far."""
    time: float
    """Unix time, s."""
    values: Mapping[str, float]
    """`learner/reward`, `eval/sampled/success`, ...; all finite."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    name: str
    """`exp_name`."""
    key: str
    """16 letters and digits, kept on resume."""
    resumed: bool
    """Whether an earlier tracker process used this key."""
    resumed_step: int
    """Step from which the learner resumes; later steps repeat."""
    folder: Path
    """The tracker's subfolder of the run folder."""
    config: Mapping[str, Any]
    """Learner configuration without secrets."""


class Tracker(ABC):
    """Receives metrics. Methods may raise or block: failed rows are sent again."""

    place: str = ""
    """URL or folder of the run, if known."""

    def __init__(self, run: TrackedRun) -> None:
        """Open the run. Subclasses take `tracker_kwargs` as keyword arguments."""
        del run

    @abstractmethod
    def write(self, row: Row) -> None:
        """Log a row."""

    def flush(self) -> None:  # noqa: B027
        """Make written rows durable. Called when none are waiting; flushed rows are not sent again."""

    def close(self, ending: Ending) -> None:  # noqa: B027
        """Close the run, which a later learner may resume."""


def make_row(
    number: int, newest: int, time: float, source: str, step: int | None, labels: Mapping[str, str], values: Values
) -> Row:
    """Convert a metric record. newest: step for a record without one."""
    parts = [source]
    if source == "eval":
        parts.append(labels.get("sampling", "sampled"))
    elif "kind" in labels:
        parts.append(labels["kind"])
    finite = {
        "/".join([*parts, name]): value for name, value in values.items() if value is not None and isfinite(value)
    }
    return Row(number, newest if step is None else step, time, finite)
