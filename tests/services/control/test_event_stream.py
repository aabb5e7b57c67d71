"""Server-sent events over a real server: in order, until the run is over, and taken up where they broke."""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import psutil
import pytest
import uvicorn
from redis import Redis

from offbeat.services.buffer.api import Proof
from offbeat.services.buffer.learner_client import RedisLearnerBuffer
from offbeat.services.control.client import ControlClient, ControlRefusedError, StreamEvent, messages
from offbeat.services.control.event_schemas import HistoryView
from offbeat.services.control.events import Event, EventKind, Feed, Position, SharedViews
from offbeat.services.control.routes import MAX_WATCHERS
from offbeat.services.control.run import DesiredState, RunState
from offbeat.services.control.schemas import RunView
from offbeat.services.keys import RunKeys
from offbeat.services.redis.incarnation import KnownIncarnation
from offbeat.services.redis.lease import LearnerLease
from offbeat.services.telemetry import AsyncRedisMetrics, MetricRecord, mean
from tests.services.control.api_harness import ApiHarness, api_harness, code
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow

LAST_EVENT_ID = "Last-Event-ID"


@pytest.fixture
async def api(redis_url: str) -> AsyncIterator[ApiHarness]:
    async with api_harness(redis_url) as made:
        yield made


@asynccontextmanager
async def served(api: ApiHarness) -> AsyncIterator[str]:
    """The URL of a server: the transport of the other tests hands over whole bodies only."""
    server = uvicorn.Server(uvicorn.Config(api.api, port=0, log_level="error", lifespan="off"))
    task = asyncio.create_task(server.serve())
    await wait_until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        await task


async def step(api: ApiHarness, number: int) -> None:
    metrics = AsyncRedisMetrics(api.redis, "a", await api.uid("a"))
    await metrics.append(MetricRecord("learner", {"loss": mean([number])}, step=number))


async def life(api: ApiHarness, number: int, event: str) -> None:
    redis: Any = api.redis
    await redis.xadd(RunKeys("a").key("buffer", "life"), {"n": number, "e": event, "d": "0"})


async def test_watchers_share_a_view_and_some_need_none(api: ApiHarness) -> None:
    await api.start("a", RunState.RUNNING)
    record = await api.store.load("a")
    view, built = await api.client.show("a"), 0

    async def build(run_id: str) -> RunView:
        nonlocal built
        built += 1
        return view.model_copy(update={"id": run_id})

    async def state() -> RunState:
        return record.state

    views = SharedViews(build)
    seen = await asyncio.gather(*(views.view("a") for _ in range(5)), views.view("b"))
    assert ([each.id for each in seen], built) == ([*["a"] * 5, "b"], 2)
    await step(api, 1)
    for kinds, count in (((EventKind.METRICS,), 2), ((EventKind.METRICS, EventKind.RUN), 3)):
        feed = Feed(api.redis, "a", lambda: SharedViews(build).view("a"), state, kinds)
        async for event in feed.follow(Position()):
            assert event.kind == EventKind.METRICS
            break
        assert built == count


class Watcher:
    """Reads a stream in the background."""

    def __init__(self) -> None:
        self.seen: list[StreamEvent] = []

    async def read(self, stream: AsyncIterator[StreamEvent]) -> None:
        async for message in stream:
            self.seen.append(message)

    def of(self, event: str) -> list[Any]:
        return [json.loads(message.data) for message in self.seen if message.event == event]

    def steps(self) -> list[int]:
        return [record["step"] for record in self.of("metrics")]


