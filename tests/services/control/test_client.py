"""The client: names of runs in its paths, and an event stream over a transport that breaks it."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import httpx
import pytest

from offbeat.services.control.client import ControlClient, ControlRefusedError
from offbeat.services.errors import RetryableError

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


async def watch(monkeypatch: pytest.MonkeyPatch, streams: list[BreakingStream]) -> AsyncGenerator[str]:
    """Yield the events of `streams`, of which the last one is repeated."""
    monkeypatch.setattr("offbeat.services.control.client.RECONNECT_INTERVAL_S", PATIENCE_S / 10)
    transport = httpx.MockTransport(
        lambda _: httpx.Response(200, stream=streams.pop(0) if len(streams) > 1 else streams[0])
    )
    async with ControlClient("http://test", transport=transport) as client:
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
