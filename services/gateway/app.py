"""HTTP routes of all APIs.

Invariants: a key opens only its own episode; an answer is delivered only once received; disconnecting cancels sampling.
"""

import asyncio
import json
import logging
import math
import re
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from offbeat.services.chat.template import UnusableError
from offbeat.services.gateway import anthropic_messages, openai_chat, openai_responses
from offbeat.services.gateway.session import (
    EpisodeEnv,
    EpisodeSession,
    InvalidCallError,
    ModelReply,
    ModelRequest,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
Sessions = dict[str, EpisodeSession]
"""By key."""
Handler = Callable[[Request, EpisodeSession, dict[str, Any]], Awaitable[Response]]
CLIENT_LEFT = 499
MAX_BODY_BYTES = 64 << 20
"""Exceeds a policy's longest conversation."""
SURROGATE = re.compile(rb"\\u[dD]")
"""Escape of a surrogate, which may lack its other half."""
CONTEXT_CHARS = 40
"""Shown before a mistake in a body."""


class CallerLeftError(Exception):
    """The client disconnected."""


def build(sessions: Sessions) -> FastAPI:
    app = FastAPI(title="Offbeat gateway", docs_url=None, redoc_url=None, openapi_url=None)
    for path, handler in (
        ("/v1/chat/completions", _chat),
        ("/v1/completions", _completion),
        ("/v1/responses", _response),
        ("/v1/messages", _message),
        ("/v1/messages/count_tokens", _count_tokens),
        ("/env/step", _step),
    ):
        # a route of Starlette's: FastAPI's would look for dependencies in each call
        app.add_route(path, _with_session(sessions, handler), ["POST"])
    for path, handler in (("/v1/models", _models), ("/env", _task)):
        app.add_route(path, _with_session(sessions, handler), ["GET"])
    return app


def _with_session(sessions: Sessions, handler: Handler) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    async def call(request: Request) -> Response:
        session = next((sessions[key] for key in _keys(request) if key in sessions), None)
        if session is None:
            return _error_response(request, 401, "no episode is open under this key", "authentication_error")
        try:
            return await handler(request, session, await _body(request))
        except InvalidCallError as error:
            return _error_response(request, 400, str(error), error.kind)
        except UnusableError as error:
            return _error_response(request, 400, str(error), "invalid_request_error")
        except CallerLeftError:
            return Response(status_code=CLIENT_LEFT)
        except Exception as error:
            logger.info("an agent's call failed", exc_info=True)
            return _error_response(request, 500, f"the policy can't be sampled: {error}", "api_error")

    return call


def _keys(request: Request) -> tuple[str, str]:
    """Return the keys of both headers: clients send one of their machine's in the other, or a key without a scheme."""
    scheme, _, token = request.headers.get("authorization", "").strip().partition(" ")
    if not token:
        scheme, token = "bearer", scheme
    return token.strip() if scheme.lower() == "bearer" else "", request.headers.get("x-api-key", "")


async def _body(request: Request) -> dict[str, Any]:
    if request.method == "GET":
        return {}
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > MAX_BODY_BYTES:
            raise InvalidCallError(f"the body has more than {MAX_BODY_BYTES >> 20} MiB")
    try:
        body = json.loads(content, parse_constant=_finite_number, parse_float=_finite_number)
        if SURROGATE.search(content):
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        before = error.object[max(0, error.start - CONTEXT_CHARS) : error.start]
        raise InvalidCallError(
            f"the body has half of a surrogate pair after {before!r}: decode texts with errors='replace'"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InvalidCallError(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidCallError("the body is no JSON object")
    return body


def _finite_number(text: str) -> float:
    """Return a number; raises ValueError for one that JSON has not, which can't be sent on."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is no number of JSON")
    return number


def _error_response(request: Request, status: int, message: str, kind: str) -> Response:
    """Return an error; `x-should-retry` stops clients from retrying."""
    if request.url.path.startswith("/v1/messages"):
        body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": message}}
    else:
        body = {"error": {"message": message, "type": kind, "code": kind, "param": None}}
    return JSONResponse(body, status, {"x-should-retry": "false"})


async def _run_while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Raise CallerLeftError if the client disconnects."""
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if disconnect.done():
            raise CallerLeftError
        return await task
    finally:
        task.cancel()
        disconnect.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _answer(request: Request, session: EpisodeSession, ask: ModelRequest) -> list[ModelReply]:
    return await _run_while_connected(request, session.answer(ask))


def _send(
    body: dict[str, Any],
    session: EpisodeSession,
    replies: list[ModelReply],
    render: Callable[[], Any],
    stream: Iterator[str],
) -> Response:
    """Return JSON or events; delivered with the last part."""
    if not body.get("stream"):
        response = JSONResponse(render())
        session.deliver(replies)
        return response

    async def events():
        for event in stream:
            yield event
        session.deliver(replies)

    return StreamingResponse(events(), media_type="text/event-stream")


async def _chat(request: Request, session: EpisodeSession, body: dict[str, Any]) -> Response:
    replies = await _answer(request, session, openai_chat.read_chat(body))
    about = (body, replies, f"chatcmpl-{uuid.uuid4().hex}", session.model)
    return _send(body, session, replies, lambda: openai_chat.write_chat(*about), openai_chat.stream_chat(*about))


async def _completion(request: Request, session: EpisodeSession, body: dict[str, Any]) -> Response:
    replies = await _answer(request, session, openai_chat.read_completion(body))
    about = (body, replies, f"cmpl-{uuid.uuid4().hex}", session.model)
    return _send(
        body, session, replies, lambda: openai_chat.write_completion(*about), openai_chat.stream_completion(*about)
    )


async def _message(request: Request, session: EpisodeSession, body: dict[str, Any]) -> Response:
    replies = await _answer(request, session, anthropic_messages.read_messages(body))
    about = (replies[0], f"msg_{uuid.uuid4().hex}", session.model)
    return _send(
        body,
        session,
        replies,
        lambda: anthropic_messages.write_message(*about),
        anthropic_messages.stream_message(*about),
    )


async def _count_tokens(_: Request, session: EpisodeSession, body: dict[str, Any]) -> Response:
    return JSONResponse({"input_tokens": await session.count_tokens(anthropic_messages.read_messages(body))})


async def _response(request: Request, session: EpisodeSession, body: dict[str, Any]) -> Response:
    before = body.get("previous_response_id")
    earlier = session.conversations.get(str(before)) if before else ()
    if earlier is None:
        raise InvalidCallError(f"previous_response_id {before!r} is not known in this episode")
    ask = openai_responses.read_responses(body, earlier)
    replies = await _answer(request, session, ask)
    answer_id = f"resp_{uuid.uuid4().hex}"
    asked = openai_responses.without_instructions(body, session.messages_of(replies[0]))
    session.conversations[answer_id] = (*asked, replies[0].message)
    about = (body, replies[0], answer_id, session.model)
    return _send(
        body,
        session,
        replies,
        lambda: openai_responses.write_response(*about),
        openai_responses.stream_response(*about),
    )


async def _models(_: Request, session: EpisodeSession, __: dict[str, Any]) -> Response:
    model = {
        "id": session.model,
        "object": "model",
        "created": 0,
        "owned_by": "offbeat",
        "type": "model",
        "display_name": session.model,
        "created_at": "1970-01-01T00:00:00Z",
        "max_model_len": session.bounds.sequence_length,
    }
    page = {"object": "list", "data": [model], "has_more": False, "first_id": session.model, "last_id": session.model}
    return JSONResponse(page)


async def _task(_: Request, session: EpisodeSession, __: dict[str, Any]) -> Response:
    return JSONResponse(_env_of(session).task)


async def _step(_: Request, session: EpisodeSession, body: dict[str, Any]) -> Response:
    action = body.get("action")
    if not isinstance(action, str):
        raise InvalidCallError(f"action is {action!r}: a text is needed")
    return JSONResponse(await _env_of(session).step(action))


def _env_of(session: EpisodeSession) -> EpisodeEnv:
    if session.env is None:
        raise InvalidCallError("this episode has no env", "no_env")
    return session.env
