"""Parsers of request bodies and parameters."""

import json
from difflib import get_close_matches
from typing import Any

from fastapi import Request
from pydantic import ValidationError

from offbeat.services.control.events import GREATEST_ID, Position
from offbeat.services.control.http_errors import MAX_PROBLEMS, HttpError
from offbeat.services.control.schemas import ProblemView, SettingsPatch
from offbeat.services.control.service import InvalidRunError
from offbeat.services.live_settings import LIVE_SETTINGS

YAML_TYPES = ("application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml")
JSON_TYPE = "application/json"
MAX_ID_PART = 2**64 - 1
MAX_INTEGER_CHARS = 400
"""Python refuses more than 4,300 digits with an unsuitable message."""
MIN_SIMILARITY = 0.6
"""Similarity (0 to 1) of a misspelling."""
ALIASES = {alias: name for name, row in LIVE_SETTINGS.items() for alias in (row.info.path, *row.info.aliases)}


async def read_document(request: Request) -> str | dict[str, Any]:
    """Read YAML text or a JSON object; raises `HttpError`."""
    kind = _kind(request)
    if kind != JSON_TYPE and kind not in YAML_TYPES:
        raise _unsupported(kind, f"{JSON_TYPE} or {YAML_TYPES[0]}")
    body = await _body(request)
    if kind == JSON_TYPE:
        return _object(body)
    try:
        return body.decode()
    except ValueError as error:
        raise HttpError(400, "malformed", f"the body can't be read: {error}") from error


async def read_object(request: Request) -> dict[str, Any]:
    """Read a JSON object; raises `HttpError`."""
    kind = _kind(request)
    if kind != JSON_TYPE:
        raise _unsupported(kind, JSON_TYPE)
    return _object(await _body(request))


async def read_change(request: Request) -> SettingsPatch:
    """Read settings to change; raises `HttpError`, `InvalidRunError`."""
    tree = await read_object(request)
    try:
        return SettingsPatch.model_validate(tree)
    except ValidationError as error:
        details = error.errors(include_url=False)
        problems = [
            _problem(".".join(map(str, each["loc"])), each["type"], each["msg"]) for each in details[:MAX_PROBLEMS]
        ]
        raise InvalidRunError(problems) from error


def _problem(key: str, kind: str, message: str) -> ProblemView:
    if kind != "extra_forbidden":
        return ProblemView(path=key, message=message)
    known = list(SettingsPatch.model_fields)
    near = get_close_matches(key.rpartition(".")[2], known, 1, MIN_SIMILARITY)
    nearest = ALIASES.get(key) or (near[0] if near else None)
    if nearest is None:
        return ProblemView(path=key, message=f"can't be changed; these can: {', '.join(known)}")
    return ProblemView(path=key, message=f"unknown key; did you mean `{nearest}`?", suggestion=nearest)


def read_position(text: str) -> Position:
    """Parse `Last-Event-ID`. Raises `HttpError`."""
    try:
        return Position.parse(text)
    except ValueError as error:
        raise HttpError(422, "invalid_request", f"Last-Event-ID: {error}") from error


def entry_id(text: str) -> str:
    """Validate a Redis stream id; raises `ValueError`."""
    if any(int(part) > MAX_ID_PART for part in text.split("-")):
        raise ValueError("not a record's id: its parts must be below 2^64")
    if text == GREATEST_ID:  # which Redis refuses as a start
        raise ValueError("the greatest possible id, which no record has")
    return text


def _kind(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _unsupported(kind: str, right: str) -> HttpError:
    return HttpError(415, "unsupported_media_type", f"send {right}, not {kind or 'nothing'}")


async def _body(request: Request) -> bytes:
    return b"".join([chunk async for chunk in request.stream()])


def _object(body: bytes) -> dict[str, Any]:
    try:
        tree = json.loads(body, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise HttpError(400, "malformed", f"the body can't be read: {error}") from error
    if not isinstance(tree, dict):
        raise HttpError(400, "malformed", "expected a JSON object")
    return tree


def _integer(text: str) -> int:
    if len(text) > MAX_INTEGER_CHARS:
        raise ValueError(f"an integer has at most {MAX_INTEGER_CHARS} digits")
    return int(text)
