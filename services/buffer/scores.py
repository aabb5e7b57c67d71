"""Scores of complete groups by frozen models, beside their trajectories.

The key of a score is `<role>@<digest of what it depends on>`. Scorers claim groups in the order of the stream and
recompute lost scores; the learner waits for those that it has taken. Both raise RetryableError while Redis does not
answer (repeatable). A group without signal is skipped, which holds under one selection (digest of what decides that): a run
that is resumed with other filters has such groups scored.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import msgpack
from redis import Redis

from offbeat.services.buffer.members import decode_member, member_numbers
from offbeat.services.buffer.scripts import (
    Argument,
    BufferKeys,
    BufferScripts,
    build_group,
    group_id_of,
    translate_errors,
)
from offbeat.services.errors import CodecError, ReconcileError
from offbeat.services.messages.types import Group
from offbeat.services.redis.connection import MAX_BLOCK_S
from offbeat.services.redis.incarnation import KnownIncarnation

VALUES, REFUSAL = b"v", b"r"
"""First byte: float32 values, or a refusal's text."""
UNNEEDED = b"it needs none"


def skip_field(key: str, selection: str) -> str:
    """Return the field that marks a group as skipped under a selection."""
    return f"{key}/{selection}"


class ScoreRefusedError(Exception):
    """A scorer gave no score for a group."""


class GroupLostError(Exception):
    """A group's trajectories are lost."""


class GroupScores(Protocol):
    """Learner's interface of scores."""

    def wait(self, number: int, keys: Sequence[str], timeout_s: float) -> dict[str, bytes] | None:
        """Return a group's scores by key; None after the timeout.

        Raises:
            ScoreRefusedError, GroupLostError: there will be none.
        """
        ...


@dataclass(frozen=True, slots=True)
class ClaimedGroup:
    """Group to score; `group` is None if it can't be decoded."""

    number: int
    group: Group | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ScoreClaim:
    num_missing: int
    """Complete groups without this score."""
    claimed: ClaimedGroup | None


class RedisGroupScores:
    def __init__(self, redis: Redis, run_id: str, selection: str = "") -> None:
        self._redis = redis
        self._selection = selection
        self._keys = BufferKeys(run_id)

    def wait(self, number: int, keys: Sequence[str], timeout_s: float) -> dict[str, bytes] | None:
        deadline = time.monotonic() + timeout_s
        blobs = f"{self._keys.root}:blobs:t:{number}"
        fields = [*keys, *(skip_field(key, self._selection) for key in keys)]
        while True:
            with translate_errors():
                position = self._newest()  # before the look, so that no later score is missed
                values = cast(list[bytes | None], self._redis.hmget(blobs, fields))
                found = [
                    score or skipped for score, skipped in zip(values[: len(keys)], values[len(keys) :], strict=True)
                ]
                if None in found and not self._redis.exists(blobs):
                    raise GroupLostError(f"Redis has lost the trajectories of group {number}")
                scores = {key: blob for key, blob in zip(keys, found, strict=True) if blob is not None}
                for key, blob in scores.items():
                    if not blob.startswith(VALUES):
                        raise ScoreRefusedError(f"{key.partition('@')[0]}: {blob[1:].decode()}")
                if len(scores) == len(keys):
                    return {key: blob[1:] for key, blob in scores.items()}
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    return None
                block_ms = max(1, int(min(remaining_s, MAX_BLOCK_S) * 1000))
                self._redis.xread({self._keys.scored: position}, count=1, block=block_ms)

    def _newest(self) -> str:
        entries = cast(list[Any], self._redis.xrevrange(self._keys.scored, count=1))
        return entries[0][0].decode() if entries else "0-0"


class RedisScoreQueue:
    """Groups to score under one key; a successor has the same `scorer`."""

    def __init__(
        self, redis: Redis, run_id: str, uid: str, scorer: str, key: str, *, lease_s: float, selection: str = ""
    ) -> None:
        """lease_s: time without `renew` until others may claim a group. selection: under which groups are skipped."""
        self._redis = redis
        self._run_id = run_id
        self._keys = BufferKeys(run_id)
        self._run = BufferScripts(redis, run_id)
        self._known = KnownIncarnation(redis, run_id, uid)
        self._scorer = scorer
        self._key = key
        self._skipped = skip_field(key, selection)
        self._lease_ms = int(lease_s * 1000)
        self._position = "0-0"
        """Newest stream entry before the last claim."""

    def claim(self) -> ScoreClaim:
        """Claim the oldest group without this score.

        Raises:
            ForeignRunError: the run was deleted or created anew.
        """
        with translate_errors():
            newest = cast(list[Any], self._redis.xrevrange(self._keys.stream, count=1))
        self._position = newest[0][0].decode() if newest else "0-0"
        reply = self._call("claim_score", self._scorer, self._key, self._lease_ms, "", self._skipped)
        num_missing, *claimed = reply
        return ScoreClaim(int(num_missing), self._decode(*claimed) if claimed else None)

    def renew(self, number: int) -> bool:
        """Extend the claim; return False if it is lost."""
        return bool(self._call("claim_score", self._scorer, self._key, self._lease_ms, number, self._skipped))

    def submit(self, number: int, values: bytes) -> bool:
        """Store float32 values; return False if the group is gone or already scored."""
        return bool(self._call("score", self._scorer, self._key, number, VALUES + values, self._key))

    def refuse(self, number: int, reason: str) -> None:
        """Store why there is no score."""
        self._call("score", self._scorer, self._key, number, REFUSAL + reason.encode(), self._key)

    def skip(self, number: int) -> None:
        """Store that a group needs no score under this selection."""
        self._call("score", self._scorer, self._key, number, REFUSAL + UNNEEDED, self._skipped)

    def wait_for_group(self, timeout_s: float) -> None:
        with translate_errors():
            self._redis.xread({self._keys.stream: self._position}, count=1, block=max(1, int(timeout_s * 1000)))

    def _call(self, name: str, *args: Argument) -> Any:
        try:
            return self._run(name, *args, incarnation=self._known.get())
        except ReconcileError:  # by the learner
            self._known.set("")
            raise

    def _decode(self, number: int, entry_id: bytes, version: int, temperature: bytes, packed: bytes) -> ClaimedGroup:
        flat = msgpack.unpackb(packed, raw=True)
        fields = {flat[i].decode(): flat[i + 1] for i in range(0, len(flat), 2)}
        group_id = group_id_of(self._run_id, number)
        try:
            trajectories = [decode_member(fields, group_id, index) for index in member_numbers(fields)]
        except CodecError as error:  # the learner drops it, too
            return ClaimedGroup(number, None, str(error))
        return ClaimedGroup(number, build_group(self._run_id, number, entry_id, version, temperature, trajectories))
