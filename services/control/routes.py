"""Routes under /runs."""

import logging
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, HTTPException, Query, Request, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import AfterValidator
from redis.exceptions import RedisError

from offbeat.services.control.console.routes import RunId
from offbeat.services.control.event_schemas import MetricsView
from offbeat.services.control.events import (
    START,
    EventKind,
    Feed,
    Position,
    SharedViews,
)
from offbeat.services.control.http_errors import HttpError, refusals
from offbeat.services.control.request_bodies import (
    JSON_TYPE,
    YAML_TYPES,
    entry_id,
    read_change,
    read_document,
    read_position,
)
from offbeat.services.control.rights import rights_of
from offbeat.services.control.run import DesiredState, RunState, UnknownRunError
from offbeat.services.control.schemas import (
    DeletedView,
    QuarantineView,
    RunsView,
    RunView,
    SettingsPatch,
    WhyView,
)
from offbeat.services.control.service import ControlService
from offbeat.services.errors import MeshError

logger = logging.getLogger(__name__)

MAX_WATCHERS = 32
"""Maximum event streams; each polls Redis."""
RETRY_MS = 1000
"""Reconnection delay of an EventSource."""

EntryId = Annotated[str, Query(pattern=r"^[0-9]{1,20}(-[0-9]{1,20})?$"), AfterValidator(entry_id)]
NameGlob = Annotated[str, Query(max_length=200, description="Glob that the run's id fits, such as `lake-*`.")]
States = Annotated[list[RunState], Query(description="States to list; none lists all.")]
YAML_OR_JSON: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "A run's configuration: what `offbeat train` takes, with `${...}` resolved.",
        "content": {YAML_TYPES[0]: {"schema": {"type": "string"}}, JSON_TYPE: {"schema": {"type": "object"}}},
    }
}
CHANGE: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {JSON_TYPE: {"schema": SettingsPatch.model_json_schema()}},
    }
}
EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "`event` is run, metrics, history or life; `data` is JSON; `id` is a value for Last-Event-ID.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    },
    204: {"description": "The run is over and nothing follows Last-Event-ID: do not reconnect."},
}


def run_routes(service: ControlService) -> APIRouter:
    routes = APIRouter(tags=["runs"])

    @routes.post(
        "/runs",
        status_code=201,
        openapi_extra=YAML_OR_JSON,
        responses={
            200: {"model": RunView | None, "description": "It is already active; or null: a valid dry run."},
            **refusals(400, 409, 413, 415, 422),
        },
    )
    async def create_run(request: Request, response: Response, dry_run: bool = False) -> RunView | None:
        """Start the run configured by the body (YAML or JSON); `dry_run` only validates."""
        document = await read_document(request)
        view, created = await service.create(document, dry_run=dry_run, rights=rights_of(request.scope))
        response.status_code = 201 if created else 200
        return view

    @routes.get("/runs", responses=refusals(422))
    async def list_runs(
        state: States = [],  # noqa: B006 - FastAPI copies it
        name: NameGlob = "*",
        after: Annotated[str | None, Query(max_length=200, description="`next` of the answer before.")] = None,
        limit: Annotated[int, Query(ge=1, le=500)] = 50,
    ) -> RunsView:
        """List runs, newest first."""
        return await service.runs(states=state, name=name, after=after, limit=limit)

    @routes.get("/runs/{run_id}", responses=refusals(404, 409, 422))
    async def show_run(run_id: RunId) -> RunView:
        """State, step, version, staleness, rates, counters, settings, and paths."""
        return await service.view(run_id)

    @routes.patch("/runs/{run_id}", openapi_extra=CHANGE, responses=refusals(400, 404, 409, 413, 415, 422))
    async def change_run(run_id: RunId, request: Request) -> RunView:
        """Change live settings: process counts at once, others at the next step."""
        return await service.change(run_id, await read_change(request))

    @routes.delete("/runs/{run_id}", responses=refusals(404, 409, 422))
    async def delete_run(run_id: RunId, request: Request, files: bool = False) -> DeletedView:
        """Delete an ended run; with `files`, also the files that it wrote."""
        return await service.delete(run_id, files=files, rights=rights_of(request.scope))

    @routes.post("/runs/{run_id}/stop", status_code=202, responses=refusals(404, 409, 422))
    async def stop_run(run_id: RunId, now: bool = False) -> RunView:
        """Drain, checkpoint and end; `now` skips draining. No effect on an ended run."""
        return await service.want(run_id, DesiredState.KILLED if now else DesiredState.STOPPED)

    @routes.post("/runs/{run_id}/pause", status_code=202, responses=refusals(404, 409, 422))
    async def pause_run(run_id: RunId) -> RunView:
        """Start no episode and no step until resumed; running episodes finish."""
        return await service.want(run_id, DesiredState.PAUSED)

    @routes.post("/runs/{run_id}/resume", status_code=202, responses=refusals(404, 409, 422))
    async def resume_run(run_id: RunId) -> RunView:
        """Resume a paused run."""
        return await service.want(run_id, DesiredState.RUNNING)

    @routes.get("/runs/{run_id}/why", responses=refusals(404, 409, 422))
    async def explain_run(run_id: RunId) -> WhyView:
        """Chain of components that wait for each other."""
        return await service.why(run_id)

    @routes.get("/runs/{run_id}/quarantine", responses=refusals(404, 409, 422))
    async def show_quarantine(run_id: RunId) -> QuarantineView:
        """Undecodable trajectories, newest first, with error and first bytes."""
        return await service.quarantine(run_id)

    @routes.get("/runs/{run_id}/metrics", responses=refusals(404, 409, 422))
    async def read_metrics(
        run_id: RunId, after: EntryId = "0", limit: Annotated[int, Query(ge=1, le=5000)] = 1000
    ) -> MetricsView:
        """Metric records after the id `after`."""
        return await service.metrics(run_id, after, limit)

    _add_events(routes, service)
    return routes


