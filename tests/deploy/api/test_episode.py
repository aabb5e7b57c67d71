"""Mistakes of callers of `rollout`, `play` and `check_env`."""

from pathlib import Path
from typing import Any

import pytest

from offbeat.deploy.api.episode import check_env, play, rollout
from offbeat.deploy.api.run import load_config
from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.run import RunConfig
from offbeat.services.rollout.config import CustomEnv, EnvManagerConfig
from tests.fakes_rollout import CountingEnv


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"episodes": 0}, "episodes: expected at least 1, got 0"),
        ({"group_size": 0}, "group_size: expected at least 1, got 0"),
        ({"group_size": -1}, "group_size: expected at least 1, got -1"),
        ({"concurrency": 0}, "concurrency: expected at least 1, got 0"),
        ({"seed": -1}, "seed: expected at least 0, got -1"),
        ({"episodes": 3, "group_size": 2}, r"episodes \(3\) must be a multiple of group_size \(2\)"),
    ],
)
def test_a_number_of_a_rollout_that_can_not_be_is_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        rollout(RunConfig(), agent="random", **settings)


def test_a_rollout_without_envs_is_refused() -> None:
    with pytest.raises(ConfigError, match="custom_envs: no env: name at least one tag"):
        rollout(RunConfig(), agent="random")


def test_a_rollout_takes_a_file_or_the_configuration_loaded_from_it() -> None:
    path = Path("deploy/configs/quickstart.yaml")
    of_file, loaded = (rollout(config, episodes=2, agent="random") for config in (str(path), load_config(path)))
    assert of_file["seed"].tolist() == loaded["seed"].tolist()


class Flaky(CountingEnv):
    """Raises on odd seeds, or on all of them."""

    def __init__(self, *, always: bool = False) -> None:
        super().__init__()
        self._always = always

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        if self._always or (seed or 0) % 2:
            raise KeyError("boom")
        return super().reset(seed=seed, options=options)


def flaky_run(**env_config: Any) -> RunConfig:
    lake = load_config(Path("deploy/configs/quickstart.yaml"))
    flaky = CustomEnv(env_type=f"{__name__}:Flaky", env_config=env_config, max_steps=2, execution="inline")
    manager = EnvManagerConfig(group_size=1)
    return lake.model_copy(update={"custom_envs": {"Flaky": flaky}, "val_env_manager": manager})


def test_a_rollout_warns_of_episodes_that_failed() -> None:
    with pytest.warns(UserWarning, match=r"4 of 8 episodes failed: reset_error: KeyError: 'boom' \(4\)"):
        rows = rollout(flaky_run(), episodes=8, agent="random")
    assert len(rows) == 4


def test_a_rollout_of_failed_episodes_alone_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"2 of 2 episodes failed: reset_error: KeyError: 'boom' \(2\)"):
        rollout(flaky_run(always=True), episodes=2, agent="random")


def test_an_episode_or_a_check_of_no_seed_is_refused() -> None:
    with pytest.raises(ValueError, match="seed: expected at least 0, got -1"):
        play("frozen_lake", seed=-1)
    with pytest.raises(ValueError, match="num_seeds: expected at least 1, got 0"):
        check_env("frozen_lake", num_seeds=0)
