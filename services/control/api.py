"""The REST API: routes of a few lines over `ControlService`, errors as bodies that a program can read.

Invariants: bad input is answered by 4xx; no answer holds a traceback; without a token the API only answers calls that a
web page in the user's browser can't have made.
"""

import hmac
import json
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException

from services.control.records import RunExistsError, UnknownRunError
from services.control.service import ControlService, InvalidRunError
from services.control.views import ErrorBody, ErrorView, MetricsView, ProblemView, RunsView, RunView

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 1_000_000
YAML_TYPES = ("application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml")
JSON_TYPE = "application/json"
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
OPEN_PATHS = ("/healthz",)
"""Answered without a token: who asks whether a service lives has none."""

RunId = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
EntryId = Annotated[str, Query(pattern=r"^\d{1,20}(-\d{1,20})?$")]
BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/yaml": {"schema": {"type": "string"}},
            JSON_TYPE: {"schema": {"type": "object"}},
        },
    }
}
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorView} for status in (400, 401, 403, 404, 409, 413, 415, 422)
}


class RefusedError(Exception):
    """A call that is answered by a 4xx."""

    def __init__(self, status: int, code: str, message: str) -> None:
        self.status, self.code = status, code
        super().__init__(message)


def create_api(
    service: ControlService,
    *,
    token: str | None = None,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
) -> FastAPI:
    """The API over `service`; with a `token`, for callers who carry it as `Authorization: Bearer`.

    lifespan: what runs beside the API for as long as it answers.
    """
    api = FastAPI(title="Offbeat", version="1", responses=REFUSALS, lifespan=lifespan)

    @api.post("/runs", status_code=201, openapi_extra=BODY)
    async def create_run(request: Request, response: Response, dry_run: bool = False) -> RunView | None:
        """Start the run that the body describes, as YAML or JSON; 200 if it goes on already."""
        view, created = await service.create(await _document(request), dry_run=dry_run)
        response.status_code = 201 if created else 200
        return view

    @api.get("/runs")
    async def list_runs() -> RunsView:
        """Every run, newest first."""
        return RunsView(runs=await service.runs())

    @api.get("/runs/{run_id}")
    async def show_run(run_id: RunId) -> RunView:
        """State, step, counters and where things lie."""
        return await service.view(run_id)

    @api.post("/runs/{run_id}/stop", status_code=202)
    async def stop_run(run_id: RunId, now: bool = False) -> RunView:
        """Drain, checkpoint and end; with `now`, end without draining."""
        return await service.stop(run_id, now=now)

    @api.get("/runs/{run_id}/metrics")
    async def read_metrics(
        run_id: RunId, after: EntryId = "0", limit: Annotated[int, Query(ge=1, le=5000)] = 1000
    ) -> MetricsView:
        """Metric records that came after the id `after`."""
        return await service.metrics(run_id, after, limit)

    @api.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Whether the service lives and reaches its state."""
        await service.healthy()
        return {"status": "ok"}

    _answer_errors(api)
    _guard(api, token)
    return api


async def _document(request: Request) -> str | dict[str, Any]:
    """The body as YAML text or as a JSON object."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON_TYPE and kind not in YAML_TYPES:
        raise RefusedError(
            415, "unsupported_media_type", f"send {JSON_TYPE} or {YAML_TYPES[0]}, not {kind or 'nothing'}"
        )
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise RefusedError(413, "too_large", f"a configuration has at most {MAX_BODY_BYTES:,} bytes")
    try:
        if kind in YAML_TYPES:
            return body.decode()
        tree = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, "malformed", f"the body can't be read: {error}") from error
    if not isinstance(tree, dict):
        raise RefusedError(400, "malformed", "expected a JSON object")
    return tree


def _error(status: int, code: str, message: str, problems: list[ProblemView] | None = None) -> JSONResponse:
    body = ErrorView(error=ErrorBody(code=code, message=message, problems=problems or []))
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse(body.model_dump(mode="json"), status, headers)


def _answer_errors(api: FastAPI) -> None:
    @api.exception_handler(InvalidRunError)
    async def invalid(_: Request, error: InvalidRunError) -> Response:
        return _error(422, "invalid_config", "the configuration was refused", error.problems)

    @api.exception_handler(UnknownRunError)
    async def unknown(_: Request, error: UnknownRunError) -> Response:
        return _error(404, "unknown_run", str(error))

    @api.exception_handler(RunExistsError)
    async def exists(_: Request, error: RunExistsError) -> Response:
        return _error(409, "run_exists", str(error))

    @api.exception_handler(RefusedError)
    async def refused(_: Request, error: RefusedError) -> Response:
        return _error(error.status, error.code, str(error))

    @api.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        problems = [
            ProblemView(path=".".join(str(part) for part in each["loc"]), message=each["msg"])
            for each in error.errors()
        ]
        return _error(422, "invalid_request", "a parameter was refused", problems)

    @api.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        return _error(error.status_code, "http_error", str(error.detail))

    @api.exception_handler(RedisError)
    async def redis(request: Request, error: RedisError) -> Response:
        logger.warning("%s %s: %s", request.method, request.url.path, error)
        return _error(503, "state_unreachable", "Redis does not answer: try again")

    @api.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return _error(500, "internal", "the control service failed; its log says why")


def _guard(api: FastAPI, token: str | None) -> None:
    @api.middleware("http")
    async def guard(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        if request.url.path in OPEN_PATHS:
            return await call_next(request)
        if token is not None:
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                return _error(401, "unauthorized", "send the bearer token: `Authorization: Bearer ...`")
        elif not _from_here(request):
            return _error(403, "forbidden", "without a token only programs on this machine may call")
        return await call_next(request)


def _from_here(request: Request) -> bool:
    """No web page of another origin made this call: neither across origins nor by rebinding a name to loopback."""
    hosts = [urlsplit(f"//{request.headers.get('host', '')}").hostname]
    if origin := request.headers.get("origin"):
        hosts.append(urlsplit(origin).hostname)
    return all(host in LOOPBACK_NAMES for host in hosts)
