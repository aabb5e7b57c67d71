"""The client: names of runs in its paths, and an event stream over a transport that breaks it."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator

import httpx
import pytest

from offbeat.services.control.client import ControlClient, ControlRefusedError
from offbeat.services.control.run import RunState
from offbeat.services.control.schemas import RunView
from offbeat.services.errors import RetryableError
from tests.services.control.api_harness import ApiHarness

SILENT_S = 0.3
PATIENCE_S = 0.1
"""Shorter than the silence, and longer than a reconnection."""


class BreakingStream(httpx.AsyncByteStream):
    """Sends its chunks and breaks."""

    def __init__(self, *chunks: bytes, silent_s: float = 0.0) -> None:
        self._chunks, self._silent_s = chunks, silent_s

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"retry: 1000\n\n"
        for chunk in self._chunks:
            yield chunk
        await asyncio.sleep(self._silent_s)
        raise httpx.ReadError("the load balancer was restarted")


def run_event(state: str) -> bytes:
    return f'id: 1-0\nevent: run\ndata: {{"state": "{state}"}}\n\n'.encode()


async def watch(
    monkeypatch: pytest.MonkeyPatch, streams: list[BreakingStream], positions: list[str | None] | None = None
) -> AsyncGenerator[str]:
    """Yield the events of `streams`, of which the last one is repeated. positions: from which they are asked for."""
    sent = [] if positions is None else positions

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request.headers.get("last-event-id"))
        return httpx.Response(200, stream=streams.pop(0) if len(streams) > 1 else streams[0])

    monkeypatch.setattr("offbeat.services.control.client.RECONNECT_INTERVAL_S", PATIENCE_S / 10)
    async with ControlClient("http://test", transport=httpx.MockTransport(answer)) as client:
        async for message in client.events("a", patience_s=PATIENCE_S, parting_s=PATIENCE_S):
            yield message.event


@pytest.mark.parametrize("state", ["running", "draining"])
async def test_a_silent_stream_that_breaks_is_resumed(monkeypatch: pytest.MonkeyPatch, state: str):
    event = b"id: 2-0\nevent: history\ndata: {}\n\n"
    streams = [BreakingStream(run_event(state), silent_s=SILENT_S), BreakingStream(event)]
    watching = watch(monkeypatch, streams)
    assert [await anext(watching), await anext(watching)] == ["run", "history"]
    await watching.aclose()


async def test_a_keep_alive_ends_an_outage(monkeypatch: pytest.MonkeyPatch):
    """Without it, the second break would be counted from the first one."""
    silent = BreakingStream(b": ping\n\n", silent_s=SILENT_S)
    event = BreakingStream(b"id: 2-0\nevent: history\ndata: {}\n\n")
    watching = watch(monkeypatch, [BreakingStream(run_event("running")), silent, event])
    assert [await anext(watching), await anext(watching)] == ["run", "history"]
    await watching.aclose()


async def test_streams_that_break_at_once_are_an_outage(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(RetryableError, match="load balancer"):
        await anext(watch(monkeypatch, [BreakingStream()]))


async def test_a_stream_that_breaks_before_its_first_event_is_resumed_from_its_position(
    monkeypatch: pytest.MonkeyPatch,
):
    """The server sends it without an event."""
    sent: list[str | None] = []
    streams = [BreakingStream(b"id: 5-0\nretry: 1000\n\n"), BreakingStream(run_event("running"))]
    watching = watch(monkeypatch, streams, sent)
    assert await anext(watching) == "run"
    await watching.aclose()
    assert sent == [None, "5-0"]


@pytest.mark.parametrize("kind", ["run", "history"])
async def test_a_stream_that_the_server_closes_is_resumed_although_the_run_is_over(api: ApiHarness, kind: str):
    """It closes streams when it can't reach Redis."""
    await api.start("a", RunState.FAILED)

    class Closing(httpx.ASGITransport):
        is_first = True

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if not self.is_first:
                return await super().handle_async_request(request)
            self.is_first = False
            return httpx.Response(200, content=b'id: 0-0,0-0,0-0\nevent: run\ndata: {"state": "running"}\n\n')

    async with ControlClient("http://127.0.0.1", transport=Closing(api.api)) as client:
        events = [(event.event, json.loads(event.data)) async for event in client.events("a", kinds=[kind])]
    assert events[0] == ("run", {"state": "running"})
    assert events[-1][0] == kind
    assert "failed" in (events[-1][1].get("state"), events[-1][1].get("detail", {}).get("state"))


@pytest.mark.parametrize("gap", ["", "id: 0-0,0-0,0-0\nretry: 1000\n\n"])
async def test_streams_closed_in_succession_are_resumed(
    api: ApiHarness, monkeypatch: pytest.MonkeyPatch, gap: str
) -> None:
    """As long as Redis comes and goes."""
    monkeypatch.setattr("offbeat.services.control.client.RECONNECT_INTERVAL_S", 0.01)
    await api.start("a", RunState.FAILED)
    closed = ['id: 0-0,0-0,0-0\nevent: run\ndata: {"state": "running"}\n\n', gap]

    class Closing(httpx.ASGITransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if closed and request.url.path.endswith("/events"):
                return httpx.Response(200, content=closed.pop(0).encode())
            return await super().handle_async_request(request)

    async with ControlClient("http://127.0.0.1", transport=Closing(api.api)) as client:
        events = [json.loads(event.data)["state"] async for event in client.events("a", kinds=["run"])]
    assert events == ["running", "failed"]


async def test_a_run_that_was_seen_to_end_is_over_though_its_service_goes(monkeypatch: pytest.MonkeyPatch):
    """The stream breaks before its end."""
    events = [event async for event in watch(monkeypatch, [BreakingStream(run_event("failed")), BreakingStream()])]
    assert events == ["run"]


async def test_a_run_deleted_after_its_end_is_over(api: ApiHarness):
    await api.start("a", RunState.FAILED)
    async with ControlClient("http://127.0.0.1", transport=httpx.ASGITransport(api.api)) as client:
        states: list[str] = []
        async for event in client.events("a", kinds=["run"]):
            states.append(json.loads(event.data)["state"])
            await client.delete("a")
    assert states == ["failed"]


async def test_a_proxy_that_closes_each_stream_is_asked_at_intervals(monkeypatch: pytest.MonkeyPatch):
    num_calls = 0

    class Closed(ControlClient):
        async def show(self, run_id: str) -> RunView:
            return RunView.model_construct(id=run_id, state=RunState.RUNNING)

    def answer(_: httpx.Request) -> httpx.Response:
        nonlocal num_calls
        num_calls += 1
        return httpx.Response(200, content=run_event("running"))

    monkeypatch.setattr("offbeat.services.control.client.RECONNECT_INTERVAL_S", 60.0)
    async with Closed("http://test", transport=httpx.MockTransport(answer)) as client:
        events = client.events("a")
        await anext(events)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(events), 0.2)
    assert num_calls == 1


@pytest.mark.parametrize("name", ["lake#2", "lake?now=true", "../x", "..", "", "a/b", "lake\n"])
async def test_what_is_no_runs_name_is_sent_as_no_other_path(name: str):
    sent: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return httpx.Response(500)

    async with ControlClient("http://test", transport=httpx.MockTransport(answer)) as client:
        for call in (client.delete, client.stop, client.show, client.why, lambda name: anext(client.events(name))):
            with pytest.raises(ControlRefusedError, match="there is no run") as caught:
                await call(name)
            assert (caught.value.status, caught.value.error.error.code) == (404, "unknown_run")
    assert sent == []
