"""Gateway of one env worker: an HTTP server on a free loopback port, in the worker's event loop."""

import asyncio
import contextlib
import socket
from collections.abc import Generator

import uvicorn

from offbeat.services.embedded_server import EmbeddedServer
from offbeat.services.gateway.app import Sessions, build
from offbeat.services.gateway.session import EpisodeSession

HOST = "127.0.0.1"
KEEP_ALIVE_S = 120
"""Idle timeout, s; exceeds clients' (httpx: 5 s)."""


class Gateway:
    def __init__(self) -> None:
        self._sessions: Sessions = {}
        self._server: EmbeddedServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self.origin = ""
        """`http://host:port`, Anthropic's base URL; OpenAI's adds `/v1`."""

    def start(self) -> None:
        """Start on the running event loop; idempotent.

        Raises:
            OSError: no free port.
        """
        if self._server is None:
            listening = socket.create_server((HOST, 0))
            config = uvicorn.Config(
                build(self._sessions),
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                loop="asyncio",
                timeout_keep_alive=KEEP_ALIVE_S,
            )
            self._server = server = EmbeddedServer(config)
            # earlier calls wait in the socket's backlog
            self._serving = asyncio.create_task(server.serve(sockets=[listening]))
            self.origin = f"http://{HOST}:{listening.getsockname()[1]}"

    async def close(self) -> None:
        if self._server is not None and self._serving is not None:
            self._server.should_exit = self._server.force_exit = True
            await asyncio.wait({self._serving})

    @contextlib.contextmanager
    def open_session(self, session: EpisodeSession) -> Generator[None, None, None]:
        self._sessions[session.key] = session
        try:
            yield
        finally:
            del self._sessions[session.key]
