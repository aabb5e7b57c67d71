"""Interfaces of the trajectory buffer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple, Protocol

from offbeat.services.live_settings import Change
from offbeat.services.messages.types import EpisodeKind, EpisodeTask, Group, Trajectory


class SubmitResult(StrEnum):
    ACCEPTED = "accepted"
    """Stored; group incomplete."""
    COMPLETED = "completed"
    """Stored; group or evaluation complete."""
    DUPLICATE = "duplicate"
    """Submitted before; ignored."""
    LATE = "late"
    """Group complete, dropped or failed; ignored."""


@dataclass(frozen=True, slots=True)
class WorkerOrders:
    cancelled: tuple[EpisodeTask, ...] = ()
    """Redundant, expired or reassigned episodes."""
    draining: bool = False
    """No more may be claimed."""


@dataclass(frozen=True, slots=True)
class BufferLimits:
    """`group_size` and `groups_per_step` are fixed for a run."""

    group_size: int
    redundancy: int
    """Extra episodes per group."""
    groups_per_step: int
    max_staleness: float
    max_groups_in_flight: int
    total_groups: int
    """Maximum groups ever admitted (`max_steps * groups_per_step`)."""
    max_attempts: int
    worker_timeout_s: float
    stale_policy: Literal["drop", "train"]
    """`drop`: groups that no step can consume within the bound are dropped as `expired`."""
    baselines: int = 0
    """Additional greedy episodes per group."""


class ClaimLimits(NamedTuple):
    """Maximum number of episodes of a claim by their kind."""

    train: int
    evaluation: int

    def is_used_up(self, tasks: Sequence[EpisodeTask], limit: int) -> bool:
        """Return whether a claim of at most `limit` that returned `tasks` may have left episodes of a kind."""
        num_eval = sum(task.kind is EpisodeKind.EVAL for task in tasks)
        counts = ClaimLimits(train=len(tasks) - num_eval, evaluation=num_eval)
        return any(most < limit and count >= most for most, count in zip(self, counts, strict=True))


class RolloutBuffer(Protocol):
    """Buffer interface of env workers."""

    async def claim(self, worker_id: str, limit: int, of_kind: ClaimLimits | None = None) -> list[EpisodeTask]:
        """Claim episodes: evaluations, retries, members of admitted groups, then new groups within the staleness bound
        (C3). of_kind: limits of both kinds within `limit`.
        """
        ...

    async def wait_for_work(self, after: str, timeout_s: float) -> str:
        """Wait for work after `after` (`"$"`: now); return the next position."""
        ...

    async def heartbeat(self, worker_id: str) -> WorkerOrders: ...

    async def submit(self, worker_id: str, task: EpisodeTask, trajectory: Trajectory) -> SubmitResult:
        """Submit an episode; idempotent by (group, member)."""
        ...

    async def fail(self, worker_id: str, task: EpisodeTask, reason: str) -> None:
        """Requeue an episode with its seed; after `max_attempts` it fails, as does a group that it leaves incomplete."""
        ...

    async def task(self, number: int, drawn: str = "") -> tuple[str, str]:
        """Return a group's task and the task sampler's state (empty: none yet); the first non-empty `drawn` sets the
        task.
        """
        ...

    async def release(self, worker_id: str) -> int:
        """Requeue a worker's episodes, attempts uncounted; return their number."""
        ...


@dataclass(frozen=True, slots=True)
class Counters:
    """Group counters: admitted = trained + dropped + failed + in flight (until acknowledged)."""

    admitted: int
    submitted: int
    """Groups that entered the stream."""
    trained: int
    dropped: dict[str, int]
    failed: dict[str, int]
    in_flight: int


class Admission(StrEnum):
    """Limit that blocks new groups (`admission.lua`)."""

    OPEN = "open"
    NOT_CONFIGURED = "not_configured"
    PAUSED = "paused"
    NO_WEIGHTS = "no_weights"
    """Version 0 is unpublished."""
    STALENESS_BOUND = "staleness_bound"
    """Rollouts are `max_staleness` ahead."""
    GROUPS_IN_FLIGHT = "groups_in_flight"
    ALL_ADMITTED = "all_admitted"


