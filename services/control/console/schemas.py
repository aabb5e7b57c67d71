from enum import StrEnum
from typing import Any, Generic, Literal, Self, TypeVar

from pydantic import Field

from offbeat.services.control.run import RunState
from offbeat.services.control.schemas import View

Floats = list[float | None]
NO_OUTCOME = 255
"""Outcome of a token that is not trained."""


class GroupState(StrEnum):
    PLAYING = "playing"
    """Episodes are running."""
    SUBMITTED = "submitted"
    """Complete, in the stream."""
    CONSUMED = "consumed"
    """Trained, without a checkpoint yet."""
    TRAINED = "trained"
    """In a durable checkpoint."""
    DROPPED = "dropped"
    FAILED = "failed"


class GroupSort(StrEnum):
    NUMBER = "number"
    """Newest first."""
    SPREAD = "spread"
    """Smallest difference of rewards first."""
    TOKENS = "tokens"
    """Most sampled tokens first."""
    RATIO = "ratio"
    STALENESS = "staleness"
    DURATION = "duration"
    """Between admission and the last member's end."""


class GroupView(View):
    """Life of a group; times are Unix seconds, null if not reached or not recorded."""

    number: int
    state: GroupState
    tag: str
    """Empty if a task sampler draws it and it is untrained."""
    admitted_version: int
    admitted_at: float | None
    submitted_at: float | None
    """End of its last member."""
    trained_at: float | None
    ended_at: float | None
    """Its checkpoint, drop or failure."""
    step: int | None
    """Optimizer step that consumed it, equal to the version produced."""
    checkpoint: int | None
    """Step of the checkpoint that acknowledged it."""
    reason: str
    """Why it was dropped, failed or masked."""
    computed: bool
    """False for a masked group, which only its step's denominators count."""
    oldest_version: int | None
    staleness: int | None
    """At consumption, in versions."""
    rewards: Floats
    """Of its members, as the env gave them, once trained."""
    num_sampled: int
    """Tokens, once trained."""
    max_ratio: float | None
    """Largest ratio of its tokens, of steps in `console.keep_steps`."""
    recorded: bool
    """Whether its trajectories can be read."""


class GroupsView(View):
    """Page of groups."""

    groups: list[GroupView]
    total: int
    """Groups that the filters select."""
    next: int | None
    """`offset` of the next page; null on the last."""


class MemberView(View):
    """Recorded trajectory of a group."""

    index: int
    reward: float | None
    turns: int
    num_sampled: int
    stop_reason: str
    oldest_version: int | None
    newest_version: int | None
    max_ratio: float | None
    outcomes: dict[str, int]
    """Tokens by outcome."""


class GroupDetailView(GroupView):
    """Group and its recorded members."""

    members: list[MemberView] = Field(default_factory=list[MemberView])
    """Empty unless `recorded`."""


class TurnView(View):
    """Turn of a trajectory: tokens `[start, end)` of a segment."""

    segment: int
    start: int
    end: int
    reward: float | None
    is_truncated: bool
    observation: str
    """What came before it, as recorded or decoded: the tokens since the segment's last turn; empty for the first prompt."""
    text: str
    """Completion, decoded."""


class ImageView(View):
    """Image in place of `count` tokens; `png` in base64."""

    start: int
    count: int
    png: str


class SegmentView(View):
    """Columns of one token sequence, of equal length; null where a token was not sampled, or not trained."""

    tokens: list[int]
    mask: list[int]
    """1 for sampled tokens."""
    versions: list[int]
    """Policy version that sampled the token; -1: none."""
    logprobs: Floats
    """When sampled."""
    trainer_logprobs: Floats
    ratio: Floats
    """To the old policy, as in the loss."""
    advantages: Floats
    outcome: list[int]
    """Index into `outcomes`; 255: not trained."""
    images: list[ImageView] = Field(default_factory=list[ImageView])


class TrajectoryView(View):
    """Recorded trajectory, and what the learner made of it."""

    group: int
    index: int
    tag: str
    seed: int
    attempt: int
    step: int
    """Optimizer step that trained it."""
    reward: float | None
    stop_reason: str
    error: str
    duration_s: float
    worker: str
    metrics: dict[str, float | None]
    reason: str
    """Why it was not trained; empty if it was."""
    turns: list[TurnView]
    text: list[str]
    """System prompt, then observations and answers alternately, if recorded; else the first prompt."""
    segments: list[SegmentView]
    pieces: dict[str, str]
    """Token id -> its text."""
    outcomes: list[str]


class FramesView(View):
    """Pictures of a replayed episode."""

    frames: list[str]
    """PNG in base64, one before each turn and one after the last."""


class LagsView(View):
    """Lags of the newest consumed groups."""

    total: int
    """Counted groups."""
    first: int | None
    """First step that consumed one; None without any."""
    last: int | None
    counts: list[list[int]]
    """Groups by range of steps, then by lag; ranges are of equal width."""


class RecipeView(View):
    """Packaged configuration."""

    name: str
    about: str


class RecipesView(View):
    recipes: list[RecipeView]


class SeriesColumns(View):
    """Points of a metric, ascending in x."""

    x: list[float]
    values: list[float]
    total: int
    """Points before downsampling."""


Axis = Literal["step", "time", "trajectories"]


class SeriesView(View):
    """Series by name; each of its buckets keeps the smallest and largest value."""

    axis: Axis
    series: dict[str, SeriesColumns]
    names: list[str]
    """All metrics of the run, as `source/name`."""
    last: dict[str, float | None]
    """Newest value of each of `names`."""
    unread_bytes: int = 0
    """Of the run's newest metrics, which later calls read; a call reads for 2 s at most."""


class ComparedRunView(View):
    """Run in a comparison."""

    id: str
    state: RunState
    step: int
    error: str
    metrics: dict[str, float | None]
    """Newest value of each metric, as `source/name`."""
    unread_bytes: int = 0
    """As in `SeriesView`."""


class CompareView(View):
    """Runs side by side."""

    runs: list[ComparedRunView]
    differences: dict[str, list[Any]]
    """Configuration key -> its value in each run, of keys that differ."""


State = TypeVar("State", bound=StrEnum)


class JobView(View, Generic[State]):
    """Newest job on a run's files; states are `running`, `failed` and its own."""

    state: State
    began_at: float | None = None
    ended_at: float | None = None
    error: str = ""

    @property
    def is_running(self) -> bool:
        return self.state.value == "running"

    def failed(self, error: str) -> Self:
        return self.model_copy(update={"state": type(self.state)("failed"), "error": error})


class ReproductionState(StrEnum):
    NONE = "none"
    RUNNING = "running"
    EQUAL = "equal"
    """Bitwise."""
    DIFFERENT = "different"
    TRAINED = "trained"
    """Without a later checkpoint to compare."""
    FAILED = "failed"


class ReproductionView(JobView[ReproductionState]):
    """Newest reproduction of recorded steps."""

    state: ReproductionState = ReproductionState.NONE
    step: int | None = None
    result: dict[str, Any] | None = None
    """As `offbeat learner reproduce --json` prints it."""


class PlanState(StrEnum):
    NONE = "none"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class PlanView(JobView[PlanState]):
    """Newest plan of a run."""

    state: PlanState = PlanState.NONE
    result: dict[str, Any] | None = None
    """As `offbeat plan --json` prints it."""
