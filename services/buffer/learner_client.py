"""Learner's buffer client.

Groups are redelivered in stream order until acknowledged or dropped. After a loss in Redis, the next command first
reconciles it with the checkpoint and the groups taken since.
"""

import heapq
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgpack
from redis import Redis

from offbeat.services.buffer.admin import limit_fields, snapshot_from
from offbeat.services.buffer.api import Admission, Boundary, BufferLimits, Counters, Proof, Reconciled, Snapshot
from offbeat.services.buffer.config import Order
from offbeat.services.buffer.members import decode_member, member_numbers
from offbeat.services.buffer.scripts import (
    Argument,
    BufferKeys,
    BufferScripts,
    build_group,
    group_id_of,
    translate_errors,
)
from offbeat.services.errors import CodecError, FencedError, ReconcileError
from offbeat.services.keys import RunKeys
from offbeat.services.live_settings import Change, decode_change, encode_change
from offbeat.services.messages.codec import decode_trajectory
from offbeat.services.messages.types import Group, Trajectory
from offbeat.services.redis.connection import MAX_BLOCK_S
from offbeat.services.redis.incarnation import KnownIncarnation, number_of

logger = logging.getLogger(__name__)

MAX_PREFETCHED_GROUPS = 16
"""Groups per round trip."""
STOP_STATES = (b"stopped", b"killed")

ACK_SIZE = 2000
"""Groups per call, some 50 ms of Redis."""
LEDGER_POLL_S = 0.2
LEDGER_TIMEOUT_S = 60.0


