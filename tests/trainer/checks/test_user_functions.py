"""Algorithms of the user's, called as configured and tried before anything starts."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.loader import validate_tree
from offbeat.trainer.checks.algorithm import load_filter
from offbeat.trainer.checks.user_functions import (
    check_user_functions,
    random_batch,
    random_groups,
    refuse_broken_functions,
)
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.config.corrections import TrainInferCorrection
from offbeat.trainer.config.rewards import RewardShaping
from offbeat.trainer.data.reward_shaping import shape_rewards
from offbeat.trainer.data.selection import carries_signal
from offbeat.trainer.data.user_functions import UserFunctionError
from offbeat.trainer.losses.advantages import estimate, token_rewards
from tests.paths import ROOT
from tests.trainer.outcome import outcome

OWN = "tests.trainer.own_algorithm"


def of(**keys: str) -> AlgorithmConfig:
    return AlgorithmConfig(**{key: f"{OWN}:{name}" for key, name in keys.items()})


@pytest.mark.parametrize(
    "config",
    [
        of(adv_estimator="center"),
        of(pg_variant="reinforce"),
        of(pg_variant="by_ratio").model_copy(update={"ratio_type": "sequence"}),
        AlgorithmConfig(reward_shaping=RewardShaping(function=f"{OWN}:pay_length")),
        AlgorithmConfig(train_infer_correction=TrainInferCorrection(function=f"{OWN}:halve_first")),
    ],
    ids=("estimator", "loss", "ratio", "shaping", "correction"),
)
def test_a_function_that_keeps_its_contract_is_accepted_and_trains(config: AlgorithmConfig):
    assert list(check_user_functions(config)) == []
    numbers = outcome(config).numbers()
    assert torch.isfinite(numbers).all()
    assert not torch.equal(numbers, outcome(AlgorithmConfig()).numbers())


def test_an_estimator_of_the_users_equals_the_built_in_formula():
    """Centered rewards with one advantage per episode are Dr. GRPO's."""
    batch = random_batch()
    own, built_in = of(adv_estimator="center"), AlgorithmConfig(adv_estimator="dr_grpo")
    one = estimate(own, batch, token_rewards(own, batch), None).advantages
    torch.testing.assert_close(one, estimate(built_in, batch, token_rewards(built_in, batch), None).advantages)


def test_a_loss_of_the_users_equals_the_built_in_formula():
    own, built_in = of(pg_variant="reinforce"), AlgorithmConfig(pg_variant="vanilla")
    torch.testing.assert_close(outcome(own).gradient, outcome(built_in).gradient)


def test_shaping_of_the_users_is_added_to_the_reward():
    config = AlgorithmConfig(reward_shaping=RewardShaping(function=f"{OWN}:pay_length"))
    groups = random_groups()
    for before, after in zip(groups, shape_rewards(groups, config), strict=True):
        for one, two in zip(before.trajectories, after.trajectories, strict=True):
            assert two.reward == pytest.approx(one.reward + 0.1 * one.num_sampled)


def test_a_filter_may_be_a_function():
    config = of(group_filter_cls="long_groups")
    three, four, _ = random_groups()
    assert not carries_signal(three, config)
    varied = four.trajectories[0]
    assert len(four.trajectories) == 4
    assert varied.turns


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"adv_estimator": "too_few"}, "returned shape [8], not ["),
        ({"adv_estimator": "whole"}, "returned torch.int64, not a float tensor"),
        ({"adv_estimator": "infinite"}, "its result has"),
        ({"adv_estimator": "in_place"}, "changes its argument `rewards`"),
        ({"adv_estimator": "raising"}, "failed on random input: KeyError: 'no such column'"),
        ({"adv_estimator": "nothing"}, "returned None, not a tensor"),
        ({"adv_estimator": "absent"}, f"can't import {OWN}:absent"),
        ({"adv_estimator": "CONSTANT"}, "is a int, not a function"),
        ({"pg_variant": "detached"}, "without gradient"),
        ({"pg_variant": "total"}, "returned shape [], not ["),
    ],
)
def test_a_mistake_is_found_before_the_start(keys: dict[str, str], message: str):
    (issue,) = check_user_functions(of(**keys))
    assert issue.path == next(iter(keys))
    assert message in issue.message


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (AlgorithmConfig(reward_shaping=RewardShaping(function=f"{OWN}:not_a_number")), "returned nan"),
        (
            AlgorithmConfig(train_infer_correction=TrainInferCorrection(function=f"{OWN}:unpaired")),
            "not a pair of weights and kept tokens",
        ),
        (
            AlgorithmConfig(train_infer_correction=TrainInferCorrection(function=f"{OWN}:float_mask")),
            "for a mask, not torch.bool",
        ),
        (
            AlgorithmConfig(train_infer_correction=TrainInferCorrection(function=f"{OWN}:int_mask")),
            "returned torch.uint8 for a mask, not torch.bool",
        ),
    ],
)
def test_a_mistake_in_a_table_is_found_before_the_start(config: AlgorithmConfig, message: str):
    (issue,) = check_user_functions(config)
    assert message in issue.message


def test_the_example_of_the_docs_keeps_its_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = (ROOT / "docs" / "algorithms.md").read_text().partition("## Your own\n")[2]
    keys, code = page.split("```yaml\n")[1].split("```")[0], page.split("```python\n")[1].split("```")[0]
    (tmp_path / "my_algorithm.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = AlgorithmConfig.model_validate(yaml.safe_load(keys))
    assert list(check_user_functions(config)) == []
    assert config.group_filter_cls is not None
    assert load_filter(config.group_filter_cls).__name__ == "keeps"


def test_a_host_without_the_module_is_refused_when_its_learner_starts():
    with pytest.raises(UserFunctionError, match="adv_estimator: can't import absent_module:estimate"):
        refuse_broken_functions(AlgorithmConfig(adv_estimator="absent_module:estimate"))


def test_a_wrong_shape_stops_the_step_instead_of_broadcasting():
    batch = random_batch()
    config = of(adv_estimator="too_few")
    with pytest.raises(UserFunctionError, match="returned shape"):
        estimate(config, batch, token_rewards(config, batch), None)


@pytest.mark.parametrize("value", ["grpoo", "my module:f", "a:b.c", ":f"])
def test_a_misspelled_estimator_names_both_choices(value: str):
    tree: dict[str, Any] = {"custom_envs": {"A": {"env_type": "frozen_lake"}}, "adv_estimator": value}
    with pytest.raises(ConfigError) as caught:
        validate_tree(tree)
    (issue,) = caught.value.issues
    assert issue.path == "adv_estimator"
    assert "'grpo'" in issue.message
    assert "`module:function`" in issue.message
