"""States and records of runs."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from typing import Any, ClassVar, TypeVar, cast

from offbeat.services.diagnosis import decode_findings
from offbeat.services.errors import CodecError, ControlError
from offbeat.services.findings import RunFinding
from offbeat.services.live_settings import Settings, decode_settings, encode_settings
from offbeat.services.weights.replica_reports import ReplicaReport, decode_report

T = TypeVar("T")
RUN_ID = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
"""Pattern of ids."""


class DesiredState(StrEnum):
    RUNNING = "running"
    PAUSED = "paused"
    """Start no episode and no step."""
    STOPPED = "stopped"
    """Drain, checkpoint and end; resumable."""
    KILLED = "killed"
    """End without draining; resumable from the last checkpoint."""

    @property
    def is_final(self) -> bool:
        return self in (DesiredState.STOPPED, DesiredState.KILLED)


class RunState(StrEnum):
    PREPARING = "preparing"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    DRAINING = "draining"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def is_terminal(self) -> bool:
        return self in (RunState.FINISHED, RunState.STOPPED, RunState.FAILED)


class RunExistsError(ControlError):
    """Run of that name is active."""


class BusyError(ControlError):
    """Resource claimed by another run. kind: as in `RunSpec.claims`, empty for another cause."""

    def __init__(self, message: str, kind: str = "") -> None:
        self.kind = kind
        super().__init__(message)


class RunStateError(ControlError):
    """Command not allowed in the run's state."""


class UnknownRunError(ControlError):
    """No run of that name."""


class LostRecordError(ControlError):
    """Active run's record that Redis has lost and its reconciler has not restored."""


class ForeignRecordError(ControlError):
    """Record of another version of Offbeat."""


@dataclass(frozen=True, slots=True)
class RunSpec:
    run_id: str
    config: str
    """Complete configuration as JSON."""
    output_dir: str
    """Absolute path."""
    max_steps: int
    settings: Settings
    resume: bool = False
    claims: Mapping[str, str] = field(default_factory=dict[str, str])
    """Resources: kind (`folder`, `app`) -> name."""
    base: str = ""
    """Identity of the weights below its adapters; empty if no other run has them."""
    downloads: tuple[str, ...] = ()
    """Models to download first."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Run in Redis; times are Unix seconds, 0 if not reached."""

    run_id: str
    config: str
    output_dir: str
    max_steps: int
    settings: Settings
    """Configured values, without `RunStore.changes`."""
    wanted: DesiredState = DesiredState.RUNNING
    state: RunState = RunState.PREPARING
    outcome: RunState = RunState.FINISHED
    """State after draining."""
    error: str = ""
    log: str = ""
    resumable: bool = True
    """False if a resume would fail again."""
    attempt: int = 1
    """Number of starts, resumes included."""
    created_at: float = 0.0
    started_at: float = 0.0
    running_at: float = 0.0
    draining_at: float = 0.0
    ended_at: float = 0.0
    beat: float = 0.0
    """Time of the last reconciliation."""
    report: str = ""
    """`due`, `written`, `failed`, or empty."""
    uid: str = ""
    """Unique among runs of this name, kept by resuming, carried by every write."""
    downloads: str = ""
    """Space-separated models and datasets to download first."""
    base: str = ""
    """As in `RunSpec`."""
    mesh: str = ""
    """Mesh that runs it: one of `offbeat train`, or "" for the deployed one."""

    @property
    def is_ending(self) -> bool:
        """Return whether an active run is to end or drains."""
        return self.wanted.is_final or self.state is RunState.DRAINING

    def encode(self) -> dict[str, str]:
        plain = {each.name: str(getattr(self, each.name)) for each in fields(self)}
        return plain | {"settings": encode_settings(self.settings)}

    @classmethod
    def decode(cls, raw: dict[bytes, bytes]) -> "RunRecord":
        """Parse a Redis hash; raises `ForeignRecordError`."""
        needed = [each.name for each in fields(cls) if each.default is MISSING]
        if lacking := [name for name in needed if name.encode() not in raw]:
            raise _foreign(raw, f"no {', '.join(lacking)}")
        kinds: dict[str, Callable[[str], Any]] = {
            "max_steps": int,
            "attempt": int,
            "settings": decode_settings,
            "wanted": DesiredState,
            "state": RunState,
            "outcome": RunState,
            "resumable": lambda text: text == str(True),
        }
        values: dict[str, Any] = {}
        for each in fields(cls):
            if (text := raw.get(each.name.encode())) is None:
                continue
            kind = kinds.get(each.name, float if each.name.endswith("_at") or each.name == "beat" else str)
            try:
                values[each.name] = kind(text.decode())
            except (ValueError, CodecError) as error:
                raise _foreign(raw, f"{each.name}: {error}") from error
        return cls(**values)