class RedisLearnerBuffer:
    """`LearnerBuffer` on Redis; every write carries the lease's `epoch`.

    Methods raise RetryableError while Redis does not answer (repeatable); one thread calls all but
    `reconcile_if_needed`.
    """

    def __init__(
        self,
        redis: Redis,
        run_id: str,
        epoch: int,
        *,
        order: Order = "completion",
        known: KnownIncarnation | None = None,
        limits: BufferLimits | None = None,
        reclaim: Callable[[], None] = lambda: None,
    ) -> None:
        """limits: restored if lost. reclaim: recovers the lease, or raises FencedError."""
        self._reclaim = reclaim
        self._redis = redis
        self._known = known or KnownIncarnation(redis, run_id)
        self._limits = limits
        self._lock = threading.RLock()
        """Held until a reply is processed, so that a reconciliation sees all delivered groups."""
        self._prove: Callable[[], Proof] | None = None
        self._on_reconciled: Callable[[Reconciled], None] = lambda _: None
        self._unannounced: Reconciled | None = None
        self._held: dict[int, int] = {}
        """Number -> version at admission, of groups neither acknowledged nor dropped."""
        self._refilled: dict[int, tuple[int, str]] = {}
        """Number -> step and reason, of held groups that were replaced."""
        self._numbers: dict[str, int] = {}
        """Entry id as delivered -> number."""
        self._entries: dict[int, str] = {}
        """Number -> entry id in this Redis."""
        self._changes: list[tuple[str, Change]] = []
        """Adopted ones, as in Redis and decoded."""
        self._num_adopted = 0
        self._run_id = run_id
        self._epoch = epoch
        self._keys = BufferKeys(run_id)
        self._run = BufferScripts(redis, run_id)
        self._last = "0-0"
        self._by_admission = order == "admission"
        self._prefetched: deque[list[Any]] = deque()
        """In stream order."""
        self._out_of_order: list[tuple[int, Group]] = []
        """Heap by number; waits for active, lower ones."""

    @property
    def epoch(self) -> int:
        return self._epoch

    def reconcile(self, proof: Proof) -> Reconciled:
        """Without data in Redis, `proof.num_trained` groups count as admitted and trained. Groups of newer, lost
        checkpoints, and sampled ones in flight, are dropped as `rewound` and replaced; unknown numbers as `lost`.
        """
        with self._lock:
            newest = max((max(batch) for _, batch in proof.saved if batch), default=-1)
            num_known = sum(len(batch) for _, batch in proof.saved)
            next_number = max(proof.next_number, newest + 1, *(number + 1 for number in self._held), 0)
            fields = {
                "known": max(proof.incarnation, self._known.number),
                "entries": list(proof.entry_ids),
                "step": proof.step,
                "trained": proof.num_trained,
                "held": [(n, version, *self._refilled.get(n, (0, ""))) for n, version in self._held.items()],
                "next": next_number or proof.num_trained,
                "all_known": num_known >= proof.num_trained,
                "changes": [(text, change.step) for text, change in self._changes],
                "limits": [str(part) for part in limit_fields(self._limits)] if self._limits else [],
                "life": proof.newest_event_ms,
                "metrics": proof.newest_metric_id,
            }
            incarnation, is_new, added, corrected, entries = self._reconcile_from_lowest(proof, fields)
            self._known.set(incarnation.decode())
            self._num_adopted = 0
            self._prefetched.clear()
            self._out_of_order.clear()
            self._last = "0-0"
            self._entries = {int(entries[i]): entries[i + 1].decode() for i in range(0, len(entries), 2)}
        return Reconciled(number_of(incarnation.decode()), bool(is_new), int(added), int(corrected))

    def _reconcile_from_lowest(self, proof: Proof, fields: dict[str, Any]) -> Any:
        """Send the trained groups that Redis may hold, as it would block for long over a whole history."""
        lowest, nonce = 1 << 53, secrets.token_hex(4)
        while True:
            rows = ((step, [number for number in batch if number >= lowest]) for step, batch in proof.saved)
            saved = [row for row in rows if row[1]]
            packed = cast(bytes, msgpack.packb({**fields, "saved": saved, "lowest": lowest}))
            reply = self._reconcile_as_holder(self._epoch, self._known.uid, nonce, packed)
            if not isinstance(reply, int):
                return reply
            lowest = reply

    def _reconcile_as_holder(self, *arguments: Argument) -> Any:
        self._reclaim()
        try:
            return self._run("reconcile", *arguments)
        except FencedError:  # by another learner, as reclaiming says, or Redis has forgotten the lease once more
            self._reclaim()
            return self._run("reconcile", *arguments)

    def prove_with(self, prove: Callable[[], Proof], on_reconciled: Callable[[Reconciled], None]) -> None:
        self._prove, self._on_reconciled = prove, on_reconciled

    def reconcile_if_needed(self) -> None:
        """Reconcile, from any thread, if the incarnation changed."""
        if self._prove is not None:
            with self._lock:
                try:
                    self._run("current", incarnation=self._known.get())
                except ReconcileError:
                    self._recover()

    def take(self, timeout_s: float, num_groups: int = 1) -> Group | None:
        """Take a group; undecodable ones are dropped as `corrupt`."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._announce()
            with self._lock:
                try:
                    group, position = self._take_next(num_groups)
                except ReconcileError:
                    self._recover()
                    continue
                if group is not None:
                    self._hold(group)
                    return group
                positions = {self._keys.stream: self._last}
                if position:  # the awaited group may also end without entering the stream
                    positions[self._keys.doorbell] = position
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return None
            self._wait(positions, remaining_s)

    def _take_next(self, num_groups: int) -> tuple[Group | None, str]:
        """Return the next group, or None and the doorbell position to wait after, too (empty: none)."""
        while True:
            while self._prefetched:
                group = self._decode_group(self._prefetched.popleft())
                if group is not None and not self._by_admission:
                    return group, ""
                if group is not None:
                    heapq.heappush(self._out_of_order, (group.number, group))
            position = self._newest_notification() if self._out_of_order else ""
            limit = min(max(num_groups, 1), MAX_PREFETCHED_GROUPS)
            reply = self._run("take", self._epoch, self._last, limit, incarnation=self._known.get())
            if isinstance(reply, int):
                if self._out_of_order and (reply < 0 or self._out_of_order[0][0] < reply):
                    return heapq.heappop(self._out_of_order)[1], ""
                return None, position
            self._last = reply[-1][0].decode()
            self._prefetched.extend(row for row in reply if row[1] not in self._held)

    def drop(self, group: Group, reason: str) -> None:
        self._call("finish", self._epoch, "dropped", reason, "", "", "", entry_ids=[group.entry_id])

    def refill(self, group: Group, reason: str, step: int) -> None:
        with self._lock:  # before the call: a reconciliation in between marks it again
            self._refilled[group.number] = step, reason
        self._call("refill", self._epoch, step, reason, entry_ids=[group.entry_id], released=())

    def close(self, reason: str) -> int:
        return int(self._call("close", self._epoch, reason))

    def ack(self, entry_ids: Sequence[str], step: int) -> int:
        """Acknowledge in parts, so that no call blocks Redis for long; a part that is not reached is the checkpoint's,
        whose learner acknowledges it.
        """
        count, parts = 0, [entry_ids[i : i + ACK_SIZE] for i in range(0, len(entry_ids), ACK_SIZE)] or [entry_ids]
        for part in parts[:-1]:
            count += int(self._call("finish", self._epoch, "trained", step, "", "", "more", entry_ids=part))
            self._wait_for_ledger()
        with self._lock:
            refilled = {number for number, (until, _) in self._refilled.items() if until <= step}
            released = [*parts[-1], *(entry_id for entry_id, number in self._numbers.items() if number in refilled)]
        last = self._call("finish", self._epoch, "trained", step, "", "", "", entry_ids=parts[-1], released=released)
        return count + int(last)

    def _wait_for_ledger(self) -> None:
        """Wait until the ledger's thread has copied events, if very many wait for it."""
        deadline = time.monotonic() + LEDGER_TIMEOUT_S
        while self.snapshot().admission is Admission.LEDGER_BEHIND:
            if time.monotonic() > deadline:
                logger.warning(
                    "the ledger on disk is far behind: events may be lost, which `offbeat audit` will report"
                )
                return
            time.sleep(LEDGER_POLL_S)

    def adopt(self, step: int) -> Boundary:
        first = self._num_adopted
        paused, desired, flat = self._call("adopt", self._epoch, step, first)
        with self._lock:
            if self._num_adopted < first:  # reconciled meanwhile
                return self.adopt(step)
            pairs = zip(flat[::2], flat[1::2], strict=True)
            self._changes[first:] = [(text.decode(), decode_change(text, int(at))) for text, at in pairs]
            self._num_adopted = len(self._changes)
            return Boundary(tuple(change for _, change in self._changes), bool(paused), desired in STOP_STATES)

    def suggest(self, step: int, values: Mapping[str, float], why: str, *, if_lost: bool = False) -> bool:
        """Request settings before `adopt(step)`; return False if the step is decided. if_lost: only if Redis has no
        earlier request.
        """
        change = encode_change(values, time.time(), why)
        return bool(self._call("suggest", self._epoch, step, change, "lost" if if_lost else ""))

    def teach(self, state: str) -> None:
        self._call("teach", self._epoch, state)

    def newest_version(self) -> int:
        with translate_errors():
            version = cast(bytes | None, self._redis.hget(RunKeys(self._run_id).progress, "version"))
        return -1 if version is None else int(version)

    def num_playing(self) -> int:
        return self.snapshot().playing

    def start_eval(self, eval_id: str, num_episodes: int, *, sampling_name: str, min_version: int) -> None:
        self._call("start_eval", self._epoch, f"e:{eval_id}", num_episodes, sampling_name, min_version)

    def eval_result(self, eval_id: str) -> list[Trajectory] | None:
        """Return the decodable trajectories by number.

        Raises:
            BufferError: no such evaluation.
        """
        flat = self._call("eval_result", f"e:{eval_id}")
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
            self._wait({self._keys.doorbell: position}, remaining_s)

    def forget_eval(self, eval_id: str) -> None:
        self._call("forget_eval", self._epoch, f"e:{eval_id}")

    def counters(self) -> Counters:
        return self.snapshot().counters

    def snapshot(self) -> Snapshot:
        return snapshot_from(self._run("snapshot"))

    def _call(
        self, name: str, *args: Argument, entry_ids: Sequence[str] = (), released: Sequence[str] | None = None
    ) -> Any:
        """Run a script, after reconciling if needed. released: groups held no longer, by default those of `entry_ids`."""
        while True:
            self._announce()
            with self._lock:
                if self._unannounced is not None:  # reconciled by another thread meanwhile
                    continue
                current = [self._entries.get(self._numbers.get(i, -1), i) for i in entry_ids]
                try:
                    reply = self._run(name, *args, *current, incarnation=self._known.get())
                except ReconcileError:
                    self._recover()
                    continue
                self._release(entry_ids if released is None else released)
                return reply

    def _hold(self, group: Group) -> None:
        self._held[group.number] = group.admitted_version
        self._numbers[group.entry_id] = group.number
        self._entries[group.number] = group.entry_id

    def _release(self, entry_ids: Sequence[str]) -> None:
        for number in (self._numbers.pop(entry_id, None) for entry_id in entry_ids):
            if number is not None:
                self._held.pop(number, None)
                self._entries.pop(number, None)
                self._refilled.pop(number, None)

    def _recover(self) -> None:
        if self._prove is None:
            raise ReconcileError("the run's data in Redis has to be reconciled by a learner with its checkpoint")
        self._unannounced = self.reconcile(self._prove())
        logger.warning(
            "Redis was restarted or replaced; its data was reconciled as incarnation %d: %d groups corrected",
            self._unannounced.incarnation,
            self._unannounced.num_corrected,
        )

    def _announce(self) -> None:
        result, self._unannounced = self._unannounced, None
        if result is not None:
            self._on_reconciled(result)

    def _decode_group(self, row: Sequence[Any]) -> Group | None:
        entry_id, number, version, temperature, packed, is_lost = row
        if is_lost:
            logger.warning("group %d dropped, Redis has lost its trajectories", number)
            self._finish_now("dropped", "lost", "", "", "", entry_id)
            return None
        flat = msgpack.unpackb(packed, raw=True)
        fields = {flat[i].decode(): flat[i + 1] for i in range(0, len(flat), 2)}
        members = member_numbers(fields)
        trajectories: list[Trajectory] = []
        unreadable: dict[int, str] = {}
        for index in members:
            try:
                trajectories.append(decode_member(fields, group_id_of(self._run_id, number), index))
            except CodecError as error:
                unreadable[index] = str(error)
        if len({(t.tag, t.seed) for t in trajectories}) > 1:
            unreadable = dict.fromkeys(members, "siblings of different tags or seeds")
        if unreadable or not trajectories:
            reason = next(iter(unreadable.values()), "no trajectories")
            logger.error("group %d dropped, it can't be decoded: %s", number, reason)
            self._finish_now("dropped", "corrupt", reason, ",".join(map(str, unreadable)), "", entry_id)
            return None
        return build_group(self._run_id, number, entry_id, version, temperature, trajectories)

    def _finish_now(self, *args: Argument) -> None:
        self._run("finish", self._epoch, *args, incarnation=self._known.get())

    def _newest_notification(self) -> str:
        with translate_errors():
            entries = cast(list[Any], self._redis.xrevrange(self._keys.doorbell, count=1))
        return entries[0][0].decode() if entries else "0-0"

    def _wait(self, positions: Mapping[str, str], timeout_s: float) -> None:
        """Wait for an entry after its stream's position."""
        block_ms = max(1, int(min(timeout_s, MAX_BLOCK_S) * 1000))
        with translate_errors():
            self._redis.xread(cast(Any, positions), count=1, block=block_ms)