async def test_a_stream_lasts_until_the_run_is_over(api: ApiHarness):
    await api.start("a")
    await step(api, 0)
    async with served(api) as url, ControlClient(url) as client:
        watcher = Watcher()
        watching = asyncio.create_task(watcher.read(client.events("a")))
        await wait_until(lambda: bool(watcher.of("run")))
        await step(api, 1)
        await life(api, 4, "admitted")
        await api.client.pause("a")
        await wait_until(lambda: watcher.of("run")[-1]["wanted"] == "paused")
        await api.store.update("a", state=RunState.STOPPED)
        await asyncio.wait_for(watching, 60)
    assert watcher.steps() == [1], "from now on, unless it asks for the start"
    assert watcher.of("life") == [{"group": 4, "event": "admitted", "detail": "0"}]
    assert [each["event"] for each in watcher.of("history")] == ["wanted", "state"]
    assert watcher.of("run")[-1]["state"] == "stopped"


async def test_a_stream_from_the_start_has_every_retained_event(api: ApiHarness):
    await api.start("a")
    for number in range(600):
        await step(api, number)
    await api.store.update("a", state=RunState.FINISHED)
    watcher = Watcher()
    await watcher.read(api.client.events("a", kinds=["metrics"], from_start=True))
    assert watcher.steps() == list(range(600))
    assert {message.event for message in watcher.seen} == {"metrics"}


async def test_a_stream_tells_of_a_reconciled_redis(api: ApiHarness):
    await api.start("a")
    uid = await api.uid("a")
    with Redis.from_url(api.redis_url) as redis, LearnerLease(redis, "a", "me", 10.0, run_uid=uid) as lease:
        buffer = RedisLearnerBuffer(redis, "a", lease.acquire(), known=KnownIncarnation(redis, "a", uid))
        buffer.reconcile(Proof(saved=[(3, [0, 1])], num_trained=2))
    await api.store.update("a", state=RunState.FINISHED)
    watcher = Watcher()
    await watcher.read(api.client.events("a", kinds=["life"], from_start=True))
    assert [(each["event"], each["detail"]) for each in watcher.of("life")] == [
        ("restored", "3:0,1"),
        ("reconciled", "1"),
    ]


async def test_an_undecodable_event_does_not_block_a_stream(api: ApiHarness, monkeypatch: pytest.MonkeyPatch):
    """Nor does a page of them end the stream of a run that is over."""
    monkeypatch.setattr("offbeat.services.control.events.PAGE_SIZE", 1)
    await api.start("a")
    for number, event in enumerate(("unknown", "admitted", "unknown", "submitted")):
        await life(api, number, event)
    await api.store.update("a", state=RunState.FINISHED)
    watcher = Watcher()
    await watcher.read(api.client.events("a", kinds=["life"], from_start=True))
    assert [each["group"] for each in watcher.of("life")] == [1, 3]


async def test_a_reconnecting_watcher_gets_every_event_once(api: ApiHarness):
    await api.start("a")
    async with served(api) as url, httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
        seen: list[StreamEvent] = []

        async def read_on(count: int) -> None:
            headers = {LAST_EVENT_ID: seen[-1].id} if seen else {}
            params = {"kind": ["metrics", "history"], "from_start": "true"}
            async with http.stream("GET", "/runs/a/events", params=params, headers=headers) as response:
                async for message in messages(response.aiter_lines()):
                    seen.append(message)
                    if len(seen) == count:
                        return

        for i in range(6):
            await step(api, i)
            await read_on(len(seen) + 2 if i == 0 else len(seen) + 1)
            if i == 3:
                await api.store.want("a", DesiredState.PAUSED)
                await read_on(len(seen) + 1)
    assert [json.loads(m.data)["step"] for m in seen if m.event == "metrics"] == list(range(6))
    assert len({m.id for m in seen}) == len(seen)


async def test_the_client_resumes_a_broken_stream(api: ApiHarness):
    await api.start("a")
    async with served(api) as url:
        cut = asyncio.Event()
        async with ControlClient(url, transport=Cutting(cut)) as client:
            watcher = Watcher()
            watching = asyncio.create_task(watcher.read(client.events("a", kinds=["metrics"], from_start=True)))
            for number in range(20):
                await step(api, number)
                if number in (5, 12):
                    await wait_until(lambda number=number: bool(watcher.steps()) and watcher.steps()[-1] == number)
                    cut.set()
            await wait_until(lambda: bool(watcher.steps()) and watcher.steps()[-1] == 19)
            await api.store.update("a", state=RunState.FINISHED)
            await asyncio.wait_for(watching, 60)
    assert watcher.steps() == list(range(20))


