"""The page at `/ui`: static files that call the REST API, and its login.

Invariant: only this origin's files run; no script reads the token.
"""

from pathlib import Path
from typing import Literal

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import BaseModel, ConfigDict, Field

from offbeat.services.control.auth import find_refused_login
from offbeat.services.control.console.page_files import PageFiles
from offbeat.services.control.http_errors import HttpError, refusals
from offbeat.services.control.rights import Tokens
from offbeat.services.control.schemas import View
from offbeat.services.control.sessions import close_session, find_grant, find_session, open_session

FOLDER = Path(__file__).with_name("ui")
Access = Literal["none", "read", "write"]


class LoginBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    token: str = Field(min_length=1, max_length=1000)


class SessionView(View):
    """What this browser may do."""

    access: Access
    """`none`: log in first."""
    needs_token: bool
    """Whether the service has tokens."""


def add_page(api: FastAPI, tokens: Tokens, *, access: Access = "write") -> None:
    """Serve the page. access: without a token."""
    api.include_router(_session_routes(tokens, access))

    @api.get("/ui", include_in_schema=False)
    async def open_page() -> Response:
        return RedirectResponse("/ui/")

    api.add_route("/ui/{path:path}", PageFiles(FOLDER).answer, include_in_schema=False)


def _session_routes(tokens: Tokens, access: Access) -> APIRouter:
    routes = APIRouter(tags=["console"])

    @routes.get("/session", responses=refusals())
    async def show_session(request: Request) -> SessionView:
        """Access of this browser's session; needs no token."""
        if not tokens.grants:
            return SessionView(access=access, needs_token=False)
        grant = find_session(request, tokens.grants)
        return SessionView(access=grant.scope if grant else "none", needs_token=True)

    @routes.post("/session", responses=refusals(422))
    async def log_in(request: Request, response: Response, body: LoginBody) -> SessionView:
        """Open a session by a token, as an HttpOnly cookie."""
        grant = find_grant(body.token, tokens.grants)
        if grant is None:
            if (refusal := find_refused_login(request)) is not None:
                raise HttpError(*refusal)
            raise HttpError(401, "unauthorized", "this is no token of the service")
        open_session(request, response, grant.token)
        return SessionView(access=grant.scope, needs_token=True)

    @routes.delete("/session", responses=refusals())
    async def log_out(request: Request, response: Response) -> SessionView:
        """Close the session."""
        close_session(request, response)
        return SessionView(access="none" if tokens.grants else access, needs_token=bool(tokens.grants))

    return routes
