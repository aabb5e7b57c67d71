import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from offbeat.services.control import service
from offbeat.services.control.auth import MAX_BODY_BYTES
from offbeat.services.control.client import ControlRefusedError
from offbeat.services.control.interfaces import Health, Observation, Removal
from offbeat.services.control.rights import Rights
from offbeat.services.control.run import RunRecord, RunSpec, RunState
from offbeat.services.diagnosis import encode_findings
from offbeat.services.errors import RetryableError
from offbeat.services.findings import RunFinding
from offbeat.services.keys import RunKeys
from offbeat.services.redis.connection import connect_async
from offbeat.services.telemetry import (
    AsyncRedisMetrics,
    MetricRecord,
    Partial,
    mean,
)
from tests.services.control.api_harness import (
    YAML,
    ApiHarness,
    FakeRunFactory,
    api_harness,
    code,
)
from tests.waiting import wait_until


async def test_a_run_is_created_by_json_or_yaml_and_wakes_the_reconciler(api: ApiHarness):
    created = await api.http.post("/runs", json={"exp_name": "a"})
    assert created.status_code == 201
    assert created.json()["state"] == "preparing"
    assert (await api.http.post("/runs", content='{"exp_name": "b"}', headers=YAML)).status_code == 201
    assert [run["id"] for run in (await api.http.get("/runs")).json()["runs"]] == ["b", "a"]
    assert api.wakes == 2


async def test_creating_the_same_run_twice_is_one_run(api: ApiHarness):
    await api.http.post("/runs", json={"exp_name": "a"})
    assert (await api.http.post("/runs", json={"exp_name": "a"})).status_code == 200
    clash = await api.http.post("/runs", json={"exp_name": "a", "seed": 1})
    assert (clash.status_code, code(clash)) == (409, "run_exists")


async def test_a_folder_that_another_run_uses_is_refused_naming_it(api: ApiHarness):
    await api.start("a", output_dir="/runs/x")
    clash = await api.http.post("/runs", json={"exp_name": "b", "output_dir": "/runs/x"})
    assert (clash.status_code, code(clash)) == (409, "busy")
    assert "in use by run 'a', which is running" in clash.json()["error"]["message"]


async def test_a_dry_run_validates_alone(api: ApiHarness):
    valid = await api.http.post("/runs?dry_run=true", json={"exp_name": "a"})
    assert (valid.status_code, valid.json()) == (200, None)
    assert (await api.http.get("/runs")).json() == {"runs": [], "unreadable": [], "next": None}
    assert (await api.http.post("/runs?dry_run=true", json={})).status_code == 422
    assert api.wakes == 0


async def test_a_refused_configuration_names_the_key_and_the_nearest_one(api: ApiHarness):
    refused = await api.http.post("/runs", json={"exp_nam": "a"})
    assert refused.status_code == 422
    assert refused.json()["error"] == {
        "code": "invalid_config",
        "message": "the configuration was refused",
        "problems": [{"path": "exp_nam", "message": "unknown key", "suggestion": "exp_name"}],
    }


@pytest.mark.parametrize(("method", "path"), [("POST", "/runs"), ("PATCH", "/runs/a")])
@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{}", "text/plain", 415),
        (b"{}", "", 415),
        (b"{", "application/json", 400),
        (b"", "application/json", 400),
        (b"\xff\xfe", "application/json", 400),
        (b"[1]", "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b'{"a": ' + b"9" * 5000 + b"}", "application/json", 400),
        (b" " * (MAX_BODY_BYTES + 1), "application/json", 413),
    ],
)
async def test_a_body_that_cannot_be_read_is_refused(
    api: ApiHarness, method: str, path: str, content: bytes, kind: str, status: int
):
    await api.start("a")
    refused = await api.http.request(method, path, content=content, headers={"Content-Type": kind})
    assert refused.status_code == status
    assert refused.json()["error"]["message"]


