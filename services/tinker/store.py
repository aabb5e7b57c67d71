"""State of a Tinker server in Redis."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar, cast

import msgspec
from redis import exceptions as redis_errors
from redis.asyncio import Redis

from offbeat.services.tinker.config import TinkerConfig
from offbeat.services.tinker.errors import GoneError, QueueFullError
from offbeat.services.tinker.keys import TinkerKeys
from offbeat.services.tinker.log import SCRIPTS
from offbeat.services.tinker.records import (
    AppliedCommand,
    CheckpointRecord,
    Command,
    LearnerActivity,
    ModelRecord,
    Result,
    Session,
    StepMetrics,
    StoredRecord,
    encode_command,
)

MIB = 1 << 20
RECONNECT_S = 0.2
FETCHED_EXPIRY_S = 3600
"""Of results that were fetched, as an answer may be lost, or a client's machine sleep."""
HINT_TIMEOUT_S = 1.0
"""Interval of checks without a hint."""

RecordT = TypeVar("RecordT", bound=StoredRecord)


class TinkerStore:
    def __init__(self, redis: Redis, name: str, config: TinkerConfig) -> None:
        self.keys = TinkerKeys(name)
        self._redis: Any = redis
        self._config = config
        self._submit = cast(Any, redis).register_script((SCRIPTS / "submit.lua").read_text())
        self._change = cast(Any, redis).register_script((SCRIPTS / "change_checkpoint.lua").read_text())
        self._hints: dict[str, asyncio.Event] = {}
        self._fetched: set[str] = set()

    async def find(self, key: str, field: str, kind: type[RecordT]) -> RecordT | None:
        data = await self._redis.hget(key, field)
        return None if data is None else msgspec.json.decode(data, type=kind)

    async def all(self, key: str, kind: type[RecordT]) -> dict[str, RecordT]:
        items = await self._redis.hgetall(key)
        return {field.decode(): msgspec.json.decode(data, type=kind) for field, data in items.items()}

    async def put(self, key: str, field: str, record: StoredRecord) -> None:
        await self._redis.hset(key, field, record.encode())

    async def put_once(self, key: str, field: str, record: StoredRecord) -> None:
        await self._redis.hsetnx(key, field, record.encode())

    async def add_model(self, model_id: str, record: ModelRecord) -> None:
        """Store a model once, among the owner's that take commands."""
        async with self._redis.pipeline(transaction=True) as transaction:
            transaction.hsetnx(self.keys.models, model_id, record.encode())
            transaction.sadd(self.keys.open_models(record.owner), model_id)
            await transaction.execute()

    async def open_models(self, owner: str) -> set[str]:
        """Return the owner's models that take commands."""
        return {each.decode() for each in await self._redis.smembers(self.keys.open_models(owner))}

    async def models_of_all(self) -> set[str]:
        """Return all owners' models that take commands."""
        models, closed = await self._redis.hkeys(self.keys.models), await self._redis.smembers(self.keys.closed)
        return {each.decode() for each in set(models) - closed}

    async def all_models(self) -> dict[str, ModelRecord]:
        return await self.all(self.keys.models, ModelRecord)

    async def change_checkpoint(
        self, owner: str, path: str, change: Callable[[CheckpointRecord], CheckpointRecord | None]
    ) -> CheckpointRecord | None:
        """Replace a checkpoint's record, or delete it if `change` returns None; return the earlier one, if any.

        Folders of deleted ones are then in `discarded_folders`.
        """
        keys = self.keys
        while (data := await self._redis.hget(keys.checkpoints, path)) is not None:
            record = msgspec.json.decode(data, type=CheckpointRecord)
            changed = change(record)
            is_changed = await self._change(
                keys=[keys.checkpoints, keys.checkpoint_sizes(owner), keys.discarded_folders],
                args=[path, data, b"" if changed is None else changed.encode(), record.adapter.folder],
            )
            if int(is_changed):
                return record
        return None

    async def add_copy(
        self, session: Session, model_id: str, model: ModelRecord, path: str, record: CheckpointRecord
    ) -> None:
        """Store a copied checkpoint with its session, which has ended, and its model, which is closed."""
        async with self._redis.pipeline(transaction=True) as transaction:
            transaction.hset(self.keys.sessions, model.session_id, session.encode())
            transaction.hset(self.keys.models, model_id, model.encode())
            transaction.sadd(self.keys.closed, model_id)
            transaction.hset(self.keys.checkpoints, path, record.encode())
            transaction.hset(self.keys.checkpoint_sizes(model.owner), path, record.size_bytes)
            await transaction.execute()

    async def expiries(self) -> dict[str, CheckpointRecord]:
        """Return the checkpoints that have an expiry, by path."""
        checkpoints = await self.all(self.keys.checkpoints, CheckpointRecord)
        return {path: each for path, each in checkpoints.items() if each.expires_at is not None}

    async def saved_bytes(self, owner: str) -> int:
        """Return the size of the owner's checkpoints."""
        return sum(map(int, await self._redis.hvals(self.keys.checkpoint_sizes(owner))))

    async def beat(self, session_id: str) -> None:
        await self._redis.hset(self.keys.heartbeats, session_id, time.time())

    async def heartbeats(self) -> dict[str, float]:
        return {name.decode(): float(at) for name, at in (await self._redis.hgetall(self.keys.heartbeats)).items()}

    async def end_session(self, session_id: str, session: Session) -> None:
        """Store an ended session, and let the learner close its models."""
        async with self._redis.pipeline(transaction=True) as transaction:
            transaction.hset(self.keys.sessions, session_id, session.encode())
            transaction.hdel(self.keys.heartbeats, session_id)
            transaction.sadd(self.keys.ended, session_id)
            await transaction.execute()

    async def submit(self, model_id: str, owner: str, seq_id: int, command: Command) -> None:
        """Append a command to its model's log, once.

        Raises:
            QueueFullError: too much is queued.
            GoneError: the model's session has ended.
        """
        config, keys = self._config, self.keys
        status = await self._submit(
            keys=[keys.log(model_id), keys.applied, keys.queued_bytes, keys.wakeups, keys.closed],
            args=[
                *(model_id, seq_id, encode_command(command), owner),
                *(config.max_queued_commands, config.max_queued_mib * MIB),
            ],
        )
        if int(status) == -1:
            raise QueueFullError(f"the model has {config.max_queued_commands} commands that are not applied")
        if int(status) == -2:
            raise QueueFullError(f"commands of {config.max_queued_mib} MiB under this key are not applied")
        if int(status) == -3:
            raise GoneError(f"the session of model {model_id} has ended: load a checkpoint in a new session")

    async def queued(self, model_id: str) -> tuple[int, list[int]]:
        """Return the last applied command's sequence id, or -1, and those of unapplied ones, ascending."""
        logged = sorted(map(int, await self._redis.hkeys(self.keys.log(model_id))))
        # Read last: a command applied meanwhile is then no gap in the log
        applied = int(await self._redis.hget(self.keys.applied, model_id) or -1)
        return applied, [each for each in logged if each > applied]

    async def activity(self) -> LearnerActivity | None:
        data = await self._redis.get(self.keys.activity)
        return None if data is None else msgspec.json.decode(data, type=LearnerActivity)

    async def newest_steps(self, model_ids: Sequence[str]) -> dict[str, StepMetrics]:
        """Return the newest optimizer steps of the models that have one."""
        found = await self._redis.hmget(self.keys.newest_steps, model_ids) if model_ids else ()
        return {
            model_id: msgspec.json.decode(data, type=StepMetrics)
            for model_id, data in zip(model_ids, found, strict=True)
            if data is not None
        }

    async def applied_commands(self, model_id: str) -> dict[int, AppliedCommand]:
        """Return what each applied command has left, by sequence id."""
        commands = await self.all(self.keys.applied_commands(model_id), AppliedCommand)
        return {int(seq_id): each for seq_id, each in commands.items()}

    async def applied_at(self, model_ids: Sequence[str]) -> dict[str, float]:
        """Return the Unix times of the models' last applied commands, if known."""
        numbers = await self._redis.hmget(self.keys.applied, model_ids) if model_ids else ()
        async with self._redis.pipeline(transaction=False) as pipeline:
            for model_id, number in zip(model_ids, numbers, strict=True):
                pipeline.hget(self.keys.applied_commands(model_id), number or "-1")
            entries = await pipeline.execute()
        return {
            model_id: msgspec.json.decode(data, type=AppliedCommand).at
            for model_id, data in zip(model_ids, entries, strict=True)
            if data is not None
        }

    async def diverged_commands(self, model_id: str) -> dict[int, AppliedCommand]:
        """Return the repetitions of commands that have left another state, by sequence id."""
        commands = await self.all(self.keys.diverged_commands(model_id), AppliedCommand)
        return {int(seq_id): each for seq_id, each in commands.items()}

    async def count_samples(self, model_id: str, sequences: Mapping[int, int], tokens: Mapping[int, int]) -> None:
        """Add sampled sequences and tokens, by version."""
        key = self.keys.samples(model_id)
        async with self._redis.pipeline(transaction=True) as transaction:
            for name, numbers in (("sequences", sequences), ("tokens", tokens)):
                for version, number in numbers.items():
                    transaction.hincrby(key, f"{version}:{name}", number)
            await transaction.execute()

    async def samples(self, model_id: str) -> dict[int, dict[str, int]]:
        """Return the numbers of sampled sequences and tokens, by version, ascending."""
        numbers: dict[int, dict[str, int]] = {}
        for field, number in (await self._redis.hgetall(self.keys.samples(model_id))).items():
            version, name = field.decode().split(":")
            numbers.setdefault(int(version), {"sequences": 0, "tokens": 0})[name] = int(number)
        return dict(sorted(numbers.items()))

    async def result(self, request_id: str) -> Result | None:
        data = await self._redis.get(self.keys.result(request_id))
        if data is None:
            return None
        self._fetched.add(request_id)
        return Result.decode(data)

    async def expire_fetched(self) -> None:
        """Let results that were fetched since the last call expire soon."""
        fetched, self._fetched = self._fetched, set()
        async with self._redis.pipeline(transaction=False) as pipeline:
            for request_id in fetched:
                pipeline.expire(self.keys.result(request_id), FETCHED_EXPIRY_S)
            await pipeline.execute()

    async def is_applied(self, model_id: str, seq_id: int) -> bool:
        return int(await self._redis.hget(self.keys.applied, model_id) or -1) >= seq_id

    async def is_logged(self, model_id: str, seq_id: int) -> bool:
        return bool(await self._redis.hexists(self.keys.log(model_id), seq_id))

    async def is_closed(self, model_id: str) -> bool:
        """Return whether a model takes no more commands."""
        return bool(await self._redis.sismember(self.keys.closed, model_id))

    async def wait_for_result(self, request_id: str, timeout_s: float) -> Result | None:
        """Return the result, or None after `timeout_s`."""
        hint = self._hints.setdefault(request_id, asyncio.Event())
        try:
            async with asyncio.timeout(timeout_s):
                while (result := await self.result(request_id)) is None:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(HINT_TIMEOUT_S):
                            await hint.wait()
                    hint.clear()
                return result
        except TimeoutError:
            return None
        finally:
            self._hints.pop(request_id, None)

    async def listen(self) -> None:
        """Wake the waiting for results until cancelled."""
        while True:
            try:
                async with self._redis.pubsub() as channel:
                    await channel.subscribe(self.keys.done)
                    async for message in channel.listen():
                        if message["type"] == "message" and (hint := self._hints.get(message["data"].decode())):
                            hint.set()
            except (redis_errors.ConnectionError, redis_errors.TimeoutError):
                await asyncio.sleep(RECONNECT_S)
