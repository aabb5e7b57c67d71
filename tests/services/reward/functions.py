"""Reward functions of a user."""

import asyncio
import time

from offbeat.services.reward.sample import RewardSample


def length(sample: RewardSample, scale: float = 1.0) -> float:
    return scale * len(sample.response)


async def waiting_length(sample: RewardSample) -> float:
    await asyncio.sleep(0)
    return float(len(sample.response))


def is_long(sample: RewardSample) -> bool:
    return len(sample.response) > 3


def hang(sample: RewardSample) -> float:
    del sample
    time.sleep(30)
    return 1.0


def fail(sample: RewardSample) -> float:
    raise KeyError(sample.response)


def stop(sample: RewardSample) -> float:
    raise SystemExit(sample.response)


def answer(sample: RewardSample) -> object:
    return {"nan": float("nan"), "none": None, "text": "1.0", "list": [1.0]}[sample.response]


NUMBER = 3


def sleep_as_told(sample: RewardSample) -> float:
    time.sleep(float(sample.response))
    return 1.0
