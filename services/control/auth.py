"""Authentication and rate limits of the API.

Without tokens, programs on this machine may call, but no web page of another origin. The read token changes nothing. A
refused call does no work.
"""

import hmac
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from offbeat.services.control.http_errors import error_response


class TokenBucket:
    """Rate limiter: `per_s` calls, bursts of `burst`."""

    def __init__(self, per_s: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._left = float(burst)
        self._at = clock()

    def take(self) -> float:
        """Take a token; return 0, or the seconds until one is available."""
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1:
            return (1 - self._left) / self._per_s
        self._left -= 1
        return 0.0


LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
OPEN_PATHS = ("/healthz",)
"""Paths without authentication, for health checks."""
DOCS_PATHS = ("/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json")
"""Paths without a token: a browser can't send one before the page is loaded."""


READ_METHODS = ("GET", "HEAD", "OPTIONS")
CALLS_PER_S, CALL_BURST = 200.0, 1000
"""Rate limit of all callers together."""
WRONG_TOKENS_PER_S, WRONG_TOKEN_BURST = 1.0, 30
"""Rate limit of calls with a wrong token."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Bearer tokens of the API."""

    operate: str | None = None
    """Full access; None: programs on this machine only."""
    read: str | None = None
    """Read access."""


NO_TOKENS = Tokens()


class AuthMiddleware:
    """ASGI middleware for authentication and rate limits."""

    def __init__(self, app: ASGIApp, tokens: Tokens) -> None:
        self._app = app
        self._tokens = tokens
        self._calls = TokenBucket(CALLS_PER_S, CALL_BURST)
        self._wrong = TokenBucket(WRONG_TOKENS_PER_S, WRONG_TOKEN_BURST)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (refusal := self._refusal(Request(scope))) is None:
            await self._app(scope, receive, send)
            return
        await error_response(*refusal)(scope, receive, send)

    def _refusal(self, request: Request) -> tuple[int, str, str] | None:
        path = request.scope["path"]
        if path in OPEN_PATHS:
            return None
        if self._tokens.operate is None:
            if not _is_from_this_host(request):
                return 403, "forbidden", "without a token only programs on this machine may call"
            return self._limit()
        if path in DOCS_PATHS:
            return self._limit()
        given = request.headers.get("authorization", "").encode()
        # Both are compared whatever the first says: the time that it takes tells nothing
        operates, reads = _matches(given, self._tokens.operate), _matches(given, self._tokens.read)
        if operates or (reads and request.method in READ_METHODS):
            return self._limit()
        if reads:
            return 403, "read_only", f"this token is for reading: {request.method} needs the operating token"
        if wait_s := self._wrong.take():
            return _too_many(wait_s)
        return 401, "unauthorized", "send the bearer token: `Authorization: Bearer ...`"

    def _limit(self) -> tuple[int, str, str] | None:
        """Count an admitted call; those that are refused must not use up the others' rate."""
        wait_s = self._calls.take()
        return _too_many(wait_s) if wait_s else None


def _matches(given: bytes, token: str | None) -> bool:
    same = hmac.compare_digest(given, f"Bearer {token or ''}".encode())
    return same and bool(token)


def _too_many(wait_s: float) -> tuple[int, str, str]:
    return 429, "too_many_calls", f"too many calls: try again in {math.ceil(wait_s)} s"


def _is_from_this_host(request: Request) -> bool:
    """Return False for a web page of another origin, also of this host's other ports or by DNS rebinding."""
    address = request.headers.get("host", "")
    if _host(f"//{address}") not in LOOPBACK_NAMES:
        return False
    origin = request.headers.get("origin")
    same_origin = origin is None or origin in (f"http://{address}", f"https://{address}")
    return same_origin and request.headers.get("sec-fetch-site", "none") in ("none", "same-origin")


def _host(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
