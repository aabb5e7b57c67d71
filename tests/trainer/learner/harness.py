"""Learners one after another on a real disk, with fakes of Redis, the weight transport and the env workers."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from offbeat.services.rollout.tasks import make_sampler
from offbeat.services.tracing.factory import open_step_tracer
from offbeat.trainer.config.run import LearnerRunConfig
from offbeat.trainer.data.replay_buffer import ReplayBuffer
from offbeat.trainer.learner.evaluations import Evaluations
from offbeat.trainer.learner.group_intake import GroupIntake
from offbeat.trainer.learner.loop import Learner, LearnerComponents
from offbeat.trainer.learner.reporter import LearnerReporter
from offbeat.trainer.learner.shared_devices import Turns
from offbeat.trainer.learner.staleness_controller import StalenessController
from offbeat.trainer.learner.step_ledger import StepLedger
from offbeat.trainer.learner.task_sampler import Curriculum
from offbeat.trainer.learner.trajectory_samples import TrajectorySampler
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.trackers.base import LoggedSteps
from offbeat.trainer.training.batch_log import BatchLog
from offbeat.trainer.training.checkpoint import read_checkpoint
from offbeat.trainer.training.checkpoint_store import CheckpointStore
from tests.fakes import (
    CrashError,
    DictBoard,
    DictLog,
    FakeLearnerBuffer,
    FakePublisher,
    FakeTrainer,
    ListSink,
    Moments,
    make_group,
    make_trajectory,
)

GROUPS_PER_STEP = 2


def learner_config(**settings: object) -> LearnerRunConfig:
    tree: dict[str, object] = {
        "max_steps": 6,
        "save_steps": 3,
        "eval_steps": 0,
        "rollout_batch_size": 2 * GROUPS_PER_STEP,
        "custom_envs": {},
        "train_env_manager": {"group_size": 2},
        "val_batch_size": 2,
        "actor_infer": {},
        "buffer": {},
        "weights": {},
        "max_staleness": 100.0,
    }
    config = LearnerRunConfig.model_validate(tree | settings)
    return config if "final_val_batch_size" in settings else config.model_copy(update={"final_val_batch_size": 0})


class NumberTokenizer:
    """Tokens as their numbers."""

    def decode(self, tokens: list[int], *, skip_special_tokens: bool = False) -> str:
        del skip_special_tokens
        return " ".join(map(str, tokens))


@dataclass
class LearnerHarness:
    """State that outlives a learner: Redis, the disk, and the env workers that fill the stream."""

    folder: Path
    config: LearnerRunConfig = field(default_factory=learner_config)
    buffer: FakeLearnerBuffer = field(default_factory=FakeLearnerBuffer)
    publisher: FakePublisher = field(default_factory=FakePublisher)
    log: DictLog = field(default_factory=DictLog)
    sink: ListSink = field(default_factory=ListSink)
    board: DictBoard = field(default_factory=DictBoard)
    epochs: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        numbers = itertools.count()
        self.buffer.on_empty = lambda buffer: buffer.stream.append(make_group(next(numbers)))

    def learner(
        self,
        moments: Moments | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        turns: Turns | None = None,
    ) -> tuple[Learner, FakeTrainer]:
        """Build a learner and resume it from the newest checkpoint."""
        moments = moments or Moments()
        self.buffer.moments = self.publisher.moments = moments
        self.buffer.reconnect()
        trainer = FakeTrainer(moments)
        epoch = next(self.epochs)
        checkpoints = CheckpointStore(self.folder / "checkpoints", keep=2, epoch=epoch)
        components = LearnerComponents(
            buffer=self.buffer,
            publisher=self.publisher,
            trainer=trainer,
            checkpoints=checkpoints,
            uploads=None,
            batch_log=BatchLog(self.folder, self.config.record_batches, epoch, self.config.console.keep_steps),
            evaluations=Evaluations(self.buffer, self.sink, self.log, self.folder / "evaluations", epoch=epoch),
            intake=GroupIntake(self.buffer, self.config, GROUPS_PER_STEP, False, 11),
            reporter=LearnerReporter(self.sink, self.board),
            ledger=StepLedger(self.folder, epoch),
            replay=ReplayBuffer(self.config.replay, GROUPS_PER_STEP, self.config.seed),
            staleness=StalenessController(
                self.config.staleness_controller,
                self.buffer,
                groups_per_step=GROUPS_PER_STEP,
                num_env_groups=self.config.train_env_manager.num_env_groups,
            ),
            curriculum=Curriculum(make_sampler(self.config.custom_envs, self.config.train_env_manager), self.buffer),
            sampler=TrajectorySampler(
                NumberTokenizer,
                self.config.custom_envs,
                self.config.logging_samples,
                LoggedSteps(self.config.logging_steps, self.config.max_steps),
            ),
            should_stop=should_stop,
            turns=turns,
            tracer=open_step_tracer(self.config.telemetry, run_id="run", algorithm=self.config.adv_estimator),
        )
        requested = self.config.resume_from_checkpoint
        lineage = "now/2" if isinstance(requested, Path) else "now"
        learner = Learner(LearnerRun("run", lineage, self.folder, self.config), components)
        newest = checkpoints.newest_complete(None if requested is True else lineage)
        if newest is None and isinstance(requested, Path):
            newest = read_checkpoint(requested)
        if newest is not None:
            learner.resume(newest)
        return learner, trainer


def run_until_crash(harness: LearnerHarness, moments: Moments) -> tuple[Learner | None, FakeTrainer | None]:
    try:
        learner, trainer = harness.learner(moments)
        learner.run()
    except CrashError:
        return None, None
    return learner, trainer


def finish_evaluations(harness: LearnerHarness, *, done: bool = True) -> None:
    """Complete each evaluation as soon as the learner waits for groups."""
    fill = harness.buffer.on_empty
    assert fill is not None

    def play(buffer: FakeLearnerBuffer) -> None:
        fill(buffer)
        for eval_id, count, *_ in buffer.started:
            if done and buffer.evaluations.get(eval_id, ()) is None:
                buffer.evaluations[eval_id] = [make_trajectory(i, reward=i % 2) for i in range(count)]

    harness.buffer.on_empty = play
