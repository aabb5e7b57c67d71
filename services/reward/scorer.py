"""Scores of a response by every reward of its tag.

Invariant: each gives a finite value, or the sample fails by `RewardError`; no failure counts as zero.
"""

import asyncio
import math
from collections.abc import Mapping

from offbeat.services.reward.caller import RewardCaller
from offbeat.services.reward.config import RewardsConfig
from offbeat.services.reward.errors import Failure, RewardError
from offbeat.services.reward.sample import RewardSample


class RewardScorer:
    def __init__(self, config: RewardsConfig, callers: Mapping[str, RewardCaller]) -> None:
        self._config = config
        self._callers = callers

    async def score(self, sample: RewardSample) -> dict[str, float]:
        """Return each reward of the sample's tag by name, unweighted.

        Raises:
            RewardError: one failed; the others are cancelled.
        """
        names = self.names(sample.tag)
        if not names:
            raise RewardError(Failure.NO_REWARD, f"no reward scores tag {sample.tag!r}")
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {name: group.create_task(self.score_one(name, sample)) for name in names}
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return {name: task.result() for name, task in tasks.items()}

    def names(self, tag: str) -> list[str]:
        return [reward.name for reward in self._config.of_tag(tag)]

    async def score_one(self, name: str, sample: RewardSample) -> float:
        """Raises RewardError."""
        return await self._callers[name].score(sample)

    @property
    def num_hung(self) -> int:
        return sum(caller.num_hung for caller in self._callers.values())

    def take_failures(self) -> dict[str, int]:
        """Return and reset the attempts without a value, by `reward/reason`."""
        counts = {f"{name}/{reason}": n for name, each in self._callers.items() for reason, n in each.failures.items()}
        for caller in self._callers.values():
            caller.failures.clear()
        return counts

    def combine(self, values: Mapping[str, float]) -> float:
        """Combine what `score` returned."""
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
        for caller in self._callers.values():
            await caller.close()
