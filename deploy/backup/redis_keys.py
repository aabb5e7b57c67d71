"""A run's keys in Redis, dumped at one moment and restored together.

Invariants: a key with an expiry (lease, heartbeat) is not dumped; the restored epoch exceeds the dumped one and the
server's, so earlier learners stay fenced.
"""

import time
from importlib.resources import files
from typing import Any, cast

import msgspec
from redis import Redis
from redis import exceptions as redis_errors

from offbeat.deploy.backup.errors import BackupError
from offbeat.services.buffer.scripts import BufferKeys
from offbeat.services.control.run import DesiredState, RunState
from offbeat.services.keys import RUNS, RunKeys

_DUMP = files("offbeat.deploy.backup").joinpath("dump.lua").read_text(encoding="utf-8")
SCRATCH_TTL_MS = 10_000
TERMINAL = tuple(state.value for state in RunState if state.is_terminal)


class KeysDump(msgspec.Struct, frozen=True):
    run_id: str
    server: str
    """Version of Redis; an older one may refuse the dumps."""
    state: str
    created_at: float
    """Unix time, s."""
    epoch: int
    newest_event: str
    """Id of the group ledger's newest event, if any."""
    next_number: int
    """Lowest free group number."""
    keys: dict[bytes, bytes]
    """Key -> value by Redis' DUMP."""


def dump_keys(redis: Redis, run_id: str) -> KeysDump:
    """Dump a run's keys, blocking the server; raises `BackupError` for an unknown run."""
    keys, buffer = RunKeys(run_id), BufferKeys(run_id)
    names = [keys.record, keys.epoch, f"{buffer.root}:ledger", buffer.life]
    reply = cast(list[Any], redis.eval(_DUMP, len(names), *names, keys.prefix))
    record, (epoch, newest, next_number, dumps) = _pairs(reply[0]), reply[1:]
    if not record:
        raise BackupError(f"its Redis has no run {run_id!r}: name the right one (--redis URL)")
    state, created_at = record.get(b"state", b"").decode(), float(record.get(b"created_at", b"0"))
    return KeysDump(
        run_id, _version(redis), state, created_at, int(epoch), newest.decode(), int(next_number), _pairs(dumps)
    )


def restore_keys(redis: Redis, dump: KeysDump, output_dir: str) -> None:
    """Restore all keys in one transaction; an active run is then stopped, and it is no longer of an
    `offbeat train`.

    Raises:
        BackupError: Redis has keys of that run, or can't read the dumps.
    """
    keys = RunKeys(dump.run_id)
    if foreign := [key for key in dump.keys if not key.startswith(keys.prefix.encode())]:
        raise BackupError(f"the backup is damaged: {foreign[0]!r} is no key of run {dump.run_id!r}")
    refuse_known_run(redis, dump.run_id)
    _try_version(redis, dump)
    with redis.pipeline() as pipe:
        pipe.watch(keys.record, keys.epoch)
        if cast(int, pipe.exists(keys.record)):
            raise BackupError(f"run {dump.run_id!r} was created in this Redis a moment ago: stop and delete it first")
        epoch = max(dump.epoch, int(cast(bytes | None, pipe.get(keys.epoch)) or 0)) + 1
        pipe.multi()
        for key, value in dump.keys.items():
            pipe.restore(key, 0, value)
        pipe.set(keys.epoch, epoch)
        pipe.hset(keys.record, mapping={"output_dir": output_dir, "mesh": "", **_ending(dump)})
        pipe.zadd(RUNS, {dump.run_id: dump.created_at})
        pipe.execute()


def refuse_known_run(redis: Redis, run_id: str) -> None:
    """Raise `BackupError` if Redis has keys of the run, besides a deleted one's epoch."""
    keys = RunKeys(run_id)
    known = sum(key != keys.epoch.encode() for key in redis.scan_iter(f"{keys.prefix}*", count=1000))
    if known:
        raise BackupError(
            f"this Redis has run {run_id!r} ({known} keys): name an empty one (--redis URL), or delete that run "
            f"first (`offbeat runs delete {run_id}`)"
        )


def _ending(dump: KeysDump) -> dict[str, str]:
    """Return the fields that stop an active run."""
    if dump.state in TERMINAL:
        return {}
    return {"state": RunState.STOPPED, "wanted": DesiredState.STOPPED, "ended_at": str(time.time())}


def _try_version(redis: Redis, dump: KeysDump) -> None:
    """Restore one value under another name: an error in a transaction would not undo it."""
    scratch = RunKeys(dump.run_id).key("restoring")
    try:
        redis.restore(scratch, SCRATCH_TTL_MS, min(dump.keys.values(), key=len), replace=True)
        redis.delete(scratch)
    except redis_errors.ResponseError as error:
        raise BackupError(
            f"Redis {_version(redis)} can't read values of Redis {dump.server} ({error}): restore on {dump.server} or later"
        ) from error


def _version(redis: Redis) -> str:
    return str(cast(dict[str, Any], redis.info("server"))["redis_version"])


def _pairs(flat: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))