async def test_the_client_stops_waiting_for_a_service_that_ended_with_its_run(api: ApiHarness):
    await api.start("a")
    watcher, cut = Watcher(), asyncio.Event()
    async with AsyncExitStack() as stack:
        async with served(api) as url:
            client = await stack.enter_async_context(ControlClient(url, transport=Cutting(cut)))
            events = client.events("a", kinds=["run", "metrics"], patience_s=600, parting_s=0.1)
            watching = asyncio.create_task(watcher.read(events))
            await api.store.update("a", state=RunState.DRAINING)
            await wait_until(lambda: any(run["state"] == "draining" for run in watcher.of("run")))
        cut.set()  # a server that stops lets its streams run on: this one breaks at its next word
        await step(api, 0)
        await asyncio.wait_for(watching, 60)


class Cutting(httpx.AsyncHTTPTransport):
    """Breaks a stream when `cut` is set."""

    def __init__(self, cut: asyncio.Event) -> None:
        super().__init__()
        self._cut = cut

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        stream: Any = response.stream
        response.stream = _CutStream(stream, self._cut)
        return response


class _CutStream(httpx.AsyncByteStream):
    def __init__(self, inner: httpx.AsyncByteStream, cut: asyncio.Event) -> None:
        self._inner, self._cut = inner, cut

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._inner:
            if self._cut.is_set():
                self._cut.clear()
                raise httpx.ReadError("cut")
            yield chunk

    async def aclose(self) -> None:
        await self._inner.aclose()


@pytest.mark.parametrize(
    "kinds", [(), ("run",), ("run", "life"), ("run", "history"), ("metrics",), ("history",)], ids="+".join
)
async def test_a_watcher_that_saw_the_end_gets_204(api: ApiHarness, kinds: tuple[str, ...]):
    """Also one that asks for some kinds, as the console's views do."""
    await api.start("a", RunState.FINISHED)
    await step(api, 0)
    await life(api, 0, "trained")
    watcher = Watcher()
    await watcher.read(api.client.events("a", from_start=True, kinds=kinds))
    query = "&".join(f"kind={kind}" for kind in kinds)
    again = await api.http.get(f"/runs/a/events?{query}", headers={LAST_EVENT_ID: watcher.seen[-1].id})
    assert (again.status_code, again.content) == (204, b"")


async def test_a_watcher_of_new_events_alone_gets_204_after_the_end(api: ApiHarness):
    """No event comes whose id it could send back."""
    await api.start("a", RunState.FINISHED)
    await step(api, 0)
    first = await api.http.get("/runs/a/events?kind=metrics")
    (position,) = (line.removeprefix("id: ") for line in first.text.splitlines() if line.startswith("id: "))
    again = await api.http.get("/runs/a/events?kind=metrics", headers={LAST_EVENT_ID: position})
    assert (again.status_code, again.content) == (204, b"")


def test_ends_of_lines_in_a_text_do_not_end_an_events_data():
    detail = {"answers": "a\u2028b\u2029c\x85d\n"}
    sent = Event(EventKind.HISTORY, Position(), HistoryView(event="state", at=1.0, detail=detail)).encode().raw_data
    assert sent is not None
    assert len(sent.splitlines()) == 1
    assert json.loads(sent)["detail"] == detail


@pytest.mark.parametrize(
    "position",
    [
        *("x", "1-1", "1-1,1-1", "1-1,1-1,1-1,1-1", "-1-1,0-0,0-0", f"{2**64}-0,0-0,0-0", "0-0,0-0,0-0\n", ""),
        f"0-0,{2**64 - 1}-{2**64 - 1},0-0",
    ],
)
async def test_an_invalid_event_id_is_refused(api: ApiHarness, position: str):
    await api.start("a")
    refused = await api.http.get("/runs/a/events", headers={LAST_EVENT_ID: position})
    assert (refused.status_code, code(refused)) == (422, "invalid_request")


