"""Browser sessions: a cookie derived from a token, hidden from scripts.

Stateless; a session ends with its token.
"""

import hmac
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from offbeat.services.control.rights import TokenGrant

COOKIE = "offbeat_session"
"""Followed by the port, as browsers send cookies to all ports of a host; builds without it wrote the name alone."""
PURPOSE = b"offbeat browser session"
MAX_AGE_S = 7 * 24 * 3600


def name_cookie(request: Request) -> str:
    """Return the name of the cookie of the request's port."""
    port = request.headers.get("host", "").rpartition(":")[2]
    return f"{COOKIE}_{port}" if port.isascii() and port.isdecimal() else COOKIE


def session_of(token: str) -> str:
    return hmac.new(token.encode(), PURPOSE, "sha256").hexdigest()


def find_session(request: Request, grants: Sequence[TokenGrant]) -> TokenGrant | None:
    """Return the grant of the request's cookie; changes only from a page of this origin."""
    given = [request.cookies.get(name, "").encode() for name in (name_cookie(request), COOKIE)]
    # All are compared, so that the time reveals nothing
    matching = [
        grant for each in given for grant in grants if hmac.compare_digest(each, session_of(grant.token).encode())
    ]
    return matching[0] if matching and is_same_origin(request) else None


def find_grant(token: str, grants: Sequence[TokenGrant]) -> TokenGrant | None:
    matching = [grant for grant in grants if hmac.compare_digest(token.encode(), grant.token.encode())]
    return matching[0] if matching else None


def is_same_origin(request: Request) -> bool:
    """Return False for a call of another origin's page."""
    address = request.headers.get("host", "")
    origin = request.headers.get("origin")
    same_origin = origin is None or origin in (f"http://{address}", f"https://{address}")
    return same_origin and request.headers.get("sec-fetch-site", "none") in ("none", "same-origin")


def open_session(request: Request, response: Response, token: str) -> None:
    response.set_cookie(
        name_cookie(request),
        session_of(token),
        max_age=MAX_AGE_S,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
        path="/",
    )


def close_session(request: Request, response: Response) -> None:
    for name in {name_cookie(request), COOKIE}:
        response.delete_cookie(name, httponly=True, samesite="strict", path="/")
