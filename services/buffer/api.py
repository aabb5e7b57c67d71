"""What env workers and the learner ask of the trajectory buffer."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol

from offbeat.services.live_settings import Change
from offbeat.services.messages.types import EpisodeTask, Group, Trajectory


class SubmitResult(StrEnum):
    """What became of a submitted trajectory."""

    ACCEPTED = "accepted"
    """Kept; its group waits for siblings."""
    COMPLETED = "completed"
    """Kept, and with it its group entered the stream (or its evaluation is complete)."""
    DUPLICATE = "duplicate"
    """This member was submitted before; nothing changed."""
    LATE = "late"
    """The group is complete, dropped or failed already; nothing changed."""


@dataclass(frozen=True, slots=True)
class WorkerOrders:
    """What a worker hears back from its heartbeat."""

    cancelled: tuple[EpisodeTask, ...] = ()
    """Episodes of this worker that nobody needs any more: redundant, expired, or given to another worker."""
    draining: bool = False
    """Claim nothing more; the run pauses or stops."""


@dataclass(frozen=True, slots=True)
class BufferLimits:
    """What admission and assembly go by; written when the run starts. A resumed run may bring others, but for `group_size`
    and `groups_per_step`."""

    group_size: int
    redundancy: int
    """Extra episodes of a group."""
    groups_per_step: int
    max_staleness: float
    max_groups_in_flight: int
    """Groups being played at most (`num_env_groups`)."""
    total_groups: int
    """Groups that the whole run trains (`max_steps * groups_per_step`); admission never goes past it."""
    max_attempts: int
    worker_timeout_s: float
    stale_policy: Literal["drop", "train"]
    """Under `drop`, groups still being played that no step can consume within the bound are dropped as `expired`."""
    baselines: int = 0
    """Members of each group beside those that are played greedily: `Group.baselines`."""


class RolloutBuffer(Protocol):
    """The buffer as an env worker sees it."""

    async def claim(self, worker_id: str, limit: int) -> list[EpisodeTask]:
        """Take up to `limit` episodes: evaluations first, then retries, then members of admitted groups, and where
        none is left admit new groups as far as the staleness bound allows (C3)."""
        ...

    async def wait_for_work(self, after: str, timeout_s: float) -> str:
        """Sleep until the doorbell rings after the position `after` (`"$"`: from now on) or the time is over; returns the
        position to wait from next."""
        ...

    async def heartbeat(self, worker_id: str) -> WorkerOrders:
        """Say that the worker lives, and hear which of its episodes nobody needs any more."""
        ...

    async def submit(self, worker_id: str, task: EpisodeTask, trajectory: Trajectory) -> SubmitResult:
        """Hand in a finished episode; idempotent by (group, member)."""
        ...

    async def fail(self, worker_id: str, task: EpisodeTask, reason: str) -> None:
        """Report that an episode could not be played: it is queued again with the same seed, and after `max_attempts`
        recorded as failed; a group that can't be completed any more is failed whole, by that reason."""
        ...

    async def task(self, number: int, drawn: str = "") -> tuple[str, str]:
        """Settle what a group plays, where a sampler draws it: the first that was `drawn` holds for all of its members.
        Returns the group's task, empty where there is none yet, and the sampler's state, empty before the learner told."""
        ...

    async def release(self, worker_id: str) -> int:
        """Give back all episodes of a worker that stops, without counting an attempt; returns how many."""
        ...


@dataclass(frozen=True, slots=True)
class Counters:
    """The ledger: admitted = trained + dropped + failed + in flight (being assembled, in the stream, or consumed and not
    yet acknowledged)."""

    admitted: int
    submitted: int
    """Groups that entered the stream."""
    trained: int
    dropped: dict[str, int]
    failed: dict[str, int]
    in_flight: int


class Admission(StrEnum):
    """Whether a new group may start now, and if not, what it waits for."""

    OPEN = "open"
    NOT_CONFIGURED = "not_configured"
    PAUSED = "paused"
    NO_WEIGHTS = "no_weights"
    """Version 0 is not published yet."""
    STALENESS_BOUND = "staleness_bound"
    """Rollouts are as far ahead as `max_staleness` allows: they wait for the learner."""
    GROUPS_IN_FLIGHT = "groups_in_flight"
    """`max_groups_in_flight` groups are being played: the learner waits for rollouts, if for anything."""
    ALL_ADMITTED = "all_admitted"
    """The run needs no more groups."""


