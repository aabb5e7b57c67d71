# pyright: basic
"""Status of Serve applications."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationStatus


@dataclass(frozen=True, slots=True)
class AppStatus:
    status: ApplicationStatus
    message: str
    """First deployment's, or the application's."""


class ServeStatus:
    """Status by name; concurrent callers share a request, as `serve.status` parses all of Serve's state."""

    def __init__(self) -> None:
        self._request: asyncio.Task[Mapping[str, AppStatus]] | None = None

    async def __call__(self) -> Mapping[str, AppStatus]:
        if self._request is None or self._request.done():
            self._request = asyncio.create_task(asyncio.to_thread(read_app_statuses))
        return await asyncio.shield(self._request)


def read_app_statuses() -> dict[str, AppStatus]:
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return {}
    statuses: dict[str, AppStatus] = {}
    for app in client.list_serve_statuses():
        messages = [deployment.message for deployment in app.deployment_statuses if deployment.message]
        status = app.app_status
        statuses[app.name] = AppStatus(status.status, messages[0] if messages else status.message)
    return statuses


def count_replicas(app: str) -> tuple[str, int]:
    """Return the only deployment's name and replicas; raises LookupError."""
    status = serve.status().applications.get(app)
    if status is None or len(status.deployments) != 1:
        raise LookupError(f"no application {app!r} with exactly one deployment")
    ((name, deployment),) = status.deployments.items()
    return name, sum(deployment.replica_states.values())
