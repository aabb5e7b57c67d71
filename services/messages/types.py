"""Messages between services.

Invariants: tokens are recorded as sampled; `loss_mask` is true, and `versions` defined, exactly on sampled tokens;
`logprobs` is zero elsewhere.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Annotated, Generic, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from typing_extensions import TypeVar

SCHEMA_VERSION = 3

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
RoutingArray = npt.NDArray[np.uint8 | np.uint16]
"""Experts by token, layer and rank, [rows, layers, top_k]; zeros in layers without experts."""
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of messages, encoded as arrays; copy with `msgspec.structs.replace`."""


class EpisodeKind(StrEnum):
    TRAIN = "train"
    EVAL = "eval"


class StopReason(StrEnum):
    TERMINATED = "terminated"
    """The env ended the task."""
    TRUNCATED = "truncated"
    """The env cut the episode."""
    MAX_STEPS = "max_steps"
    MAX_LENGTH = "max_length"
    """The next prompt would fill `sequence_length`."""
    ERROR = "error"
    """`on_env_error` or `on_agent_error` gave the reward."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    """The engine went to sleep; the rest is to be sampled elsewhere."""


class VersionSpan(NamedTuple):
    """Tokens `[start, end)` sampled by `version`."""

    start: int
    end: int
    version: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters; `temperature=0` is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    """Not empty; as in `services.chat.stops`."""


class PromptImage(Message, frozen=True):
    """In place of tokens `[start, start + count)`."""

    start: int
    count: int
    png: bytes

    @property
    def digest(self) -> str:
        return blake2b(self.png, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Turn to sample; the prompt includes image tokens."""

    request_id: str
    prompt: Sequence[int]
    """`array("i")` encodes fastest."""
    sampling: Sampling
    min_version: int = 0
    """The replica waits for it."""
    images: tuple[PromptImage, ...] = ()
    """By position."""
    episode: str = ""
    """Episode, whose requests go to one replica; empty: none. Sent in `request_id`, if it continues."""
    continues: bool = False
    """Whether prompts of the episode continue the one before and its answer, as a rule."""
    group: str = ""
    """Group whose first prompts are alike, for the choice of a replica; not sent."""
    num_answered: int = 0
    """Tokens at the prompt's end that begin the answer, sampled elsewhere. Sent if there are stop strings."""
    routing_start: int = 0
    """Tokens at the prompt's start whose experts are not asked for. Sent if there are any."""


@dataclass(frozen=True, slots=True)
class Completion:
    """Sampled turn, with stop token or string; if refused, only `error` is set."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    """Under the sampling distribution (temperature applied, float32)."""
    versions: tuple[VersionSpan, ...] = ()
    """Spans over `token_ids`."""
    finish_reason: FinishReason = FinishReason.STOP
    error: str = ""
    replica_id: str = ""
    """Replica that aborted it."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values the engine had; not sent."""
    routing: RoutingArray | None = field(default=None, compare=False)
    """Experts of the prompt's and the answer's tokens from `routing_start`, of which the last was not computed; None: not
    recorded.
    """


class Turn(NamedTuple):
    """Completion at tokens `[start, end)` of a segment."""

    segment: int
    start: int
    end: int
    reward: float
    state_hash: str = ""
    """Digest of the observation (anchor state of GiGPO)."""
    is_truncated: bool = False
    """True if the token limit came before an end token."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Token sequence in one context.

    tokens: [T] int32; loss_mask: [T] bool; logprobs: [T] float32, 0 if unsampled; versions: spans over sampled tokens;
    images: by position, on unsampled tokens; routing: experts of the first tokens, as an engine chose them; None: not
    recorded.
    """

    tokens: Int32Array
    loss_mask: BoolArray
    logprobs: Float32Array
    versions: tuple[VersionSpan, ...]
    images: tuple[PromptImage, ...] = ()
    routing: RoutingArray | None = None

    def token_versions(self) -> Int32Array:
        """Return versions, [T] int32; -1: unsampled."""
        out = np.full(len(self.tokens), -1, dtype=np.int32)
        for start, end, version in self.versions:
            out[start:end] = version
        return out


SegmentT = TypeVar("SegmentT", default=Segment)