@dataclass(frozen=True, slots=True)
class WorkerState:
    """An env worker as the buffer knows it."""

    worker_id: str
    silent_s: float
    """Time since it was heard of."""
    episodes: int
    """That it plays now."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole buffer at one moment."""

    counters: Counters
    playing: int
    """Groups being assembled."""
    ready: int
    """Complete groups that the learner has not been given yet."""
    consumed: int
    """Groups that the learner was given and has not acknowledged."""
    queued_train: int
    """Training episodes that nobody plays, though admitted."""
    queued_eval: int
    quarantined: int
    """Unreadable trajectories that are kept for people to look at (the newest 16)."""
    step: int | None
    """Of the newest published weights."""
    epoch: int
    admission: Admission
    workers: tuple[WorkerState, ...]


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """A group that is being played."""

    number: int
    size: int
    """Episodes that it needs."""
    done: int
    failed: int
    """Episodes that were given up."""
    played: int
    """Episodes that a worker plays now."""
    queued: int
    """Episodes that nobody plays yet."""
    version: int
    """Of the weights at its admission."""

    @property
    def missing(self) -> int:
        """Episodes that it still waits for."""
        return self.size - self.done


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A trajectory that could not be read, kept for people to look at."""

    unit: str
    """`t:<group number>`."""
    index: int
    complaint: str
    blob: bytes


@dataclass(frozen=True, slots=True)
class Boundary:
    """What a learner hears between two steps."""

    changes: tuple[Change, ...] = ()
    """Every change of the run's settings so far; all of them hold from a step that is known."""
    paused: bool = False
    ends: bool = False
    """Somebody wants the run to end."""


class LearnerBuffer(Protocol):
    """The buffer as the learner sees it; every writing call carries the lease's epoch and raises FencedError when a newer
    learner holds the run."""

    def take(self, timeout_s: float, wanted: int = 1) -> Group | None:
        """The next group in stream order, or in order of admission if the run wants that; None when none came in time. After
        (re)connecting, groups that were delivered and not acknowledged come first, in their old order.

        wanted: how many the caller is about to take; those that are there already may come with this one, and count as
        delivered.
        """
        ...

    def adopt(self, step: int) -> Boundary:
        """Before optimizer batch `step` (0-based): let the changes that were asked for meanwhile hold from here on;
        admission follows in the same moment. A change never holds for a batch whose weights were published before."""
        ...

    def teach(self, state: str) -> None:
        """What the task sampler knows now, for groups that start from here on."""
        ...

    def restore(self, num_trained: int, next_number: int | None = None) -> int:
        """After the resumed checkpoint's `ack`: make the ledger agree with it where Redis lost data, or knows of groups that
        only a lost checkpoint had trained; returns groups added, or, negative, given up as dropped `rewound`."""
        ...

    def drop(self, group: Group, reason: str) -> None:
        """Take a group out for good without training on it, counted by `reason`; admission makes up for it."""
        ...

    def ack(self, entry_ids: Sequence[str], step: int) -> int:
        """Take groups out that the durable checkpoint of `step` contains; idempotent; returns how many were still in."""
        ...

    def start_eval(self, eval_id: str, num_episodes: int, *, sampling_name: str, min_version: int) -> None:
        """Queue evaluation episodes number 0..num_episodes-1 ahead of training; idempotent by `eval_id`."""
        ...

    def eval_result(self, eval_id: str) -> list[Trajectory] | None:
        """All trajectories of an evaluation once every episode was submitted or failed; None before."""
        ...

    def wait_eval(self, eval_id: str, timeout_s: float) -> list[Trajectory] | None:
        """`eval_result`, once there is one or the time is over; sleeps meanwhile."""
        ...

    def forget_eval(self, eval_id: str) -> None:
        """Remove an evaluation's keys."""
        ...

    def counters(self) -> Counters:
        """The ledger now."""
        ...
