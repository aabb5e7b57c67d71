"""Errors as JSON: 4xx for bad input, never a traceback."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException

from offbeat.services.control.console.archive import NotRecordedError, UnknownGroupError
from offbeat.services.control.console.derived_runs import TooManyPlansError, TooManyReproductionsError
from offbeat.services.control.console.replays import TooManyReplaysError
from offbeat.services.control.run import (
    BusyError,
    ForeignRecordError,
    LostRecordError,
    RunExistsError,
    RunStateError,
    UnknownRunError,
)
from offbeat.services.control.schemas import ErrorBody, ErrorView, ProblemView
from offbeat.services.control.service import (
    InvalidPlaceError,
    InvalidRunError,
    NotAllowedError,
    TooManyValidationsError,
)
from offbeat.services.errors import MeshError, RetryableError
from offbeat.services.redis.errors import RedisReadOnlyError

logger = logging.getLogger(__name__)

MAX_PROBLEMS = 100
MAX_TEXT_CHARS = 10_000
"""Some errors quote a value."""
STATUS_DESCRIPTIONS = {
    400: "The body is malformed.",
    401: "The bearer token is missing or wrong.",
    403: "Without a token only programs on this machine may call; the token is for reading, or does not allow a key in "
    "`problems`.",
    404: "There is no such run, group or trajectory; or the run's folder does not hold it.",
    409: "The state of the run, or of another one, does not allow it.",
    413: "The body is too large.",
    415: "The body is of another type than YAML or JSON.",
    422: "A value was refused; `problems` names each key, and the nearest valid one where a key is unknown.",
    429: "Too many calls, event streams, validations, replays, reproductions or plans at once.",
    503: "Redis is unavailable: retry.",
}
RETRY = {"Retry-After": "1"}  # in seconds
HEADERS_BY_STATUS: dict[int, dict[str, str]] = {401: {"WWW-Authenticate": "Bearer"}, 429: RETRY, 503: RETRY}
STATUS_BY_ERROR: dict[type[Exception], tuple[int, str]] = {
    UnknownRunError: (404, "unknown_run"),
    LostRecordError: (503, "state_unreachable"),
    RunExistsError: (409, "run_exists"),
    BusyError: (409, "busy"),
    RunStateError: (409, "run_state"),
    ForeignRecordError: (409, "foreign_record"),
    TooManyValidationsError: (429, "too_many_validations"),
    TooManyReplaysError: (429, "too_many_replays"),
    TooManyReproductionsError: (429, "too_many_reproductions"),
    TooManyPlansError: (429, "too_many_plans"),
    UnknownGroupError: (404, "unknown_group"),
    NotRecordedError: (404, "not_recorded"),
}


class HttpError(MeshError):
    """4xx response."""

    def __init__(self, status: int, code: str, message: str) -> None:
        self.status, self.code = status, code
        super().__init__(message)


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return a route's error responses, including 401, 403, 429 and 503."""
    return {
        status: {"model": ErrorView, "description": STATUS_DESCRIPTIONS[status]}
        for status in sorted({401, 403, 429, 503, *statuses})
    }


def error_response(
    status: int,
    code: str,
    message: str,
    problems: Sequence[ProblemView] = (),
    *,
    close: bool = False,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """Build a response; lone surrogates become `?`.

    close: end the connection without reading the rest of the request.
    """
    shown = [_clean(problem) for problem in problems[:MAX_PROBLEMS]]
    if (more := len(problems) - MAX_PROBLEMS) > 0:
        message = f"{message}; {more:,} more problems are not listed"
    body = ErrorView(error=ErrorBody(code=code, message=_text(message), problems=shown))
    sent = {**(headers or {}), **HEADERS_BY_STATUS.get(status, {})}
    if close or status == 413:
        sent["Connection"] = "close"
    return JSONResponse(body.model_dump(mode="json"), status, sent)


def _text(text: str) -> str:
    text = text if len(text) <= MAX_TEXT_CHARS else f"{text[:MAX_TEXT_CHARS]}..."
    return text.encode("utf-8", "replace").decode()


def _clean(problem: ProblemView) -> ProblemView:
    suggestion = None if problem.suggestion is None else _text(problem.suggestion)
    return ProblemView(path=_text(problem.path), message=_text(problem.message), suggestion=suggestion)


def answer_errors(api: FastAPI) -> None:
    @api.exception_handler(InvalidRunError)
    async def invalid(_: Request, error: InvalidRunError) -> Response:
        return error_response(422, "invalid_config", "the configuration was refused", error.problems)

    @api.exception_handler(NotAllowedError)
    async def not_allowed(_: Request, error: NotAllowedError) -> Response:
        return error_response(
            403,
            "not_allowed",
            "this is beyond your rights, which the service's `control` settings give",
            error.problems,
        )

    @api.exception_handler(InvalidPlaceError)
    async def no_place(_: Request, error: InvalidPlaceError) -> Response:
        problem = ProblemView(path="query.after", message=str(error))
        return error_response(422, "invalid_request", "a parameter was refused", [problem])

    @api.exception_handler(HttpError)
    async def refused(_: Request, error: HttpError) -> Response:
        return error_response(error.status, error.code, str(error))

    @api.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        problems = [_problem(each) for each in error.errors()]
        return error_response(422, "invalid_request", "a parameter was refused", problems)

    @api.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        if error.status_code == 204:
            return Response(status_code=204)
        return error_response(error.status_code, "http_error", str(error.detail), headers=error.headers)

    @api.exception_handler(RedisError)
    @api.exception_handler(RetryableError)
    async def unreachable(request: Request, error: Exception) -> Response:
        logger.warning("%s %s: %s", request.method, request.url.path, error)
        refusal = error if isinstance(error, RedisReadOnlyError) else error.__cause__
        message = str(refusal) if isinstance(refusal, RedisReadOnlyError) else "Redis does not answer"
        return error_response(503, "state_unreachable", f"{message}: try again")

    @api.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return error_response(500, "internal", "the control service failed; see its log")

    for kind in STATUS_BY_ERROR:
        api.add_exception_handler(kind, _known)


async def _known(_: Request, error: Exception) -> Response:
    status, code = STATUS_BY_ERROR[type(error)]
    return error_response(status, code, str(error))


def _problem(details: Mapping[str, Any]) -> ProblemView:
    return ProblemView(path=".".join(str(part) for part in details["loc"]), message=str(details["msg"]))
