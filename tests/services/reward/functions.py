"""Reward functions of a user."""

import asyncio
import time
from collections.abc import Sequence

from offbeat.services.reward.sample import GroupMember, RewardSample


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


def shortness(samples: Sequence[GroupMember], scale: float = 1.0) -> list[float]:
    return [scale / len(sample.response) for sample in samples]


async def gap_to_best(samples: Sequence[GroupMember]) -> list[float]:
    """The distance to the group's best `length` and own reward."""
    totals = [sample.rewards.get("length", 0.0) + sample.own_reward for sample in samples]
    return [total - max(totals) for total in totals]


def answers_of_group(samples: Sequence[GroupMember]) -> object:
    results = {
        "few": [1.0],
        "number": 1.0,
        "text": "ab",
        "nan": [1.0, float("nan")],
        "mapping": {0: 0.5, 1: 0.25},
        "set": {0.5, 0.25},
    }
    return results[samples[0].response]


def told(samples: Sequence[GroupMember]) -> object:
    """Four over each answer's length, or what the first answer names."""
    return answers_of_group(samples) if samples[0].response == "few" else shortness(samples, 4.0)
