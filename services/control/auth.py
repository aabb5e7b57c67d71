"""Authentication, rate and size limits of the API.

Without tokens, local programs may call, but no web page of another origin. A refused call counts only against its own
kind's rate.
"""

import hmac
import math
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from offbeat.services.control.http_errors import HttpError, error_response
from offbeat.services.control.rights import RIGHTS, Tokens
from offbeat.services.control.sessions import find_session, is_same_origin
from offbeat.services.ports import LOOPBACK_NAMES


class TokenBucket:
    """Rate limiter of `per_s` calls and bursts of `burst`."""

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


OPEN_PATHS = ("/healthz",)
DOCS_PATHS = ("/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json")
"""Without token: a browser can't send one before the page loads."""
PAGE, SESSION = "/ui", "/session"
LIMIT_LOGIN = "offbeat.limit_login"


READ_METHODS = ("GET", "HEAD", "OPTIONS")
CALLS_PER_S, CALL_BURST = 200.0, 1000
"""Per token; without tokens, for all callers."""
WRONG_TOKENS_PER_S, WRONG_TOKEN_BURST = 1.0, 30
MAX_BODY_BYTES = 1_000_000
SCHEME = b"bearer "


Refusal = tuple[int, str, str]


class AuthMiddleware:
    def __init__(self, app: ASGIApp, tokens: Tokens) -> None:
        self._app = app
        self._grants = tokens.grants
        self._local_rights = tokens.rights
        self._calls = {grant.token: TokenBucket(CALLS_PER_S, CALL_BURST) for grant in self._grants}
        self._local_calls = TokenBucket(CALLS_PER_S, CALL_BURST)
        self._docs_calls = TokenBucket(CALLS_PER_S, CALL_BURST)
        self._wrong = TokenBucket(WRONG_TOKENS_PER_S, WRONG_TOKEN_BURST)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        refusal = _oversized(request) or self._refusal(request)
        if refusal is None:
            await self._app(scope, *_limited(receive, send))
            return
        await error_response(*refusal, close=True)(scope, receive, send)

    def _refusal(self, request: Request) -> Refusal | None:
        path = request.scope["path"]
        if path in OPEN_PATHS:
            return None
        if not self._grants:
            if not is_from_this_host(request):
                return 403, "forbidden", "without a token only programs on this machine may call"
            request.scope[RIGHTS] = self._local_rights
            return _limit(self._local_calls)
        if path in DOCS_PATHS or path in (SESSION, PAGE) or path.startswith(f"{PAGE}/"):
            request.scope[LIMIT_LOGIN] = lambda: _limit(self._wrong)
            return _limit(self._docs_calls)
        given = request.headers.get("authorization", "").encode()
        # All are compared, whatever the first result, so that the time reveals nothing
        matching = [grant for grant in self._grants if _matches(given, grant.token)]
        if not given and (grant := find_session(request, self._grants)) is not None:
            matching = [grant]
        if not matching:
            return _limit(self._wrong) or (401, "unauthorized", "send the bearer token: `Authorization: Bearer ...`")
        grant = matching[0]
        if grant.scope == "read" and request.method not in READ_METHODS:
            return 403, "read_only", f"this token is for reading: {request.method} needs a token of scope write"
        request.scope[RIGHTS] = grant.rights
        return _limit(self._calls[grant.token])


def find_refused_login(request: Request) -> Refusal | None:
    """Count a wrong login; return the refusal if there were too many."""
    limit = request.scope.get(LIMIT_LOGIN)
    return None if limit is None else limit()


def _limit(bucket: TokenBucket) -> Refusal | None:
    wait_s = bucket.take()
    return (429, "too_many_calls", f"too many calls: try again in {math.ceil(wait_s)} s") if wait_s else None


def _matches(given: bytes, token: str) -> bool:
    """Compare with a token, whatever the case of the scheme (RFC 9110, 11.1)."""
    scheme = given[: len(SCHEME)].lower()
    return hmac.compare_digest(scheme + given[len(SCHEME) :], SCHEME + token.encode())


def _oversized(request: Request) -> Refusal | None:
    """Refuse a declared length before reading anything."""
    length = request.headers.get("content-length", "")
    return TOO_LARGE if length.isdecimal() and int(length[:20]) > MAX_BODY_BYTES else None


TOO_LARGE: Refusal = (413, "too_large", f"a body has at most {MAX_BODY_BYTES:,} bytes")


def _limited(receive: Receive, send: Send) -> tuple[Receive, Send]:
    """Count bytes on arrival."""
    received, responded = 0, False

    async def receive_limited() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received <= MAX_BODY_BYTES:
            return message
        if responded:
            return {"type": "http.disconnect"}
        raise HttpError(*TOO_LARGE)

    async def send_noticing(message: Message) -> None:
        nonlocal responded
        responded = True
        await send(message)

    return receive_limited, send_noticing


def is_from_this_host(request: Request) -> bool:
    """Return False for web pages of other origins, including other ports and DNS rebinding."""
    address = request.headers.get("host", "")
    if _host(f"//{address}") not in LOOPBACK_NAMES:
        return False
    return is_same_origin(request)


def _host(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
