from collections.abc import AsyncIterator

import httpx
import pytest_asyncio

from offbeat.services.redis.connection import connect, connect_async
from offbeat.services.tinker.app import create_app
from offbeat.services.tinker.log import CommandLog
from offbeat.services.tinker.owners import Keys
from tests.services.tinker.api_server import CONFIG, Server, make_service


@pytest_asyncio.fixture
async def server(redis_url: str) -> AsyncIterator[Server]:
    redis = connect_async(redis_url)
    service = make_service(redis, CONFIG)
    transport = httpx.ASGITransport(create_app(service, Keys(None), CONFIG), raise_app_exceptions=False)
    with connect(redis_url) as learner:
        log = CommandLog(learner, "test")
        log.take_over()
        async with (
            service.background(),
            httpx.AsyncClient(transport=transport, base_url="http://[::1]/api/v1") as client,
        ):
            yield Server(client, log, learner, service)
    await redis.aclose()
