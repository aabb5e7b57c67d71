"""HTTP server in an event loop that is already running."""

import contextlib
from collections.abc import Generator

import uvicorn


class EmbeddedServer(uvicorn.Server):
    """Server that installs no signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
