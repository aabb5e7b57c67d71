"""FastAPI application of the control service."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.security import HTTPBearer

from offbeat.services.control.auth import AuthMiddleware
from offbeat.services.control.console.derived_routes import derived_routes
from offbeat.services.control.console.derived_runs import DerivedRuns
from offbeat.services.control.console.pages import add_page
from offbeat.services.control.console.recipe_routes import recipe_routes
from offbeat.services.control.console.routes import archive_routes
from offbeat.services.control.http_errors import answer_errors, refusals
from offbeat.services.control.prometheus.routes import prometheus_routes
from offbeat.services.control.rights import NO_TOKENS, Tokens
from offbeat.services.control.routes import run_routes
from offbeat.services.control.schemas import HealthView
from offbeat.services.control.service import ControlService

ABOUT = """Starts, steers and watches runs of Offbeat.

Errors are `{"error": {"code", "message", "problems": [{"path", "message", "suggestion"}]}}`.
"""


def create_api(
    service: ControlService,
    *,
    tokens: Tokens = NO_TOKENS,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
) -> FastAPI:
    api = FastAPI(title="Offbeat", version="1", description=ABOUT, lifespan=lifespan)
    bearer: list[Any] = []
    if tokens.grants:
        # Documents what `AuthMiddleware` requires.
        bearer = [Depends(HTTPBearer(auto_error=False, description="A token that the service was started with."))]
    api.include_router(run_routes(service), dependencies=bearer)
    api.include_router(archive_routes(service.archive, service.view), dependencies=bearer)
    api.include_router(prometheus_routes(service.exporter), dependencies=bearer)
    api.include_router(derived_routes(DerivedRuns(service)), dependencies=bearer)
    api.include_router(recipe_routes(service.factory), dependencies=bearer)

    @api.get("/healthz", tags=["service"], responses={503: refusals()[503]})
    async def healthz() -> HealthView:
        """Report whether the service and Redis respond; needs no token."""
        await service.healthy()
        return HealthView()

    add_page(api, tokens)
    answer_errors(api)
    api.add_middleware(AuthMiddleware, tokens=tokens)
    return api
