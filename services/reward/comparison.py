"""Comparison of a group's members by one reward."""

import asyncio
import random
from itertools import combinations

from offbeat.services.reward.caller import RewardCaller
from offbeat.services.reward.kinds.config import RewardConfig
from offbeat.services.reward.kinds.model_config import LlmJudgeConfig
from offbeat.services.reward.sample import GroupSample

TIE = 0.5
"""Value of an answer with none to compare it with."""


class GroupComparison:
    def __init__(self, config: RewardConfig, caller: RewardCaller[GroupSample, list[float]]) -> None:
        self._config = config
        self.caller = caller

    async def score(self, sample: GroupSample) -> list[float]:
        """Return a value for each member.

        Raises:
            RewardError: a call failed; the others are cancelled.
        """
        config = self._config
        if not isinstance(config, LlmJudgeConfig):
            return await self.caller.score(sample)
        if len(sample.members) == 1:
            return [TIE]
        if config.compare == "ranking":
            return await self.caller.score(sample)
        pairs = draw_pairs(len(sample.members), config.num_partners, sample.seed)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {pair: group.create_task(self._compare(sample, pair)) for pair in pairs}
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return win_rates(len(sample.members), {pair: task.result() for pair, task in tasks.items()})

    async def _compare(self, sample: GroupSample, pair: tuple[int, int]) -> float:
        """Return the first one's value; equal answers tie without a call."""
        two = GroupSample([sample.members[place] for place in pair])
        one, other = two.answers
        return TIE if one == other else (await self.caller.score(two))[0]


def draw_pairs(count: int, num_partners: int | None, seed: int) -> list[tuple[int, int]]:
    """Return the pairs to compare among `count` members, each with `num_partners` others (one has one more if both
    numbers are odd), or with all.

    In a circle of the members, shuffled by the seed, each one's partners are its neighbours, and for an odd number the
    opposite one.
    """
    if num_partners is None or num_partners >= count - 1:
        return list(combinations(range(count), 2))
    circle = list(range(count))
    random.Random(seed).shuffle(circle)
    places = [(at, at + step) for step in range(1, num_partners // 2 + 1) for at in range(count)]
    if num_partners % 2:
        places += [(at, at + count // 2) for at in range((count + 1) // 2)]
    return [(circle[one], circle[other % count]) for one, other in places]


def win_rates(count: int, wins: dict[tuple[int, int], float]) -> list[float]:
    """Return the mean of each member's comparisons. wins: pair -> 1 if its first member is better, .5 for a tie."""
    values: list[list[float]] = [[] for _ in range(count)]
    for (one, other), won in wins.items():
        values[one].append(won)
        values[other].append(1.0 - won)
    return [sum(each) / len(each) for each in values]
