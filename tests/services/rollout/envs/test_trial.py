"""An env is tried in a process of its own before a run."""

from pathlib import Path
from typing import Any

import pytest

from offbeat.services.rollout.config import CustomEnv
from offbeat.services.rollout.envs.trial import NUM_EPISODES, try_env
from tests.fakes_rollout import HERE

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, the start of the env's process alone takes more than the time for all episodes."""
    for name in ("BUDGET_S", "STEPS_BUDGET_S"):
        monkeypatch.setattr(f"offbeat.services.rollout.envs.trial.{name}", 600.0)


def env(name: str = "BadEnv", **changes: Any) -> CustomEnv:
    values = {"env_type": HERE + name, "step_timeout_s": 60.0, **changes}
    return CustomEnv(**values)


async def test_a_sound_env_shows_its_first_observation_and_traits():
    trial = await try_env(env("CountingEnv"), seed=3)
    assert trial.num_episodes == NUM_EPISODES
    assert not trial.failures
    assert trial.observation == (await try_env(env("CountingEnv"), seed=3)).observation
    assert trial.traits is not None
    assert trial.traits.system_prompt == "Walk P to G ."


@pytest.mark.parametrize(
    ("how", "when", "reason"),
    [
        ("raise", "make", "make_error"),
        ("raise", "reset", "reset_error"),
        ("raise", "step", "step_error"),
        ("nan", "step", "step_error"),
        ("no_text", "step", "step_error"),
        ("exit", "step", "step_error"),
        ("crash", "reset", "env_crashed"),
        ("hang", "step", "step_timeout"),
    ],
)
async def test_a_failing_env_is_contained_and_named(how: str, when: str, reason: str):
    limits = {"step_timeout_s": 2.0} if how == "hang" else {}
    trial = await try_env(env(env_config={"how": how, "when": when}, execution="inline", **limits), seed=0)
    assert trial.always_fails
    assert {error.reason for error in trial.failures} == {reason}


async def test_an_env_is_stepped_however_long_its_start_takes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("offbeat.services.rollout.envs.trial.BUDGET_S", 0.0)
    trial = await try_env(env(env_config={"how": "raise", "when": "step"}), seed=0)
    assert [error.reason for error in trial.failures] == ["step_error"]
    assert trial.always_fails


async def test_a_failure_of_one_episode_is_not_one_of_all(tmp_path: Path):
    trial = await try_env(env(env_config={"how": "raise", "marker": str(tmp_path / "once")}), seed=0)
    assert [error.reason for error in trial.failures] == ["step_error"]
    assert not trial.always_fails
