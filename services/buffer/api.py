"""Interfaces of the trajectory buffer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple, Protocol

from offbeat.services.buffer.members import Addition
from offbeat.services.live_settings import Change
from offbeat.services.messages.types import EpisodeKind, EpisodeTask, Group, Trajectory


class SubmitResult(StrEnum):
    ACCEPTED = "accepted"
    """Stored; group incomplete."""
    COMPLETED = "completed"
    DUPLICATE = "duplicate"
    """Submitted before; ignored."""
    LATE = "late"


@dataclass(frozen=True, slots=True)
class WorkerOrders:
    cancelled: tuple[EpisodeTask, ...] = ()
    """Redundant or reassigned episodes."""
    draining: bool = False
    """No more may be claimed."""


@dataclass(frozen=True, slots=True)
class BufferLimits:
    """Limits; `group_size` and `groups_per_step` are fixed for a run."""

    group_size: int
    redundancy: int
    """Extra episodes per group."""
    groups_per_step: int
    max_staleness: float
    max_groups_in_flight: int
    total_groups: int
    """`max_steps * groups_per_step`."""
    max_attempts: int
    worker_timeout_s: float
    stale_policy: Literal["drop", "train"]
    """`drop`: groups that no step can consume within the bound are `expired`."""
    baselines: int = 0
    """Greedy episodes per group."""
    temperature: float | None = None
    """Sampling temperature that new groups carry, until a change sets another; None for rows."""


class ClaimLimits(NamedTuple):
    """Maximum episodes of a claim by kind."""

    train: int
    evaluation: int

    def is_used_up(self, tasks: Sequence[EpisodeTask], limit: int) -> bool:
        """Return whether a kind may have episodes left after a claim of at most `limit` returned `tasks`."""
        num_eval = sum(task.kind is EpisodeKind.EVAL for task in tasks)
        counts = ClaimLimits(train=len(tasks) - num_eval, evaluation=num_eval)
        return any(most < limit and count >= most for most, count in zip(self, counts, strict=True))


class GroupSamples(NamedTuple):
    """What rewards of a whole group compare."""

    mark: str = ""
    """Names these samples: those of members that were played again, after Redis lost some, have another."""
    by_member: Mapping[int, bytes] = {}


class RolloutBuffer(Protocol):
    """Buffer interface of env workers."""

    async def claim(self, worker_id: str, limit: int, of_kind: ClaimLimits | None = None) -> list[EpisodeTask]:
        """Claim evaluations, retries, members of admitted groups, then new groups within the staleness bound. of_kind:
        limits of both kinds within `limit`.
        """
        ...

    async def wait_for_work(self, worker_id: str, timeout_s: float) -> bool:
        """Wait for work that the worker's last claim did not find; return whether there may be some."""
        ...

    async def heartbeat(self, worker_id: str) -> WorkerOrders: ...

    async def submit(
        self, worker_id: str, task: EpisodeTask, trajectory: Trajectory, sample: bytes = b""
    ) -> SubmitResult:
        """Submit an episode; idempotent by (group, member). sample: to be compared with those of its group before that is
        complete; empty: none.
        """
        ...

    async def samples(self, worker_id: str, task: EpisodeTask) -> GroupSamples:
        """Return the samples of a group to score; none if it is scored or gone."""
        ...

    async def score_group(
        self, worker_id: str, task: EpisodeTask, additions: Mapping[int, Addition], mark: str
    ) -> SubmitResult:
        """Complete a group with what its rewards add, by member, if its samples are still those of `mark`; idempotent."""
        ...

    async def fail(self, worker_id: str, task: EpisodeTask, reason: str) -> None:
        """Requeue an episode with its seed; after `max_attempts` it fails, as does a group that it leaves incomplete."""
        ...

    async def task(self, number: int, drawn: str = "") -> tuple[str, str]:
        """Return a group's task and the task sampler's state (empty: none); the first non-empty `drawn` sets the task."""
        ...

    async def release(self, worker_id: str) -> int:
        """Requeue a worker's episodes, attempts uncounted."""
        ...


@dataclass(frozen=True, slots=True)
class Counters:
    """Groups: admitted = trained + dropped + failed + in flight (until acknowledged)."""

    admitted: int
    submitted: int
    trained: int
    dropped: dict[str, int]
    failed: dict[str, int]
    in_flight: int
    refilled: int = 0
    """Dropped ones that a learner which repeats their step would take again; their events come with its checkpoint."""


