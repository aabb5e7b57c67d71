from typing import Any

import pytest
from ray.serve.schema import ApplicationStatus
from redis import Redis

from offbeat.deploy.components.serve_status import AppStatus, ServeStatus
from offbeat.deploy.components.shared_generation import SharedGeneration
from offbeat.services.control.interfaces import Health
from offbeat.services.errors import ControlError


class FakeServeStatus(ServeStatus):
    """Fixed statuses instead of those of Serve's controller."""

    def __init__(self, **apps: ApplicationStatus) -> None:
        super().__init__()
        self.apps = apps

    async def __call__(self) -> dict[str, AppStatus]:
        return {name: AppStatus(status, "") for name, status in self.apps.items()}


def generation(redis: Redis, run_id: str, **apps: ApplicationStatus) -> SharedGeneration:
    return SharedGeneration(run_id, "engines", redis, FakeServeStatus(**apps))


async def test_run_claims_and_releases_the_application(redis: Redis):
    one = generation(redis, "one", engines=ApplicationStatus.RUNNING)
    assert (await one.observe()).health is Health.ABSENT
    await one.ensure()
    assert (await one.observe()).health is Health.READY
    await one.stop(now=True)
    assert (await one.observe()).health is Health.ABSENT


async def test_another_runs_application_is_neither_claimed_nor_released(redis: Redis):
    one, two = (generation(redis, name, engines=ApplicationStatus.RUNNING) for name in ("one", "two"))
    await one.ensure()
    with pytest.raises(ControlError, match="'one'"):
        await two.ensure()
    await two.stop(now=True)
    assert (await one.observe()).health is Health.READY


@pytest.mark.parametrize("apps", [{}, {"engines": ApplicationStatus.DEPLOY_FAILED}])
async def test_run_waits_for_a_removed_or_broken_application(redis: Redis, apps: dict[str, Any]):
    one = generation(redis, "one", **apps)
    await one.ensure()
    observation = await one.observe()
    assert observation.health is Health.STARTING
    assert "engines" in observation.detail