async def test_too_many_watchers_are_refused_until_one_leaves(api: ApiHarness):
    await api.start("a")
    limits = httpx.Limits(max_connections=None)
    async with served(api) as url, httpx.AsyncClient(base_url=url, limits=limits, timeout=PATIENCE_S) as http:
        count = 0

        async def watch() -> None:
            nonlocal count
            async with http.stream("GET", "/runs/a/events") as response:
                async for _ in response.aiter_lines():
                    count += 1
                    await asyncio.Event().wait()

        def all_watch() -> bool:
            for task in watching:
                if task.done():
                    task.result()
            return count == MAX_WATCHERS

        watching = [asyncio.create_task(watch()) for _ in range(MAX_WATCHERS)]
        await wait_until(all_watch)
        refused = await http.get("/runs/a/events")
        assert (refused.status_code, code(refused)) == (429, "too_many_watchers")
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)

        async def room() -> bool:
            async with http.stream("GET", "/runs/a/events") as response:
                return response.status_code == httpx.codes.OK

        await wait_until(room)


async def test_the_bound_on_streams_holds_for_concurrent_calls_and_clients_that_vanish(api: ApiHarness):
    """Each round opens more at once than are allowed; the clients then vanish, half of them before an answer."""
    await api.start("a")
    async with served(api) as url:
        port, idle = int(url.rpartition(":")[2]), len(asyncio.all_tasks())
        for _ in range(3):
            opened = await asyncio.gather(*(open_stream(port) for _ in range(MAX_WATCHERS + 16)))
            statuses = await asyncio.gather(*(read_status(reader) for reader, _ in opened))
            assert sorted(statuses) == [200] * MAX_WATCHERS + [429] * 16
            vanishing = await asyncio.gather(*(open_stream(port) for _ in range(8)))
            for _, writer in [*opened, *vanishing]:
                reset(writer)

            async def has_room() -> bool:
                reader, writer = await open_stream(port)
                status = await read_status(reader)
                reset(writer)
                return status == 200

            await wait_until(has_room)

            async def has_all_room() -> bool:
                again = await asyncio.gather(*(open_stream(port) for _ in range(MAX_WATCHERS)))
                statuses = await asyncio.gather(*(read_status(reader) for reader, _ in again))
                for _, writer in again:
                    reset(writer)
                return statuses == [200] * MAX_WATCHERS

            await wait_until(has_all_room)
            await wait_until(lambda: not open_sockets(port) and len(asyncio.all_tasks()) == idle)  # it has noticed


async def open_stream(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /runs/a/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    await writer.drain()
    return reader, writer


async def read_status(reader: asyncio.StreamReader) -> int:
    return int((await asyncio.wait_for(reader.readline(), 60)).split()[1])


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST instead of FIN, as a client does that is killed with unread data."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def open_sockets(port: int) -> list[Any]:
    """Connections of the server that are still established."""
    connections = psutil.Process().net_connections("tcp")
    return [each for each in connections if each.laddr.port == port and each.status == psutil.CONN_ESTABLISHED]


async def test_deleting_a_run_ends_its_streams(api: ApiHarness):
    await api.start("a")
    async with served(api) as url, ControlClient(url) as client:
        watcher = Watcher()
        watching = asyncio.create_task(watcher.read(client.events("a")))
        await wait_until(lambda: bool(watcher.of("run")))
        redis: Any = api.redis
        await redis.delete(RunKeys("a").record)
        with pytest.raises(ControlRefusedError, match="there is no run 'a'"):
            await asyncio.wait_for(watching, 60)


def test_a_position_survives_its_text_form():
    position = Position("1-2", "3-4", f"{2**64 - 1}-0")
    assert Position.parse(str(position)) == position
