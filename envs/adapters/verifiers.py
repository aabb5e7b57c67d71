"""Adapter for single-answer tasksets of verifiers (Prime Intellect, `verifiers.v1`).

Tasks beyond one answer need `played_by: agent` and `offbeat.deploy.agents.verifiers_env` as `agent_runner`.
"""

from functools import lru_cache
from hashlib import blake2b
from inspect import Parameter, signature
from json import dumps, loads
from typing import Any, ClassVar, Literal, cast

from gymnasium.utils import seeding
from pydantic import Field, JsonValue

from offbeat.envs.adapters.text import TextEnv
from offbeat.envs.config import Config
from offbeat.envs.event_loop import run_coroutine
from offbeat.envs.optional_imports import require

HELD_OUT_SHARE = 8
AGENT_HINT = "set agent_runner.path: offbeat.deploy.agents.verifiers_env:play and played_by: agent"


class VerifiersConfig(Config):
    id: str
    """Installed taskset package, such as `gsm8k` or `primeintellect/gsm8k`."""
    taskset: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """Taskset settings."""
    num_tasks: int | None = Field(default=None, ge=2)
    """Required for an unbounded taskset."""
    split: Literal["train", "held_out", "any"] = "train"
    """One task in eight is held out, by key digest."""
    played_by: Literal["policy", "agent"] = "policy"
    """`policy`: one answer ends the episode; `agent`: verifiers runs it, the env only selects the task."""
    environment: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """With `played_by: agent`: verifiers' `[env]` block without taskset (id, agents, harness, runtime)."""
    success_reward: float = 1.0
    """Minimum reward of a success."""


class VerifiersEnv(TextEnv):
    """Task of a verifiers taskset, rewarded by the weighted sum of its rewards, with its metrics in info."""

    config_class: ClassVar[type[VerifiersConfig]] = VerifiersConfig

    def __init__(self, config: VerifiersConfig) -> None:
        """Raises ValueError for an unknown taskset, or one with multi-answer tasks."""
        self._library: Any = require("verifiers.v1", "verifiers")
        self.config = config
        self._tasks = load_tasks(
            config.id, dumps(config.taskset, sort_keys=True), config.num_tasks, config.split, config.played_by
        )
        super().__init__(self._tasks[0].data.system_prompt or "")
        self._task: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._task = self._tasks[self._index(seed, self.np_random)]
        if self.config.played_by == "agent":
            return dumps(self._describe_episode()), {}
        own_prompt = self._task.data.system_prompt or ""
        prefix = f"{own_prompt}\n\n" if own_prompt != self.system_prompt else ""
        return prefix + self._task.data.prompt_text, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Score the answer; raises RuntimeError if verifiers runs the episode."""
        if self.config.played_by == "agent":
            raise RuntimeError("verifiers runs the episodes of this env: it takes no answers")
        trace = self._trace(action)
        run_coroutine(self._task.score(trace))
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        rewards = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        reward = float(trace.reward)
        return "", reward, True, False, {**metrics, **rewards, "success": reward >= self.config.success_reward}

    def task_id(self, seed: int) -> str:
        return str(self._tasks[self._index(seed, seeding.np_random(seed)[0])].key)

    def _describe_episode(self) -> dict[str, JsonValue]:
        taskset: dict[str, JsonValue] = {**self.config.taskset, "id": self.config.id}
        return {
            "taskset": taskset,
            "idx": int(self._task.data.idx),
            "environment": self.config.environment,
            "success_reward": self.config.success_reward,
        }

    def _index(self, seed: int | None, rng: Any) -> int:
        """Enumerate in evaluation, draw in training."""
        if self.config.split == "held_out" and seed is not None:
            return seed % len(self._tasks)
        return int(rng.integers(len(self._tasks)))

    def _trace(self, answer: str) -> Any:
        vf, task = self._library, self._task
        messages = [(vf.UserMessage(content=task.data.prompt_text), False), (vf.AssistantMessage(content=answer), True)]
        if task.data.system_prompt:
            messages.insert(0, (vf.SystemMessage(content=task.data.system_prompt), False))
        nodes = [
            vf.MessageNode(parent=i - 1 if i else None, message=message, sampled=sampled)
            for i, (message, sampled) in enumerate(messages)
        ]
        trace_task = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        return vf.Trace(
            task=trace_task, agent=vf.AgentInfo(config=vf.AgentConfig()), nodes=nodes, is_completed=True, ok=True
        )


@lru_cache(maxsize=8)
def load_tasks(taskset_id: str, settings: str, num_tasks: int | None, split: str, played_by: str) -> tuple[Any, ...]:
    """Return a split's read-only tasks, shared per process. settings: JSON.

    Raises ValueError for an unknown taskset, or multi-answer tasks.
    """
    vf = require("verifiers.v1", "verifiers")
    try:
        taskset = vf.load_taskset(vf.taskset_config_type(taskset_id)(**loads(settings), id=taskset_id))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"verifiers' taskset {taskset_id!r}: {error}") from error
    if num_tasks is None and not taskset.bounded:
        raise ValueError(f"verifiers' taskset {taskset_id!r} is unbounded: set num_tasks")
    tasks = list(taskset if num_tasks is None else taskset.take(num_tasks))
    for task in tasks if played_by == "policy" else ():
        if requirement := _extra_requirement(vf, taskset_id, taskset, task):
            raise ValueError(f"verifiers' taskset {taskset_id!r} needs {requirement}: {AGENT_HINT}")
    selected = tuple(task for task in tasks if split == "any" or _is_held_out(task.key) == (split == "held_out"))
    if not selected:
        raise ValueError(f"verifiers' taskset {taskset_id!r} has no task of split {split!r} among {len(tasks)}")
    return selected


def _extra_requirement(vf: Any, taskset_id: str, taskset: Any, task: Any) -> str:
    """Return the requirement beyond one answer, or ""."""
    kind, loader = cast(Any, type(task)), cast(Any, type(taskset))
    if vf.environment_class(taskset_id) is not vf.SingleAgentEnv:
        return "an Env of its own"
    if task.data.prompt is None:
        return "a user who opens the conversation"
    if any(message.role not in ("system", "user") for message in _messages(task.data.prompt)):
        return "a conversation with earlier answers"
    if kind.toolsets(task.config) or loader.toolsets(taskset.config):
        return "tools"
    if kind.NEEDS_CONTAINER or kind.setup is not vf.Task.setup or kind.finalize is not vf.Task.finalize:
        return "a runtime of its own"
    hooks = (*task.hooks("reward"), *task.hooks("metric"))
    return "a runtime to score in" if any(_takes_runtime(hook) for hook in hooks) else ""


def _messages(prompt: object) -> list[Any]:
    return cast(list[Any], prompt) if isinstance(prompt, list) else []


def _takes_runtime(hook: Any) -> bool:
    parameter = signature(hook).parameters.get("runtime")
    return parameter is not None and parameter.default is Parameter.empty


def _is_held_out(key: str) -> bool:
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big") % HELD_OUT_SHARE == 0
