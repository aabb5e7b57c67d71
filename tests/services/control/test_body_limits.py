"""Bodies over a real server: too large a one is refused before it is read, whoever sends it."""

import asyncio
from collections.abc import AsyncIterator

import psutil
import pytest

from offbeat.services.control.auth import MAX_BODY_BYTES
from tests.services.control.api_harness import ApiHarness, api_harness
from tests.services.control.test_event_stream import served

pytestmark = pytest.mark.slow

MIB = 1 << 20
HUGE = 400 * MIB
MOST_SENT = 32 * MIB
"""What fits into sockets and buffers until the refusal arrives."""
MOST_GROWTH = 64 * MIB


@pytest.fixture
async def api(redis_url: str) -> AsyncIterator[ApiHarness]:
    async with api_harness(redis_url, token="secret") as made:
        yield made


async def send(url: str, headers: list[str], frames: AsyncIterator[bytes]) -> tuple[int, int]:
    """The status, and how many bytes were sent until it came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    lines = ["POST /runs HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/yaml", *headers]
    writer.write("\r\n".join([*lines, "", ""]).encode())
    status = asyncio.create_task(reader.readline())
    sent = 0
    try:
        async for frame in frames:
            if status.done():
                break
            writer.write(frame)
            await writer.drain()
            sent += len(frame)
            await asyncio.sleep(0)
    except ConnectionError:
        pass  # the server has closed
    line = await asyncio.wait_for(status, 30)
    writer.transport.abort()
    return int(line.split()[1]), sent


async def plain(size: int) -> AsyncIterator[bytes]:
    for _ in range(size // MIB):
        yield bytes(MIB)


async def chunked(size: int) -> AsyncIterator[bytes]:
    async for part in plain(size):
        yield f"{len(part):x}\r\n".encode() + part + b"\r\n"
    yield b"0\r\n\r\n"


@pytest.mark.parametrize("token", ["secret", "wrong", None])
@pytest.mark.parametrize("is_chunked", [False, True], ids=["declared", "chunked"])
async def test_a_huge_body_is_refused_before_it_is_read(api: ApiHarness, token: str | None, is_chunked: bool):
    authorization = [f"Authorization: Bearer {token}"] if token else []
    length = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {HUGE}"
    async with served(api) as url:
        before = psutil.Process().memory_info().rss
        status, sent = await send(url, [*authorization, length], (chunked if is_chunked else plain)(HUGE))
        assert status == (401 if is_chunked and token != "secret" else 413)
        assert sent <= MOST_SENT
        assert psutil.Process().memory_info().rss - before < MOST_GROWTH


async def test_the_largest_body_is_read(api: ApiHarness):
    text = b'{"exp_name": "a"}'
    async with served(api) as url:
        authorization = "Authorization: Bearer secret"

        async def body() -> AsyncIterator[bytes]:
            yield text + b" " * (MAX_BODY_BYTES - len(text))

        assert (await send(url, [authorization, f"Content-Length: {MAX_BODY_BYTES}"], body()))[0] == 201
        assert (await send(url, [authorization, f"Content-Length: {MAX_BODY_BYTES + 1}"], body()))[0] == 413
