"""Resumable event stream of a run.

A reconnected watcher gets each retained event after its last id once, except entries that can't be decoded; idle
watchers hold no Redis connection.
"""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, cast

from fastapi.sse import ServerSentEvent
from pydantic import BaseModel
from redis.asyncio import Redis

from offbeat.services.control.event_schemas import HistoryView, LifeView, MetricView
from offbeat.services.control.run import RunState
from offbeat.services.control.schemas import RunView
from offbeat.services.errors import CodecError
from offbeat.services.keys import RunKeys
from offbeat.services.telemetry import decode_record

logger = logging.getLogger(__name__)

POLL_S = 0.25
VIEW_INTERVAL_S = 1.0
MAX_VIEW_AGE_S = 0.5
"""Of a view built for another watcher."""
PAGE_SIZE = 500
POSITION = re.compile(r"[0-9]{1,20}-[0-9]{1,20}(?:,[0-9]{1,20}-[0-9]{1,20}){2}")
GREATEST_ID = f"{2**64 - 1}-{2**64 - 1}"
"""No entry has it, and Redis refuses it as a start."""
START = "0-0"
LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})
"""Ends of lines that JSON leaves as they are, and that clients and libraries split data at."""


class EventKind(StrEnum):
    RUN = "run"
    """`RunView`, at first and after each change."""
    METRICS = "metrics"
    """`MetricView`."""
    HISTORY = "history"
    """`HistoryView`: states, commands, deaths, changes of settings."""
    LIFE = "life"


@dataclass(frozen=True, slots=True)
class Position:
    """Last seen id of each stream."""

    metrics: str = START
    life: str = START
    history: str = START

    @classmethod
    def parse(cls, text: str) -> "Position":
        """Parse `str(position)`. Raises `ValueError`."""
        is_valid = POSITION.fullmatch(text) and GREATEST_ID not in text.split(",")
        if not is_valid or any(int(part) >= 2**64 for part in re.split("[-,]", text)):
            raise ValueError(f"{text!r} is not an event id: use the id of a received event, or omit it")
        return cls(*text.split(","))

    def __str__(self) -> str:
        return f"{self.metrics},{self.life},{self.history}"


@dataclass(frozen=True, slots=True)
class Event:
    kind: EventKind
    position: Position
    body: BaseModel

    def encode(self) -> ServerSentEvent:
        text = self.body.model_dump_json().translate(LINE_ENDS)
        return ServerSentEvent(raw_data=text, event=self.kind, id=str(self.position))


class SharedViews:
    """Views that all watchers of a run share."""

    def __init__(self, view: Callable[[str], Awaitable[RunView]]) -> None:
        self._view = view
        self._building: dict[str, tuple[float, asyncio.Task[RunView]]] = {}

    async def view(self, run_id: str) -> RunView:
        """Return a view that is at most `MAX_VIEW_AGE_S` old."""
        now = asyncio.get_running_loop().time()
        self._building = {each: made for each, made in self._building.items() if now < made[0] + MAX_VIEW_AGE_S}
        if run_id not in self._building:
            self._building[run_id] = now, asyncio.create_task(self._build(run_id))
        return await asyncio.shield(self._building[run_id][1])

    async def _build(self, run_id: str) -> RunView:
        return await self._view(run_id)


class Feed:
    def __init__(
        self,
        redis: Redis,
        run_id: str,
        view: Callable[[], Awaitable[RunView]],
        state: Callable[[], Awaitable[RunState]],
        kinds: Collection[EventKind] = tuple(EventKind),
    ) -> None:
        """view: not called without `EventKind.RUN`, as the cheaper `state` suffices."""
        self.run_id = run_id
        self._redis: Any = redis
        self._view = view
        self._state = state
        self._kinds = kinds
        keys = RunKeys(run_id)
        self._streams = {"metrics": keys.metrics, "life": keys.key("buffer", "life"), "history": keys.history}
        self._shown = ""
        self._shown_at = float("-inf")

    async def newest(self) -> Position:
        ids: dict[str, str] = {}
        for name, key in self._streams.items():
            entries = await self._redis.xrevrange(key, count=1)
            ids[name] = entries[0][0].decode() if entries else START
        return Position(**ids)

    async def has_sent_all(self, position: Position) -> bool:
        """Return whether a watcher at `position` has each event, if the run is over."""
        newest = await self.newest()
        sent = {*self._kinds, *([EventKind.HISTORY] if EventKind.RUN in self._kinds else [])}
        return all(
            getattr(position, name) == getattr(newest, name) for name in self._streams if EventKind(name) in sent
        )

    async def follow(self, position: Position) -> AsyncIterator[Event]:
        while True:
            view, is_over = await self._look()
            before = position
            position, events = await self._read(before)
            for event in events:
                yield event
            if view is not None and self._is_news(view):
                if is_over and EventKind.HISTORY not in self._kinds:  # which `has_sent_all` compares
                    position = replace(position, history=(await self.newest()).history)
                yield Event(EventKind.RUN, position, view)
            if position == before:
                if is_over:
                    return
                await asyncio.sleep(POLL_S)

    async def _look(self) -> tuple[RunView | None, bool]:
        """Return the view, if it is due and wanted, and whether the run is known to be over."""
        now = asyncio.get_running_loop().time()
        if now < self._shown_at + VIEW_INTERVAL_S:
            return None, False
        self._shown_at = now
        if EventKind.RUN not in self._kinds:
            return None, (await self._state()).is_terminal
        view = await self._view()
        return view, view.state.is_terminal

    def _is_news(self, view: RunView) -> bool:
        text = view.model_dump_json()
        news, self._shown = text != self._shown, text
        return news

    async def _read(self, position: Position) -> tuple[Position, list[Event]]:
        streams = {name: key for name, key in self._streams.items() if EventKind(name) in self._kinds}
        if not streams:
            return position, []
        positions = {key: getattr(position, name) for name, key in streams.items()}
        rows = cast(list[Any], await self._redis.xread(positions, count=PAGE_SIZE) or [])
        events: list[Event] = []
        for key, entries in rows:
            kind = next(EventKind(name) for name, stream in streams.items() if stream == key.decode())
            for raw_id, fields in entries:
                entry_id = raw_id.decode()
                position = replace(position, **{kind.value: entry_id})
                try:
                    events.append(Event(kind, position, _body(kind, entry_id, fields)))
                except (CodecError, ValueError, KeyError) as error:
                    logger.warning("run %s: undecodable %s event %s skipped: %r", self.run_id, kind, entry_id, error)
        return position, events


def _body(kind: EventKind, entry_id: str, fields: dict[bytes, bytes]) -> BaseModel:
    match kind:
        case EventKind.METRICS:
            return MetricView.of(entry_id, decode_record(fields[b"r"]))
        case EventKind.LIFE:
            event = cast(Any, fields[b"e"].decode())
            return LifeView(group=int(fields[b"n"]), event=event, detail=fields[b"d"].decode())
        case _:
            at = int(entry_id.partition("-")[0]) / 1000
            return HistoryView(event=cast(Any, fields[b"e"].decode()), at=at, detail=json.loads(fields[b"d"]))
