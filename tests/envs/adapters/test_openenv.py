"""The OpenEnv adapter over a real server of openenv-core; skipped where that is not installed."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat.envs import registry
from offbeat.envs.contract import check_contract
from tests.waiting import wait_until_sync

pytest.importorskip("openenv.core")


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, str(Path(__file__).parent / "number_server.py"), str(port), "24"])
    try:
        wait_until_sync(lambda: listens(port), timeout_s=120)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def env(url: str) -> Iterator[registry.TextEnv]:
    made = registry.make("openenv", {"base_url": url, "action_field": "number", "observation_field": "text"})
    yield made
    made.close()


def test_a_session_meets_the_contract(url: str):
    report = check_contract(
        "openenv", {"base_url": url, "action_field": "number", "observation_field": "text"}, num_seeds=4
    )
    assert report.problems == []
    assert report.num_turns > 10


def test_a_game_runs_to_its_end_and_restarts(env: registry.TextEnv):
    for _ in range(2):
        assert env.reset(seed=3)[0] == "0 to 9"
        results = [env.step(str(number)) for number in range(10)]
        end = next(i for i, step in enumerate(results) if step[2])
        assert [step[:3] for step in results[:end]] == [("higher", 0.0, False)] * end
        assert results[end][:3] == ("yes", 1.0, True)
        assert results[end][4]["success"] is True


def test_a_rejected_action_costs_the_penalty_without_a_step(env: registry.TextEnv):
    env.reset(seed=3)
    observation, reward, terminated, _, info = env.step("seven")
    assert (observation, reward, terminated, info["action_is_valid"]) == ("0 to 9", -0.1, False, False)
    assert "VALIDATION_ERROR" in info["refused"]
    assert env.step("5")[4]["action_is_valid"] is True


def test_whole_actions_are_json_and_whole_observations_too(url: str):
    env = registry.make("openenv", {"base_url": url, "reset": {"top": 1}})
    assert '"text": "0 to 0"' in env.reset(seed=1)[0]
    assert env.step("0")[4]["action_is_valid"] is False
    assert env.step('{"number": 0}')[1:3] == (1.0, True)
    env.close()


def test_words_are_declared_for_the_tiny_policy(url: str):
    config = {"base_url": url, "words": ["to", *map(str, range(10))], "system_prompt": "guess to"}
    made = registry.make("openenv", config)
    assert getattr(made, "words") == ("to", *map(str, range(10)), "guess")  # noqa: B009 (an attribute of some envs)
    assert not hasattr(registry.make("openenv", {"base_url": url}), "words")


def test_a_server_failure_fails_the_episode_and_reset_reconnects(env: registry.TextEnv):
    env.reset(seed=3)
    with pytest.raises(RuntimeError, match="the game breaks"):
        env.step("100")
    assert env.reset(seed=3)[0] == "0 to 9"


def test_a_full_server_is_reported(url: str):
    made = [registry.make("openenv", {"base_url": url, "action_field": "number"}) for _ in range(25)]
    for env in made[:24]:
        env.reset(seed=1)
    with pytest.raises((ConnectionError, RuntimeError), match=r"max_concurrent_envs|CAPACITY"):
        made[24].reset(seed=1)
    for env in made:
        env.close()
    made[-1].reset(seed=1)
    made[-1].close()


def test_an_unreachable_server_and_a_missing_field_are_named(url: str):
    with pytest.raises(ConnectionError, match=r"ws://127\.0\.0\.1:9/ws"):
        registry.make("openenv", {"base_url": "http://127.0.0.1:9"}).reset(seed=1)
    env = registry.make("openenv", {"base_url": url, "observation_field": "words"})
    with pytest.raises(ValueError, match="no field 'words': it has text"):
        env.reset(seed=1)
    env.close()
