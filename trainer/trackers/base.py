"""Interface of a tracker of `metrics.jsonl` rows, in order.

Invariant: steps never decrease and no row is sent twice, except a resumed learner's repeated steps and rows unconfirmed
by a killed tracker; `Row.number` identifies rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from offbeat.services.text_samples import TextSample

Values = Mapping[str, float | None]
Ending = Literal["finished", "stopped", "died"]
"""All steps trained, stopped on request, or failed."""


@dataclass(frozen=True, slots=True)
class Row:
    number: int
    """Line in `metrics.jsonl`, from 1, across resumes."""
    step: int
    """The learner's, or the newest."""
    time: float
    """Unix time, s."""
    values: Mapping[str, float]
    """Finite; e.g. `learner/reward`, `eval/sampled/success`."""
    samples: tuple[TextSample, ...] = ()
    """Trajectories as text; optional."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    name: str
    """`exp_name`."""
    key: str
    """16 letters and digits, kept on resume."""
    resumed: bool
    """True if an earlier process used this key."""
    resumed_step: int
    """Later steps repeat."""
    folder: Path
    """The tracker's, in the run folder."""
    config: Mapping[str, Any]
    """The learner's, without secrets."""


class Tracker(ABC):
    """Receiver of metrics. Methods may raise or block: failed rows are resent."""

    place: str = ""
    """URL or folder, if known."""

    def __init__(self, run: TrackedRun) -> None:
        """Open the run; subclasses take `tracker_kwargs` as keyword arguments."""
        del run

    @abstractmethod
    def write(self, row: Row) -> None:
        """Log a row."""

    def flush(self) -> None:  # noqa: B027
        """Make rows durable, so that they are not resent; called when none are waiting."""

    def close(self, ending: Ending) -> None:  # noqa: B027
        """Close the run, which a later learner may resume."""


@dataclass(frozen=True, slots=True)
class LoggedSteps:
    every: int = 1
    last: int = 0

    def __contains__(self, step: int) -> bool:
        return step % self.every == 0 or step == self.last


def make_row(
    number: int,
    newest: int,
    time: float,
    source: str,
    step: int | None,
    labels: Mapping[str, str],
    values: Values,
    samples: tuple[TextSample, ...] = (),
) -> Row:
    """Convert a record. newest: step if it has none."""
    parts = [source]
    if source == "eval":
        parts.append(labels.get("sampling", "sampled"))
    elif "kind" in labels:
        parts.append(labels["kind"])
    finite = {
        "/".join([*parts, name]): value for name, value in values.items() if value is not None and isfinite(value)
    }
    return Row(number, newest if step is None else step, time, finite, samples)
