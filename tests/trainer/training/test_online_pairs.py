"""Online DPO trains each group's best against its worst trajectory, as the same pairs from a dataset."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offbeat.services.messages.types import Group
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.data.pairs import best_and_worst
from offbeat.trainer.engines.frozen import FrozenModel
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.training.data_step import DataTrainer
from offbeat.trainer.training.optimizer_step import StepModels
from tests.copying import replace
from tests.fakes import make_group, train_on
from tests.trainer.plain_engine import PlainEngine
from tests.trainer.trajectories import group, trajectory

ALONE = Ranks(0, 0, 1, torch.device("cpu"))
GROUPS = [
    make_group(0, rewards=(0.5, 1.0, 0.0, 1.0)),
    make_group(1, rewards=(1.0, 1.0, 1.0, 1.0)),
    make_group(2, rewards=(0.0, -1.0)),
]
PAIRS = [(0, 1, 2), (2, 0, 1)]
"""Group, its best and its worst member."""


def train(folder: Path, pipeline: str, groups: list[Group], reference: int = 2) -> tuple[Tensor, dict[str, Any]]:
    config = LearnerConfig.model_validate(
        {"pipeline": pipeline, "actor_train": {"training_args": {"learning_rate": 1e-2}}}
    )
    policy = PlainEngine(load_policy(folder, ModelArgs(), seed=1))
    frozen = FrozenModel(load_policy(folder, ModelArgs(), seed=reference), ALONE)
    gauges = train_on(DataTrainer(config, StepModels(policy, reference=frozen), ALONE), groups, 0)
    return torch.cat([tensor.flatten() for _, tensor in policy.tensors()]), gauges


def test_a_pair_is_the_best_and_the_worst_of_a_group():
    pairs = list(best_and_worst(GROUPS))
    assert [(pair.number, *(t.index for t in pair.trajectories)) for pair in pairs] == PAIRS


def test_trajectories_without_sampled_tokens_make_no_pair():
    assert not list(best_and_worst([group(0, trajectory(0, [(3, 0, 1.0)]), trajectory(1, [(3, 2, 0.0)]))]))


def test_a_step_is_that_of_the_same_pairs_as_rows(folder: Path):
    rows = [
        replace(GROUPS[n], trajectories=(GROUPS[n].trajectories[best], GROUPS[n].trajectories[worst]))
        for n, best, worst in PAIRS
    ]
    online, gauges = train(folder, "online_dpo", GROUPS)
    offline, expected = train(folder, "dpo", rows)
    assert torch.equal(online, offline)
    assert gauges["loss"].value == expected["loss"].value
    assert gauges["rewards/margins"].count == len(PAIRS)
    assert not torch.equal(online, train(folder, "online_dpo", GROUPS, reference=3)[0])


def test_a_step_raises_the_margins_of_its_own_pairs(folder: Path):
    """From 0, where policy and reference are equal. Those of a run's next pairs, which it plays itself, may still fall."""
    config = LearnerConfig.model_validate(
        {"pipeline": "online_dpo", "actor_train": {"training_args": {"learning_rate": 1e-3}}}
    )
    policy = PlainEngine(load_policy(folder, ModelArgs(), seed=1))
    reference = FrozenModel(load_policy(folder, ModelArgs(), seed=1), ALONE)
    trainer = DataTrainer(config, StepModels(policy, reference=reference), ALONE)
    margins = [train_on(trainer, GROUPS, step)["rewards/margins"].value for step in range(4)]
    assert margins[0] == 0.0
    assert margins == sorted(margins)
    assert margins[-1] > 0.0


def test_a_batch_without_pairs_trains_nothing(folder: Path):
    unchanged = torch.cat([t.flatten() for _, t in PlainEngine(load_policy(folder, ModelArgs(), seed=1)).tensors()])
    weights, gauges = train(folder, "online_dpo", [GROUPS[1]])
    assert torch.equal(weights, unchanged)
    assert gauges == {}
