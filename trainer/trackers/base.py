"""The seam behind which each tracker stands: rows in, in the order of `metrics.jsonl`.

Invariant: a tracker hears no row twice, and steps only grow, but for what a learner that was killed repeats and what a
tracker that was killed had not yet confirmed; `Row.number` tells those.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal

Values = Mapping[str, float | None]
Ending = Literal["finished", "stopped", "died"]
"""How a learner ended: all steps are trained, somebody stopped it, or it failed or was killed."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one part of the mesh measured."""

    number: int
    """Line in `metrics.jsonl`, from 1: grows over all lives of the run."""
    step: int
    """The learner's, or the newest one where the row belongs to none."""
    time: float
    """Unix time, s."""
    values: Mapping[str, float]
    """`learner/reward`, `eval/sampled/success`, ...; all finite."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run whose rows a tracker takes."""

    name: str
    """`exp_name`."""
    key: str
    """16 letters and digits; stays when the run is resumed."""
    resumed: bool
    """An earlier life of the tracker has had this key."""
    resumed_step: int
    """The learner goes on from here; what came after it is trained again."""
    folder: Path
    """The tracker's own, in the run's folder."""
    config: Mapping[str, Any]
    """What the learner was told: hyperparameters, without secrets."""


class Tracker(ABC):
    """Takes a run's metrics; may raise and block as it likes, what it does not take is offered again."""

    place: str = ""
    """Where people see the run, if that can be told: a URL or a folder."""

    def __init__(self, run: TrackedRun) -> None:
        """A tracker that can be told something takes it as further arguments, by the names of `tracker_kwargs`."""
        del run

    @abstractmethod
    def write(self, row: Row) -> None:
        """Take one row."""

    def flush(self) -> None:  # noqa: B027
        """Called after some rows, when no more are there: what is written is not offered again."""

    def close(self, ending: Ending) -> None:  # noqa: B027
        """The learner has ended; another one may go on with the run."""


def row_of(
    number: int, newest: int, time: float, source: str, step: int | None, labels: Mapping[str, str], values: Values
) -> Row:
    """A record as trackers take it. newest: step at which a record without one stands."""
    parts = [source]
    if source == "eval":
        parts.append(labels.get("sampling", "sampled"))
    elif "kind" in labels:
        parts.append(labels["kind"])
    finite = {
        "/".join([*parts, name]): value for name, value in values.items() if value is not None and isfinite(value)
    }
    return Row(number, newest if step is None else step, time, finite)
