import contextlib
import json
import math
import os
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pytest

from offbeat import AgentTask
from offbeat.testing import FakeModel, RecordingTracker, assert_env, deliver, run_episode, step_record
from tests.fakes_rollout import CountingEnv


def ask(task: AgentTask, messages: list[dict[str, Any]], **parameters: Any) -> dict[str, Any]:
    """One call of OpenAI's chat completions, by the standard library; returns the choice."""
    body = json.dumps({"model": task.model, "messages": messages, **parameters}).encode()
    headers = {"Authorization": f"Bearer {task.api_key}", "Content-Type": "application/json"}
    with urlopen(Request(f"{task.base_url}/chat/completions", body, headers)) as response:
        return json.loads(response.read())["choices"][0]


def complete(task: AgentTask, messages: list[dict[str, str]]) -> str:
    return ask(task, messages)["message"]["content"]


def agent(task: AgentTask) -> float:
    """An agent as a user would write it; returns the episode's reward."""
    messages = [{"role": "user", "content": task.observation}]
    reward, done = 0.0, False
    while not done:
        answer = complete(task, messages)
        reply = task.step(answer)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": reply.observation}]
        reward, done = reward + reply.reward, reply.done
    return reward


def test_a_fake_model_takes_images():
    url = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"
    shown = {"type": "image_url", "image_url": {"url": url}}
    with FakeModel(["Left"]) as model:
        task = model.task("frozen_lake")
        for count in (0, 1, 3):
            content = [{"type": "text", "text": "a"}, *[shown] * count]
            assert complete(task, [{"role": "user", "content": content}]) == "Left"


def test_an_agent_runs_against_a_fake_model_and_a_real_env():
    with FakeModel(["Right", "Right", "Down", "Down", "Right", "Down"]) as model:
        assert agent(model.task("frozen_lake", seed=1)) == 1.0


def test_an_agent_steps_in_a_process_with_many_open_files():
    with FakeModel(["Right"]) as model, contextlib.ExitStack() as files:
        assert agent(model.task("frozen_lake", seed=1, max_steps=1)) == 0.0  # opens what is opened once
        while files.enter_context(open(os.devnull)).fileno() <= 1024:
            pass
        assert agent(model.task("frozen_lake", seed=1, max_steps=3)) == 0.0


def test_each_task_of_a_fake_model_starts_its_script_anew():
    with FakeModel(["Down"]) as model:
        assert agent(model.task("frozen_lake", seed=1)) == 0.0  # a hole
        assert agent(model.task("frozen_lake", seed=1, max_steps=1)) == 0.0


class UnboundedEnv(CountingEnv):
    system_prompt = None  # type: ignore[assignment]

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated, truncated, {**info, "distance": math.inf, "success": np.bool_(True)}


def test_a_fake_models_episode_ends_as_in_a_run():
    """An answer is cut at max_tokens, no step follows the last one, and metrics are finite, of numpy's types, too."""
    with FakeModel(["Right"]) as model:
        task = model.task(f"{__name__}:UnboundedEnv", {"length": 1})
        assert ask(task, [{"role": "user", "content": "a"}], max_tokens=2)["finish_reason"] == "length"
        assert ask(task, [{"role": "user", "content": "a"}])["finish_reason"] == "stop"
        assert task.system_prompt == ""
        reply = task.step("Right")
        assert (reply.done, "total" in reply.metrics, "distance" in reply.metrics) == (True, True, False)
        assert reply.metrics["success"] == 1.0
        with pytest.raises(RuntimeError, match="the episode is over"):
            task.step("Right")


def test_a_fake_model_without_completions_is_refused():
    with pytest.raises(ValueError, match="at least one completion"):
        FakeModel([])


def test_assert_env_lists_the_problems():
    with pytest.raises(AssertionError, match="settings: "):
        assert_env("frozen_lake", {"no_such_setting": 1})


def test_an_episode_stops_when_the_env_ends_it():
    trace = run_episode("frozen_lake", ["Down", "Down", "Down"], seed=1)
    assert (len(trace.rewards), len(trace.observations), trace.terminated) == (1, 2, True)


def test_a_rejected_row_is_dropped_and_the_next_delivered(tmp_path):
    tracker = RecordingTracker(rejects=[1])
    deliver(tracker, step_record(1, reward=1.0), step_record(2, reward=2.0), folder=tmp_path)
    deliver(tracker, step_record(3, reward=3.0), folder=tmp_path)
    assert tracker.numbers == [2, 3]
