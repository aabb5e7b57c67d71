"""Who may call the API: with a token, who carries it; without one, programs on this machine.

Invariant: without a token, no web page in the user's browser can make a call that is answered.
"""

import hmac
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from services.control.refusals import error_response

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
OPEN_PATHS = ("/healthz",)
"""Answered to everybody: who asks whether a service lives has no token."""
DOCS_PATHS = ("/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json")
"""Answered without the token: a browser has no way to send one before the page is there, and nothing here is secret."""


class Guard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on, or refuse it."""
        if scope["type"] != "http" or (refusal := self._refusal(Request(scope))) is None:
            await self._app(scope, receive, send)
            return
        await error_response(*refusal)(scope, receive, send)

    def _refusal(self, request: Request) -> tuple[int, str, str] | None:
        path = request.scope["path"]
        if path in OPEN_PATHS:
            return None
        if self._token is None:
            if _from_here(request):
                return None
            return 403, "forbidden", "without a token only programs on this machine may call"
        given = request.headers.get("authorization", "")
        if path in DOCS_PATHS or hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            return None
        return 401, "unauthorized", "send the bearer token: `Authorization: Bearer ...`"


def _from_here(request: Request) -> bool:
    """No web page of another origin made this call: neither across origins nor by rebinding a name to loopback."""
    hosts = [_host(f"//{request.headers.get('host', '')}")]
    if origin := request.headers.get("origin"):
        hosts.append(_host(origin))
    return all(host in LOOPBACK_NAMES for host in hosts)


def _host(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
