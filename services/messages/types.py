"""Messages between services.

Invariants: tokens are recorded as sampled and never re-made from text; `loss_mask` is true exactly on tokens that the
policy sampled; `versions` covers exactly those tokens; `logprobs` is zero elsewhere.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""A non-negative integer of 64 bits."""


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of messages and parts of messages: encoded as an array of their fields, in order.

    Copy with `msgspec.structs.replace`.
    """


class EpisodeKind(StrEnum):
    """Purpose of an episode."""

    TRAIN = "train"
    EVAL = "eval"


class StopReason(StrEnum):
    """Reason for the end of an episode."""

    TERMINATED = "terminated"
    """The env ended the task."""
    TRUNCATED = "truncated"
    """The env itself cut the episode."""
    MAX_STEPS = "max_steps"
    MAX_LENGTH = "max_length"
    """The next prompt would not leave room for a token below `sequence_length`."""


class FinishReason(StrEnum):
    """Reason for the end of a completion."""

    STOP = "stop"
    LENGTH = "length"


class VersionSpan(NamedTuple):
    """Tokens `[start, end)` were sampled by weights `version`."""

    start: int
    end: int
    version: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters; `temperature=0` is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()


class Picture(Message, frozen=True):
    """Image that the model sees in place of the placeholder tokens `[start, start + count)` of its sequence."""

    start: int
    count: int
    png: bytes

    @property
    def digest(self) -> str:
        """Digest of the image, independent of its position."""
        return blake2b(self.png, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One turn to sample: token ids in, those of pictures written out."""

    request_id: str
    prompt: Sequence[int]
    """As an `array("i")` it is encoded without visiting each token."""
    sampling: Sampling
    min_version: int = 0
    """The replica holds the request until it serves at least this version."""
    pictures: tuple[Picture, ...] = ()
    """Images in the order of their positions in the prompt."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled turn: token ids out, stop token included. `error` is set, and the rest empty, if it was refused."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    """Logprob of each sampled token under the sampling distribution (temperature applied, float32)."""
    versions: tuple[VersionSpan, ...] = ()
    """Spans over `token_ids`."""
    finish_reason: FinishReason = FinishReason.STOP
    error: str = ""


class Turn(NamedTuple):
    """One completion and the env's reply: tokens `[start, end)` of segment `segment` are the completion."""

    segment: int
    start: int
    end: int
    reward: float
    state_hash: str = ""
    """Digest of the observation that the turn answered (GiGPO's anchor state)."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One token sequence in one continuous context.

    tokens: [T] int32; loss_mask: [T] bool; logprobs: [T] float32, 0 for tokens that were not sampled; versions: spans
    over the positions of sampled tokens; pictures: in order of position, on tokens that were not sampled.
    """

    tokens: Int32Array
    loss_mask: BoolArray
    logprobs: Float32Array
    versions: tuple[VersionSpan, ...]
    pictures: tuple[Picture, ...] = ()

    def token_versions(self) -> Int32Array:
        """Return the version that sampled each token, [T] int32; -1 for tokens not sampled by the policy."""
        out = np.full(len(self.tokens), -1, dtype=np.int32)
        for start, end, version in self.versions:
            out[start:end] = version
        return out


SegmentT = TypeVar("SegmentT", default=Segment)


class Trajectory(Message, Generic[SegmentT], frozen=True):
    """The recorded turns of one episode; encoded with packed segments (`services.messages.segments`)."""

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
    """Env metrics of the episode, already aggregated over its turns (`success`, `action_is_valid`, ...)."""
    worker_id: str = ""
    duration_s: float = 0.0
    text: tuple[str, ...] = ()
    """For display: system prompt, then observation and answer in turn. Never used for training."""
    baseline: bool = False
    """Greedy episode for comparison (ReMax): its reward counts, its tokens are never trained on."""

    @property
    def reward(self) -> float:
        """Undiscounted sum over turns."""
        return sum(turn.reward for turn in self.turns)

    @property
    def num_tokens(self: "Trajectory[Segment]") -> int:
        return sum(len(segment.tokens) for segment in self.segments)

    @property
    def num_sampled(self: "Trajectory[Segment]") -> int:
        return sum(int(segment.loss_mask.sum()) for segment in self.segments)

    def version_range(self: "Trajectory[Segment]") -> tuple[int, int] | None:
        """Return the oldest and newest version that sampled a token, or None."""
        versions = [span.version for span in self._spans()]
        return (min(versions), max(versions)) if versions else None

    def _spans(self: "Trajectory[Segment]") -> Iterator[VersionSpan]:
        for segment in self.segments:
            yield from segment.versions


@dataclass(frozen=True, slots=True)
class Group:
    """Sibling trajectories of one task and seed, as the learner takes them from the stream."""

    entry_id: str
    """Redis stream id: what is acknowledged after the checkpoint."""
    group_id: str
    number: int
    """Admission number, 0-based; with the config it fixes tag and seed, unless a task sampler draws them."""
    tag: str
    seed: int
    admitted_version: int
    trajectories: tuple[Trajectory, ...]
    temperature: float | None = None
    """Sampling temperature, if the run's was changed since it started."""
    baselines: tuple[Trajectory, ...] = ()
    """Greedy episodes of the same task and seed, if configured."""

    @property
    def oldest_version(self) -> int:
        ranges = [r for t in (*self.trajectories, *self.baselines) if (r := t.version_range())]
        return min((r[0] for r in ranges), default=self.admitted_version)


@dataclass(frozen=True, slots=True)
class EpisodeTask:
    """One episode that a worker has claimed and must submit, fail, or lose to another worker."""

    kind: EpisodeKind
    group_id: str
    number: int
    index: int
    attempt: int
    min_version: int
    """Completions must come from this version or a newer one."""
    sampling_name: str = "train"
    """Name of the run's sampling parameters: `train`, or for evaluation `sampled` or `greedy`."""
    temperature: float | None = None
    """Instead of that setting's own."""

    @property
    def is_baseline(self) -> bool:
        """True for a greedy episode that a group is compared with."""
        return self.kind is EpisodeKind.TRAIN and self.sampling_name != "train"


class TensorSpec(Message, frozen=True):
    """One tensor of a weight version, by its Hugging Face name."""

    name: str
    dtype: str
    shape: tuple[Count, ...]


class BaseVersion(Message, frozen=True):
    """A complete weight version that another one is a delta to; fields as in `Manifest`."""

    location: str
    digest: str
    num_bytes: Count


class Manifest(Message, frozen=True):
    """One published weight version and the location of its bytes."""

    run_id: str
    version: Count
    step: Count
    """Optimizer batches trained in the lineage that these weights end."""
    epoch: Count
    """Fencing epoch of the learner that published it."""
    transport: str
    location: str
    """Location of the bytes for the transport: a path, a URL."""
    digest: str
    """Digest of the bytes, as computed by the transport."""
    num_bytes: Count
    tensors: tuple[TensorSpec, ...]
    published_at: float
    """Unix time, s."""
    anchor: BaseVersion | None = None
    """Version to which the bytes at `location` are a delta; None: they are a complete version."""
