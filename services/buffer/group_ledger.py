"""File of all group events, of which Redis keeps only the newest.

Invariants: an append is one write; the next writer removes a partial last line; no event before the newest is missing,
as Redis forgets none that is not synced to this file, and admits no groups while half a million wait for that.
Lines of concurrent writers (a learner and its replacement) are equal.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
from redis import Redis
from redis.exceptions import RedisError

from offbeat.services.buffer.scripts import BufferKeys, BufferScripts
from offbeat.services.errors import MeshError
from offbeat.services.jsonl import LinesFile, last_lines, read_lines
from offbeat.services.threads import Follower

logger = logging.getLogger(__name__)

LEDGER_FILE = Path("ledger", "groups.jsonl")
PAGE_SIZE = 1000
BLOCK_MS = 500
RETRY_INTERVAL_S = 0.5
SYNC_INTERVAL_S = 1.0
SYNC_BACKOFF_S = 9.0
"""Added after a failure."""
UNNUMBERED = 0


class LifeEvent(msgspec.Struct, frozen=True, gc=False):
    id: str
    """Stream id."""
    ordinal: int
    """1, 2, ... in this Redis; 0 from an older Offbeat."""
    number: int
    """0 of `reconciled`."""
    event: str
    """`admitted`, `submitted`, `trained`, `dropped`, `failed`; after a loss in Redis `restored`, `reconciled`."""
    detail: str
    """admitted, submitted: version at admission; trained: step of the checkpoint; restored: step, colon, its trained
    groups, overriding earlier events; reconciled: incarnation; else the reason.
    """

    @property
    def at(self) -> float:
        """Unix time, s, of Redis."""
        return int(self.id.partition("-")[0]) / 1000

    @property
    def sort_key(self) -> tuple[int, int]:
        milliseconds, _, sequence = self.id.partition("-")
        return int(milliseconds), int(sequence or 0)


def read_events_after(redis: Redis, run_id: str, after: str, *, block_ms: int | None = None) -> list[LifeEvent]:
    reply = redis.xread({BufferKeys(run_id).life: after}, count=PAGE_SIZE, block=block_ms)
    streams = cast(list[Any], reply or [])
    return [_decode_event(entry_id, fields) for _, entries in streams for entry_id, fields in entries]


def _decode_event(entry_id: bytes, fields: dict[bytes, bytes]) -> LifeEvent:
    number, event, detail = (fields[name] for name in (b"n", b"e", b"d"))
    return LifeEvent(entry_id.decode(), int(fields.get(b"i", UNNUMBERED)), int(number), event.decode(), detail.decode())


class LedgerFile:
    def __init__(self, output_dir: Path) -> None:
        path = output_dir / LEDGER_FILE
        self._lines = LinesFile(path)  # first: it removes a cut last line, which must be copied again
        self.newest = _newest_event(path)

    @property
    def position(self) -> str:
        """Stream id of the newest event; 0 without any."""
        return self.newest.id if self.newest else "0"

    def append(self, events: Sequence[LifeEvent]) -> None:
        """Append; repeatable. Raises OSError."""
        if events:
            self._lines.append(msgspec.structs.asdict(event) for event in events)
            self.newest = events[-1]

    def sync(self) -> None:
        self._lines.sync()

    def close(self) -> None:
        self._lines.close()


def read_ledger(output_dir: Path) -> list[LifeEvent]:
    """Return every valid event once, in order."""
    events_by_id = {event.id: event for event in _parse_rows(output_dir / LEDGER_FILE) if event is not None}
    return sorted(events_by_id.values(), key=lambda event: event.sort_key)


def newest_event_ms(output_dir: Path) -> int:
    """Return the newest event's time, Unix ms of Redis; 0 without any."""
    newest = _newest_event(output_dir / LEDGER_FILE)
    return int(newest.id.partition("-")[0]) if newest else 0


def count_broken_lines(output_dir: Path) -> int:
    return sum(event is None for event in _parse_rows(output_dir / LEDGER_FILE))


def _parse_rows(path: Path) -> Iterator[LifeEvent | None]:
    return (None if row is None else parse_event(row) for row in read_lines(path))


def parse_event(row: dict[str, Any]) -> LifeEvent | None:
    try:
        identifier = str(row["id"])
        milliseconds, _, sequence = identifier.partition("-")
        if not milliseconds.isdecimal() or (sequence and not sequence.isdecimal()):
            return None
        return LifeEvent(identifier, int(row["ordinal"]), int(row["number"]), str(row["event"]), str(row["detail"]))
    except (ValueError, TypeError, KeyError):
        return None


def _newest_event(path: Path) -> LifeEvent | None:
    events = [event for row in last_lines(path) if (event := parse_event(row)) is not None]
    return max(events, key=lambda event: event.sort_key, default=None)


class LedgerThread(Follower):
    """Copies events to the file, and has Redis forget those that are durable there."""

    def __init__(self, redis: Redis, run_id: str, output_dir: Path) -> None:
        self._redis = redis
        self._run = BufferScripts(redis, run_id)
        self._run_id = run_id
        self._output_dir = output_dir
        self._warned = False
        super().__init__("ledger")

    def _follow(self) -> None:
        file = LedgerFile(self._output_dir)
        synced_at, is_synced = time.monotonic(), False  # a writer before this one may have had no time to trim
        try:
            while True:
                is_stopping = self._stop.is_set()
                count = self._copy(file, None if is_stopping else BLOCK_MS)
                if is_stopping and not count:
                    return
                is_synced = is_synced and not count
                if not is_synced and time.monotonic() > synced_at + SYNC_INTERVAL_S:
                    is_synced = _sync(file) and self._trim(file)
                    synced_at = time.monotonic() + (0.0 if is_synced else SYNC_BACKOFF_S)
        finally:
            _sync(file)
            file.close()

    def _warn_if_unnumbered(self, events: Sequence[LifeEvent]) -> None:
        if not self._warned and any(event.ordinal == UNNUMBERED for event in events):
            self._warned = True
            logger.warning(
                "run %s: its Redis has unnumbered events of an older version of Offbeat: training continues, "
                "and `offbeat audit` can't prove that none of those is missing",
                self._run_id,
            )

    def _trim(self, file: LedgerFile) -> bool:
        try:
            if file.newest is not None:
                self._run("trim", file.newest.id, file.newest.ordinal)
        except MeshError as error:
            logger.warning("the ledger's events in Redis are not trimmed: %s", error)
            return False
        return True

    def _copy(self, file: LedgerFile, block_ms: int | None) -> int:
        try:
            events = read_events_after(self._redis, self._run_id, file.position, block_ms=block_ms)
            file.append(events)
            self._warn_if_unnumbered(events)
        except (RedisError, OSError) as error:
            logger.warning("ledger not written: %s; retrying every %g s", error, RETRY_INTERVAL_S)
            self._stop.wait(RETRY_INTERVAL_S)
            return 0
        return len(events)


def _sync(file: LedgerFile) -> bool:
    try:
        file.sync()
    except OSError as error:
        logger.warning("ledger not synced to disk: %s", error)
        return False
    return True
