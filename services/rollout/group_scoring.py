"""Rewards of complete groups, as a claimed task of their own.

Invariant: a group is submitted with all its rewards, or its task fails by reason, which the buffer tries again.
"""

import time

from offbeat.services.buffer.api import RolloutBuffer, SubmitResult
from offbeat.services.messages.types import EpisodeTask
from offbeat.services.retry import retry_until_answered
from offbeat.services.reward.sample import decode_member
from offbeat.services.rollout.metrics import WorkerMetrics
from offbeat.services.rollout.rewards import EpisodeRewards
from offbeat.services.rollout.slots import Slot
from offbeat.services.rollout.wait_status import Wait, Waiting


class GroupScoring:
    def __init__(self, worker_id: str, buffer: RolloutBuffer, rewards: EpisodeRewards, reporter: WorkerMetrics) -> None:
        self._worker_id = worker_id
        self._buffer = buffer
        self._rewards = rewards
        self._reporter = reporter

    async def run(self, task: EpisodeTask, tag: str, slot: Slot, waiting: Waiting) -> SubmitResult:
        """Score and submit a group, lending its slot; raises RewardError."""
        slot.lend()
        waiting.enter(Wait.REWARD)
        blobs = await retry_until_answered(lambda: self._buffer.samples(self._worker_id, task))
        if not blobs:
            return SubmitResult.LATE
        began = time.monotonic()
        members = [decode_member(blob) for blob in blobs.values()]
        additions = await self._rewards.compare(members, task.number)
        self._reporter.group_scored(tag, members, additions, time.monotonic() - began)
        waiting.enter(Wait.BUFFER)
        by_index = dict(zip(blobs, additions, strict=True))
        return await retry_until_answered(lambda: self._buffer.score_group(self._worker_id, task, by_index))
