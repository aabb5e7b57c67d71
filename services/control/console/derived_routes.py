"""Routes of work on a run's files: forks, reproductions, plans."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from offbeat.services.control.console.derived_runs import DerivedRuns
from offbeat.services.control.console.routes import MAX_NUMBER, RunId
from offbeat.services.control.console.schemas import PlanView, ReproductionView
from offbeat.services.control.http_errors import refusals
from offbeat.services.control.request_bodies import JSON_TYPE, read_object
from offbeat.services.control.rights import rights_of
from offbeat.services.control.schemas import RunView

Step = Annotated[int, Query(ge=0, le=MAX_NUMBER)]
CHANGES: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "Keys that differ from the run's, dotted or nested; `{}`: none but the name.",
        "content": {JSON_TYPE: {"schema": {"type": "object"}}},
    }
}


def derived_routes(derived: DerivedRuns) -> APIRouter:
    routes = APIRouter(tags=["runs"])

    @routes.post(
        "/runs/{run_id}/fork",
        status_code=201,
        openapi_extra=CHANGES,
        responses={
            200: {"model": RunView, "description": "It is already active."},
            **refusals(400, 404, 409, 413, 415, 422),
        },
    )
    async def fork_run(run_id: RunId, step: Step, request: Request, response: Response) -> RunView:
        """Start a new run from a checkpoint of this one, with changed keys."""
        changes = await read_object(request)
        view, created = await derived.fork(run_id, step, changes, rights_of(request.scope))
        response.status_code = 201 if created else 200
        return view

    @routes.post("/runs/{run_id}/reproduce", status_code=202, responses=refusals(404, 409, 422))
    async def reproduce_steps(run_id: RunId, step: Step) -> ReproductionView:
        """Repeat training on recorded batches up to a step, and compare the weights with checkpoints."""
        return await derived.reproduce(run_id, step)

    @routes.get("/runs/{run_id}/reproduce", responses=refusals(404, 409, 422))
    async def show_reproduction(run_id: RunId) -> ReproductionView:
        """State and result of the newest reproduction."""
        return await derived.reproduction(run_id)

    @routes.post("/runs/{run_id}/plan", status_code=202, responses=refusals(404, 409, 422))
    async def plan_run(run_id: RunId) -> PlanView:
        """Simulate the run from its measured times, under the settings in force and with changes of them."""
        return await derived.plan(run_id)

    @routes.get("/runs/{run_id}/plan", responses=refusals(404, 409, 422))
    async def show_plan(run_id: RunId) -> PlanView:
        """State and result of the newest plan."""
        return await derived.newest_plan(run_id)

    return routes
