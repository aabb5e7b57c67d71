"""Command logs of the models.

Invariants: a model's commands are applied in the order of their sequence ids, each once; a command stays in the log
until a state on disk contains it; a superseded learner commits nothing.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from redis import Redis

from offbeat.services.errors import FencedError
from offbeat.services.tinker.keys import SERVERS, TinkerKeys
from offbeat.services.tinker.records import (
    AppliedCommand,
    CheckpointRecord,
    LearnerActivity,
    ModelRecord,
    Result,
    SharedPass,
    StoredRecord,
    request_id_of,
)

logger = logging.getLogger(__name__)

SCRIPTS = Path(__file__).parent / "lua"
RESULT_EXPIRY_S = 24 * 3600
"""Of results that are not fetched."""
CLOSED_EXPIRY_S = 30 * 24 * 3600
"""Of what a closed model's commands have left: the audit's entries, metrics and numbers of samples."""
WAKEUPS_PER_WAIT = 1024


@dataclass(frozen=True, slots=True)
class Write:
    """Entry of a hash, written with a command's result."""

    key: str
    field: str
    value: bytes

    @classmethod
    def of(cls, key: str, field: str, record: StoredRecord) -> "Write":
        return cls(key, field, record.encode())


class CommandLog:
    def __init__(self, redis: Redis, name: str) -> None:
        self.keys = TinkerKeys(name)
        self._redis: Any = redis
        self._commit: Any = redis.register_script((SCRIPTS / "commit.lua").read_text())
        self._close: Any = redis.register_script((SCRIPTS / "close.lua").read_text())
        self._epoch = 0
        self._deaths: dict[str, int] = {}

    def take_over(self) -> None:
        """Fence other learners off, and let limits of keys count what a build without them has stored."""
        self._epoch = int(self._redis.incr(self.keys.epoch))
        self._redis.sadd(SERVERS, self.keys.name)
        self._redis.transaction(self._index_owners, self.keys.models, self.keys.checkpoints, self.keys.closed)
        self._count_deaths()

    def deaths(self, model_id: str, seq_id: int) -> int:
        """Return the number of learners that died of a command since one has last applied it."""
        return self._deaths.get(request_id_of(model_id, seq_id), 0)

    def count_death(self, model_id: str, seq_id: int) -> None:
        """Count the death that comes of a repetition that failed: `take_over` counts those of first applications."""
        self._redis.hincrby(self.keys.deaths, request_id_of(model_id, seq_id), 1)

    def model_ids(self) -> list[str]:
        return sorted(each.decode() for each in self._redis.hkeys(self.keys.models))

    def model(self, model_id: str) -> ModelRecord:
        return msgspec.json.decode(self._redis.hget(self.keys.models, model_id), type=ModelRecord)

    def checkpoint(self, path: str) -> CheckpointRecord | None:
        data = self._redis.hget(self.keys.checkpoints, path)
        return None if data is None else msgspec.json.decode(data, type=CheckpointRecord)

    def checkpoint_writes(self, owner: str, path: str, record: CheckpointRecord) -> tuple[Write, Write]:
        """Return a checkpoint's entries: its record, and its size among the owner's."""
        size = Write(self.keys.checkpoint_sizes(owner), path, str(record.size_bytes).encode())
        return Write.of(self.keys.checkpoints, path, record), size

    def take_up(self, model_id: str, seq_id: int) -> bytes | None:
        """Return a command, if it has come, and let others see that it is applied now."""
        data = self.command(model_id, seq_id)
        if data is not None:
            self.report(model_id, seq_id)
        return data

    def report(self, model_id: str, seq_id: int, shared_with: Mapping[str, int] | None = None) -> None:
        """Let others see what is applied now. shared_with: other models' commands in the same pass."""
        activity = LearnerActivity(
            model_id=model_id, seq_id=seq_id, since=time.time(), shared_with=dict(shared_with or {})
        )
        self._redis.set(self.keys.activity, activity.encode())

    def report_idle(self) -> None:
        """Let others see that no command is applied now."""
        self._redis.delete(self.keys.activity)

    def applied(self, model_id: str) -> int:
        """Return the last command whose result is stored. -1: none"""
        return int(self._redis.hget(self.keys.applied, model_id) or -1)

    def applied_of(self, model_ids: Sequence[str]) -> dict[str, int]:
        """Return what `applied` does of several models."""
        numbers = self._redis.hmget(self.keys.applied, model_ids) if model_ids else ()
        return {model_id: int(number or -1) for model_id, number in zip(model_ids, numbers, strict=True)}

    def shared_pass(self, model_id: str, seq_id: int) -> SharedPass | None:
        """Return what the pass of an applied gradient was shared with."""
        data = self._redis.hget(self.keys.shared_passes(model_id), seq_id)
        return None if data is None else msgspec.json.decode(data, type=SharedPass)

    def command(self, model_id: str, seq_id: int) -> bytes | None:
        return self._redis.hget(self.keys.log(model_id), seq_id)

    def wait(self, timeout_s: float) -> set[str]:
        first = self._redis.blpop(self.keys.wakeups, timeout_s)
        if first is None:
            return set()
        return {first[1].decode(), *self.poll()}

    def poll(self) -> set[str]:
        """Return what `wait` does at once."""
        return set(map(bytes.decode, self._redis.lpop(self.keys.wakeups, WAKEUPS_PER_WAIT) or ()))

    def logged_models(self) -> set[str]:
        """Return the models with commands in their logs."""
        model_ids = self.model_ids()
        with self._redis.pipeline(transaction=False) as pipeline:
            for model_id in model_ids:
                pipeline.hlen(self.keys.log(model_id))
            return {model_id for model_id, number in zip(model_ids, pipeline.execute(), strict=True) if number}

    def commit(
        self,
        model_id: str,
        owner: str,
        seq_id: int,
        result: Result,
        writes: Sequence[Write] = (),
        discarded: str = "",
    ) -> bool:
        """Store a result with its writes, unless one is stored; return whether it was. Raises FencedError after a takeover.

        discarded: folder of a replaced checkpoint.
        """
        keys, request_id = self.keys, request_id_of(model_id, seq_id)
        hashes = (keys.applied, keys.queued_bytes, keys.result(request_id), keys.done, keys.discarded_folders)
        status = self._commit(
            keys=[keys.epoch, keys.log(model_id), *hashes, *(each.key for each in writes)],
            args=[
                *(self._epoch, model_id, seq_id, result.encode(), RESULT_EXPIRY_S, owner, request_id, discarded),
                *(part for each in writes for part in (each.field, each.value)),
            ],
        )
        if int(status) < 0:
            raise FencedError("another learner serves this Tinker server")
        if self._deaths.pop(request_id, 0):
            self._redis.hdel(keys.deaths, request_id)
        return bool(status)

    def applied_command(self, model_id: str, seq_id: int) -> AppliedCommand | None:
        """Return what an applied command has left. None: of an earlier build."""
        data = self._redis.hget(self.keys.applied_commands(model_id), seq_id)
        return None if data is None else msgspec.json.decode(data, type=AppliedCommand)

    def compare_repeated(self, model_id: str, seq_id: int, first: AppliedCommand, repeated: AppliedCommand) -> None:
        """Record the first repetition that has left another state than the command did."""
        if not repeated.leaves_state_of(first) and not self.has_diverged(model_id):
            logger.error(
                "command %d (%s) of model %s has left another state after a kill", seq_id, first.kind, model_id
            )
            self._redis.hset(self.keys.diverged_commands(model_id), seq_id, repeated.encode())

    def has_diverged(self, model_id: str) -> bool:
        """Return whether a repetition has left another state than the command did."""
        return bool(self._redis.exists(self.keys.diverged_commands(model_id)))

    def unused_folders(self) -> list[str]:
        """Return folders of deleted and replaced checkpoints that no logged command writes or reads, and no sampling
        session reads.
        """
        discarded = self._redis.smembers(self.keys.discarded_folders)
        samplers = self._redis.hvals(self.keys.samplers) if discarded else []
        folders = [each.decode() for each in discarded if not any(each in sampler for sampler in samplers)]
        if not folders:
            return []  # without the logs, which may be large
        logs = {model_id: self._redis.hgetall(self.keys.log(model_id)) for model_id in self.model_ids()}

        def is_used(folder: str) -> bool:
            path = Path(folder)
            model_id, seq_id = path.parents[1].name, path.name.rpartition("@")[2]
            is_written = seq_id.encode() in logs.get(model_id, ())
            return is_written or any(folder.encode() in each for log in logs.values() for each in log.values())

        return [each for each in folders if not is_used(each)]

    def forget_folder(self, folder: str) -> None:
        self._redis.srem(self.keys.discarded_folders, folder)

    def ended(self) -> dict[str, list[str]]:
        """Return the models of ended sessions, by session."""
        ended = {each.decode(): list[str]() for each in self._redis.smembers(self.keys.ended)}
        for model_id in self.model_ids() if ended else ():
            if (models := ended.get(self.model(model_id).session_id)) is not None:
                models.append(model_id)
        return ended

    def close(self, model_id: str) -> bool:
        """Close a model to further commands, unless its next one is queued; return whether it is closed."""
        keys, owner = self.keys, self.model(model_id).owner
        hashes = (keys.applied, keys.closed, keys.inflight, keys.queued_bytes, keys.open_models(owner))
        left = (keys.applied_commands, keys.diverged_commands, keys.metrics, keys.samples)
        own = (keys.shared_passes(model_id), *(key(model_id) for key in left))
        return bool(self._close(keys=[keys.log(model_id), *hashes, *own], args=[model_id, owner, CLOSED_EXPIRY_S]))

    def closed(self) -> set[str]:
        return {each.decode() for each in self._redis.smembers(self.keys.closed)}

    def forget_session(self, session_id: str) -> None:
        """Remove the samplers of an ended session whose models are closed."""
        samplers = [
            each for each in self._redis.hkeys(self.keys.samplers) if each.startswith(f"{session_id}:".encode())
        ]
        if samplers:
            self._redis.hdel(self.keys.samplers, *samplers)
        self._redis.srem(self.keys.ended, session_id)

    def truncate(self, model_id: str, seq_ids: Iterable[int]) -> None:
        """Remove commands that a state on disk contains."""
        if ids := list(seq_ids):
            with self._redis.pipeline(transaction=True) as transaction:
                transaction.hdel(self.keys.log(model_id), *ids)
                transaction.hdel(self.keys.shared_passes(model_id), *ids)
                transaction.execute()

    def logged(self, model_id: str) -> list[int]:
        """Return the sequence ids in a model's log, ascending."""
        return sorted(map(int, self._redis.hkeys(self.keys.log(model_id))))

    def _count_deaths(self) -> None:
        """Count the death of a predecessor in what it was applying."""
        if (data := self._redis.get(self.keys.activity)) is not None:
            for model_id, seq_id in msgspec.json.decode(data, type=LearnerActivity).commands.items():
                if seq_id > self.applied(model_id):
                    self._redis.hincrby(self.keys.deaths, request_id_of(model_id, seq_id), 1)
            self.report_idle()
        self._deaths = {name.decode(): int(number) for name, number in self._redis.hgetall(self.keys.deaths).items()}

    def _index_owners(self, transaction: Any) -> None:
        """Add open models and checkpoints to the sets and hashes of their owners."""
        owners = {
            model_id.decode(): msgspec.json.decode(data, type=ModelRecord).owner
            for model_id, data in transaction.hgetall(self.keys.models).items()
        }
        closed = {each.decode() for each in transaction.smembers(self.keys.closed)}
        checkpoints = transaction.hgetall(self.keys.checkpoints)
        transaction.multi()
        for model_id in owners.keys() - closed:
            transaction.sadd(self.keys.open_models(owners[model_id]), model_id)
        for path, data in checkpoints.items():
            record = msgspec.json.decode(data, type=CheckpointRecord)
            transaction.hsetnx(self.keys.checkpoint_sizes(owners[record.model_id]), path, record.size_bytes)
