"""A real HTTP service, in a thread."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

Reply = tuple[int, bytes]


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # connections that wait while the machine is busy


class Service:
    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.headers: list[Any] = []
        self.paths: list[str] = []
        self.reply: Callable[[], Reply] = lambda: (200, b'{"score": 0.5}')
        self.answer: Callable[[Any], Reply] = lambda _: self.reply()
        """The reply to a request's body."""
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                asked = json.loads(body)
                service.requests.append(asked)
                service.headers.append(dict(self.headers))
                service.paths.append(self.path)
                status, content = service.answer(asked)
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None: ...

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/score"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    yield service
    service.close()