@dataclass(frozen=True, slots=True)
class WorkerState:
    worker_id: str
    silent_s: float
    """Time since the last heartbeat."""
    episodes: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Buffer state, read atomically."""

    counters: Counters
    playing: int
    """Groups being assembled."""
    ready: int
    """Complete groups not yet delivered."""
    consumed: int
    """Groups delivered, not acknowledged."""
    queued_train: int
    """Training episodes without a worker."""
    queued_eval: int
    quarantined: int
    """Undecodable trajectories kept (at most 16)."""
    step: int | None
    """Step of the newest weights."""
    epoch: int
    admission: Admission
    workers: tuple[WorkerState, ...]


@dataclass(frozen=True, slots=True)
class GroupProgress:
    number: int
    size: int
    """Episodes needed."""
    done: int
    failed: int
    """Episodes failed after all attempts."""
    played: int
    queued: int
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
    """State read between two steps."""

    changes: tuple[Change, ...] = ()
    """All changes, each with its first step."""
    paused: bool = False
    ends: bool = False


@dataclass(frozen=True, slots=True)
class Proof:
    """What the surviving lineage of weights has trained, whatever Redis remembers."""

    saved: Sequence[tuple[int, Sequence[int]]] = ()
    """Groups of each step in the newest durable checkpoint, by the journal."""
    entry_ids: Sequence[str] = ()
    """Its entries, where the journal lacks them."""
    step: int = 0
    """Step of the checkpoint."""
    num_trained: int = 0
    """Its groups, another run's included."""
    next_number: int = 0
    """Lowest number certainly not admitted; 0: one past the highest of `saved` and held groups."""
    incarnation: int = 0
    """Greatest incarnation number in the journal."""
    newest_event_ms: int = 0
    """Newest copied event, Unix ms of Redis."""


@dataclass(frozen=True, slots=True)
class Reconciled:
    incarnation: int
    is_new: bool
    """True if Redis may have lost data."""
    num_added: int = 0
    """Groups without a number that Redis had lost; negative: trained in a lost lineage."""
    num_corrected: int = 0
    """Groups of which Redis knew less than the proof."""


class LearnerBuffer(Protocol):
    """Learner's buffer interface; writes raise FencedError if a newer learner holds the run.

    After `prove_with`, a call that meets a new incarnation of the data reconciles it and goes on.
    """

    def reconcile(self, proof: Proof) -> Reconciled:
        """Make Redis agree with `proof` and the groups delivered by this object; idempotent."""
        ...

    def newest_version(self) -> int:
        """Return the newest published version, -1 without any."""
        ...

    def prove_with(self, prove: Callable[[], Proof], on_reconciled: Callable[[Reconciled], None]) -> None:
        """Reconcile by `prove`, called from any thread; `on_reconciled` is called within the next method call."""
        ...

    def take(self, timeout_s: float, num_groups: int = 1) -> Group | None:
        """Return the next group in the configured order, or None after the timeout; unacknowledged ones first after a
        reconnect.

        num_groups: groups about to be taken; prefetched ones count as delivered.
        """
        ...

    def adopt(self, step: int) -> Boundary:
        """Apply requested changes from batch `step` (0-based), atomically with admission; never to a batch with
        published weights.
        """
        ...

    def teach(self, state: str) -> None:
        """Publish the task sampler's state for later groups."""
        ...

    def drop(self, group: Group, reason: str) -> None:
        """Drop a group, counted by `reason`; admission replaces it."""
        ...

    def close(self, reason: str) -> int:
        """Drop all groups in flight of a finished run; return their number; idempotent."""
        ...

    def ack(self, entry_ids: Sequence[str], step: int) -> int:
        """Remove groups in the durable checkpoint of `step`; return their number; idempotent."""
        ...

    def start_eval(self, eval_id: str, num_episodes: int, *, sampling_name: str, min_version: int) -> None:
        """Queue evaluation episodes before training; idempotent by `eval_id`."""
        ...

    def eval_result(self, eval_id: str) -> list[Trajectory] | None:
        """Return the trajectories, or None until every episode was submitted or failed."""
        ...

    def wait_eval(self, eval_id: str, timeout_s: float) -> list[Trajectory] | None:
        """Wait for `eval_result`; None after the timeout."""
        ...

    def forget_eval(self, eval_id: str) -> None: ...

    def counters(self) -> Counters: ...
