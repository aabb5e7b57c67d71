"""What the learner works with, in memory: a buffer, a publisher, a trainer, a sink."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from offbeat.services.buffer.api import Boundary, Counters, Proof, Reconciled
from offbeat.services.live_settings import Change
from offbeat.services.messages.types import (
    Group,
    Manifest,
    Segment,
    StopReason,
    Trajectory,
    Turn,
    VersionSpan,
)
from offbeat.services.telemetry import MetricRecord, Partial
from offbeat.trainer.algorithms.aggregation import NO_MASKED, MaskedCounts
from offbeat.trainer.data.step_batch import StepBatch
from offbeat.trainer.training.optimizer_step import BatchTrainer, Gauges
from offbeat.trainer.training.policy_trainer import PolicyTrainer
from offbeat.trainer.training.step_tokens import StepTokens
from tests.copying import replace


def make_trajectory(
    group: int = 0,
    index: int = 0,
    *,
    reward: float = 0.0,
    version: int = 0,
    num_turns: int = 2,
    success: float | None = None,
    text: tuple[str, ...] = (),
) -> Trajectory:
    """A prompt of 3 tokens, then turns of 2 sampled tokens with 2 observed ones between them; the last turn is rewarded."""
    length = 3 + 4 * num_turns - 2
    tokens = np.random.default_rng([group, index]).integers(0, 11, length).astype(np.int32)
    starts = [3 + 4 * turn for turn in range(num_turns)]
    mask = np.zeros(length, dtype=np.bool_)
    for start in starts:
        mask[start : start + 2] = True
    spans = tuple(VersionSpan(start, start + 2, version) for start in starts)
    logprobs = np.where(mask, -2.0, 0.0).astype(np.float32)
    turns = tuple(Turn(0, start, start + 2, reward if start == starts[-1] else 0.0) for start in starts)
    metrics = {"success": reward if success is None else success}
    segment = Segment(tokens, mask, logprobs, spans)
    return Trajectory(
        f"run:{group}", index, 0, "tag", group, (segment,), turns, StopReason.TERMINATED, metrics, text=text
    )


def make_group(
    number: int, *, rewards: Sequence[float] = (0.0, 1.0), version: int = 0, greedy: Sequence[float] = ()
) -> Group:
    """Siblings with those rewards, sampled by `version`. greedy: rewards of baselines."""
    members, baselines = (
        tuple(make_trajectory(number, i, reward=reward, version=version) for i, reward in enumerate(values, start))
        for values, start in ((rewards, 0), (greedy, len(rewards)))
    )
    marked = tuple(replace(trajectory, baseline=True) for trajectory in baselines)
    return Group(f"{number + 1}-0", f"run:{number}", number, "tag", number, version, members, baselines=marked)


class CrashError(Exception):
    """The learner dies here, as by kill -9."""


@dataclass
class Moments:
    """Names every call that changes something, in order, and crashes before the n-th or right after it."""

    crash_at: int | None = None
    after: bool = False
    names: list[str] = field(default_factory=list[str])

    def pass_by(self, name: str, act: Callable[[], None]) -> None:
        self.names.append(name)
        dies = self.crash_at is not None and len(self.names) == self.crash_at
        if dies and not self.after:
            raise CrashError(name)
        act()
        if dies:
            raise CrashError(name)


@dataclass
class FakeLearnerBuffer:
    """A stream of groups; `on_empty` may add more. What was delivered and not taken out comes again after `reconnect`."""

    on_empty: Callable[["FakeLearnerBuffer"], None] | None = None
    moments: Moments = field(default_factory=Moments)
    stream: list[Group] = field(default_factory=list[Group])
    trained: list[int] = field(default_factory=list[int])
    dropped: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    evaluations: dict[str, list[Trajectory] | None] = field(default_factory=dict[str, list[Trajectory] | None])
    started: list[tuple[str, int, str, int]] = field(default_factory=list[tuple[str, int, str, int]])
    restored: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(groups trained, next number) of each proof."""
    boundary: Boundary = field(default_factory=Boundary)
    boundaries: list[Boundary] = field(default_factory=list[Boundary])
    """What the next boundaries say, before `boundary` does."""
    adopted_at: list[int] = field(default_factory=list[int])
    playing: int = 0
    published: int = -1
    """Newest version that earlier learners have published."""
    taught: list[str] = field(default_factory=list[str])
    """States of the task sampler, as they came."""
    refilled: dict[str, tuple[int, str]] = field(default_factory=dict[str, tuple[int, str]])
    """Entry id -> step and reason, of groups that the present learner has refilled."""
    _delivered: int = 0

    def reconnect(self) -> None:
        self._delivered = 0

    def take(self, timeout_s: float, num_groups: int = 1) -> Group | None:
        del timeout_s, num_groups
        if self._delivered == len(self.stream) and self.on_empty is not None:
            self.on_empty(self)
        if self._delivered == len(self.stream):
            return None
        self._delivered += 1
        return self.stream[self._delivered - 1]

    def drop(self, group: Group, reason: str) -> None:
        def act() -> None:
            self._remove([group.entry_id])
            self.dropped.append((group.number, reason))

        self.moments.pass_by(f"drop {group.number}", act)

    def refill(self, group: Group, reason: str, step: int) -> None:
        self.moments.pass_by(
            f"refill {group.number}", lambda: self.refilled.__setitem__(group.entry_id, (step, reason))
        )

    def _drop_refilled(self, step: int) -> None:
        for entry_id, (at, reason) in list(self.refilled.items()):
            if at <= step:
                del self.refilled[entry_id]
                self.dropped += [(number, reason) for number in self._remove([entry_id])]

    def close(self, reason: str) -> int:
        """Unlike the real one, without a moment: it is the last call of a run."""
        numbers = self._remove([group.entry_id for group in self.stream])
        self.dropped += [(number, reason) for number in numbers]
        return len(numbers)

    def ack(self, entry_ids: Sequence[str], step: int) -> int:
        gone: list[int] = []

        def act() -> None:
            gone.extend(self._remove(entry_ids))
            self.trained.extend(gone)
            self._drop_refilled(step)

        self.moments.pass_by(f"ack {step}", act)
        return len(gone)

    def _remove(self, entry_ids: Sequence[str]) -> list[int]:
        gone = [group for group in self.stream if group.entry_id in entry_ids]
        self._delivered -= sum(self.stream.index(group) < self._delivered for group in gone)
        self.stream = [group for group in self.stream if group not in gone]
        return [group.number for group in gone]

    def adopt(self, step: int) -> Boundary:
        self.adopted_at.append(step)
        return self.boundaries.pop(0) if self.boundaries else self.boundary

    def suggest(self, step: int, values: Mapping[str, float], why: str, *, if_lost: bool = False) -> bool:
        """Holds from the next boundary on."""
        del why
        if if_lost and self.boundary.changes:
            return False
        self.boundary = replace(self.boundary, changes=(*self.boundary.changes, Change(dict(values), step=step)))
        return True

    def teach(self, state: str) -> None:
        self.taught.append(state)

    def num_playing(self) -> int:
        return self.playing

    def reconcile(self, proof: Proof) -> Reconciled:
        self.restored.append((proof.num_trained, proof.next_number))
        numbers = {number for _, batch in proof.saved for number in batch}
        missing = [group.entry_id for group in self.stream if group.number in numbers]
        if missing:
            self.ack(missing, proof.step)
        self._drop_refilled(proof.step)
        self.refilled.clear()
        return Reconciled(1, is_new=False)

    def newest_version(self) -> int:
        return self.published

    def prove_with(self, prove: Callable[[], Proof], on_reconciled: Callable[[Reconciled], None]) -> None:
        self.prove, self.on_reconciled = prove, on_reconciled

    def start_eval(self, eval_id: str, num_episodes: int, *, sampling_name: str, min_version: int) -> None:
        self.started.append((eval_id, num_episodes, sampling_name, min_version))
        self.evaluations.setdefault(eval_id, None)

    def eval_result(self, eval_id: str) -> list[Trajectory] | None:
        return self.evaluations[eval_id]

    def wait_eval(self, eval_id: str, timeout_s: float) -> list[Trajectory] | None:
        del timeout_s
        if self.on_empty is not None:
            self.on_empty(self)
        return self.evaluations[eval_id]

    def forget_eval(self, eval_id: str) -> None:
        self.evaluations.pop(eval_id, None)

    def counters(self) -> Counters:
        return Counters(0, 0, len(self.trained), {}, {}, len(self.stream))