async def test_yaml_that_is_no_text_is_refused(api: ApiHarness):
    refused = await api.http.post("/runs", content=b"\xff\xfe", headers=YAML)
    assert (refused.status_code, code(refused)) == (400, "malformed")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/runs/nobody", 404),
        ("PATCH", "/runs/nobody", 404),
        ("DELETE", "/runs/nobody", 404),
        ("POST", "/runs/nobody/stop", 404),
        ("POST", "/runs/nobody/pause", 404),
        ("POST", "/runs/nobody/resume", 404),
        ("GET", "/runs/nobody/why", 404),
        ("GET", "/runs/nobody/events", 404),
        ("GET", "/runs/nobody/metrics", 404),
        ("GET", "/runs/{x}", 422),
        ("GET", "/runs/%00", 422),
        ("GET", "/runs/nobody/metrics?after=x", 422),
        ("GET", "/runs/nobody/metrics?after=99999999999999999999", 422),
        ("GET", "/runs/nobody/metrics?after=%D9%A1", 422),  # a digit of Arabic
        ("GET", f"/runs/nobody/metrics?after={2**64 - 1}-{2**64 - 1}", 422),
        ("GET", "/runs/nobody/metrics?limit=0", 422),
        ("GET", "/runs/nobody/events?kind=gossip", 422),
        ("GET", "/runs?state=happy", 422),
        ("GET", "/runs?limit=0", 422),
        ("GET", "/runs?limit=99999999999999999999999", 422),
        ("GET", "/runs?after=x", 422),
        ("GET", "/runs?after=nan~x", 422),
        ("GET", "/runs?after=1e999~x", 422),
        ("POST", "/runs/nobody/stop?now=perhaps", 422),
        ("DELETE", "/runs/nobody?files=perhaps", 422),
        ("GET", "/nowhere", 404),
        ("PUT", "/runs", 405),
    ],
)
async def test_bad_calls_are_answered_by_4xx_that_a_program_can_read(
    api: ApiHarness, method: str, path: str, status: int
):
    body = {"json": {"temperature": 0.5}} if method == "PATCH" else {}
    answer = await api.http.request(method, path, **body)
    assert answer.status_code == status
    assert ("allow" in answer.headers) is (status == 405)
    assert code(answer)


async def test_a_run_shows_its_state_counters_and_components(api: ApiHarness):
    await api.start("a")
    await api.store.components.set_observations("a", {"learner": Observation(Health.DEAD, "exit code 1")})
    redis: Any = api.redis
    shown = {"loss": 1.5, "staleness": 0.25, "staleness_max": 1.0}
    await redis.hset(RunKeys("a").record, mapping={"learner_phase": "training", "learner_metrics": json.dumps(shown)})
    await redis.hset(RunKeys("a").progress, mapping={"version": 3, "step": 3})
    metrics = AsyncRedisMetrics(api.redis, "a", await api.uid("a"))
    for source, name in (("rollout", "episodes"), ("generation", "tokens"), ("learner", "tokens_trained")):
        await metrics.append(MetricRecord(source, {name: Partial("sum", 30.0)}, step=3))
    view = await api.client.show("a")
    assert (view.state, view.step, view.version, view.max_steps, view.phase) == (RunState.RUNNING, 3, 3, 7, "training")
    assert view.components["learner"].detail == "exit code 1"
    assert view.counters is not None
    assert view.counters.admitted == 0
    assert view.staleness is not None
    assert (view.staleness.mean, view.staleness.max, view.staleness.bound) == (0.25, 1.0, 1.0)
    assert view.rates is not None
    assert (view.rates.trajectories, view.rates.tokens_generated, view.rates.tokens_trained) == (2.0, 2.0, 2.0)
    assert view.settings.learning_rate == 1e-3
    assert view.metrics == shown
    assert view.paths.output_dir == "/runs/a"


