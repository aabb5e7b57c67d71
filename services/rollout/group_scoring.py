"""Rewards of complete groups, as a claimed task of their own.

Invariant: a group is submitted with all its rewards, or its task fails by reason, which the buffer tries again.
"""

import time
from collections.abc import Mapping

from offbeat.services.buffer.api import RolloutBuffer, SubmitResult
from offbeat.services.buffer.members import Addition
from offbeat.services.messages.types import EpisodeTask
from offbeat.services.retry import retry_until_answered
from offbeat.services.reward.sample import decode_member
from offbeat.services.rollout.metrics import WorkerMetrics
from offbeat.services.rollout.rewards import EpisodeRewards
from offbeat.services.rollout.slots import Slot
from offbeat.services.rollout.wait_status import Wait, Waiting


class GroupScoring:
    def __init__(
        self, worker_id: str, buffer: RolloutBuffer, rewards: EpisodeRewards | None, reporter: WorkerMetrics
    ) -> None:
        """rewards: None: of a run that was resumed without rewards, whose groups get none."""
        self._worker_id = worker_id
        self._buffer = buffer
        self._rewards = rewards
        self._reporter = reporter

    async def run(self, task: EpisodeTask, tag: str, slot: Slot, waiting: Waiting) -> SubmitResult:
        """Score and submit a group, lending its slot; raises RewardError."""
        slot.lend()
        waiting.enter(Wait.REWARD)
        mark, blobs = await retry_until_answered(lambda: self._buffer.samples(self._worker_id, task))
        if not blobs:
            return SubmitResult.LATE
        if self._rewards is None:
            return await self._complete(task, {}, mark, waiting)
        began = time.monotonic()
        members = [decode_member(blob) for blob in blobs.values()]
        additions = await self._rewards.compare(members, task.number)
        seconds = time.monotonic() - began
        result = await self._complete(task, dict(zip(blobs, additions, strict=True)), mark, waiting)
        if result is SubmitResult.COMPLETED:
            self._reporter.group_scored(tag, members, additions, seconds)
        return result

    async def _complete(
        self, task: EpisodeTask, additions: Mapping[int, Addition], mark: str, waiting: Waiting
    ) -> SubmitResult:
        waiting.enter(Wait.BUFFER)
        return await retry_until_answered(lambda: self._buffer.score_group(self._worker_id, task, additions, mark))
