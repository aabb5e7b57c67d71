"""The gateway of one env worker: a server on a free port of loopback, and the episodes that are open on it.

It lives in the worker's process and on its loop: an episode's conversation belongs to the worker that plays it, so a call
finds its tree without another hop, and a worker that dies takes both with it, to be played again elsewhere.
"""

import asyncio
import contextlib
import socket
from collections.abc import Generator

import uvicorn

from services.gateway.app import Sessions, build
from services.gateway.session import EpisodeSession

HOST = "127.0.0.1"
LOOK_S = 0.01


class _Server(uvicorn.Server):
    """Leaves signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class Gateway:
    """Serves from `start` to `close`."""

    def __init__(self) -> None:
        self._sessions: Sessions = {}
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self.origin = ""
        """`http://host:port`; OpenAI's base URL is that and `/v1`, Anthropic's is that alone."""

    async def start(self) -> None:
        """Serve from here on; a second call does nothing.

        Raises:
            OSError: there is no port.
        """
        async with self._starting:
            if self._server is not None:
                return
            listening = socket.create_server((HOST, 0))
            config = uvicorn.Config(
                build(self._sessions), log_level="warning", access_log=False, lifespan="off", ws="none", loop="asyncio"
            )
            self._server = server = _Server(config)
            self._serving = asyncio.create_task(server.serve(sockets=[listening]))
            self.origin = f"http://{HOST}:{listening.getsockname()[1]}"
            while not server.started and not self._serving.done():
                await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        """Answer no more."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = self._server.force_exit = True
            await asyncio.wait({self._serving})

    @contextlib.contextmanager
    def opened(self, session: EpisodeSession) -> Generator[None, None, None]:
        """The session's key opens it for as long as this lasts."""
        self._sessions[session.key] = session
        try:
            yield
        finally:
            del self._sessions[session.key]
