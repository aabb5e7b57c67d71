import time
from typing import Any

import pytest
from ray.serve.schema import ApplicationStatus
from redis import Redis

from offbeat.deploy.components.serve_status import AppStatus, ServeStatus
from offbeat.deploy.components.shared_generation import SharedGeneration
from offbeat.services.control.interfaces import Health
from offbeat.services.errors import ControlError
from offbeat.services.generation.tenancy import APP
from offbeat.services.keys import RunKeys, claims_key, slots_key
from offbeat.services.weights.replica_reports import ReplicaLoad, ReplicaReport, encode_report


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


def share(redis: Redis, slots: int, **bases: str) -> dict[str, SharedGeneration]:
    """Let runs with bases have an application with slots."""
    redis.hset(slots_key(APP), "engines", str(slots))
    for run_id, base in bases.items():
        redis.hset(RunKeys(run_id).record, mapping={"state": "running", "base": base})
    return {run_id: generation(redis, run_id, engines=ApplicationStatus.RUNNING) for run_id in bases}


async def test_runs_share_an_application_and_each_releases_its_own_slot(redis: Redis):
    runs = share(redis, 2, one="b", two="b", three="b", other="c")
    await runs["one"].ensure()
    await runs["two"].ensure()
    await runs["two"].ensure()
    assert (await runs["one"].observe()).detail == "application engines, with two"
    replaced = generation(redis, "one", engines=ApplicationStatus.UNHEALTHY)
    assert (await replaced.observe()).detail == "application engines, with two: a replica is being replaced"
    for run_id, reason in (("three", "has 2 adapter slots"), ("other", "another base")):
        with pytest.raises(ControlError, match=reason):
            await runs[run_id].ensure()
        await runs[run_id].stop(now=True)
    await runs["one"].stop(now=True)
    assert redis.hget(claims_key(APP), "engines") == b"two"
    await runs["three"].ensure()
    assert redis.hget(claims_key(APP), "engines") == b"two three"


async def test_a_run_that_is_over_or_forgotten_keeps_no_slot_from_another(redis: Redis):
    runs = share(redis, 2, one="b", two="b", three="b")
    for run_id in ("one", "two"):
        await runs[run_id].ensure()
    redis.hset(RunKeys("one").record, "state", "failed")
    await runs["three"].ensure()
    assert redis.hget(claims_key(APP), "engines") == b"two three"


async def test_a_run_whose_weights_the_engines_refuse_is_broken(redis: Redis):
    runs = share(redis, 2, one="b", two="b")
    for run_id in ("one", "two"):
        await runs[run_id].ensure()
    refusal = ReplicaLoad(refused="the weights differ")
    for version, at in ((-1, 0.0), (4, time.time() + 60)):
        redis.hset(RunKeys("two").served, "r", encode_report(ReplicaReport(version, at, refusal)).decode())
        assert (await runs["two"].observe()).health is Health.READY
    redis.hset(RunKeys("two").served, "r", encode_report(ReplicaReport(-1, time.time() + 60, refusal)).decode())
    observation = await runs["two"].observe()
    assert (observation.health, (await runs["one"].observe()).health) == (Health.BROKEN, Health.READY)
    assert observation.detail == "application engines refuses the run's weights: the weights differ"


@pytest.mark.parametrize("behind_s", [-3600.0, 3600.0])
async def test_a_refusal_counts_whatever_its_nodes_clock_says(redis: Redis, behind_s: float):
    refusal, now = ReplicaLoad(refused="the weights differ"), time.time()
    one = generation(redis, "one", engines=ApplicationStatus.RUNNING)
    await one.ensure()
    for received, health in ((now - 60, Health.READY), (now + 60, Health.BROKEN)):
        report = ReplicaReport(-1, received - behind_s, refusal, received=received)
        redis.hset(RunKeys("one").served, "r", encode_report(report).decode())
        assert (await one.observe()).health is health
