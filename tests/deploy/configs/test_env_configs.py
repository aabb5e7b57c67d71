"""The configurations of envs are valid as they stand, and a report on Sokoban knows its baselines."""

import pytest

from offbeat.deploy.config.loader import load_run
from offbeat.deploy.report.baselines import run_baselines
from offbeat.envs.registry import BUILT_IN
from offbeat.services.rollout.config import CustomEnv
from tests.fakes_rollout import HERE
from tests.paths import CONFIGS


@pytest.mark.parametrize("name", ["sokoban", "webshop", "terminal"])
def test_the_configuration_of_an_env_is_valid(name: str):
    assert load_run(CONFIGS / f"{name}.yaml").exp_name == name


def test_sokoban_is_compared_with_a_random_a_scripted_and_the_best_player():
    found = run_baselines(load_run(CONFIGS / "sokoban.yaml", ["final_val_batch_size=6"]))
    assert 0 < found["random"] < found["scripted"] <= found["optimal"] == 1


@pytest.mark.parametrize("name", ["frozen_lake", "sokoban"])
def test_a_built_in_env_by_its_class_path_has_the_same_baselines(name: str):
    config = load_run(CONFIGS / "sokoban.yaml", ["final_val_batch_size=2"])
    (tag,) = config.val_env_manager.tags_of(config.custom_envs)
    found = [
        run_baselines(config.model_copy(update={"custom_envs": {tag: CustomEnv(env_type=env_type, max_steps=5)}}))
        for env_type in (name, BUILT_IN[name])
    ]
    assert found[0] == found[1] != {}


def test_an_env_without_baselines_has_none_and_is_not_made():
    """What it needs may have ended with the run."""
    config = load_run(CONFIGS / "sokoban.yaml")
    unmade = CustomEnv(env_type=f"{HERE}BadEnv", env_config={"how": "raise", "when": "make"})
    managers = {"val_env_manager": config.val_env_manager.model_copy(update={"tags": ()})}
    mixed = {"custom_envs": {**config.custom_envs, "Unmade": unmade}, **managers}
    assert run_baselines(config.model_copy(update=mixed)) == {}