async def test_rates_of_steps_longer_than_the_window_are_those_of_the_last_step(api: ApiHarness):
    await api.start("a")
    redis: Any = api.redis
    metrics, key = {"time/step_s": 60.0, "tokens_trained": 30.0}, RunKeys("a").record

    async def rates(since: float) -> tuple[float, float]:
        doing = {"stage": "taking", "step": 3, "since": api.store.clock() - since}
        await redis.hset(key, mapping={"learner_metrics": json.dumps(metrics), "learner_doing": json.dumps(doing)})
        view = await api.client.show("a")
        assert view.rates is not None
        return view.rates.tokens_trained, view.rates.steps

    assert await rates(since=20.0) == (0.5, 1 / 60)
    tokens_per_s, steps_per_s = await rates(since=600.0)
    assert tokens_per_s == pytest.approx(0.05, rel=0.1)
    assert steps_per_s == pytest.approx(1 / 600, rel=0.1)
    await AsyncRedisMetrics(api.redis, "a", await api.uid("a")).append(
        MetricRecord("learner", {"tokens_trained": Partial("sum", 30.0)}, step=3)
    )
    for state in (RunState.PAUSED, RunState.FINISHED, RunState.FAILED):
        await redis.hset(key, "state", state.value)
        assert await rates(since=20.0) == (0.0, 0.0)


async def test_a_diagnosis_is_part_of_the_run_and_of_why(api: ApiHarness):
    await api.start("a", RunState.FINISHED)
    found = RunFinding("truncated", "a token limit cut 90% of the episodes", "raise it", ("sequence_length",))
    redis: Any = api.redis
    await redis.hset(RunKeys("a").record, mapping={"learner_findings": encode_findings([found])})
    assert [each.finding() for each in (await api.client.show("a")).diagnosis] == [found]
    why = await api.client.why("a")
    assert (why.chain[-1].who, why.chain[-1].state) == ("training", "truncated")
    assert why.sentence.endswith(f"diagnosis: {found}.")


async def test_episodes_that_fail_often_are_part_of_the_diagnosis(api: ApiHarness):
    await api.start("a", RunState.RUNNING)
    counts = {"finished": 12, "failed": 4, "recent": 16, "recent_failed": 8, "limit": 16}
    last = {"tag": "Hills", "error": "step_error: no slope", "trace": "Traceback"}
    report = {"at": api.store.clock() + 1, "groups": {}, "evaluations": {}, "episodes": {**counts, **last}}
    redis: Any = api.redis
    await redis.hset(RunKeys("a").doing, "w0", json.dumps(report))
    (finding,) = (await api.client.show("a")).diagnosis
    assert (finding.name, finding.keys) == ("failing_episodes", ("custom_envs.Hills",))
    assert finding.seen.startswith("8 of the last 16 episodes failed")
    await api.store.update("a", state=RunState.FINISHED)
    assert (await api.client.show("a")).diagnosis == []


async def test_runs_are_listed_by_state_and_name_a_page_at_a_time(api: ApiHarness):
    for i in range(7):
        await api.start(f"lake-{i}", RunState.FINISHED if i % 2 else RunState.RUNNING)
    await api.start("sea")
    found = await api.client.runs(states=["running"], name="lake-*")
    assert [run.id for run in found.runs] == ["lake-6", "lake-4", "lake-2", "lake-0"]
    assert found.next is None
    pages, after = [], None
    while True:
        page = await api.client.runs(states=["running", "finished"], after=after, limit=3)
        pages.append([run.id for run in page.runs])
        if (after := page.next) is None:
            break
    assert pages == [["sea", "lake-6", "lake-5"], ["lake-4", "lake-3", "lake-2"], ["lake-1", "lake-0"]]


