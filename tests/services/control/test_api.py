import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from services.buffer.client import Counters
from services.control.api import MAX_BODY_BYTES, create_api
from services.control.client import ControlClient, ControlRefusedError
from services.control.components import Health, Observation
from services.control.records import RunSpec, RunState, RunStore
from services.control.service import ControlService, InvalidRunError
from services.control.views import ProblemView
from services.errors import RetryableError
from services.telemetry import AsyncRedisMetrics, MetricRecord, Partial, mean

COUNTERS = Counters(10, 8, 5, {"stale": 1}, {"timeout": 1}, 3)
YAML = {"Content-Type": "application/yaml"}


def validate(document: str | dict[str, Any]) -> RunSpec:
    """Stands in for `deploy`'s validation: any mapping with a name is a run."""
    tree = json.loads(document) if isinstance(document, str) else document
    if "exp_name" not in tree:
        raise InvalidRunError([ProblemView(path="exp_nam", message="unknown key", suggestion="exp_name")])
    return RunSpec(tree["exp_name"], json.dumps(tree), f"/runs/{tree['exp_name']}", 7)


class Fixture:
    """An API over an empty Redis."""

    def __init__(self, redis: Redis, token: str | None) -> None:
        self.store = RunStore(redis)
        self.wakes = 0
        service = ControlService(self.store, validate, wake=self.wake, counters=self.counters)
        transport = httpx.ASGITransport(create_api(service, token=token), raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")
        self.client = ControlClient("http://127.0.0.1", token=token, transport=transport)

    def wake(self) -> None:
        self.wakes += 1

    async def counters(self, run_id: str) -> Counters | None:
        return COUNTERS if run_id else None


@asynccontextmanager
async def fixture(redis_url: str, token: str | None = None) -> AsyncIterator[Fixture]:
    async with Redis.from_url(redis_url) as redis:
        made = Fixture(redis, token)
        async with made.http, made.client:
            yield made


@pytest.fixture
async def api(redis_url: str) -> AsyncIterator[Fixture]:
    async with fixture(redis_url) as made:
        yield made


def code(response: httpx.Response) -> str:
    return response.json()["error"]["code"]


async def test_a_run_is_created_by_json_or_yaml_and_wakes_the_reconciler(api: Fixture):
    created = await api.http.post("/runs", json={"exp_name": "a"})
    assert created.status_code == 201
    assert created.json()["state"] == "preparing"
    assert (await api.http.post("/runs", content='{"exp_name": "b"}', headers=YAML)).status_code == 201
    assert [run["id"] for run in (await api.http.get("/runs")).json()["runs"]] == ["b", "a"]
    assert api.wakes == 2


async def test_creating_the_same_run_twice_is_one_run(api: Fixture):
    await api.http.post("/runs", json={"exp_name": "a"})
    assert (await api.http.post("/runs", json={"exp_name": "a"})).status_code == 200
    clash = await api.http.post("/runs", json={"exp_name": "a", "seed": 1})
    assert (clash.status_code, code(clash)) == (409, "run_exists")


async def test_a_dry_run_validates_alone(api: Fixture):
    assert (await api.http.post("/runs?dry_run=true", json={"exp_name": "a"})).status_code == 200
    assert (await api.http.get("/runs")).json() == {"runs": []}
    assert (await api.http.post("/runs?dry_run=true", json={})).status_code == 422


async def test_a_refused_configuration_names_the_key_and_the_nearest_one(api: Fixture):
    refused = await api.http.post("/runs", json={"exp_nam": "a"})
    assert refused.status_code == 422
    assert refused.json()["error"] == {
        "code": "invalid_config",
        "message": "the configuration was refused",
        "problems": [{"path": "exp_nam", "message": "unknown key", "suggestion": "exp_name"}],
    }


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{}", "text/plain", 415),
        (b"{}", "", 415),
        (b"{", "application/json", 400),
        (b"\xff\xfe", "application/json", 400),
        (b"\xff\xfe", "application/yaml", 400),
        (b"[1]", "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b" " * (MAX_BODY_BYTES + 1), "application/json", 413),
    ],
)
async def test_a_body_that_cannot_be_read_is_refused(api: Fixture, content: bytes, kind: str, status: int):
    refused = await api.http.post("/runs", content=content, headers={"Content-Type": kind})
    assert refused.status_code == status
    assert refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/runs/nobody", 404),
        ("POST", "/runs/nobody/stop", 404),
        ("GET", "/runs/nobody/metrics", 404),
        ("GET", "/runs/{x}", 422),
        ("GET", "/runs/nobody/metrics?after=x", 422),
        ("GET", "/runs/nobody/metrics?limit=0", 422),
        ("POST", "/runs/nobody/stop?now=perhaps", 422),
        ("GET", "/nowhere", 404),
        ("PUT", "/runs", 405),
    ],
)
async def test_bad_calls_are_answered_by_4xx_that_a_program_can_read(api: Fixture, method: str, path: str, status: int):
    answer = await api.http.request(method, path)
    assert answer.status_code == status
    assert code(answer)