class Trajectory(Message, Generic[SegmentT], frozen=True):
    """Episode, encoded with packed segments."""

    group_id: str
    index: Count
    """Position in the group, 0-based."""
    attempt: Count
    tag: str
    seed: int
    segments: tuple[SegmentT, ...]
    turns: tuple[Turn, ...]
    stop_reason: StopReason
    metrics: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    """Over all turns (`success`, `action_is_valid`, ...)."""
    worker_id: str = ""
    duration_s: float = 0.0
    text: tuple[str, ...] = ()
    """System prompt, then observations and answers alternately; for display."""
    baseline: bool = False
    """Greedy episode (ReMax), used only for its reward."""
    error: str = ""
    """Reason and message (`StopReason.ERROR`)."""
    traceparent: str = ""
    """W3C's header of the episode's span, if traced."""
    seats: tuple[str, ...] = ()
    """Seat of each turn in a game of several; segments belong to one seat."""

    @property
    def reward(self) -> float:
        """Undiscounted sum over turns."""
        return sum(turn.reward for turn in self.turns)

    @property
    def is_truncated(self) -> bool:
        """Return whether a token limit cut the last answer, or left no room for a prompt."""
        return self.stop_reason is StopReason.MAX_LENGTH or bool(self.turns and self.turns[-1].is_truncated)

    @property
    def is_cut(self) -> bool:
        """Return whether a limit of tokens, turns or time ended it, so that rewards may be missing; an error's reward is
        its last.
        """
        if self.stop_reason is StopReason.ERROR:
            return False
        return self.is_truncated or self.stop_reason is not StopReason.TERMINATED

    @property
    def num_tokens(self: "Trajectory[Segment]") -> int:
        return sum(len(segment.tokens) for segment in self.segments)

    @property
    def num_sampled(self: "Trajectory[Segment]") -> int:
        return sum(int(segment.loss_mask.sum()) for segment in self.segments)

    def version_range(self: "Trajectory[Segment]") -> tuple[int, int] | None:
        """Return the oldest and newest version, if any."""
        versions = [span.version for span in self._spans()]
        return (min(versions), max(versions)) if versions else None

    def _spans(self: "Trajectory[Segment]") -> Iterator[VersionSpan]:
        for segment in self.segments:
            yield from segment.versions


@dataclass(frozen=True, slots=True)
class Group:
    entry_id: str
    """Redis stream id, to acknowledge."""
    group_id: str
    number: int
    """Admission number, 0-based; determines tag and seed, without a task sampler."""
    tag: str
    seed: int
    admitted_version: int
    trajectories: tuple[Trajectory, ...]
    temperature: float | None = None
    """Of its sampling; None for rows, and for groups of earlier builds, whose temperature is the configured one."""
    baselines: tuple[Trajectory, ...] = ()
    scores: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """By key: float32, little-endian."""

    @property
    def oldest_version(self) -> int:
        ranges = [r for t in (*self.trajectories, *self.baselines) if (r := t.version_range())]
        return min((r[0] for r in ranges), default=self.admitted_version)

    @property
    def newest_version(self) -> int:
        ranges = [r for t in (*self.trajectories, *self.baselines) if (r := t.version_range())]
        return max((r[1] for r in ranges), default=self.admitted_version)


@dataclass(frozen=True, slots=True)
class EpisodeTask:
    kind: EpisodeKind
    group_id: str
    number: int
    index: int
    attempt: int
    min_version: int
    """Of completions."""
    sampling_name: str = "train"
    """`train`, `scoring`, or for evaluation `sampled` or `greedy`."""
    temperature: float | None = None
    """Overrides the temperature of `sampling_name`."""

    @property
    def is_baseline(self) -> bool:
        return self.kind is EpisodeKind.TRAIN and self.sampling_name == "greedy"

    @property
    def is_scoring(self) -> bool:
        """Return whether it stands for the rewards of its whole group, whose members are complete."""
        return self.sampling_name == "scoring"


class TensorSpec(Message, frozen=True):
    name: str
    dtype: str
    shape: tuple[Count, ...]


class BaseVersion(Message, frozen=True):
    """Complete version that a delta applies to."""

    location: str
    digest: str
    num_bytes: Count


class Manifest(Message, frozen=True):
    """Published weight version."""

    run_id: str
    version: Count
    step: Count
    """Batches trained in its lineage."""
    epoch: Count
    """Fencing epoch of the learner."""
    transport: str
    location: str
    """Path or URL."""
    digest: str
    num_bytes: Count
    tensors: tuple[TensorSpec, ...]
    published_at: float
    """Unix time, s."""
    anchor: BaseVersion | None = None
    """Base of a delta; None for a complete version."""
