"""The learner's buffer client.

Groups are redelivered in stream order until acknowledged or dropped.
"""

import heapq
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgpack
from redis import Redis

from offbeat.services.buffer.admin import snapshot_from
from offbeat.services.buffer.api import Boundary, Counters, Snapshot
from offbeat.services.buffer.config import Order
from offbeat.services.buffer.scripts import (
    BufferKeys,
    BufferScripts,
    group_id_of,
    translate_errors,
)
from offbeat.services.errors import CodecError
from offbeat.services.live_settings import decode_change, encode_change
from offbeat.services.messages.codec import decode_trajectory
from offbeat.services.messages.types import Group, Trajectory
from offbeat.services.redis.connection import MAX_BLOCK_S

logger = logging.getLogger(__name__)

MAX_PREFETCHED_GROUPS = 16
"""Groups per round trip."""
STOP_STATES = (b"stopped", b"killed")
"""Desired states that end the learner."""


class RedisLearnerBuffer:
    """`LearnerBuffer` on Redis, with the lease's `epoch` in every write.

    Methods raise RetryableError while Redis does not answer (repeatable); writes raise FencedError if a newer learner
    holds the run.
    """

    def __init__(self, redis: Redis, run_id: str, epoch: int, *, order: Order = "completion") -> None:
        self._redis = redis
        self._run_id = run_id
        self._epoch = epoch
        self._keys = BufferKeys(run_id)
        self._run = BufferScripts(redis, run_id)
        self._last = "0-0"
        self._by_admission = order == "admission"
        self._prefetched: deque[list[Any]] = deque()
        """Prefetched groups, in stream order."""
        self._out_of_order: list[tuple[int, Group]] = []
        """Heap by number of groups that wait for active groups with lower numbers."""

    @property
    def epoch(self) -> int:
        return self._epoch

    def take(self, timeout_s: float, num_groups: int = 1) -> Group | None:
        """Take a group; undecodable ones are quarantined and dropped as `corrupt`."""
        deadline = time.monotonic() + timeout_s
        while True:
            if self._prefetched:
                group = self._decode_group(self._prefetched.popleft())
                if group is not None and not self._by_admission:
                    return group
                if group is not None:
                    heapq.heappush(self._out_of_order, (group.number, group))
                continue
            position = self._newest_notification() if self._out_of_order else ""
            reply = self._run("take", self._epoch, self._last, min(max(num_groups, 1), MAX_PREFETCHED_GROUPS))
            if not isinstance(reply, int):
                self._last = reply[-1][0].decode()
                self._prefetched.extend(reply)
                continue
            if self._out_of_order and (reply < 0 or self._out_of_order[0][0] < reply):
                return heapq.heappop(self._out_of_order)[1]
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return None
            if self._out_of_order:  # the awaited group may also end without entering the stream
                self._wait(self._keys.doorbell, position, remaining_s)
            else:
                self._wait(self._keys.stream, self._last, remaining_s)

    def drop(self, group: Group, reason: str) -> None:
        self._run("finish", self._epoch, "dropped", reason, "", "", group.entry_id)

    def ack(self, entry_ids: Sequence[str], step: int) -> int:
        return int(self._run("finish", self._epoch, "trained", step, "", "", *entry_ids))

    def adopt(self, step: int) -> Boundary:
        paused, desired, flat = self._run("adopt", self._epoch, step)
        changes = tuple(decode_change(flat[i], int(flat[i + 1])) for i in range(0, len(flat), 2))
        return Boundary(changes, bool(paused), desired in STOP_STATES)

    def suggest(self, step: int, values: Mapping[str, float], why: str, *, if_lost: bool = False) -> bool:
        """Request settings before `adopt(step)`; return False if the step was decided before or its weights exist.

        if_lost: only if Redis has no earlier request.
        """
        change = encode_change(values, time.time(), why)
        return bool(self._run("suggest", self._epoch, step, change, "lost" if if_lost else ""))

    def teach(self, state: str) -> None:
        self._run("teach", self._epoch, state)

    def num_playing(self) -> int:
        return self.snapshot().playing

    def restore(self, num_trained: int, next_number: int | None = None) -> int:
        """Reconcile the ledger with the resumed checkpoint, after its `ack`.

        If Redis lost its data, `num_trained` groups (step * groups_per_step) count as admitted and trained, and numbers
        continue at `next_number` (default: `num_trained`). Groups of newer, lost checkpoints are dropped as `rewound`
        and replaced.

        Returns:
            Groups added (positive) or dropped (negative); 0 in an ordinary restart.
        """
        return int(self._run("restore", self._epoch, num_trained, "" if next_number is None else next_number))

    def start_eval(self, eval_id: str, num_episodes: int, *, sampling_name: str, min_version: int) -> None:
        self._run("start_eval", self._epoch, f"e:{eval_id}", num_episodes, sampling_name, min_version)

    def eval_result(self, eval_id: str) -> list[Trajectory] | None:
        """Return the decodable trajectories by number.

        Raises:
            BufferError: no such evaluation.
        """
        flat = self._run("eval_result", f"e:{eval_id}")
        if flat is None:
            return None
        trajectories: list[Trajectory] = []
        for index, blob in sorted((int(flat[i]), flat[i + 1]) for i in range(0, len(flat), 2)):
            try:
                trajectories.append(decode_trajectory(blob))
            except CodecError as error:
                logger.warning("evaluation %s: episode %d skipped, it can't be decoded: %s", eval_id, index, error)
        return trajectories

    def wait_eval(self, eval_id: str, timeout_s: float) -> list[Trajectory] | None:
        deadline = time.monotonic() + timeout_s
        while True:
            position = self._newest_notification()
            trajectories = self.eval_result(eval_id)
            remaining_s = deadline - time.monotonic()
            if trajectories is not None or remaining_s <= 0:
                return trajectories
            self._wait(self._keys.doorbell, position, remaining_s)

    def forget_eval(self, eval_id: str) -> None:
        self._run("forget_eval", self._epoch, f"e:{eval_id}")

    def counters(self) -> Counters:
        return self.snapshot().counters

    def snapshot(self) -> Snapshot:
        return snapshot_from(self._run("snapshot"))

    def _decode_group(self, row: Sequence[Any]) -> Group | None:
        entry_id, number, version, temperature, packed = row
        flat = msgpack.unpackb(packed, raw=True)
        members = {int(flat[i]): flat[i + 1] for i in range(0, len(flat), 2)}
        trajectories: list[Trajectory] = []
        unreadable: dict[int, str] = {}
        for index in sorted(members):
            try:
                trajectories.append(self._decode_member(number, index, members[index]))
            except CodecError as error:
                unreadable[index] = str(error)
        if len({(t.tag, t.seed) for t in trajectories}) > 1:
            unreadable = dict.fromkeys(members, "siblings of different tags or seeds")
        if unreadable or not trajectories:
            reason = next(iter(unreadable.values()), "no trajectories")
            logger.error("group %d dropped, it can't be decoded: %s", number, reason)
            self._run("finish", self._epoch, "dropped", "corrupt", reason, ",".join(map(str, unreadable)), entry_id)
            return None
        first = trajectories[0]
        group_id = group_id_of(self._run_id, number)
        return Group(
            entry_id.decode(),
            group_id,
            number,
            first.tag,
            first.seed,
            version,
            tuple(trajectory for trajectory in trajectories if not trajectory.baseline),
            float(temperature) if temperature else None,
            tuple(trajectory for trajectory in trajectories if trajectory.baseline),
        )

    def _decode_member(self, number: int, index: int, blob: bytes) -> Trajectory:
        trajectory = decode_trajectory(blob)
        expected = (group_id_of(self._run_id, number), index)
        if (trajectory.group_id, trajectory.index) != expected:
            raise CodecError(f"{trajectory.group_id}/{trajectory.index} is stored as {expected[0]}/{index}")
        return trajectory

    def _newest_notification(self) -> str:
        with translate_errors():
            entries = cast(list[Any], self._redis.xrevrange(self._keys.doorbell, count=1))
        return entries[0][0].decode() if entries else "0-0"

    def _wait(self, stream: str, after: str, timeout_s: float) -> None:
        block_ms = max(1, int(min(timeout_s, MAX_BLOCK_S) * 1000))
        with translate_errors():
            self._redis.xread({stream: after}, count=1, block=block_ms)