async def test_metrics_are_read_on_from_where_one_stopped(api: ApiHarness):
    await api.start("a")
    metrics = AsyncRedisMetrics(api.redis, "a", await api.uid("a"))
    for step in range(3):
        await metrics.append(MetricRecord("learner", {"loss": mean([step])}, step=step))
    first = await api.client.metrics("a", limit=2)
    assert [record.step for record in first.records] == [0, 1]
    rest = await api.client.metrics("a", after=first.next)
    assert [record.step for record in rest.records] == [2]
    assert (await api.client.metrics("a", after=rest.next)).next == rest.next


async def test_only_a_run_that_is_over_is_deleted_and_whole(api: ApiHarness, tmp_path: Path):
    folder = tmp_path / "run"
    folder.mkdir()
    await api.start("a", output_dir=str(folder))
    refused = await api.http.delete("/runs/a?files=true")
    assert (refused.status_code, code(refused)) == (409, "run_state")
    assert folder.exists()
    await api.store.update("a", state=RunState.STOPPED)
    assert (await api.client.delete("a")).files == []
    assert folder.exists()
    assert [key async for key in api.redis.scan_iter("offbeat:{a}*")] == [b"offbeat:{a}:epoch"]
    await api.start("a", RunState.STOPPED, output_dir=str(folder))
    assert (await api.client.delete("a", files=True)).files == [str(folder)]
    assert not folder.exists()
    with pytest.raises(ControlRefusedError, match="there is no run 'a'"):
        await api.client.show("a")


