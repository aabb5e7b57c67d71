"""Links of the chain that explains a run's wait."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offbeat.services.buffer.api import GroupProgress, Snapshot
from offbeat.services.control.interfaces import Observation
from offbeat.services.control.run import LearnerReport, RunRecord
from offbeat.services.weights.replica_reports import ReplicaReport

MAX_REPORT_AGE_S = 5.0
MIN_REPORTED_WAIT_S = 0.05


@dataclass(frozen=True, slots=True)
class Cause:
    component: str
    """`learner`, `group 41`, `episodes`, `env workers`, `generation`, `env`, `agent`, `run`, `redis`, or a component.
    """
    state: str
    """One word: `waits`, `trains`, `loads`, `samples`, `absent`, ..."""
    text: str
    """Clause for humans."""
    waits_for: str | None = None
    """Next link; None if busy."""
    since_s: float | None = None
    detail: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """Input of `chain`."""

    now: float
    record: RunRecord
    observations: Mapping[str, Observation]
    learner: LearnerReport
    buffer: Snapshot
    groups: Sequence[GroupProgress]
    workers: Mapping[str, Mapping[str, Any]]
    """Worker -> report."""
    replicas: Mapping[str, ReplicaReport]
    version: int
    """Newest published version; -1: none."""
    leased: bool = True
    redis_trouble: str = ""

    @property
    def trains_by_admission(self) -> bool:
        """Return whether the learner holds complete groups back until the oldest is complete."""
        return json.loads(self.record.config).get("buffer", {}).get("order") == "admission"

    @property
    def awaited_group(self) -> GroupProgress | None:
        """Return the active group that the learner takes next, as far as known."""
        if self.trains_by_admission:
            return min(self.groups, key=lambda group: group.number, default=None)
        return min(self.groups, key=lambda group: (group.missing, group.number), default=None)


def for_seconds(seconds: float) -> str:
    return f" since {seconds:.1f} s" if seconds >= MIN_REPORTED_WAIT_S else ""


def spoken_name(name: str) -> str:
    return f"the {name.replace('-', ' ')}" if name == "learner" else name.replace("-", " ")


def join_components(names: Sequence[str]) -> str:
    return join_names([spoken_name(name) for name in names]) or "no component"


def join_names(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)
