"""Folder of a long run, made by a real run's writers: ledgers, metrics, the newest batches and their tokens.

Rewards, times and ratios are drawn; tokens are random.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from offbeat.deploy.config.loader import dump_yaml, load_run
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.run_folder import CONFIG
from offbeat.deploy.run_setup import prepare_folder
from offbeat.services.buffer.group_ledger import LedgerFile, LifeEvent
from offbeat.services.messages.types import Group, Segment, StopReason, Trajectory, Turn, VersionSpan
from offbeat.services.metric_registry import METRICS
from offbeat.services.telemetry import MetricRecord, Partial
from offbeat.trainer.data.batch import pack
from offbeat.trainer.data.step_batch import StepBatch
from offbeat.trainer.learner.step_groups import StepGroups
from offbeat.trainer.learner.step_ledger import StepLedger
from offbeat.trainer.losses.targets import build_targets
from offbeat.trainer.trackers.metrics_file import METRICS_FILE, MetricsFile
from offbeat.trainer.training.batch_log import BatchLog
from offbeat.trainer.training.step_tokens import StepTokens

TAG = "FrozenLake"
GROUPS_PER_STEP = 2
GROUP_SIZE = 5
SAVE_STEPS = 10
STEP_MS = 1000
VOCABULARY = 20
"""Of drawn tokens, below the tiny policy's."""
TURNS, ANSWER = 5, 4
SHORT = TURNS * ANSWER
"""Tokens of discarded trajectories."""
MESSAGES = ("You walk on a lake.", *("Row 1: S . # ." if i % 2 == 0 else "right" for i in range(2 * TURNS)))
RATIO_SPREAD = 0.05
LATE_SHARE = 0.02
"""Of groups dropped as stale."""
WORKERS, REPLICAS = 4, 2
"""Each writes a record per step, as a real one does each second."""


@dataclass(frozen=True, slots=True)
class MadeStep:
    events: list[LifeEvent]
    taken: StepGroups
    record: MetricRecord


