"""`GET /metrics`: a real Redis, scraped as Prometheus does."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from redis.exceptions import ConnectionError

from offbeat.services.control.interfaces import Health, Observation
from offbeat.services.control.prometheus.exporter import PrometheusExporter
from offbeat.services.control.prometheus.run_state import MESH_FAMILIES, STATE_FAMILIES
from offbeat.services.control.run import Restarts, RunRecord, RunState
from offbeat.services.control.store import RunStore
from offbeat.services.keys import RunKeys
from offbeat.services.redis.connection import connect
from offbeat.services.telemetry import AsyncRedisMetrics, MetricRecord, Partial, mean
from offbeat.services.tinker.config import TinkerConfig
from offbeat.services.tinker.log import CommandLog, Write
from offbeat.services.tinker.records import ForwardBackwardCommand, Lora, ModelRecord, OptimStep, Result, StepMetrics
from offbeat.services.tinker.store import TinkerStore
from offbeat.services.weights.replica_reports import ReplicaReport, encode_report
from tests.services.control.api_harness import ApiHarness, FakeRunFactory, api_harness

Scraped = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parse(text: str) -> Scraped:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def scrape(api: ApiHarness, **headers: str) -> Scraped:
    answer = await api.http.get("/metrics", headers=headers)
    assert answer.status_code == 200, answer.text
    return parse(answer.text)


def of(scraped: Scraped, name: str, **labels: str) -> float:
    return scraped[name, frozenset(labels.items())]


async def append(api: ApiHarness, source: str, values: Mapping[str, Partial], step: int | None = None, **labels: str):
    sink = AsyncRedisMetrics(api.redis, "a", await api.uid("a"))
    await sink.append(MetricRecord(source, dict(values), step, labels))


async def test_a_run_is_exported_with_its_state(api: ApiHarness):
    await api.start("a")
    await api.store.components.set_observations(
        "a", {"learner": Observation(Health.READY), "generation": Observation(Health.DEAD)}
    )
    await api.store.components.set_restarts("a", "generation", Restarts(count=1, total=3), "killed")
    report = encode_report(ReplicaReport(version=-1, at=api.store.clock()))
    await api.redis.hset(RunKeys("a").served, "r1", report)  # type: ignore[misc]
    scraped = await scrape(api)
    assert of(scraped, "offbeat_redis_up") == 1
    assert of(scraped, "offbeat_redis_refuses_writes") == 0
    assert of(scraped, "offbeat_run_state", run="a", state="running") == 1
    assert of(scraped, "offbeat_run_state", run="a", state="failed") == 0
    assert of(scraped, "offbeat_run_step", run="a") == -1
    assert of(scraped, "offbeat_component_ready", run="a", component="learner") == 1
    assert of(scraped, "offbeat_component_ready", run="a", component="generation") == 0
    assert of(scraped, "offbeat_component_restarts_total", run="a", component="generation") == 3
    assert of(scraped, "offbeat_replica_version", run="a", replica="r1") == -1
    assert of(scraped, "offbeat_setting_max_staleness", run="a") == 1
    assert ("offbeat_replica_lag_versions", frozenset({("run", "a"), ("replica", "r1")})) not in scraped


async def test_every_sample_of_state_has_the_labels_that_its_family_declares(api: ApiHarness):
    await api.start("a")
    declared = {family.name: {*family.labels, "run"} for family in STATE_FAMILIES}
    declared |= {family.name: set[str]() for family in MESH_FAMILIES}
    scraped = {(name.removesuffix("_total"), frozenset(dict(labels))) for name, labels in await scrape(api)}
    assert len(scraped) > 15
    assert {name: set(labels) for name, labels in scraped} == {name: declared[name] for name, _ in scraped}


async def test_records_become_gauges_counters_and_summaries(api: ApiHarness):
    await api.start("a")
    step = {
        "reward": mean([0.0, 1.0]),
        "actor/approx_kl": mean([0.25]),
        "actor/ess": Partial("last", 0.75),
        "advantage/max": Partial("max", 2.0),
        "tokens_trained": Partial("sum", 40.0),
        "time/train_s": mean([3.0]),
        "groups_dropped/stale": Partial("sum", 2.0),
    }
    await append(api, "learner", step, step=1)
    played = {"episodes": Partial("sum", 4.0), "episode_s": Partial("mean", 6.0, 4.0), "reward": mean([0.5, 1.0])}
    for worker in ("w1", "w2"):
        await append(api, "rollout", played, worker=worker, kind="train", tag="lake")
    await append(api, "generation", {"pause_s": Partial("mean", 0.5, 2.0), "weight_updates": Partial("sum", 2)})
    scraped = await scrape(api)
    assert of(scraped, "offbeat_learner_reward", run="a") == 0.5
    assert of(scraped, "offbeat_learner_actor_approx_kl_nats", run="a") == 0.25
    assert of(scraped, "offbeat_learner_actor_ess", run="a") == 0.75
    assert of(scraped, "offbeat_learner_advantage", run="a", stat="max") == 2
    assert of(scraped, "offbeat_learner_time_seconds", run="a", stage="train") == 3
    assert of(scraped, "offbeat_learner_tokens_trained_total", run="a") == 40
    assert of(scraped, "offbeat_learner_groups_dropped_total", run="a", reason="stale") == 2
    workers = {"run": "a", "kind": "train", "tag": "lake"}
    assert of(scraped, "offbeat_rollout_episodes_total", **workers) == 8
    assert of(scraped, "offbeat_rollout_episode_seconds_sum", **workers) == 12
    assert of(scraped, "offbeat_rollout_episode_seconds_count", **workers) == 8
    assert of(scraped, "offbeat_rollout_reward", **workers) == 0.75
    assert of(scraped, "offbeat_generation_pause_seconds_sum", run="a") == 0.5
    assert of(scraped, "offbeat_generation_weight_updates_total", run="a") == 2


async def test_an_evaluation_s_values_are_those_of_the_newest_one(api: ApiHarness):
    await api.start("a")
    labels = {"when": "during", "sampling": "greedy"}
    for step, success in ((10, 0.25), (20, 0.5)):
        values = {
            "episodes": Partial("sum", 8.0),
            "env/lake/success": mean([success]),
            "env/lake/episodes": Partial("sum", 8),
        }
        await append(api, "eval", values, step=step, **labels)
    scraped = await scrape(api)
    assert of(scraped, "offbeat_eval_episodes", run="a", **labels) == 8
    assert of(scraped, "offbeat_eval_env", run="a", tag="lake", metric="success", **labels) == 0.5
    assert of(scraped, "offbeat_eval_env", run="a", tag="lake", metric="episodes", **labels) == 8


async def test_counters_add_what_came_since_the_last_scrape_and_gauges_show_the_newest(api: ApiHarness):
    await api.start("a")
    for number in range(1, 4):
        await append(api, "learner", {"reward": mean([number]), "tokens_trained": Partial("sum", 10.0)}, step=number)
        scraped = await scrape(api)
        assert of(scraped, "offbeat_learner_tokens_trained_total", run="a") == 10 * number
        assert of(scraped, "offbeat_learner_reward", run="a") == number


async def test_a_long_stream_is_read_whole_after_the_first_scrape(api: ApiHarness):
    await api.start("a")
    await append(api, "learner", {"tokens_trained": Partial("sum", 1.0)}, step=1)
    await scrape(api)
    for _ in range(2_100):
        await append(api, "learner", {"tokens_trained": Partial("sum", 1.0)}, step=1)
    assert of(await scrape(api), "offbeat_learner_tokens_trained_total", run="a") == 2_101


async def test_a_value_that_is_not_finite_leaves_the_metric_as_it_was(api: ApiHarness):
    await api.start("a")
    await append(api, "rollout", {"episode_s": mean([1.0])}, kind="train", tag="x")
    await append(api, "rollout", {"episode_s": mean([float("nan")])}, kind="train", tag="x")
    assert of(await scrape(api), "offbeat_rollout_episode_seconds_sum", run="a", kind="train", tag="x") == 1


async def test_an_ended_run_stays_for_ten_minutes_without_its_metrics(api: ApiHarness):
    await api.start("a")
    await append(api, "learner", {"reward": mean([1.0])}, step=1)
    await api.store.update("a", state=RunState.FAILED, ended_at=api.store.clock() - 500)
    scraped = await scrape(api)
    assert of(scraped, "offbeat_run_state", run="a", state="failed") == 1
    assert ("offbeat_learner_reward", frozenset({("run", "a")})) not in scraped
    await api.store.update("a", ended_at=api.store.clock() - 700)
    assert not [name for name, labels in await scrape(api) if ("run", "a") in labels]


async def test_a_resumed_or_new_run_of_the_name_starts_its_counters_again(api: ApiHarness):
    await api.start("a")
    await append(api, "learner", {"tokens_trained": Partial("sum", 10.0)}, step=1)
    await scrape(api)
    await api.store.update("a", state=RunState.STOPPED, ended_at=api.store.clock())
    await api.http.delete("/runs/a")
    await api.start("a")
    await append(api, "learner", {"tokens_trained": Partial("sum", 3.0)}, step=1)
    assert of(await scrape(api), "offbeat_learner_tokens_trained_total", run="a") == 3


async def test_runs_whose_record_is_lost_or_foreign_leave_the_others(api: ApiHarness):
    for run_id in ("a", "b", "c"):
        await api.start(run_id)
    await api.redis.delete(RunKeys("b").record)
    await api.redis.hdel(RunKeys("c").record, "settings")  # type: ignore[misc]
    runs = {dict(labels)["run"] for name, labels in await scrape(api) if name == "offbeat_run_step"}
    assert runs == {"a"}


async def test_labels_of_envs_can_not_forge_metrics(api: ApiHarness):
    await api.start("a")
    name = 'x"} 1\noffbeat_redis_up 0\n\\'
    await append(api, "rollout", {name: mean([1.0])}, kind="train", tag="t")
    scraped = await scrape(api)
    assert of(scraped, "offbeat_rollout_env", run="a", kind="train", tag="t", metric=name) == 1
    assert of(scraped, "offbeat_redis_up") == 1


async def test_the_number_of_series_is_bounded(api: ApiHarness, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("offbeat.services.control.prometheus.meters.MAX_SERIES", 3)
    await api.start("a")
    await append(api, "rollout", {f"m{number}": mean([1.0]) for number in range(10)})
    scraped = await scrape(api)
    assert len([name for name, _ in scraped if name == "offbeat_rollout_env"]) == 3
    assert of(scraped, "offbeat_run_values_left_out", run="a") == 7


async def test_open_metrics_are_sent_where_they_are_asked_for(api: ApiHarness):
    await api.start("a")
    await append(api, "learner", {"reward": mean([1.0]), "tokens_trained": Partial("sum", 1.0)}, step=1)
    answer = await api.http.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    names = {family.name for family in parse_openmetrics(answer.text)}
    assert {"offbeat_learner_tokens_trained", "offbeat_learner_reward"} <= names


async def test_without_redis_the_answer_says_so(redis_url: str):
    async with api_harness("redis://127.0.0.1:1/0") as api:
        assert await scrape(api) == {
            ("offbeat_redis_refuses_writes", frozenset()): 0,
            ("offbeat_redis_up", frozenset()): 0,
        }
    del redis_url


async def test_a_token_of_either_scope_may_scrape_and_no_one_else(redis_url: str):
    async with api_harness(redis_url, token="all", read_token="eyes") as api:
        assert (await api.http.get("/metrics")).status_code == 401
        assert (await api.http.get("/metrics", headers={"Authorization": "Bearer wrong"})).status_code == 401
        for token in ("all", "eyes"):
            assert of(await scrape(api, Authorization=f"Bearer {token}"), "offbeat_redis_up") == 1


@dataclass(frozen=True)
class FailingStore(RunStore):
    """A store that fails to read one run's record while the other's is being read."""

    reading: asyncio.Event = field(default_factory=asyncio.Event)

    async def load(self, run_id: str) -> RunRecord:
        if run_id == "broken":
            await self.reading.wait()
            raise ConnectionError("gone")
        self.reading.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.reading.clear()
        raise AssertionError("nothing ends the wait")


async def test_no_run_is_still_being_read_when_a_scrape_has_failed(api: ApiHarness):
    await api.start("broken")
    await api.start("other")
    store = FailingStore(api.redis)
    text, _ = await PrometheusExporter(store, FakeRunFactory(api.redis), lambda: "").export("")
    assert of(parse(text.decode()), "offbeat_redis_up") == 0
    assert not store.reading.is_set()


async def test_open_models_of_tinker_servers_are_exported_for_all_keys(api: ApiHarness, redis_url: str):
    store = TinkerStore(api.redis, "tinker", TinkerConfig())
    for model_id, owner in (("one", "a"), ("other", "b"), ("ended", "b")):
        record = ModelRecord(owner=owner, session_id="session", created_at=0.0, lora=Lora(rank=1, seed=2))
        await store.add_model(model_id, record)
    with connect(redis_url) as redis:
        log = CommandLog(redis, "tinker")
        log.take_over()
        log.close("ended")
        await store.submit("one", "a", 0, OptimStep())
        await store.submit("one", "a", 1, ForwardBackwardCommand(b""))
        step = StepMetrics(
            at=5.0, version=3, loss=2.5, num_sequences=4, num_tokens=40, grad_norm=0.5, learning_rate=1e-3
        )
        log.commit("one", "a", 0, Result.of_json({}), [Write.of(log.keys.newest_steps, "one", step)])
    scraped = await scrape(api)
    assert of(scraped, "offbeat_tinker_queued_commands", server="tinker", model="one") == 1
    assert of(scraped, "offbeat_tinker_queued_commands", server="tinker", model="other") == 0
    assert of(scraped, "offbeat_tinker_loss", server="tinker", model="one") == 2.5
    assert of(scraped, "offbeat_tinker_version", server="tinker", model="one") == 3
    assert not [labels for _, labels in scraped if ("model", "ended") in labels]


@pytest.mark.parametrize("accept", ["application/openmetrics-text; version=abc", "text/plain; version=abc", "x;y=z"])
async def test_a_malformed_accept_header_gets_text(api: ApiHarness, accept: str):
    answer = await api.http.get("/metrics", headers={"Accept": accept})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