async def test_a_run_tells_its_state_counters_and_components(api: Fixture):
    await api.client.create('{"exp_name": "a"}')
    await api.store.update("a", state=RunState.RUNNING)
    await api.store.set_observations("a", {"learner": Observation(Health.DEAD, "exit code 1")})
    record = MetricRecord("learner", {"loss": mean([1.0, 2.0]), "kl": Partial("last", float("nan"))}, step=3)
    await AsyncRedisMetrics(api.store.redis, "a").append(record)
    view = await api.client.show("a")
    assert (view.state, view.step, view.max_steps) == (RunState.RUNNING, -1, 7)
    assert view.components["learner"].detail == "exit code 1"
    assert view.counters
    assert view.counters.dropped == {"stale": 1}
    assert view.metrics == {"loss": 1.5, "kl": None}
    assert view.places.output_dir == "/runs/a"


async def test_metrics_are_read_on_from_where_one_stopped(api: Fixture):
    await api.client.create('{"exp_name": "a"}')
    metrics = AsyncRedisMetrics(api.store.redis, "a")
    for step in range(3):
        await metrics.append(MetricRecord("learner", {"loss": mean([step])}, step=step))
    first = await api.client.metrics("a", limit=2)
    assert [record.step for record in first.records] == [0, 1]
    rest = await api.client.metrics("a", after=first.next)
    assert [record.step for record in rest.records] == [2]
    assert (await api.client.metrics("a", after=rest.next)).next == rest.next


@pytest.mark.parametrize(("now", "wanted"), [(False, "stopped"), (True, "killed")])
async def test_stopping_says_what_is_wanted(api: Fixture, now: bool, wanted: str):
    await api.client.create('{"exp_name": "a"}')
    assert (await api.client.stop("a", now=now)).wanted == wanted
    assert api.wakes == 2


async def test_the_client_raises_what_the_service_refused(api: Fixture):
    with pytest.raises(ControlRefusedError, match="there is no run 'a'") as caught:
        await api.client.show("a")
    assert caught.value.status == 404


async def test_with_a_token_only_who_carries_it_is_answered(redis_url: str):
    async with fixture(redis_url, token="secret") as api:
        for headers in ({}, {"Authorization": "Bearer secre"}, {"Authorization": "secret"}):
            refused = await api.http.get("/runs", headers=headers)
            assert (refused.status_code, code(refused)) == (401, "unauthorized")
        assert (await api.http.get("/openapi.json")).status_code == 401
        assert (await api.http.get("/healthz")).status_code == 200
        assert await api.client.runs() == []


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": "https://evil.example"}])
async def test_without_a_token_a_web_page_cannot_call(api: Fixture, headers: dict[str, str]):
    refused = await api.http.post("/runs", json={"exp_name": "a"}, headers=headers)
    assert (refused.status_code, code(refused)) == (403, "forbidden")


async def test_a_lost_redis_is_a_503_and_the_client_may_try_again():
    async with fixture("redis://127.0.0.1:1/0") as api:
        answer = await api.http.get("/runs")
        assert (answer.status_code, code(answer)) == (503, "state_unreachable")
        assert (await api.http.get("/healthz")).status_code == 503
        with pytest.raises(RetryableError):
            await api.client.runs()


async def test_an_unexpected_failure_tells_no_traceback(api: Fixture):
    await api.client.create('{"exp_name": "a"}')
    await api.store.update("a", state="nonsense")
    answer = await api.http.get("/runs/a")
    assert (answer.status_code, code(answer)) == (500, "internal")
    assert "Traceback" not in answer.text
    assert "nonsense" not in answer.text