class Admission(StrEnum):
    """Limit that blocks new groups (`admission.lua`)."""

    OPEN = "open"
    NOT_CONFIGURED = "not_configured"
    PAUSED = "paused"
    NO_WEIGHTS = "no_weights"
    """Version 0 is unpublished."""
    LEDGER_BEHIND = "ledger_behind"
    """Half a million events of groups wait for a learner to copy them to the run's folder."""
    STALENESS_BOUND = "staleness_bound"
    """Rollouts are `max_staleness` ahead."""
    GROUPS_IN_FLIGHT = "groups_in_flight"
    ALL_ADMITTED = "all_admitted"


@dataclass(frozen=True, slots=True)
class WorkerState:
    worker_id: str
    silent_s: float
    episodes: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Buffer state, read atomically."""

    counters: Counters
    playing: int
    """Groups being assembled."""
    ready: int
    """Complete, not yet delivered."""
    consumed: int
    """Groups delivered, not acknowledged."""
    queued_train: int
    """Without a worker."""
    queued_eval: int
    quarantined: int
    """Undecodable trajectories (at most 16)."""
    step: int | None
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
    """Failed after all attempts."""
    played: int
    queued: int
    version: int
    """Version at admission."""
    is_scoring: bool = False
    """Whether it is complete but for the rewards of the whole group."""

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
    """Changes, each with its first step."""
    paused: bool = False
    ends: bool = False


@dataclass(frozen=True, slots=True)
class Proof:
    """What the surviving lineage of weights has trained."""

    saved: Sequence[tuple[int, Sequence[int]]] = ()
    """Groups of each step in the newest durable checkpoint."""
    entry_ids: Sequence[str] = ()
    """Its entries, where the journal lacks them."""
    step: int = 0
    """Step of the checkpoint."""
    num_trained: int = 0
    """Its groups, of other runs, too."""
    next_number: int = 0
    """Lowest number certainly not admitted; 0: derived from `saved` and held groups."""
    incarnation: int = 0
    """Greatest in the journal."""
    newest_event_ms: int = 0
    """Newest copied event, Unix ms of Redis."""
    newest_metric_id: str = "0"
    """Of `metrics.jsonl`."""


@dataclass(frozen=True, slots=True)
class Reconciled:
    incarnation: int
    is_new: bool
    """True if Redis may have lost data."""
    num_added: int = 0
    """Groups that Redis had lost; negative: trained in a lost lineage."""
    num_corrected: int = 0
    """Groups of which Redis knew less than the proof."""


class LearnerBuffer(Protocol):
    """Learner's buffer interface; writes raise FencedError if a newer learner holds the run.

    After `prove_with`, a call that meets a new incarnation of the data first reconciles it.
    """

    def reconcile(self, proof: Proof) -> Reconciled:
        """Make Redis agree with `proof` and the delivered groups; idempotent."""
        ...

    def newest_version(self) -> int:
        """Return the newest published version, -1 without any."""
        ...

    def prove_with(self, prove: Callable[[], Proof], on_reconciled: Callable[[Reconciled], None]) -> None:
        """Set the proof of later reconciliations, made in any thread; `on_reconciled` is called within the next
        method call."""
        ...

    def take(self, timeout_s: float, num_groups: int = 1) -> Group | None:
        """Return the next group, unacknowledged ones first after a reconnect; None after the timeout.

        num_groups: groups about to be taken; prefetched ones count as delivered.
        """
        ...

    def adopt(self, step: int) -> Boundary:
        """Apply requested changes from batch `step` (0-based), never to one with published weights; atomic with
        admission.
        """
        ...

    def teach(self, state: str) -> None: ...

    def drop(self, group: Group, reason: str) -> None:
        """Drop and replace a group, counted by `reason`."""
        ...

    def refill(self, group: Group, reason: str, step: int) -> None:
        """Replace a group in the batch that leads to `step`: the step's `ack` drops it, counted by `reason`; until then a
        successor takes it again.
        """
        ...

    def close(self, reason: str) -> int:
        """Drop all groups in flight of a finished run; return their number; idempotent."""
        ...

    def ack(self, entry_ids: Sequence[str], step: int) -> int:
        """Remove groups in the checkpoint of `step`, and drop refilled ones; return the number of the former; idempotent."""
        ...

    def start_eval(self, eval_id: str, num_episodes: int, *, sampling_name: str, min_version: int) -> None:
        """Queue evaluation episodes before training; idempotent by `eval_id`."""
        ...

    def eval_result(self, eval_id: str) -> list[Trajectory] | None:
        """Return the trajectories, or None while episodes are open."""
        ...

    def wait_eval(self, eval_id: str, timeout_s: float) -> list[Trajectory] | None: ...

    def forget_eval(self, eval_id: str) -> None: ...

    def counters(self) -> Counters: ...