class MadeRun:
    """Writers of one run; `add` writes a step, `flush` makes it readable."""

    def __init__(self, folder: Path, quickstart: Path, *, name: str, steps: int, tokens: int) -> None:
        """tokens: per trajectory."""
        sizes = (f"rollout_batch_size={GROUPS_PER_STEP * GROUP_SIZE}", f"train_env_manager.group_size={GROUP_SIZE}")
        overrides = [f"exp_name={name}", f"output_dir={folder}", f"max_steps={steps}", *sizes]
        self.config: RunConfig = load_run(quickstart, overrides)
        prepare_folder(self.config)
        (folder / CONFIG).write_text(dump_yaml(self.config), encoding="utf-8")
        self._began_ms = 1_700_000_000_000
        self._rng = np.random.default_rng(0)
        self._names, self._worker_names, self._replica_names = (
            [metric.name for metric in METRICS if metric.source == source and "{" not in metric.name]
            for source in ("learner", "rollout", "generation")
        )
        self._tokens = tokens
        self._steps = steps
        self._group = self._event = 0
        self._unsaved: list[int] = []
        self._life, self._ledger = LedgerFile(folder), StepLedger(folder, 1)
        self._metrics = MetricsFile(folder / METRICS_FILE)
        self._log = BatchLog(folder, 0, 1, self.config.console.keep_steps)
        self._ledger.write_resumed(0)
        self.step = 0

    def add(self) -> MadeStep:
        self.step += 1
        events = list(self._admit())
        groups = [self._make_group(event.number) for event in events if event.event == "submitted"]
        if self.step % SAVE_STEPS == 0:
            numbers = [*self._unsaved, *(group.number for group in groups)]
            events += [self._make_event(number, "trained", str(self.step)) for number in numbers]
            self._unsaved = []
        else:
            self._unsaved += [group.number for group in groups]
        taken = StepGroups(groups=groups, trained=groups, masked=[])
        self._life.append(events)
        self._ledger.write_step(self.step, taken, max_staleness=1.0, skipped=False)
        if self._is_kept:
            self._record(groups)
        record = self._make_record()
        self._metrics.write(f"{self._at_ms()}-0", record)
        for i, each in enumerate(self._make_service_records()):
            self._metrics.write(f"{self._at_ms()}-{i + 1}", each)
        return MadeStep(events, taken, record)

    def flush(self) -> None:
        self._metrics.flush()
        self._log.flush()

    def close(self) -> None:
        self.flush()
        self._life.close()
        self._ledger.close()
        self._metrics.close()

    def _at_ms(self) -> int:
        return self._began_ms + STEP_MS * self.step

    def _admit(self) -> Iterator[LifeEvent]:
        """Yield the events of the step's groups, and of dropped ones."""
        numbers = range(self._group, self._group + GROUPS_PER_STEP + int(self._rng.random() < LATE_SHARE))
        self._group = numbers.stop
        for number in numbers:
            yield self._make_event(number, "admitted", str(self.step - 1))
        for number in numbers[:GROUPS_PER_STEP]:
            yield self._make_event(number, "submitted", str(self.step - 1))
        for number in numbers[GROUPS_PER_STEP:]:
            yield self._make_event(number, "dropped", "stale")

    def _make_event(self, number: int, event: str, detail: str) -> LifeEvent:
        self._event += 1
        return LifeEvent(f"{self._at_ms()}-{self._event}", self._event, number, event, detail)

    def _make_group(self, number: int) -> Group:
        version = max(0, self.step - 1 - int(self._rng.integers(0, 2)))
        tokens = self._tokens if self._is_kept else SHORT
        rewards = self._rng.integers(0, 2, GROUP_SIZE)
        members = tuple(
            make_trajectory(self._rng, number, index, float(reward), version, tokens)
            for index, reward in enumerate(rewards)
        )
        return Group(f"{number + 1}-0", f"run:{number}", number, TAG, number, version, members)

    @property
    def _is_kept(self) -> bool:
        return self.step > self._steps - self.config.console.keep_steps

    def _record(self, groups: Sequence[Group]) -> None:
        batch = StepBatch.build(self.step - 1, list(groups), self.config)
        packed = pack(list(groups))
        behavior = packed.behavior_logprobs
        noise = torch.from_numpy(self._rng.normal(0, RATIO_SPREAD, len(behavior)).astype(np.float32))
        targets = build_targets(packed, self.config, old_logprobs=behavior)
        self._log.record(batch, self.config.actor_train.training_args.learning_rate)
        self._log.record_tokens(StepTokens(self.step, tuple(groups), packed, targets, behavior + noise, self.config))

    def _make_record(self) -> MetricRecord:
        trend = 1 - math.exp(-3 * self.step / self._steps)
        noise = self._rng.normal(0, 0.1, len(self._names))
        values = {name: Partial("last", trend + float(each)) for name, each in zip(self._names, noise, strict=True)}
        values["trajectories"] = Partial("sum", float(GROUPS_PER_STEP * GROUP_SIZE))
        return MetricRecord("learner", values, self.step, time=self._at_ms() / 1000)

    def _make_service_records(self) -> Iterator[MetricRecord]:
        for source, label, names, count in (
            ("rollout", "worker", self._worker_names, WORKERS),
            ("generation", "replica", self._replica_names, REPLICAS),
        ):
            for i in range(count):
                values = {
                    name: Partial("last", float(each))
                    for name, each in zip(names, self._rng.random(len(names)), strict=True)
                }
                labels = {label: f"{label}-{i}", **({"kind": "train"} if source == "rollout" else {})}
                yield MetricRecord(source, values, labels=labels, time=self._at_ms() / 1000)


def make_trajectory(
    rng: np.random.Generator, group: int, index: int, reward: float, version: int, tokens: int
) -> Trajectory:
    """Return a trajectory of `TURNS` answers, rewarded at its end."""
    ends = [(turn + 1) * tokens // TURNS for turn in range(TURNS)]
    mask = np.zeros(tokens, dtype=np.bool_)
    for end in ends:
        mask[end - ANSWER : end] = True
    segment = Segment(
        tokens=rng.integers(0, VOCABULARY, tokens).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -rng.random(tokens), 0.0).astype(np.float32),
        versions=tuple(VersionSpan(end - ANSWER, end, version) for end in ends),
    )
    turns = tuple(Turn(0, end - ANSWER, end, reward if end == tokens else 0.0) for end in ends)
    metrics = {"success": reward}
    return Trajectory(
        f"run:{group}", index, 0, TAG, group, (segment,), turns, StopReason.TERMINATED, metrics, text=MESSAGES
    )
