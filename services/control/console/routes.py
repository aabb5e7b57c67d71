"""Routes of groups, trajectories, series and comparisons."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query, Response
from fastapi.responses import JSONResponse

from offbeat.services.control.console.archive import GroupQuery, RunArchive
from offbeat.services.control.console.comparison import compare
from offbeat.services.control.console.encoding import MSGPACK_TYPE, pack_trajectory
from offbeat.services.control.console.replays import Replays
from offbeat.services.control.console.schemas import (
    Axis,
    CompareView,
    FramesView,
    GroupDetailView,
    GroupSort,
    GroupState,
    GroupsView,
    LagsView,
    SeriesView,
    TrajectoryView,
)
from offbeat.services.control.http_errors import HttpError, refusals
from offbeat.services.control.run import RUN_ID
from offbeat.services.control.schemas import RunView

MAX_COMPARED = 8
MAX_NAMES = 64
MAX_NUMBER = 2**53

RunId = Annotated[str, Path(pattern=RUN_ID, description="The run's `exp_name`.")]
Number = Annotated[int, Path(ge=0, le=MAX_NUMBER)]
Names = Annotated[str, Query(max_length=8000, description="Metrics as `source/name`, separated by commas.")]
Finite = Annotated[float | None, Query(allow_inf_nan=False)]
TRAJECTORY: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Msgpack with columns as little-endian bytes (int32; uint8; float32, NaN for null), or JSON if "
        "`Accept` asks for application/json.",
        "content": {
            MSGPACK_TYPE: {"schema": {"type": "string", "format": "binary"}},
            "application/json": {"schema": {"$ref": "#/components/schemas/TrajectoryView"}},
        },
    }
}

OpenArchive = Callable[[str], Awaitable[RunArchive]]
ViewRun = Callable[[str], Awaitable[RunView]]


def archive_routes(open_archive: OpenArchive, view_run: ViewRun) -> APIRouter:
    routes, replays = APIRouter(tags=["console"]), Replays()

    @routes.get("/runs/{run_id}/groups", responses=refusals(404, 409, 422))
    async def list_groups(
        run_id: RunId,
        state: Annotated[list[GroupState], Query(description="States to list; none lists all.")] = [],  # noqa: B006
        tag: Annotated[str | None, Query(max_length=200)] = None,
        step: Annotated[int | None, Query(ge=0, le=MAX_NUMBER, description="Step that consumed the group.")] = None,
        min_reward: Finite = None,
        max_reward: Finite = None,
        sort: GroupSort = GroupSort.NUMBER,
        offset: Annotated[int, Query(ge=0, le=MAX_NUMBER)] = 0,
        limit: Annotated[int, Query(ge=1, le=500)] = 50,
    ) -> GroupsView:
        """List groups; `min_reward` and `max_reward` bound the members' mean."""
        archive = await open_archive(run_id)
        query = GroupQuery(state, tag, step, min_reward, max_reward, sort, offset, limit)
        return await asyncio.to_thread(archive.groups, query)

    @routes.get("/runs/{run_id}/lags", responses=refusals(404, 409, 422))
    async def count_lags(
        run_id: RunId,
        groups: Annotated[int, Query(ge=1, le=100_000, description="Newest groups to count.")] = 2000,
        columns: Annotated[int, Query(ge=1, le=1000, description="Maximum ranges of steps.")] = 48,
    ) -> LagsView:
        """Lags of the newest consumed groups, counted by ranges of steps."""
        archive = await open_archive(run_id)
        return await asyncio.to_thread(archive.lags, groups, columns)

    @routes.get("/runs/{run_id}/groups/{group}", responses=refusals(404, 409, 422))
    async def show_group(run_id: RunId, group: Number) -> GroupDetailView:
        """Life of a group, and its recorded members."""
        archive = await open_archive(run_id)
        return await asyncio.to_thread(archive.group, group)

    @routes.get(
        "/runs/{run_id}/trajectories/{group}/{index}",
        response_model=TrajectoryView,
        responses={**TRAJECTORY, **refusals(404, 409, 422)},
    )
    async def show_trajectory(
        run_id: RunId, group: Number, index: Number, accept: Annotated[str, Header(max_length=1000)] = "*/*"
    ) -> Response:
        """Recorded trajectory: turns, text, tokens, and the learner's outcomes."""
        archive = await open_archive(run_id)
        view = await asyncio.to_thread(archive.trajectory, group, index)
        if "application/json" in accept.lower():
            return JSONResponse(view.model_dump(mode="json"))
        return Response(await asyncio.to_thread(pack_trajectory, view), media_type=MSGPACK_TYPE)

    @routes.get("/runs/{run_id}/trajectories/{group}/{index}/frames", responses=refusals(404, 409, 422))
    async def render_frames(run_id: RunId, group: Number, index: Number) -> FramesView:
        """Pictures of the env, from a replay of the recorded episode."""
        return await replays.frames(await open_archive(run_id), group, index)

    @routes.get("/runs/{run_id}/series", responses=refusals(404, 409, 422))
    async def read_series(
        run_id: RunId,
        names: Names = "",
        axis: Axis = "step",
        since: Finite = None,
        points: Annotated[int, Query(ge=4, le=5000, description="Maximum points of each series.")] = 1000,
    ) -> SeriesView:
        """Metrics from `since` on the axis on, downsampled; without `names`, the newest values."""
        archive = await open_archive(run_id)
        return await asyncio.to_thread(archive.series, _split(names, MAX_NAMES, "names"), axis, since, points)

    @routes.get("/compare", responses=refusals(404, 409, 422))
    async def compare_runs(
        runs: Annotated[str, Query(max_length=1000, description="Runs, separated by commas.")],
    ) -> CompareView:
        """State and newest metrics of runs, and the configuration keys in which they differ."""
        ids = _split(runs, MAX_COMPARED, "runs")
        if not ids:
            raise HttpError(422, "invalid_request", "runs: name at least one run")
        views = [await view_run(run_id) for run_id in ids]
        archives = [await open_archive(run_id) for run_id in ids]
        return await asyncio.to_thread(compare, views, archives)

    return routes


def _split(text: str, most: int, what: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if len(parts) > most:
        raise HttpError(422, "invalid_request", f"{what}: at most {most} in one call, not {len(parts)}")
    return list(dict.fromkeys(parts))
