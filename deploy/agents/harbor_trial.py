"""Agent that runs Harbor's trials (0.25, Python 3.12); requires `env_type: harbor`, `played_by: agent`.

Harbor's agent calls the policy through the episode's endpoint, which captures its tokens.
"""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offbeat.envs.optional_imports import require
from offbeat.services.rollout.agents.task import AgentTask

SANDBOX = {"import_path": "offbeat.deploy.sandboxes.harbor:SandboxEnvironment"}
SHELL_AGENT = {"import_path": "offbeat.deploy.agents.harbor_shell:ShellAgent"}


async def play(task: AgentTask) -> dict[str, Any]:
    """Run one trial.

    Raises:
        RuntimeError: the trial failed before its verifier, or the reward has another name.
    """
    request = json.loads(task.observation)
    with tempfile.TemporaryDirectory() as folder:
        result = await _run(task, request, request["trials_dir"] or folder)
    if result.verifier_result is None or not result.verifier_result.rewards:
        errors = [result.exception_info, *(step.exception_info for step in result.step_results or [])]
        texts = [f"{error.exception_type}: {error.exception_message}" for error in errors if error]
        raise RuntimeError("; ".join(texts) or "Harbor's verifier gave no reward")
    rewards = {name: float(value) for name, value in result.verifier_result.rewards.items()}
    if request["reward_key"] not in rewards:
        raise RuntimeError(f"reward_key: no reward {request['reward_key']!r}; the verifier gave {', '.join(rewards)}")
    reward = rewards.pop(request["reward_key"])
    metrics = {f"reward_{name}": value for name, value in rewards.items()}
    return {"reward": reward, "metrics": {**metrics, "success": float(reward >= request["success_reward"])}}


async def _run(task: AgentTask, request: dict[str, Any], folder: str) -> Any:
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else importing it asks the network
    config = require("harbor.models.trial.config", "harbor")
    trial = require("harbor.trial.trial", "harbor").Trial
    agent = _fill(request["agent"] or SHELL_AGENT, task)
    agent.setdefault("model_name", f"openai/{task.model}")
    agent["env"] = {**task.environment(), **agent.get("env", {})}
    agent["env"].pop("OFFBEAT_TASK", None)
    running = await trial.create(
        config.TrialConfig(
            task=config.TaskConfig(path=Path(request["task_dir"])),
            trials_dir=Path(folder),
            agent=config.AgentConfig.model_validate(agent),
            environment=config.EnvironmentConfig.model_validate(
                request["environment"] or {**SANDBOX, "kwargs": {"limits": request["limits"]}}
            ),
        )
    )
    return await running.run()


def _fill(value: Any, task: AgentTask) -> Any:
    """Copy settings, filling `{base_url}`, `{anthropic_base_url}`, `{api_key}` and `{model}` in texts."""
    if isinstance(value, Mapping):
        return {name: _fill(item, task) for name, item in value.items()}
    if isinstance(value, list):
        return [_fill(item, task) for item in value]
    if isinstance(value, str):
        for name in ("anthropic_base_url", "base_url", "api_key", "model"):
            value = value.replace(f"{{{name}}}", getattr(task, name))
    return value
