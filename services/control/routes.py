"""The routes about runs, of a few lines each, over `ControlService`."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import AfterValidator

from offbeat.services.control.event_schemas import MetricsView
from offbeat.services.control.events import (
    START,
    EventKind,
    Feed,
    Position,
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

MAX_WATCHERS = 32
"""Streams of events at a time; each polls Redis."""
COMMENT_EVERY_S = 10.0
RETRY_MS = 1000
"""Reconnection delay of a browser's EventSource."""

RunId = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$", description="The run's `exp_name`.")]
EntryId = Annotated[str, Query(pattern=r"^\d{1,20}(-\d{1,20})?$"), AfterValidator(entry_id)]
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
        "description": "`event` is run, metrics, history or life; `data` is JSON; `id` is what Last-Event-ID takes.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    },
    204: {"description": "The run is over and there is nothing after Last-Event-ID: do not come back."},
}


def run_routes(service: ControlService) -> APIRouter:
    """Every route under /runs."""
    routes = APIRouter(tags=["runs"])

    @routes.post(
        "/runs",
        status_code=201,
        openapi_extra=YAML_OR_JSON,
        responses={
            200: {"model": RunView | None, "description": "It goes on already; or, of a dry run, it is valid (null)."},
            **refusals(400, 409, 413, 415, 422),
        },
    )
    async def create_run(request: Request, response: Response, dry_run: bool = False) -> RunView | None:
        """Start the run that the body describes, as YAML or JSON. `dry_run` only validates it."""
        view, created = await service.create(await read_document(request), dry_run=dry_run)
        response.status_code = 201 if created else 200
        return view

    @routes.get("/runs", responses=refusals(422))
    async def list_runs(
        state: States = [],  # noqa: B006 - FastAPI copies it
        name: NameGlob = "*",
        after: Annotated[str | None, Query(max_length=200, description="`next` of the answer before.")] = None,
        limit: Annotated[int, Query(ge=1, le=500)] = 50,
    ) -> RunsView:
        """Runs, newest first."""
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
    async def delete_run(run_id: RunId, files: bool = False) -> DeletedView:
        """Forget a run that is over; with `files`, remove what it wrote into its folder too."""
        return await service.delete(run_id, files=files)

    @routes.post("/runs/{run_id}/stop", status_code=202, responses=refusals(404, 409, 422))
    async def stop_run(run_id: RunId, now: bool = False) -> RunView:
        """Drain, checkpoint and end; with `now`, end without draining. A run that is over stays as it is."""
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
        """Components that currently wait for each other, as a chain and as one sentence."""
        return await service.why(run_id)

    @routes.get("/runs/{run_id}/quarantine", responses=refusals(404, 409, 422))
    async def show_quarantine(run_id: RunId) -> QuarantineView:
        """Trajectories that could not be read, newest first: why, and how they begin."""
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

    @routes.get(
        "/runs/{run_id}/events", response_class=StreamingResponse, responses={**EVENTS, **refusals(404, 409, 422, 429)}
    )
    async def watch_run(
        run_id: RunId,
        kind: Annotated[list[EventKind], Query(description="Events to send; none sends all.")] = [],  # noqa: B006
        from_start: Annotated[bool, Query(description="Begin with the oldest that is kept, not with now.")] = False,
        last_event_id: Annotated[str | None, Header(max_length=200)] = None,
    ) -> Response:
        """Server-sent events until the run is over; resumes after `Last-Event-ID`."""
        record = await service.store.load(run_id)
        if len(watchers) >= MAX_WATCHERS:
            raise HttpError(429, "too_many_watchers", f"{MAX_WATCHERS} streams of events are open already")
        feed = Feed(service.store.redis, run_id, lambda: service.view(run_id), kind or tuple(EventKind))
        position = Position(START, START, START)
        if last_event_id is not None:
            position = read_position(last_event_id)
            if record.state.over and position == await feed.newest():
                return Response(status_code=204)
        elif not from_start:
            position = await feed.newest()
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(_encoded(feed, position, watchers), media_type="text/event-stream", headers=headers)


async def _encoded(feed: Feed, position: Position, watchers: set[Feed]) -> AsyncIterator[bytes]:
    clock = asyncio.get_running_loop().time
    watchers.add(feed)
    spoke = clock()
    try:
        yield f"retry: {RETRY_MS}\n\n".encode()
        async for event in feed.follow(position):
            if event is not None:
                yield event.encode()
                spoke = clock()
            elif clock() > spoke + COMMENT_EVERY_S:
                yield b": still here\n\n"
                spoke = clock()
    except UnknownRunError:
        return
    finally:
        watchers.discard(feed)
