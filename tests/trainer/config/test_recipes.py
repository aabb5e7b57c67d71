"""Every recipe trains: its own configuration, a small policy, groups with turns, states and versions."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
import torch

from offbeat.deploy.config.loader import load_run
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.config.corrections import ImportanceWeight, MismatchFilter, TrainInferCorrection
from offbeat.trainer.config.rewards import RewardNormalization, RewardShaping
from offbeat.trainer.engines.frozen import FrozenModel
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.models.loading import load_critic, load_policy
from offbeat.trainer.training.data_step import make_trainer
from offbeat.trainer.training.optimizer_step import StepModels
from tests.fakes import make_group, train_on
from tests.paths import ROOT
from tests.trainer.plain_engine import PlainEngine

RECIPES = sorted((ROOT / "deploy" / "configs" / "recipes").glob("*.yaml"))
ALONE = Ranks(0, 0, 1, torch.device("cpu"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_moves_the_policy_by_finite_steps(recipe: Path, folder: Path):
    config = load_run(recipe)
    head = config.has_value_head
    policy = PlainEngine(load_policy(folder, config.actor_train.model_args, seed=1, value_head=head))
    critic = PlainEngine(load_critic(folder, ModelArgs(), seed=1)) if config.has_own_critic else None
    frozen = FrozenModel(load_policy(folder, ModelArgs(), seed=2), ALONE)
    reference = frozen if config.needs_reference else None
    batches = make_trainer(config, StepModels(policy, critic, reference), ALONE)
    before = [tensor.clone() for _, tensor in policy.tensors()]
    groups = [make_group(n, rewards=(0.0, 1.0, 1.0, 0.5), greedy=(0.5,)) for n in range(4)]
    for step in range(config.critic_warmup, config.critic_warmup + 2):
        gauges = train_on(batches, groups, step)
        assert gauges["actor/skipped_steps"].total == 0
        assert gauges["actor/grad_norm"].value > 0
    assert any(not torch.equal(old, new) for old, (_, new) in zip(before, policy.tensors(), strict=True))


def choices_of(annotation: object) -> Iterator[object]:
    """Yield the values of a Literal, which may be one of several types."""
    for each in get_args(annotation):
        if get_origin(annotation) is Literal:
            yield each
        else:
            yield from choices_of(each)


def test_the_document_names_every_key_of_an_algorithm_and_every_recipe():
    text = (ROOT / "docs" / "algorithms.md").read_text()
    tables = (
        AlgorithmConfig,
        RewardNormalization,
        RewardShaping,
        TrainInferCorrection,
        ImportanceWeight,
        MismatchFilter,
    )
    keys = {name for table in tables for name in table.model_fields} | {path.stem for path in RECIPES}
    assert not [key for key in keys if not re.search(rf"\b{key}\b", text)]
    names = set(re.findall(r"^\| `([a-z0-9_-]+)` \|", text, re.MULTILINE))
    for key in ("adv_estimator", "pg_variant", "ratio_type", "loss_agg_mode", "old_logprobs"):
        choices = {each for each in choices_of(AlgorithmConfig.model_fields[key].annotation) if isinstance(each, str)}
        assert choices
        assert choices <= names
