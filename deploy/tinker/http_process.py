"""HTTP server and engine, `python -m offbeat.deploy.tinker.http_process`, with settings on stdin.

Invariant: the socket is the parent's, so that clients wait while it is replaced.
"""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable

import msgspec
import uvicorn

from offbeat.deploy.tinker.open_service import ServiceSettings, open_service
from offbeat.services.embedded_server import EmbeddedServer
from offbeat.services.telemetry import configure_logging
from offbeat.services.tinker.service import TinkerService

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
KEEP_ALIVE_S = 120
GRACE_S = 1
"""For calls in progress at shutdown, which clients repeat."""


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """descriptor: of the listening socket."""

    descriptor: int
    service: ServiceSettings


async def serve(settings: HttpSettings) -> None:
    """Serve until SIGTERM; raises what the engine or a background task has failed with."""
    async with open_service(settings.service) as opened:
        server = EmbeddedServer(
            uvicorn.Config(
                opened.app,
                log_level="warning",
                access_log=False,
                ws="none",
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=GRACE_S,
            )
        )

        def stop() -> None:
            server.should_exit = True

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
        watch = asyncio.create_task(_watch(opened.service, stop))
        try:
            await server.serve(sockets=[socket.socket(fileno=settings.descriptor)])
            if watch.done():
                watch.result()
        finally:
            watch.cancel()


async def _watch(service: TinkerService, stop: Callable[[], None]) -> None:
    try:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            await service.check()
    finally:
        stop()


def main() -> int:
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=HttpSettings)
    configure_logging("http", None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    asyncio.run(serve(settings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
