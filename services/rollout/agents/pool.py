"""Processes of external agents: reused while healthy, killed with all descendants.

Invariants: at most `num_agents` of a tag run; failed, cancelled or timed-out agents and ended commands leave no process
behind.
"""

import asyncio
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from offbeat.services.errors import EpisodeError
from offbeat.services.rollout.agents.task import AgentTask
from offbeat.services.rollout.child_process import ChildProcess
from offbeat.services.rollout.config import AgentRunner

MODULE = "offbeat.services.rollout.agents.process_main"


@dataclass(frozen=True, slots=True)
class AgentOutcome:
    """An agent's parsed return value."""

    reward: float | None = None
    answer: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


class AgentPool:
    """A worker's agents."""

    def __init__(self) -> None:
        self._idle: defaultdict[str, list[ChildProcess]] = defaultdict(list)
        self._limiters: dict[str, asyncio.Semaphore] = {}

    def limiter(self, tag: str, runner: AgentRunner) -> asyncio.Semaphore:
        """Return the semaphore of a tag's concurrent episodes, acquired before the env's reset."""
        return self._limiters.setdefault(tag, asyncio.Semaphore(runner.num_agents))

    async def run(self, runner: AgentRunner, task: AgentTask) -> AgentOutcome:
        """Run an episode.

        Raises:
            EpisodeError: `agent_error`, `agent_timeout`, `agent_crashed` or `agent_result`.
        """
        child = self._idle[task.tag].pop() if self._idle[task.tag] else ChildProcess(MODULE, "agent_crashed")
        try:
            if child.pid is None:
                await child.start()
            command = ("call", runner.path) if runner.path else ("run", list(runner.command))
            returned = await child.ask(command[0], runner.timeout_s, command[1], task.plain())
        except EpisodeError as error:
            await child.kill()
            reason = {"call_error": "agent_error", "run_error": "agent_error"}.get(error.reason, error.reason)
            reason = {"call_timeout": "agent_timeout", "run_timeout": "agent_timeout"}.get(reason, reason)
            raise EpisodeError(reason, str(error), error.trace) from error
        except BaseException:
            await asyncio.shield(child.kill())
            raise
        if runner.path:
            self._idle[task.tag].append(child)
        else:
            await child.kill()
        return outcome_of(returned)

    async def close(self) -> None:
        """Kill idle processes."""
        idle = [child for children in self._idle.values() for child in children]
        self._idle.clear()
        await asyncio.gather(*(child.kill() for child in idle))


def outcome_of(returned: Any) -> AgentOutcome:
    """Parse an agent's return value: number, string, object or None.

    Raises:
        EpisodeError: anything else.
    """
    if returned is None:
        return AgentOutcome()
    if isinstance(returned, str):
        return AgentOutcome(answer=returned)
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
                None if answer is None else str(answer),
                {str(name): _finite(str(name), value) for name, value in cast(dict[str, Any], metrics).items()},
            )
    raise EpisodeError(
        "agent_result",
        f"the agent returned {returned!r}: a reward, an answer, None, or an object of reward, answer and metrics is needed",
    )


def _finite(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise EpisodeError("agent_result", f"the agent's {name} is {value!r}: a finite number is needed")
    return float(value)
