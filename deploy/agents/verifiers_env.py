"""Agent that runs an episode with verifiers: its harness, tools, users, runtimes and rewards, with the policy as the model.

Requires `env_type: verifiers` and `played_by: agent`.
"""

import asyncio
import json
import os
from functools import cache
from typing import Any

from offbeat.envs.optional_imports import require
from offbeat.services.rollout.agents.task import AgentTask

KEY_NAME = "OFFBEAT_EPISODE_KEY"
"""Environment variable from which verifiers' client reads the episode's key; a process runs one episode at a time."""
ALONE: dict[str, Any] = {"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}
"""A chat loop with the task's tools on this machine; verifiers' own default is a box of Prime's cloud."""


def play(task: AgentTask) -> dict[str, Any]:
    """Run one task.

    Raises:
        RuntimeError: verifiers failed; the message is its own.
    """
    return asyncio.run(_play(task, json.loads(task.observation)))


async def _play(task: AgentTask, order: dict[str, Any]) -> dict[str, Any]:
    vf = require("verifiers.v1", "verifiers")
    env, row = _loaded(json.dumps([order["environment"] or ALONE, order["taskset"]]), order["idx"])
    os.environ[KEY_NAME] = task.api_key
    client = vf.EvalClientConfig(base_url=task.base_url, api_key_var=KEY_NAME)
    async with env.serving():
        episode = await env.run_slot(env.slots(row)[0], vf.ModelContext(task.model, client))
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "verifiers gave up")
    played = [trace for trace in episode.traces if trace.agent.trainable]
    reward = sum(float(trace.reward) for trace in played)
    metrics = {name: float(value) for trace in played for name, value in trace.metrics.items() if value is not None}
    return {"reward": reward, "metrics": {**metrics, "success": float(reward >= order["success_reward"])}}


@cache
def _loaded(settings: str, idx: int) -> tuple[Any, Any]:
    """Return the env and the task, cached: a process runs many episodes of few tasks.

    settings: JSON, the `[env]` block and the taskset.
    """
    vf = require("verifiers.v1", "verifiers")
    environment, taskset = json.loads(settings)
    env = vf.load_environment(vf.resolve_env_config({**environment, "taskset": taskset}))
    return env, next(task for task in env.taskset if task.data.idx == idx)