async def test_a_death_while_files_are_removed_leaves_no_record_without_files(
    api: ApiHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    left = list[bool]()

    def die(_factory: FakeRunFactory, _record: RunRecord) -> Removal:
        left.append(tmp_path.exists())
        raise OSError("killed")

    monkeypatch.setattr(FakeRunFactory, "remove_files", die)
    await api.start("a", RunState.STOPPED, output_dir=str(tmp_path))
    assert (await api.http.delete("/runs/a?files=true")).status_code == 500
    assert left == [True]
    assert not await api.redis.exists(RunKeys("a").record)


async def test_why_shows_a_chain_and_a_sentence(api: ApiHarness):
    await api.start("a", RunState.PREPARING)
    why = await api.client.why("a")
    assert why.sentence == "The run makes its folder and its model ready."
    assert [(link.who, link.state, link.waits_for) for link in why.chain] == [("run", "preparing", None)]


async def test_the_client_raises_what_the_service_refused(api: ApiHarness):
    with pytest.raises(ControlRefusedError, match="there is no run 'a'") as caught:
        await api.client.show("a")
    assert caught.value.status == 404


async def test_a_lost_redis_is_a_503_and_the_client_may_try_again():
    async with api_harness("redis://127.0.0.1:1/0") as api:
        answer = await api.http.get("/runs")
        assert (answer.status_code, code(answer)) == (503, "state_unreachable")
        assert answer.headers["Retry-After"] == "1"
        assert (await api.http.get("/healthz")).status_code == 503
        with pytest.raises(RetryableError):
            await api.client.runs()


async def test_a_read_only_redis_is_a_503_and_reads_are_answered(redis_url: str):
    redis = connect_async(redis_url, patience_s=0.05)
    world = ApiHarness(redis, redis_url, None, None)
    await world.start("a")
    await redis.config_set("maxmemory", "1")
    try:
        answer = await world.http.post("/runs/a/stop")
        assert (answer.status_code, code(answer)) == (503, "state_unreachable")
        assert answer.json()["error"]["message"].startswith("Redis refuses writes: OOM ")
        for path in ("/runs", "/runs/a", "/runs/a/why"):
            assert (await world.http.get(path)).status_code == 200, path
    finally:
        await redis.config_set("maxmemory", "0")
    assert (await world.http.post("/runs/a/stop")).status_code == 202
    await world.http.aclose()
    await redis.aclose()


async def test_an_unexpected_failure_shows_no_traceback(api: ApiHarness):
    await api.start("a")
    await api.redis.hset(RunKeys("a").progress, "version", "nonsense")  # pyright: ignore[reportGeneralTypeIssues]
    answer = await api.http.get("/runs/a")
    assert (answer.status_code, code(answer)) == (500, "internal")
    assert "Traceback" not in answer.text
    assert "nonsense" not in answer.text


async def test_the_documentation_names_every_route_and_what_it_may_answer(api: ApiHarness):
    document = (await api.http.get("/openapi.json")).json()
    routes = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    assert routes == {
        ("POST", "/runs"),
        ("GET", "/runs"),
        ("GET", "/runs/{run_id}"),
        ("PATCH", "/runs/{run_id}"),
        ("DELETE", "/runs/{run_id}"),
        ("POST", "/runs/{run_id}/stop"),
        ("POST", "/runs/{run_id}/pause"),
        ("POST", "/runs/{run_id}/resume"),
        ("GET", "/runs/{run_id}/why"),
        ("GET", "/runs/{run_id}/quarantine"),
        ("GET", "/runs/{run_id}/metrics"),
        ("GET", "/runs/{run_id}/events"),
        ("GET", "/runs/{run_id}/groups"),
        ("GET", "/runs/{run_id}/groups/{group}"),
        ("GET", "/runs/{run_id}/lags"),
        ("GET", "/runs/{run_id}/trajectories/{group}/{index}"),
        ("GET", "/runs/{run_id}/trajectories/{group}/{index}/frames"),
        ("GET", "/runs/{run_id}/series"),
        ("GET", "/recipes"),
        ("GET", "/recipes/{name}"),
        ("POST", "/runs/{run_id}/fork"),
        ("POST", "/runs/{run_id}/reproduce"),
        ("GET", "/runs/{run_id}/reproduce"),
        ("POST", "/runs/{run_id}/plan"),
        ("GET", "/runs/{run_id}/plan"),
        ("GET", "/compare"),
        ("GET", "/session"),
        ("POST", "/session"),
        ("DELETE", "/session"),
        ("GET", "/metrics"),
        ("GET", "/healthz"),
    }
    create = document["paths"]["/runs"]["post"]
    assert set(create["responses"]) >= {"200", "201", "400", "401", "403", "409", "413", "415", "422", "503"}
    assert set(create["requestBody"]["content"]) == {"application/yaml", "application/json"}
    patch = document["paths"]["/runs/{run_id}"]["patch"]
    assert set(patch["requestBody"]["content"]["application/json"]["schema"]["properties"]) == {
        *("num_workers", "num_replicas", "learning_rate", "temperature", "max_staleness", "num_env_groups")
    }
    assert "text/event-stream" in document["paths"]["/runs/{run_id}/events"]["get"]["responses"]["200"]["content"]
    for path, item in document["paths"].items():
        for method, route in item.items():
            refusal = route["responses"].get("422")
            if refusal:
                schema = refusal["content"]["application/json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/ErrorView"}, (method, path)


async def test_validations_beyond_the_limit_are_refused_until_one_ends(redis_url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(service, "VALIDATION_WAIT_S", 0.2)
    ending, validate = asyncio.Event(), FakeRunFactory.validate
    names: list[str] = []

    async def hang(factory: FakeRunFactory, document: dict[str, Any], rights: Rights) -> RunSpec:
        names.append(document["exp_name"])
        await ending.wait()
        return await validate(factory, document, rights)

    monkeypatch.setattr(FakeRunFactory, "validate", hang)
    async with api_harness(redis_url) as api:
        calls = [asyncio.create_task(api.http.post("/runs", json={"exp_name": f"a{i}"})) for i in range(4)]
        await wait_until(lambda: len(names) == 4)
        refused = await api.http.post("/runs", json={"exp_name": "b"})
        assert (refused.status_code, code(refused)) == (429, "too_many_validations")
        assert (await api.client.runs()).runs == []
        calls[0].cancel()
        ending.set()
        assert {answer.status_code for answer in await asyncio.gather(*calls[1:])} == {201}
        assert (await api.http.post("/runs", json={"exp_name": "b"})).status_code == 201
