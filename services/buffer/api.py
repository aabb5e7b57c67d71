"""Interface of the trajectory buffer to env workers and the learner."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol

from offbeat.services.live_settings import Change
from offbeat.services.messages.types import EpisodeTask, Group, Trajectory


class SubmitResult(StrEnum):
    ACCEPTED = "accepted"
    """Stored; the group is incomplete."""
    COMPLETED = "completed"
    """Stored, and the group entered the stream (or the evaluation is complete)."""
    DUPLICATE = "duplicate"
    """Submitted before; nothing changed."""
    LATE = "late"
    """The group is complete, dropped or failed; nothing changed."""


@dataclass(frozen=True, slots=True)
class WorkerOrders:
    """Response to a worker's heartbeat."""

    cancelled: tuple[EpisodeTask, ...] = ()
    """Episodes that are redundant, expired or reassigned."""
    draining: bool = False
    """True if the worker must claim nothing more."""


@dataclass(frozen=True, slots=True)
class BufferLimits:
    """Limits of admission and assembly. A resumed run may change all but `group_size` and `groups_per_step`."""

    group_size: int
    redundancy: int
    """Extra episodes per group."""
    groups_per_step: int
    max_staleness: float
    max_groups_in_flight: int
    """Maximum number of active groups."""
    total_groups: int
    """Groups that the run trains (`max_steps * groups_per_step`), the maximum ever admitted."""
    max_attempts: int
    worker_timeout_s: float
    stale_policy: Literal["drop", "train"]
    """`drop`: active groups that no step can consume within the bound are dropped as `expired`."""
    baselines: int = 0
    """Greedy episodes per group, in addition to the sampled ones."""


class RolloutBuffer(Protocol):
    """Buffer interface of env workers."""

    async def claim(self, worker_id: str, limit: int) -> list[EpisodeTask]:
        """Claim up to `limit` episodes: evaluations, then retries, then members of admitted groups, then newly admitted
        groups within the staleness bound (C3)."""
        ...

    async def wait_for_work(self, after: str, timeout_s: float) -> str:
        """Wait for work announced after the position `after` (`"$"`: now); return the next position."""
        ...

    async def heartbeat(self, worker_id: str) -> WorkerOrders: ...

    async def submit(self, worker_id: str, task: EpisodeTask, trajectory: Trajectory) -> SubmitResult:
        """Submit a finished episode; idempotent by (group, member)."""
        ...

    async def fail(self, worker_id: str, task: EpisodeTask, reason: str) -> None:
        """Report a failed episode: requeued with the same seed, failed after `max_attempts`. A group that can't be completed
        fails with the same reason."""
        ...

    async def task(self, number: int, drawn: str = "") -> tuple[str, str]:
        """Set a group's task, if a sampler draws it: the first `drawn` value wins. Return the task, empty if unset, and the
        sampler's state, empty before the learner's first report."""
        ...

    async def release(self, worker_id: str) -> int:
        """Requeue all of a worker's episodes without counting an attempt, and return their number."""
        ...


@dataclass(frozen=True, slots=True)
class Counters:
    """The ledger: admitted = trained + dropped + failed + in flight (assembling, in the stream, or unacknowledged)."""

    admitted: int
    submitted: int
    """Groups that entered the stream."""
    trained: int
    dropped: dict[str, int]
    failed: dict[str, int]
    in_flight: int


class Admission(StrEnum):
    """Limit that blocks new groups, as determined by `admission.lua`."""

    OPEN = "open"
    NOT_CONFIGURED = "not_configured"
    PAUSED = "paused"
    NO_WEIGHTS = "no_weights"
    """Version 0 is not published."""
    STALENESS_BOUND = "staleness_bound"
    """Rollouts are `max_staleness` ahead of the learner."""
    GROUPS_IN_FLIGHT = "groups_in_flight"
    ALL_ADMITTED = "all_admitted"
    """The run needs no more groups."""


@dataclass(frozen=True, slots=True)
class WorkerState:
    worker_id: str
    silent_s: float
    """Time since the last heartbeat."""
    episodes: int
    """Number of running episodes."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The buffer's state, read atomically."""

    counters: Counters
    playing: int
    """Groups being assembled."""
    ready: int
    """Complete groups not yet delivered to the learner."""
    consumed: int
    """Groups delivered and not acknowledged."""
    queued_train: int
    """Admitted training episodes without a worker."""
    queued_eval: int
    quarantined: int
    """Undecodable trajectories kept for inspection (at most 16)."""
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
    """Episodes that complete it."""
    done: int
    failed: int
    """Episodes that failed for good."""
    played: int
    """Running episodes."""
    queued: int
    """Queued episodes."""
    version: int
    """Version at admission."""

    @property
    def missing(self) -> int:
        return self.size - self.done


@dataclass(frozen=True, slots=True)
class Quarantined:
    unit: str
    """`t:<group number>`."""
    index: int
    complaint: str
    blob: bytes


@dataclass(frozen=True, slots=True)
class Boundary:
    """State that the learner reads between two steps."""

    changes: tuple[Change, ...] = ()
    """All changes of the run's settings, each with its first step."""
    paused: bool = False
    ends: bool = False
    """True if the run should end."""


class LearnerBuffer(Protocol):
    """Buffer interface of the learner; every write raises FencedError if a newer learner holds the run."""

    def take(self, timeout_s: float, num_groups: int = 1) -> Group | None:
        """Return the next group in the configured order, or None after the timeout. After a reconnect, unacknowledged groups
        are delivered again first, in the same order.

        num_groups: number of groups about to be taken; available ones may be prefetched, and count as delivered.
        """
        ...

    def adopt(self, step: int) -> Boundary:
        """Apply requested changes before batch `step` (0-based), atomically with admission. A change never applies to a
        batch whose weights are published."""
        ...

    def teach(self, state: str) -> None:
        """Publish the task sampler's state for groups that start later."""
        ...

    def restore(self, num_trained: int, next_number: int | None = None) -> int:
        """Reconcile the ledger with the resumed checkpoint, after its `ack`; return the number of groups added or, negative,
        dropped as `rewound`."""
        ...

    def drop(self, group: Group, reason: str) -> None:
        """Drop a group without training on it, counted by `reason`; admission replaces it."""
        ...

    def ack(self, entry_ids: Sequence[str], step: int) -> int:
        """Remove groups that the durable checkpoint of `step` contains; idempotent. Return how many were removed."""
        ...

    def start_eval(self, eval_id: str, num_episodes: int, *, sampling_name: str, min_version: int) -> None:
        """Queue evaluation episodes 0..num_episodes-1 ahead of training; idempotent by `eval_id`."""
        ...

    def eval_result(self, eval_id: str) -> list[Trajectory] | None:
        """Return the trajectories once every episode was submitted or failed, None before."""
        ...

    def wait_eval(self, eval_id: str, timeout_s: float) -> list[Trajectory] | None:
        """Wait for `eval_result`; return None after the timeout."""
        ...

    def forget_eval(self, eval_id: str) -> None: ...

    def counters(self) -> Counters: ...
