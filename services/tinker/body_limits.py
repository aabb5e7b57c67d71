"""Limits of request bodies.

Invariant: no byte of a caller without a key is read, nor more of a body than its route takes.
"""

from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from offbeat.services.tinker.errors import TinkerError

LARGE_PATH = "/forward_backward"
MAX_LARGE_BYTES = 256 << 20
MAX_BYTES = 16 << 20
"""A prompt of a million tokens has 8 MB."""
BODY_METHODS = frozenset({"POST", "PUT", "PATCH", "DELETE"})


class BodyLimits:
    def __init__(self, app: ASGIApp, check_key: Callable[[Request], object]) -> None:
        """check_key: raises TinkerError for a request that may have no body."""
        self._app = app
        self._check_key = check_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in BODY_METHODS:
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        limit = MAX_LARGE_BYTES if scope["path"].endswith(LARGE_PATH) else MAX_BYTES
        length = request.headers.get("content-length", "")
        try:
            self._check_key(request)
            if length.isdecimal() and int(length[:20]) > limit:
                raise _too_large(limit)
        except TinkerError as error:
            await _refuse(error.status, str(error))(scope, receive, send)
        except HTTPException as error:
            await _refuse(error.status_code, error.detail)(scope, receive, send)
        else:
            await self._app(scope, _limited(receive, limit), send)


def _refuse(status: int, detail: str) -> JSONResponse:
    return JSONResponse({"detail": detail}, status, {"connection": "close"})


def _too_large(limit: int) -> HTTPException:
    """Return what FastAPI passes on from reading a body."""
    return HTTPException(413, f"the body has more than {limit >> 20} MiB: send fewer sequences at once")


def _limited(receive: Receive, limit: int) -> Receive:
    received = 0

    async def receive_limited() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > limit:
            raise _too_large(limit)
        return message

    return receive_limited