@dataclass
class FakePublisher:
    """Keeps every announced version; older ones are left alone, as the broker does."""

    moments: Moments = field(default_factory=Moments)
    versions: dict[int, float] = field(default_factory=dict[int, float])

    def publish(self, version: int, step: int, tensors: Iterator[tuple[str, Tensor]]) -> None:
        assert version == step

        def act() -> None:
            if version > max(self.versions, default=-1):
                self.versions[version] = float(dict(tensors)["weight"])

        self.moments.pass_by(f"publish {version}", act)

    def needs_base(self) -> bool:
        return True

    def newest(self) -> Manifest | None:
        return None

    def flush(self) -> bool:
        return False

    def close(self) -> None: ...


def train_on(
    trainer: BatchTrainer | PolicyTrainer,
    groups: Sequence[Group],
    step: int,
    masked: MaskedCounts = NO_MASKED,
    weights: Sequence[float] = (),
) -> Gauges:
    """Train on groups whose rewards are shaped by the trainer's configuration."""
    return trainer.train(StepBatch.build(step, groups, trainer._config, masked=masked, weights=weights))


@dataclass
class FakeTrainer:
    """Its one weight is a digest of all groups that it was trained on, in order."""

    moments: Moments = field(default_factory=Moments)
    history: list[tuple[int, tuple[int, ...]]] = field(default_factory=list[tuple[int, tuple[int, ...]]])
    kl_coef: float = 0.5
    rates: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    """(steps trained before, learning rate) of each `set_learning_rate`."""
    masked: list[MaskedCounts] = field(default_factory=list[MaskedCounts])
    gauges: dict[str, Partial] = field(default_factory=lambda: {"tokens/computed": Partial("sum", 10.0)})
    last_step: StepTokens | None = None
    is_on_devices: bool = True

    def begin(self, progress: Callable[[int, int], None], should_stop: Callable[[], bool]) -> bool:
        progress(1, 1)
        return not should_stop()

    def set_learning_rate(self, learning_rate: float) -> None:
        self.rates.append((len(self.history), learning_rate))

    def train(self, batch: StepBatch) -> dict[str, Partial]:
        assert self.is_on_devices
        self.masked.append(batch.masked)
        assert not batch.weights or len(batch.weights) == len(batch.groups)
        numbers = tuple(group.number for group in batch.groups)
        self.moments.pass_by(f"train {batch.step}", lambda: self.history.append((batch.step, numbers)))
        return self.gauges

    @property
    def weight(self) -> float:
        return float(int(hashlib.sha256(repr(self.history).encode()).hexdigest()[:6], 16))

    def tensors(self, *, with_base: bool = True) -> Iterator[tuple[str, Tensor]]:  # noqa: ARG002
        yield "weight", torch.tensor(self.weight)

    def offload_states(self) -> None:
        assert self.is_on_devices
        self.is_on_devices = False
        self.moments.pass_by("offload", lambda: None)

    def load_states(self) -> None:
        assert not self.is_on_devices
        self.is_on_devices = True
        self.moments.pass_by("load", lambda: None)

    def save(self, folder: Path) -> None:
        assert self.is_on_devices
        self.moments.pass_by("save", lambda: None)
        (folder / "weights.json").write_text(json.dumps(self.history))

    def load(
        self, folder: Path, kl_coef: float, progress: Callable[..., None], should_stop: Callable[[], bool]
    ) -> bool:
        del progress, should_stop
        rows = json.loads((folder / "weights.json").read_text())
        self.history = [(step, tuple(numbers)) for step, numbers in rows]
        self.kl_coef = kl_coef
        return True


@dataclass
class ListSink:
    """Keeps metric records."""

    records: list[MetricRecord] = field(default_factory=list[MetricRecord])

    def append(self, record: MetricRecord, once: str = "") -> None:
        del once
        self.records.append(record)

    def of(self, source: str) -> list[MetricRecord]:
        return [record for record in self.records if record.source == source and record.step is not None]


@dataclass
class DictBoard:
    """Keeps the values of a run's record."""

    fields: dict[str, str] = field(default_factory=dict[str, str])

    def show(self, **fields: str) -> None:
        self.fields |= fields


@dataclass
class DictLog:
    """An evaluation log that outlives learners."""

    states: dict[str, str] = field(default_factory=dict[str, str])

    def load(self) -> dict[str, str]:
        return dict(self.states)

    def put(self, eval_id: str, state: str) -> None:
        self.states[eval_id] = state

    def remove(self, eval_id: str) -> None:
        del self.states[eval_id]
