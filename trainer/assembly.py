"""Puts together what the loop works with, as a run's configuration says; for a learner process, and for benchmarks."""

from collections.abc import Callable

from services.buffer.learner import RedisLearnerBuffer
from services.rollout.tasks import make_sampler
from services.telemetry import MetricsSink
from services.weights.client import WeightPublisher
from trainer.checkpoint import CheckpointStore
from trainer.curriculum import Curriculum
from trainer.evaluations import EvaluationLog, Evaluations
from trainer.intake import Intake
from trainer.journal import StepJournal
from trainer.loop import Parts
from trainer.policy_trainer import Trainer
from trainer.replay import Replay
from trainer.reporting import Reporter
from trainer.run import LearnerRun
from trainer.staleness import StalenessController

EVALUATIONS = "evaluations"


def parts_of(
    run: LearnerRun,
    *,
    trainer: Trainer,
    vocab_size: int,
    publisher: WeightPublisher,
    buffer: RedisLearnerBuffer,
    checkpoints: CheckpointStore,
    sink: MetricsSink,
    log: EvaluationLog,
    reporter: Reporter,
    stopped: Callable[[], bool],
) -> Parts:
    """sink: takes evaluations; stopped: whether somebody wants the learner to end."""
    config = run.config
    return Parts(
        buffer=buffer,
        publisher=publisher,
        trainer=trainer,
        checkpoints=checkpoints,
        evaluations=Evaluations(buffer, sink, log, run.output_dir / EVALUATIONS, checkpoints.score),
        intake=Intake(
            buffer=buffer,
            config=config,
            groups_per_step=config.groups_per_step,
            max_staleness=config.max_staleness,
            train_stale=config.buffer.stale_policy == "train",
            vocab_size=vocab_size,
        ),
        reporter=reporter,
        journal=StepJournal(run.output_dir, buffer.epoch),
        replay=Replay(config.replay, config.groups_per_step, config.seed),
        staleness=StalenessController(
            config.staleness_controller,
            buffer,
            groups_per_step=config.groups_per_step,
            num_env_groups=config.train_env_manager.num_env_groups,
        ),
        curriculum=Curriculum(make_sampler(config.custom_envs, config.train_env_manager), buffer),
        stopped=stopped,
    )
