from collections.abc import Callable
from functools import partial

from offbeat.services.buffer.learner_client import RedisLearnerBuffer
from offbeat.services.buffer.scores import GroupScores
from offbeat.services.chat.tokenizer import load_tokenizer
from offbeat.services.messages.types import Group
from offbeat.services.rollout.tasks import make_sampler
from offbeat.services.telemetry import MetricsSink
from offbeat.services.tracing.factory import open_step_tracer
from offbeat.services.weights.api import WeightPublisher
from offbeat.trainer.checks.user_functions import refuse_broken_functions
from offbeat.trainer.config.scored_roles import scored_roles
from offbeat.trainer.data.replay_buffer import ReplayBuffer
from offbeat.trainer.learner.evaluations import EvaluationLog, Evaluations
from offbeat.trainer.learner.expired_groups import ExpiredGroups
from offbeat.trainer.learner.file_scores import open_file_scores
from offbeat.trainer.learner.group_intake import GroupIntake
from offbeat.trainer.learner.loop import LearnerComponents
from offbeat.trainer.learner.reporter import LearnerReporter
from offbeat.trainer.learner.score_intake import ScoreIntake
from offbeat.trainer.learner.shared_devices import Turns
from offbeat.trainer.learner.staleness_controller import StalenessController
from offbeat.trainer.learner.step_ledger import StepLedger
from offbeat.trainer.learner.task_sampler import Curriculum
from offbeat.trainer.learner.trajectory_samples import TrajectorySampler
from offbeat.trainer.learner.uploads import CheckpointUploads
from offbeat.trainer.learner.validation import count_prompts, read_validation
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.trackers.base import LoggedSteps
from offbeat.trainer.training.batch_log import BatchLog
from offbeat.trainer.training.checkpoint_store import CheckpointStore
from offbeat.trainer.training.score_keys import score_keys
from offbeat.trainer.training.trainer import Trainer

EVALUATIONS = "evaluations"


def build_components(
    run: LearnerRun,
    *,
    trainer: Trainer,
    vocab_size: int,
    publisher: WeightPublisher,
    buffer: RedisLearnerBuffer,
    checkpoints: CheckpointStore,
    uploads: CheckpointUploads | None,
    sink: MetricsSink,
    log: EvaluationLog,
    reporter: LearnerReporter,
    scores: GroupScores,
    turns: Turns | None,
    should_stop: Callable[[], bool],
) -> LearnerComponents:
    config = run.config
    refuse_broken_functions(config)  # this host may lack the user's module
    return LearnerComponents(
        buffer=buffer,
        publisher=publisher,
        trainer=trainer,
        checkpoints=checkpoints,
        uploads=uploads,
        batch_log=BatchLog(run.output_dir, config.record_batches, buffer.epoch, config.console.keep_steps),
        evaluations=Evaluations(
            buffer,
            sink,
            log,
            run.output_dir / EVALUATIONS,
            checkpoints.score,
            epoch=buffer.epoch,
            group_size=config.val_env_manager.group_size,
            drops_long=config.plays_prompts,
            scores_losses=not config.plays,
        ),
        intake=GroupIntake(
            buffer=buffer,
            config=config,
            groups_per_step=config.groups_per_step,
            train_stale=config.buffer.stale_policy == "train",
            vocab_size=vocab_size,
            scores=_build_scores(run, scores, reporter),
            files=open_file_scores(run, None if config.data is None else config.data.dataset_name),
            reads_data=config.reads_data,
            drops_long=config.plays_prompts,
            expired=ExpiredGroups(buffer),
        ),
        reporter=reporter,
        ledger=StepLedger(run.output_dir, buffer.epoch, partial(reporter.set_problem, of="ledger")),
        replay=ReplayBuffer(config.replay, config.groups_per_step, config.seed),
        staleness=StalenessController(
            config.staleness_controller,
            buffer,
            groups_per_step=config.groups_per_step,
            num_env_groups=config.train_env_manager.num_env_groups,
        ),
        curriculum=Curriculum(make_sampler(config.custom_envs, config.train_env_manager), buffer),
        sampler=TrajectorySampler(
            partial(load_tokenizer, run.model_folder),
            config.custom_envs,
            config.logging_samples,
            LoggedSteps(config.logging_steps, config.max_steps),
        ),
        should_stop=should_stop,
        turns=turns,
        validation=read_validation(run),
        tracer=open_step_tracer(config.telemetry, run_id=run.run_id, algorithm=config.adv_estimator),
        num_val_prompts=count_prompts(run),
    )


def _build_scores(run: LearnerRun, scores: GroupScores, reporter: LearnerReporter) -> ScoreIntake | None:
    config, keys = run.config, score_keys(run)
    roles = {role: keys[role.name] for role in scored_roles(config, config.reference)}

    def report(step: int, group: Group | None) -> None:
        if group is None:
            reporter.set_activity("taking", step=step, groups=config.groups_per_step)
        else:
            names = ",".join(role.name for role in roles if role.scores(group.tag))
            reporter.set_activity("scoring", step=step, group=group.number, roles=names)

    return ScoreIntake(scores, roles, report) if roles else None
