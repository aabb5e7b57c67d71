"""HTTP server in an event loop of ours."""

import contextlib
from collections.abc import Generator

import uvicorn


class EmbeddedServer(uvicorn.Server):
    """Leaves signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
