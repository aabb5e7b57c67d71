"""What a run should be and what it is: the words, the record, and how the record lies in Redis."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from typing import Any

from offbeat.services.errors import CodecError, ControlError
from offbeat.services.live_settings import Settings, decode_settings, encode_settings
from offbeat.services.weights.replica_reports import ReplicaReport


class DesiredState(StrEnum):
    """What a person wants of a run."""

    RUNNING = "running"
    PAUSED = "paused"
    """Begin no episode and no optimizer step; all processes stay."""
    STOPPED = "stopped"
    """Drain, checkpoint, end; it may be resumed."""
    KILLED = "killed"
    """End now, without draining; it may be resumed from its last checkpoint."""

    @property
    def ends(self) -> bool:
        return self in (DesiredState.STOPPED, DesiredState.KILLED)


class RunState(StrEnum):
    """What a run is."""

    PREPARING = "preparing"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    DRAINING = "draining"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def over(self) -> bool:
        return self in (RunState.FINISHED, RunState.STOPPED, RunState.FAILED)


class RunExistsError(ControlError):
    """A run of that name is going on."""


class BusyError(ControlError):
    """Another run has the use of something that this one needs."""


class RunStateError(ControlError):
    """A command that makes no sense for what the run is at."""


class UnknownRunError(ControlError):
    """There is no run of that name."""


class ForeignRecordError(ControlError):
    """The record of a run was written by another version of this program."""


@dataclass(frozen=True, slots=True)
class RunSpec:
    """A validated run, as much of it as the control service needs to know."""

    run_id: str
    config: str
    """The whole configuration as JSON."""
    output_dir: str
    """Absolute."""
    max_steps: int
    settings: Settings
    """What may be changed while it goes on, as the configuration has it."""
    resume: bool = False
    """Go on with what an earlier run of this name left in Redis, instead of forgetting it."""
    claims: Mapping[str, str] = field(default_factory=dict[str, str])
    """What no other run may use at the same time: kind (`folder`, `app`) -> name."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run as Redis holds it; times are Unix seconds, 0 where it has not come to that."""

    run_id: str
    config: str
    output_dir: str
    max_steps: int
    settings: Settings
    """As the configuration has them; `RunStore.changes` came after."""
    wanted: DesiredState = DesiredState.RUNNING
    state: RunState = RunState.PREPARING
    outcome: RunState = RunState.FINISHED
    """What it becomes when it has drained."""
    error: str = ""
    log: str = ""
    """File that tells more about `error`."""
    attempt: int = 1
    """Times it was started: 1, and one more each time it was resumed."""
    created_at: float = 0.0
    started_at: float = 0.0
    """Of this attempt."""
    running_at: float = 0.0
    draining_at: float = 0.0
    ended_at: float = 0.0
    beat: float = 0.0
    """When a reconciler last looked."""

    def encode(self) -> dict[str, str]:
        plain = {each.name: str(getattr(self, each.name)) for each in fields(self)}
        return plain | {"settings": encode_settings(self.settings)}

    @classmethod
    def decode(cls, raw: dict[bytes, bytes]) -> "RunRecord":
        """The record that a hash of Redis holds. Raises `ForeignRecordError`."""
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
        f"run {run_id!r} was recorded by another version of Offbeat ({what}): move {place}/redis aside, and it goes on from "
        "its newest checkpoint; in a Redis of several runs, delete it (`offbeat runs delete`) and start it again"
    )


@dataclass(frozen=True, slots=True)
class Restarts:
    """How often a component has died without the run getting further in between."""

    count: int = 0
    total: int = 0
    last_at: float = 0.0
    incident: str = ""
    step: int = -1


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the published weights have come; -1 before version 0."""

    version: int = -1
    step: int = -1


@dataclass(frozen=True, slots=True)
class LearnerReport:
    """What the learner says of itself in the run's record."""

    phase: str = ""
    """For people: `warming up 120/300`, `training`."""
    doing: dict[str, Any] = field(default_factory=dict[str, Any])
    """`stage`, the `step` it belongs to (0-based batches trained) and `since` when, Unix time; see `Reporter.doing`."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """Of its newest step."""
    trouble: str = ""
    """What goes wrong while it trains on: a checkpoint that can't be written."""


@dataclass(frozen=True, slots=True)
class ComponentReports:
    """What the parts of a run said last, however long ago."""

    workers: Mapping[str, Mapping[str, Any]]
    """Env worker -> what its episodes wait for; see `offbeat.services.rollout.wait_status`."""
    replicas: Mapping[str, ReplicaReport]
    leased: bool
    """A learner holds the run."""
