"""Routes of the SDK that are refused, with what to use instead."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple, NoReturn

from fastapi import APIRouter, params

from offbeat.services.tinker.errors import TinkerError

NO_PROJECTS = "there are no projects: a key sees its own sessions, models and checkpoints"
NOT_BILLED = "nothing is billed"
UNPUBLISHED = "checkpoints are not published: a key has its own alone; give its owner's key to who is to load it"
CHECKPOINT = "/training_runs/{model_id}/checkpoints/{checkpoint_id:path}"


class RefusedRoute(NamedTuple):
    method: str
    path: str
    reason: str


REFUSED_ROUTES = (
    RefusedRoute("POST", f"{CHECKPOINT}/publish", UNPUBLISHED),
    RefusedRoute("DELETE", f"{CHECKPOINT}/publish", UNPUBLISHED),
    RefusedRoute(
        "GET",
        f"{CHECKPOINT}/external_weights_urls",
        "checkpoints have no URLs: they are PEFT adapters in checkpoints/ of the server's folder",
    ),
    RefusedRoute(
        "POST",
        "/create_custom_loss",
        "custom losses run in the client: forward_backward_custom takes the function, or a LossHandle without loss_id",
    ),
    RefusedRoute(
        "POST", "/sessions/search", "sessions can't be searched: list_sessions lists them, get_session shows one"
    ),
    RefusedRoute("PUT", "/sessions/{session_id}/project", NO_PROJECTS),
    RefusedRoute(
        "GET",
        "/sessions/{session_id}/trace_export",
        "there is no trace: GET training_runs/MODEL/metrics has the times of a model's optimizer steps",
    ),
    RefusedRoute("GET", "/audit", "there is no log of accesses: `offbeat audit MODEL` audits a model's commands"),
    RefusedRoute("GET", "/billing/usage/events", NOT_BILLED),
)


def add_refused(router: APIRouter, authorized: params.Depends) -> None:
    """Add the routes; before those whose paths match theirs."""
    for each in REFUSED_ROUTES:
        router.add_api_route(
            each.path, _refuse_by(each.reason), methods=[each.method], dependencies=[authorized], response_model=None
        )


def _refuse_by(reason: str) -> Callable[[], Awaitable[NoReturn]]:
    async def refuse() -> NoReturn:
        raise TinkerError(reason)

    return refuse
