"""The verifiers adapter over the real library and a taskset as its authors write them; skipped where it is not installed."""

import json
import sys
from pathlib import Path

import pytest

from offbeat.envs import registry
from offbeat.envs.contract import check_contract

vf = pytest.importorskip("verifiers.v1")


@pytest.fixture(autouse=True)
def _own_tasksets_are_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def right(question: str) -> str:
    first, second = question.removesuffix(" = ?").split(" + ")
    return str(int(first) + int(second))


def test_a_taskset_meets_the_contract():
    report = check_contract("verifiers", {"id": "vf_sums"}, num_seeds=4)
    assert report.problems == []
    assert report.num_turns > 10


def test_the_reward_is_the_tasks_weighted_sum_with_its_metrics():
    env = registry.make("verifiers", {"id": "vf_sums", "success_reward": 1.5})
    assert env.system_prompt == "Add."
    question, _ = env.reset(seed=3)
    _, reward, terminated, _, info = env.step(right(question))
    assert (reward, terminated, info["success"]) == (1.5, True, True)
    assert (info["is_right"], info["is_short"], info["num_words"]) == (1.0, 1.0, 1.0)
    env.reset(seed=3)
    _, reward, _, _, info = env.step(f"the answer is {right(question)}")
    assert (reward, info["success"], info["num_words"]) == (1.0, False, 4.0)


async def test_an_answer_is_scored_within_a_running_event_loop():
    env = registry.make("verifiers", {"id": "vf_sums"})
    question, _ = env.reset(seed=3)
    assert env.step(right(question))[1] == 1.5


def test_splits_are_disjoint_and_evaluation_covers_its_own():
    train = registry.make("verifiers", {"id": "vf_sums"})
    held_out = registry.make("verifiers", {"id": "vf_sums", "split": "held_out"})
    task_ids = [held_out.task_id(seed) for seed in range(40)]
    assert not {train.task_id(seed) for seed in range(200)} & set(task_ids)
    assert task_ids[: len(set(task_ids))] == list(dict.fromkeys(task_ids))


def test_multi_turn_tasks_are_refused_with_a_hint():
    with pytest.raises(ValueError, match=r"needs tools: set agent_runner.path"):
        registry.make("verifiers", {"id": "vf_shop"})
    env = registry.make("verifiers", {"id": "vf_shop", "played_by": "agent"})
    observation, _ = env.reset(seed=1)
    assert json.loads(observation)["taskset"] == {"id": "vf_shop"}
    with pytest.raises(RuntimeError, match="verifiers runs the episodes"):
        env.step("tea")


@pytest.mark.parametrize(
    ("env_config", "message"),
    [
        ({"id": "vf_nothing"}, "taskset 'vf_nothing' not found"),
        ({"id": "vf_sums", "taskset": {"sise": 3}}, "sise"),
        (
            {"id": "vf_shop", "played_by": "agent", "num_tasks": 2, "split": "held_out"},
            "has no task of split 'held_out'",
        ),
        ({"id": "vf_endless"}, "is unbounded: set num_tasks"),
    ],
)
def test_an_unknown_env_or_setting_is_named(env_config: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        registry.make("verifiers", env_config)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(ValueError, match=r"uv pip install 'offbeat\[verifiers\]'"):
        registry.make("verifiers", {"id": "vf_sums"})
