"""Samples and functions of the tests."""

import asyncio
from typing import Any

from pydantic import TypeAdapter

from offbeat.services.reward.config import AnyReward
from offbeat.services.reward.factory import build_function
from offbeat.services.reward.function import RewardFunction
from offbeat.services.reward.sample import GroupSample, RewardSample, as_member

ADAPTER: TypeAdapter[Any] = TypeAdapter(AnyReward)


def sample(response: str, truth: Any = None, **fields: Any) -> RewardSample:
    return RewardSample([{"role": "user", "content": "Why?"}], response, ground_truth=truth, **fields)


def group_of(*responses: str, seed: int = 0, **fields: Any) -> GroupSample:
    members = [as_member(sample(response, **fields), {"length": float(len(response))}, 0.0) for response in responses]
    return GroupSample(members, seed)


def config_of(kind: str, **settings: Any) -> Any:
    return ADAPTER.validate_python({"name": "r", "kind": kind, **settings}, strict=False)


async def score_once(function: RewardFunction, a_sample: RewardSample) -> float:
    try:
        return await function.score(a_sample)
    finally:
        await function.close()


def score(kind: str, response: str, truth: Any = None, row: Any = None, **settings: Any) -> float:
    """Score by a new function of the kind."""
    a_sample = sample(response, truth, row=row or {})

    async def main() -> float:
        return await score_once(build_function(config_of(kind, **settings)), a_sample)

    return asyncio.run(main())
