"""Agent that runs verifiers' episodes; requires `env_type: verifiers`, `played_by: agent`."""

import asyncio
import json
import os
from collections.abc import Iterator
from functools import cache
from typing import Any

from offbeat.envs.optional_imports import require
from offbeat.services.rollout.agents.task import AgentTask

KEY_NAME = "OFFBEAT_EPISODE_KEY"
"""Environment variable with the running episode's API key."""
DEFAULT_ENVIRONMENT: dict[str, Any] = {"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}
"""Local, unlike verifiers' default."""


def play(task: AgentTask) -> dict[str, Any]:
    """Run one task.

    Raises:
        RuntimeError: verifiers failed.
    """
    return asyncio.run(_play(task, json.loads(task.observation)))


async def _play(task: AgentTask, request: dict[str, Any]) -> dict[str, Any]:
    vf = require("verifiers.v1", "verifiers")
    env, unread, tasks = _load(json.dumps([request["environment"] or DEFAULT_ENVIRONMENT, request["taskset"]]))
    try:
        while request["idx"] not in tasks:
            row = next(unread)
            tasks[row.data.idx] = row
    except Exception:
        _load.cache_clear()  # an iterator that has failed gives no more
        raise
    row = tasks[request["idx"]]
    os.environ[KEY_NAME] = task.api_key
    client = vf.EvalClientConfig(base_url=task.base_url, api_key_var=KEY_NAME)
    async with env.serving():
        episode = await env.run_slot(env.slots(row)[0], vf.ModelContext(task.model, client))
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "verifiers gave up")
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    reward = sum(float(trace.reward) for trace in traces)
    metrics = {name: float(value) for trace in traces for name, value in trace.metrics.items() if value is not None}
    return {"reward": reward, "metrics": {**metrics, "success": float(reward >= request["success_reward"])}}


@cache
def _load(settings: str) -> tuple[Any, Iterator[Any], dict[int, Any]]:
    """Load an env once per process; return it with an iterator over its tasks, and those read so far by `idx`."""
    vf = require("verifiers.v1", "verifiers")
    environment, taskset = json.loads(settings)
    env = vf.load_environment(vf.resolve_env_config({**environment, "taskset": taskset}))
    return env, iter(env.taskset), {}
