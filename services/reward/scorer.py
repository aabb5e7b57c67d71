"""Scores of a response, or of a group of them, by every reward of its tag.

Invariant: each gives a finite value, or the sample fails by `RewardError`; no failure counts as zero.
"""

import asyncio
import math
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from offbeat.services.reward.caller import RewardCaller
from offbeat.services.reward.comparison import GroupComparison
from offbeat.services.reward.config import RewardsConfig
from offbeat.services.reward.errors import Failure, RewardError
from offbeat.services.reward.sample import GroupSample, RewardSample

ResultT = TypeVar("ResultT")


class RewardScorer:
    def __init__(
        self,
        config: RewardsConfig,
        callers: Mapping[str, RewardCaller],
        comparisons: Mapping[str, GroupComparison],
    ) -> None:
        """comparisons: by name; rewards of a group without one are left out."""
        self._config = config
        self._callers = callers
        self._comparisons = comparisons

    async def score(self, sample: RewardSample) -> dict[str, float]:
        """Return each reward that scores a sample of its tag alone by name, unweighted.

        Raises:
            RewardError: one failed; the others are cancelled.
        """
        if not self._config.of_tag(sample.tag):
            raise RewardError(Failure.NO_REWARD, f"no reward scores tag {sample.tag!r}")
        return await _gather({name: self.score_one(name, sample) for name in self.names(sample.tag)})

    async def score_group(self, sample: GroupSample) -> list[dict[str, float]]:
        """Return for each member the rewards that compare it with the others, by name, unweighted.

        Raises:
            RewardError: one failed; the others are cancelled.
        """
        names = self.group_names(sample.members[0].tag)
        values = await _gather({name: self.compare(name, sample) for name in names})
        return [{name: values[name][place] for name in names} for place in range(len(sample.members))]

    def names(self, tag: str) -> list[str]:
        return [reward.name for reward in self._config.of_tag(tag) if not reward.is_of_group]

    def group_names(self, tag: str) -> list[str]:
        return [reward.name for reward in self._config.of_tag(tag) if reward.name in self._comparisons]

    async def compare(self, name: str, sample: GroupSample) -> list[float]:
        """Raises RewardError."""
        return await self._comparisons[name].score(sample)

    async def score_one(self, name: str, sample: RewardSample) -> float:
        """Raises RewardError."""
        return await self._callers[name].score(sample)

    @property
    def num_hung(self) -> int:
        return sum(caller.num_hung for caller in self._all_callers().values())

    def take_failures(self) -> dict[str, int]:
        """Return and reset the attempts without a value, by `reward/reason`."""
        callers = self._all_callers()
        counts = {f"{name}/{reason}": n for name, each in callers.items() for reason, n in each.failures.items()}
        for caller in callers.values():
            caller.failures.clear()
        return counts

    def combine(self, values: Mapping[str, float]) -> float:
        """Combine what `score`, and `score_group` for a member, returned; 0 without a value."""
        if not values:
            return 0.0
        rewards = [reward for reward in self._config.rewards if reward.name in values]
        match self._config.combine:
            case "weighted":
                return sum(reward.weight * values[reward.name] for reward in rewards)
            case "product":
                return math.prod(values.values())
            case "gate":
                gates = [reward for reward in rewards if reward.threshold is not None]
                if any(values[gate.name] < (gate.threshold or 0.0) for gate in gates):
                    return 0.0
                others = [reward for reward in rewards if reward.threshold is None]
                return sum(reward.weight * values[reward.name] for reward in others) if others else 1.0

    async def close(self) -> None:
        for caller in self._all_callers().values():
            await caller.close()

    def _all_callers(self) -> dict[str, RewardCaller[Any, Any]]:
        return {**self._callers, **{name: each.caller for name, each in self._comparisons.items()}}


async def _gather(calls: Mapping[str, Coroutine[Any, Any, ResultT]]) -> dict[str, ResultT]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = {name: group.create_task(call) for name, call in calls.items()}
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return {name: task.result() for name, task in tasks.items()}
