"""Steps of data pipelines: what the reference says, in whichever passes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat.benchmarks.harness.pretrained import write_llama
from offbeat.envs.frozen_lake.rows import pairs, write_rows
from offbeat.services.messages.types import Group
from offbeat.services.rollout.data.config import DataConfig
from offbeat.services.rollout.data.source import DataSource
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.data.step_batch import StepBatch
from offbeat.trainer.engines.frozen import FrozenModel
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.packing import PackedInput
from offbeat.trainer.training.data_step import DataTrainer
from offbeat.trainer.training.optimizer_step import StepModels
from tests.trainer.plain_engine import PlainEngine

ALONE = Ranks(0, 0, 1, torch.device("cpu"))


class Watched(FrozenModel):
    """Keeps what it was asked."""

    def infer(self, batch: Any) -> list[torch.Tensor]:
        self.seen: list[PackedInput] = list(batch)
        return super().infer(batch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data-step")
    write_llama(path / "model")
    write_rows(path / "rows.jsonl", pairs(6))
    return path


def make_step(folder: Path, **settings: Any) -> tuple[DataTrainer, tuple[Group, ...], Watched, PlainEngine]:
    data = DataConfig(dataset_name=folder / "rows.jsonl", shuffle=False)
    source = DataSource(data, "dpo", folder / "model", seed=0, max_tokens=512)
    members = [tuple(source.trajectory(n, index, 0) for index in range(2)) for n in range(6)]
    groups = tuple(Group(f"{n}-0", str(n), n, "dpo", 0, 0, each) for n, each in enumerate(members))
    args = {"learning_rate": 1e-3, "max_tokens_per_microbatch": 600, **settings.pop("training_args", {})}
    tree = {"pipeline": "dpo", "data": data, "sequence_length": 512, "actor_train": {"training_args": args}, **settings}
    engine = PlainEngine(load_policy(folder / "model", ModelArgs(), seed=0))
    reference = Watched(load_policy(folder / "model", ModelArgs(), seed=0), ALONE)
    trainer = DataTrainer(LearnerConfig.model_validate(tree), StepModels(engine, None, reference), ALONE)
    return trainer, groups, reference, engine


def first_step(folder: Path, **settings: Any) -> tuple[dict[str, float], Watched, PlainEngine]:
    trainer, groups, reference, engine = make_step(folder, **settings)
    gauges = trainer.train(StepBatch(0, groups, groups))
    return {name: partial.value for name, partial in gauges.items()}, reference, engine


@pytest.mark.parametrize("budget", [100, 600, 10_000])
def test_an_equal_policys_margins_are_exactly_zero(budget: int, folder: Path) -> None:
    gauges, reference, engine = first_step(folder, training_args={"max_tokens_per_microbatch": budget})
    names = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
    assert [gauges[name] for name in names] == [0.0] * 4
    assert [len(x.tokens) for x in reference.seen] == [len(x.tokens) for x in engine.seen[0]]


def test_a_references_passes_have_a_size_of_their_own(folder: Path) -> None:
    plain, _, _ = first_step(folder)
    large, reference, engine = first_step(folder, reference={"infer_batch_size": 100})
    assert len(reference.seen) == 1 < len(engine.seen[0])
    assert large == pytest.approx(plain, abs=1e-5)


def test_an_evaluation_is_computed_in_parts_of_a_step(folder: Path) -> None:
    """Its memory does not grow with the file."""
    results: list[dict[str, float]] = []
    for size, last in ((64, 6), (4, 2)):
        trainer, groups, reference, engine = make_step(folder, rollout_batch_size=size)
        with torch.no_grad():
            for tensor in engine.module.parameters():
                tensor.mul_(1.1)
        results.append({name: partial.value for name, partial in trainer.evaluate(groups).items()})
        learned = [
            part.loss_mask.sum() for group in groups[-last:] for each in group.trajectories for part in each.segments
        ]
        assert sum(len(x.positions) for x in reference.seen) == sum(learned)
    assert results[0]["rewards/margins"] != 0
    assert results[1] == pytest.approx(results[0], rel=1e-5)


def test_kto_counts_the_tokens_that_it_trains(folder: Path) -> None:
    """Those of mismatched responses estimate the KL alone."""
    trainer, groups, _, engine = make_step(folder, dpo={"loss_type": "kto"})
    gauges = {name: partial.value for name, partial in trainer.train(StepBatch(0, groups, groups)).items()}
    lengths = [float(sum(part.loss_mask.sum() for part in group.trajectories[0].segments)) for group in groups]
    assert gauges["tokens_trained"] == sum(lengths) == sum(len(x.positions) for x in engine.seen[0])
    assert gauges["tokens/shared"] == 0
    assert gauges["tokens/response_length/mean"] == pytest.approx(sum(lengths) / len(lengths))
