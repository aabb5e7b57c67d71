"""Steps of a run that was resumed with other keys are reproduced."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offbeat.trainer.config.run import LearnerRunConfig
from offbeat.trainer.data.step_batch import StepBatch
from offbeat.trainer.engines.process_group import Ranks, process_group, ranks_of_environment
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.training.batch_log import BatchLog
from offbeat.trainer.training.checkpoint import LearnerState
from offbeat.trainer.training.checkpoint_store import CheckpointStore
from offbeat.trainer.training.group_scorer import encode_scores
from offbeat.trainer.training.policy_trainer import PolicyTrainer
from offbeat.trainer.training.reproduction import find_plan, reproduce
from offbeat.trainer.training.score_keys import score_keys
from tests.copying import replace
from tests.fakes import make_group
from tests.integration.test_learner_policy_trainer import begun, run_of


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    torch.set_num_threads(1)
    with process_group(alone := ranks_of_environment("cpu")):
        yield alone


def test_steps_are_reproduced_under_the_keys_that_they_were_trained_with(tmp_path: Path, ranks: Ranks) -> None:
    """A schedule ends at `max_steps`, with which the run is resumed."""
    profiled, schedule = ("profiler_timeline=true", "profiler_steps=[2]"), "actor_train.training_args.lr_scheduler_type"
    first = run_of(tmp_path, ("zero_variance=train", "max_steps=4", f"{schedule}=linear", *profiled))
    resumed = replace(first, config=first.config.model_copy(update={"max_steps": 8, "entropy_loss_coef": 0.1}))
    log, checkpoints = BatchLog(tmp_path, max_kept=9), CheckpointStore(first.checkpoints, keep=9, epoch=1)

    def train(trainer: PolicyTrainer, run: LearnerRun, steps: range) -> None:
        for step in steps:
            group = make_group(step, rewards=(0.0, 1.0), version=step - 1)
            batch = StepBatch.build(step - 1, [group], run.config)
            log.record(batch, run.config.settings.learning_rate)
            trainer.train(batch)
        log.flush()
        state = LearnerState(
            steps[-1], "now", kl_coef=trainer.kl_coef, config=LearnerRunConfig.model_dump(run.config, mode="json")
        )
        checkpoints.save(state, trainer.save).result()

    trainer = begun(first, ranks)
    checkpoints.save(LearnerState(0, "now", kl_coef=trainer.kl_coef), trainer.save).result()
    train(trainer, first, range(1, 3))
    trainer = PolicyTrainer(resumed, ranks)
    trainer.load(resumed.checkpoints / "step-000002", 0.0)
    train(trainer, resumed, range(3, 5))
    (tmp_path / "profiler" / "step-000002-rank-0.json.gz").unlink()
    replayed = reproduce(resumed, find_plan(resumed, 4), ranks, sample_step=None, show=lambda _: None)
    assert [(each.step, each.equal) for each in replayed.compared] == [(4, True)]
    whole = reproduce(resumed, find_plan(resumed, None), ranks, sample_step=None, show=lambda _: None)
    assert [(each.step, each.equal) for each in whole.compared] == [(2, True), (4, True)]
    assert not list((tmp_path / "profiler").iterdir())


@pytest.mark.parametrize("placement", ["service", "learner"])
def test_a_reference_of_another_lineage_is_reproduced(tmp_path: Path, ranks: Ranks, placement: str) -> None:
    """Its scores were recorded, or its weights are in the checkpoint: `start/` is that of a later lineage."""
    run = run_of(
        tmp_path,
        (
            "zero_variance=train",
            "use_kl_loss=true",
            "kl_loss_coef=0.5",
            f"reference.strategy_args.placement={placement}",
        ),
    )
    run = replace(run, lineage="1700000000.0")
    log, checkpoints = BatchLog(tmp_path, max_kept=9), CheckpointStore(run.checkpoints, keep=9, epoch=1)
    trainer = begun(run, ranks)
    checkpoints.save(LearnerState(0, "now", kl_coef=trainer.kl_coef), trainer.save).result()
    keys = score_keys(run)
    assert keys.keys() == ({"reference"} if placement == "service" else set())
    for step in (1, 2):
        group = make_group(step, rewards=(0.0, 1.0), version=step - 1)
        num_sampled = sum(each.num_sampled for each in group.trajectories)
        scores = encode_scores(torch.linspace(-3.0, -1.0, num_sampled))
        group = replace(group, scores={"reference@0123456789ab": b"", **dict.fromkeys(keys.values(), scores)})
        batch = StepBatch.build(step - 1, [group], run.config)
        log.record(batch, run.config.settings.learning_rate)
        trainer.train(batch)
    log.flush()
    checkpoints.save(LearnerState(2, "now", kl_coef=trainer.kl_coef), trainer.save).result()
    begun(run_of(tmp_path / "later", ("seed=7", "use_kl_loss=true", "kl_loss_coef=0.5")), ranks)
    shutil.rmtree(tmp_path / "start")
    (tmp_path / "later" / "start").rename(tmp_path / "start")
    later = (tmp_path / "start" / "model.safetensors").read_bytes()
    reproduced = replace(run, lineage="reproduce")
    (compared,) = reproduce(reproduced, find_plan(run, 2), ranks, sample_step=2, show=lambda _: None).compared
    assert compared.equal
    assert (tmp_path / "start" / "model.safetensors").read_bytes() == later
