from typing import Any

import pytest
from ray.serve.schema import ApplicationStatus
from redis import Redis

from offbeat.deploy.components.serve_status import AppStatus, ServeStatus
from offbeat.deploy.components.shared_generation import SharedGeneration
from offbeat.services.control.interfaces import Health
from offbeat.services.errors import ControlError


class ToldStatus(ServeStatus):
    """What Serve's controller is said to say."""

    def __init__(self, **apps: ApplicationStatus) -> None:
        super().__init__()
        self.apps = apps

    async def __call__(self) -> dict[str, AppStatus]:
        return {name: AppStatus(status, "") for name, status in self.apps.items()}


def generation(redis: Redis, run_id: str, **apps: ApplicationStatus) -> SharedGeneration:
    return SharedGeneration(run_id, "engines", redis, ToldStatus(**apps))


async def test_a_run_claims_the_application_and_lets_go_of_it(redis: Redis):
    one = generation(redis, "one", engines=ApplicationStatus.RUNNING)
    assert (await one.observe()).health is Health.ABSENT
    await one.ensure()
    assert (await one.observe()).health is Health.READY
    await one.stop(now=True)
    assert (await one.observe()).health is Health.ABSENT


async def test_another_runs_application_is_neither_taken_nor_given_up(redis: Redis):
    one, two = (generation(redis, name, engines=ApplicationStatus.RUNNING) for name in ("one", "two"))
    await one.ensure()
    with pytest.raises(ControlError, match="'one'"):
        await two.ensure()
    await two.stop(now=True)
    assert (await one.observe()).health is Health.READY


@pytest.mark.parametrize("apps", [{}, {"engines": ApplicationStatus.DEPLOY_FAILED}])
async def test_a_run_waits_for_an_application_that_was_removed_or_broken(redis: Redis, apps: dict[str, Any]):
    one = generation(redis, "one", **apps)
    await one.ensure()
    seen = await one.observe()
    assert seen.health is Health.STARTING
    assert "engines" in seen.detail