def _foreign(raw: Mapping[bytes, bytes], what: str) -> ForeignRecordError:
    run_id, place = (raw.get(name, b"?").decode(errors="replace") for name in (b"run_id", b"output_dir"))
    return ForeignRecordError(
        f"run {run_id!r} was recorded by another version of Offbeat ({what}): move {place}/redis aside, and it resumes from "
        "its newest checkpoint; in a Redis of several runs, delete it (`offbeat runs delete`) and start it again"
    )


def decode_fields(kind: type[T], text: str | bytes, **kinds: Callable[[Any], Any]) -> T:
    """Decode a dataclass of JSON values, ignoring unknown fields.

    kinds: conversions by field.

    Raises:
        CodecError: a field is missing or mistyped.
    """
    try:
        tree = json.loads(text)
        known = {each.name: tree[each.name] for each in fields(cast(Any, kind)) if each.name in tree}
        return kind(**{name: kinds[name](value) if name in kinds else value for name, value in known.items()})
    except (ValueError, TypeError) as error:
        raise CodecError(f"malformed {kind.__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class Restarts:
    """Deaths of a component since the run last progressed."""

    count: int = 0
    total: int = 0
    last_at: float = 0.0
    incident: str = ""
    step: int = -1
    has_recovered: bool = True
    """Whether it has been ready since."""
    start_failed: bool = False
    """Whether the last one counted is a failed start after `incident`."""


@dataclass(frozen=True, slots=True)
class WeightProgress:
    version: int = -1
    """Newest published weights; -1: none."""
    step: int = -1
    """Step of the last published weights; below `version` while a learner repeats steps whose weights are gone."""


@dataclass(frozen=True, slots=True)
class LearnerReport:
    phase: str = ""
    """For display: `warming up 120/300`, `training`."""
    doing: dict[str, Any] = field(default_factory=dict[str, Any])
    """`stage`, 0-based `step`, and `since` (Unix time)."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    trouble: str = ""
    findings: tuple[RunFinding, ...] = ()
    has_trained: bool = True
    """False while no step had a gradient."""

    FIELDS: ClassVar[tuple[str, ...]] = tuple(
        f"learner_{part}" for part in ("phase", "doing", "metrics", "trouble", "findings", "has_trained")
    )
    """Of the run's record."""

    @property
    def is_saving(self) -> bool:
        """Return whether it writes or uploads a checkpoint."""
        return self.doing.get("stage") in ("checkpoint", "settle", "upload")

    @classmethod
    def decode(cls, values: Sequence[bytes | None]) -> "LearnerReport":
        """values: of `FIELDS`, None for a missing one."""
        phase, doing, metrics, trouble, findings, trained = values
        return cls(
            phase.decode() if phase else "",
            json.loads(doing) if doing else {},
            json.loads(metrics) if metrics else {},
            trouble.decode() if trouble else "",
            decode_findings(findings) if findings else (),
            trained != b"0",
        )


@dataclass(frozen=True, slots=True)
class ComponentReports:
    workers: Mapping[str, Mapping[str, Any]]
    """Worker -> report."""
    replicas: Mapping[str, ReplicaReport]
    leased: bool

    @classmethod
    def decode(
        cls, workers: Mapping[bytes, bytes], replicas: Mapping[bytes, bytes], leased: int, ahead_s: float
    ) -> "ComponentReports":
        """Decode reports, with times of a clock that is ahead of Redis' one."""
        return cls(
            {name.decode(): _shift_clock(json.loads(blob), ahead_s) for name, blob in workers.items()},
            {name.decode(): decode_report(blob).shift_clock(ahead_s) for name, blob in replicas.items()},
            bool(leased),
        )


def _shift_clock(report: Mapping[str, Any], ahead_s: float) -> Mapping[str, Any]:
    """Return a worker's report with times of a clock that is ahead of Redis' one; those of older workers are unchanged."""
    if "received" not in report:
        return report
    at = report["received"] + ahead_s
    waits = {
        kind: {
            unit: {wait: [number, since + at - report["at"]] for wait, (number, since) in by_wait.items()}
            for unit, by_wait in report[kind].items()
        }
        for kind in ("groups", "evaluations")
        if kind in report
    }
    return {**report, **waits, "at": at}
