"""Interface of the trajectory buffer to env workers and the learner."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol

from offbeat.services.live_settings import Change
from offbeat.services.messages.types import EpisodeTask, Group, Trajectory


class SubmitResult(StrEnum):
    """Result of submitting a trajectory."""

    ACCEPTED = "accepted"
    """Stored; its group is incomplete."""
    COMPLETED = "completed"
    """Stored, and its group was completed and entered the stream (or its evaluation is complete)."""
    DUPLICATE = "duplicate"
    """This member was submitted before; nothing changed."""
    LATE = "late"
    """The group is already complete, dropped or failed; nothing changed."""


@dataclass(frozen=True, slots=True)
class WorkerOrders:
    """Response to a worker's heartbeat."""

    cancelled: tuple[EpisodeTask, ...] = ()
    """Episodes of this worker that are no longer needed: redundant, expired, or reassigned."""
    draining: bool = False
    """Claim nothing more: the run is pausing or stopping."""


@dataclass(frozen=True, slots=True)
class BufferLimits:
    """Limits of admission and assembly, written when the run starts. A resumed run may have others, except `group_size`
    and `groups_per_step`."""

    group_size: int
    redundancy: int
    """Extra episodes of a group."""
    groups_per_step: int
    max_staleness: float
    max_groups_in_flight: int
    """Maximum number of active groups (`num_env_groups`)."""
    total_groups: int
    """Groups that the whole run trains (`max_steps * groups_per_step`); admission never goes past it."""
    max_attempts: int
    worker_timeout_s: float
    stale_policy: Literal["drop", "train"]
    """With `drop`, active groups that no step can consume within the bound are dropped as `expired`."""
    baselines: int = 0
    """Greedy episodes per group, in addition to the sampled ones: `Group.baselines`."""


class RolloutBuffer(Protocol):
    """The buffer as an env worker sees it."""

    async def claim(self, worker_id: str, limit: int) -> list[EpisodeTask]:
        """Take up to `limit` episodes: evaluations first, then retries, then members of admitted groups, and where
        none is left admit new groups as far as the staleness bound allows (C3)."""
        ...

    async def wait_for_work(self, after: str, timeout_s: float) -> str:
        """Wait for work announced after the position `after` (`"$"`: from now on), or until the timeout; return the
        position to wait from next."""
        ...

    async def heartbeat(self, worker_id: str) -> WorkerOrders:
        """Send a heartbeat; return which of the worker's episodes are no longer needed."""
        ...

    async def submit(self, worker_id: str, task: EpisodeTask, trajectory: Trajectory) -> SubmitResult:
        """Submit a finished episode; idempotent by (group, member)."""
        ...

    async def fail(self, worker_id: str, task: EpisodeTask, reason: str) -> None:
        """Report a failed episode: it is queued again with the same seed, and after `max_attempts` recorded as failed;
        a group that can't be completed any more fails as a whole, with that reason."""
        ...

    async def task(self, number: int, drawn: str = "") -> tuple[str, str]:
        """Set a group's task if a sampler draws it: the first `drawn` value holds for all members. Return the group's
        task, empty if there is none yet, and the sampler's state, empty before the learner's first report."""
        ...

    async def release(self, worker_id: str) -> int:
        """Return all episodes of a worker that stops, without counting an attempt; return their number."""
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
    """Limit that keeps new groups from starting, as determined by `admission.lua`."""

    OPEN = "open"
    NOT_CONFIGURED = "not_configured"
    PAUSED = "paused"
    NO_WEIGHTS = "no_weights"
    """Version 0 is not published yet."""
    STALENESS_BOUND = "staleness_bound"
    """Rollouts are as far ahead as `max_staleness` allows: they wait for the learner."""
    GROUPS_IN_FLIGHT = "groups_in_flight"
    """`max_groups_in_flight` groups are active."""
    ALL_ADMITTED = "all_admitted"
    """The run needs no more groups."""


@dataclass(frozen=True, slots=True)
class WorkerState:
    """State of an env worker."""

    worker_id: str
    silent_s: float
    """Time since its last heartbeat."""
    episodes: int
    """Number of its current episodes."""


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
    """Admitted training episodes that no worker has claimed."""
    queued_eval: int
    quarantined: int
    """Undecodable trajectories kept for inspection (the newest 16)."""
    step: int | None
    """Step of the newest published weights."""
    epoch: int
    admission: Admission
    workers: tuple[WorkerState, ...]


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """Progress of an active group."""

    number: int
    size: int
    """Episodes that it needs."""
    done: int
    failed: int
    """Episodes that were given up."""
    played: int
    """Episodes that are running."""
    queued: int
    """Episodes in the queue."""
    version: int
    """Version at its admission."""

    @property
    def missing(self) -> int:
        """Episodes that it still waits for."""
        return self.size - self.done


@dataclass(frozen=True, slots=True)
class Quarantined:
    """An undecodable trajectory, kept for inspection."""

    unit: str
    """`t:<group number>`."""
    index: int
    complaint: str
    blob: bytes


@dataclass(frozen=True, slots=True)
class Boundary:
    """State that the learner reads between two steps."""

    changes: tuple[Change, ...] = ()
    """All changes of the run's settings so far, each with the step from which it holds."""
    paused: bool = False
    ends: bool = False
    """True if the run should end."""


class LearnerBuffer(Protocol):
    """The learner's interface; every write carries the lease's epoch and raises FencedError if a newer learner holds
    the run."""

    def take(self, timeout_s: float, wanted: int = 1) -> Group | None:
        """Return the next group in stream order, or in order of admission if configured; None if none arrived in time.
        After (re)connecting, delivered but unacknowledged groups come first, in their old order.

        wanted: number of groups that the caller is about to take; available ones may be fetched along with this one,
        and count as delivered.
        """
        ...

    def adopt(self, step: int) -> Boundary:
        """Apply the requested changes before optimizer batch `step` (0-based); admission changes in the same call. A
        change never applies to a batch whose weights were published before."""
        ...

    def teach(self, state: str) -> None:
        """Publish the task sampler's state for groups that start from now on."""
        ...

    def restore(self, num_trained: int, next_number: int | None = None) -> int:
        """Make the ledger agree with the resumed checkpoint, after its `ack`, if Redis lost data or counts groups that
        only a lost checkpoint had trained; return the number of groups added, or, negative, dropped as `rewound`."""
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
        """Return all trajectories of an evaluation once every episode was submitted or failed; None before."""
        ...

    def wait_eval(self, eval_id: str, timeout_s: float) -> list[Trajectory] | None:
        """Wait until `eval_result` has a result or the timeout is over, and return it."""
        ...

    def forget_eval(self, eval_id: str) -> None:
        """Remove an evaluation's keys."""
        ...

    def counters(self) -> Counters:
        """Return the ledger now."""
        ...
