"""Processes of external agents: reused while healthy, killed with all descendants.

Invariants: at most `num_agents` of a tag run; cancelled or timed-out agents and ended commands leave no process.
"""

import asyncio
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from offbeat.services.awake_clock import AwakeClock
from offbeat.services.errors import EpisodeError
from offbeat.services.rollout.agents.process import AgentProcess
from offbeat.services.rollout.agents.task import AgentTask
from offbeat.services.rollout.child_process import ChildProcess
from offbeat.services.rollout.config import AgentRunner

COMMAND_MODULE = "offbeat.services.rollout.agents.command_main"


@dataclass(frozen=True, slots=True)
class AgentOutcome:
    reward: float | None = None
    answer: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


class AgentPool:
    def __init__(self, clock: AwakeClock | None = None) -> None:
        """clock: of episodes' time."""
        self._clock = clock or AwakeClock()
        self._processes: defaultdict[str, list[AgentProcess]] = defaultdict(list)
        self._limiters: dict[str, asyncio.Semaphore] = {}

    def limiter(self, tag: str, runner: AgentRunner) -> asyncio.Semaphore:
        """Return the semaphore of a tag's episodes, acquired before the episode's time limit begins."""
        return self._limiters.setdefault(tag, asyncio.Semaphore(runner.num_agents))

    async def run(self, runner: AgentRunner, task: AgentTask) -> AgentOutcome:
        """Run an episode.

        Raises:
            EpisodeError: `agent_error`, `agent_timeout`, `agent_crashed` or `agent_result`.
        """
        if runner.command:
            return outcome_of(await _run_command(runner, task, self._clock))
        process = self._take(runner, task.tag)
        try:
            return outcome_of(await process.ask(runner.path, task.plain(), runner.timeout_s))
        finally:
            if not process.healthy and process in self._processes[task.tag]:
                self._processes[task.tag].remove(process)

    def _take(self, runner: AgentRunner, tag: str) -> AgentProcess:
        """Assign the fullest process with room, or a new one."""
        free = [process for process in self._processes[tag] if process.is_free]
        if free:
            return max(free, key=lambda process: process.num_episodes)
        process = AgentProcess(runner.python, runner.episodes_per_process, runner.cancel_grace_s, self._clock)
        self._processes[tag].append(process)
        return process

    async def close(self) -> None:
        processes = [process for each in self._processes.values() for process in each]
        self._processes.clear()
        await asyncio.gather(*(process.kill() for process in processes))


async def _run_command(runner: AgentRunner, task: AgentTask, clock: AwakeClock) -> Any:
    child = ChildProcess(COMMAND_MODULE, "agent_crashed", clock=clock)
    try:
        await child.start()
        return await child.ask("run", runner.timeout_s, list(runner.command), task.plain())
    except EpisodeError as error:
        reason = {"run_error": "agent_error", "run_timeout": "agent_timeout"}.get(error.reason, error.reason)
        raise EpisodeError(reason, error.detail, error.trace) from error
    finally:
        await asyncio.shield(child.kill())


def outcome_of(returned: Any) -> AgentOutcome:
    """Parse an agent's return value: number, string, object or None.

    Raises:
        EpisodeError: anything else.
    """
    if returned is None:
        return AgentOutcome()
    if isinstance(returned, str):
        return AgentOutcome(answer=_text(returned))
    if isinstance(returned, int | float):
        return AgentOutcome(reward=_finite("reward", returned))
    if isinstance(returned, dict):
        result = cast(dict[str, Any], returned)
        unknown = set(result) - {"reward", "answer", "metrics"}
        metrics = result.get("metrics") or {}
        if not unknown and isinstance(metrics, dict):
            reward, answer = result.get("reward"), result.get("answer")
            return AgentOutcome(
                None if reward is None else _finite("reward", reward),
                None if answer is None else _text(str(answer)),
                {str(name): _finite(str(name), value) for name, value in cast(dict[str, Any], metrics).items()},
            )
    raise EpisodeError(
        "agent_result",
        f"the agent returned {returned!r}: a reward, an answer, None, or an object of reward, answer and metrics is needed",
    )


def _finite(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise EpisodeError("agent_result", f"the agent's {name} is {value!r}: a finite number is needed")
    return float(value)


def _text(answer: str) -> str:
    try:
        answer.encode()
    except UnicodeEncodeError as error:
        raise EpisodeError("agent_result", f"the agent's answer is no text: {error}") from error
    return answer
