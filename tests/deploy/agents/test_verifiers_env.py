"""The agent over a stand-in for verifiers; over the real library see tests/services/gateway/test_verifiers.py."""

import json
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from offbeat.deploy.agents import verifiers_env
from offbeat.services.rollout.agents.task import AgentTask


class Environment:
    """Endless tasks, each rewarded by its index."""

    num_loaded = 0
    num_read = 0

    def __init__(self, config: dict[str, Any]) -> None:
        assert config["taskset"] == {"id": "endless"}
        Environment.num_loaded += 1
        self.taskset = self._tasks()

    @staticmethod
    def _tasks() -> Generator[Any]:
        for idx in range(1_000_000):
            Environment.num_read += 1
            if idx == 3 and not Environment.is_reachable():
                raise ConnectionError
            yield SimpleNamespace(data=SimpleNamespace(idx=idx))

    @staticmethod
    def is_reachable() -> bool:
        return True

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[None]:
        yield

    def slots(self, task: Any) -> list[Any]:
        return [task]

    async def run_slot(self, slot: Any, context: Any) -> Any:
        del context
        agent = SimpleNamespace(trainable=True)
        return SimpleNamespace(ok=True, traces=[SimpleNamespace(agent=agent, reward=slot.data.idx, metrics={})])


def play(idx: int) -> float:
    request = {"taskset": {"id": "endless"}, "idx": idx, "environment": {}, "success_reward": 1.0}
    return verifiers_env.play(AgentTask("", "", "", "", "policy", "Tag", 1, "", json.dumps(request), 4))["reward"]


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(verifiers_env.KEY_NAME, "")  # so that the episode's is removed
    names = ("EvalClientConfig", "ModelContext")
    library = SimpleNamespace(
        load_environment=Environment, resolve_env_config=dict, **dict.fromkeys(names, lambda *_, **__: None)
    )
    monkeypatch.setitem(sys.modules, "verifiers", cast(ModuleType, SimpleNamespace(v1=library)))
    monkeypatch.setitem(sys.modules, "verifiers.v1", cast(ModuleType, library))
    monkeypatch.setattr(Environment, "num_loaded", 0)
    monkeypatch.setattr(Environment, "num_read", 0)
    verifiers_env._load.cache_clear()


def test_an_environment_is_loaded_once_and_its_tasks_are_read_as_needed():
    assert [play(idx) for idx in (5, 2, 9, 5)] == [5, 2, 9, 5]
    assert (Environment.num_loaded, Environment.num_read) == (1, 10)


def test_a_taskset_that_could_not_be_read_is_read_anew(monkeypatch: pytest.MonkeyPatch):
    """As one whose data is downloaded."""
    broken = iter([True])
    monkeypatch.setattr(Environment, "is_reachable", staticmethod(lambda: not next(broken, False)))
    with pytest.raises(ConnectionError):
        play(5)
    assert [play(5), Environment.num_loaded] == [5, 2]