def _add_events(routes: APIRouter, service: ControlService) -> None:
    watchers: set[Feed] = set()
    views = SharedViews(service.view)

    async def open_feed(
        run_id: RunId,
        kind: Annotated[list[EventKind], Query(description="Events to send; none sends all.")] = [],  # noqa: B006
        from_start: Annotated[
            bool, Query(description="Start with the oldest retained event, not with new ones.")
        ] = False,
        last_event_id: Annotated[str | None, Header(max_length=200)] = None,
    ) -> AsyncIterator[tuple[Feed, Position]]:
        """Yield a watcher's feed and first position.

        A dependency, as an error in a streaming route would follow the status code.
        """
        record = await service.store.load(run_id)
        if len(watchers) >= MAX_WATCHERS:
            raise HttpError(429, "too_many_watchers", f"{MAX_WATCHERS} event streams are open already")

        async def state() -> RunState:
            return (await service.store.load(run_id)).state

        feed = Feed(service.store.redis, run_id, lambda: views.view(run_id), state, kind or tuple(EventKind))
        watchers.add(feed)
        try:
            yield (
                feed,
                await _first_position(feed, last_event_id, is_over=record.state.is_terminal, from_start=from_start),
            )
        finally:
            watchers.discard(feed)

    @routes.get(
        "/runs/{run_id}/events",
        response_class=EventSourceResponse,
        responses={**EVENTS, **{status: _as_json(answer) for status, answer in refusals(404, 409, 422).items()}},
    )
    async def watch_run(
        opened: Annotated[tuple[Feed, Position], Depends(open_feed)],
    ) -> AsyncIterator[ServerSentEvent]:
        """Server-sent events until the run is over; resumes after `Last-Event-ID`."""
        feed, position = opened
        yield ServerSentEvent(retry=RETRY_MS, id=str(position))  # with which a client that gets no event resumes
        try:
            async for event in feed.follow(position):
                yield event.encode()
        except UnknownRunError:
            return
        except (RedisError, MeshError) as error:
            logger.warning("event stream of run %s closed: %s; its client resumes it", feed.run_id, error)


def _as_json(refusal: dict[str, Any]) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{refusal['model'].__name__}"}
    return {"description": refusal["description"], "content": {JSON_TYPE: {"schema": schema}}}


async def _first_position(feed: Feed, last_event_id: str | None, *, is_over: bool, from_start: bool) -> Position:
    if last_event_id is None:
        return Position(START, START, START) if from_start else await feed.newest()
    position = read_position(last_event_id)
    if is_over and await feed.has_sent_all(position):
        raise HTTPException(204)
    return position
