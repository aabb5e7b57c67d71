"""Who may call, and how often."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import httpx
import pytest
from redis.asyncio import Redis

from offbeat.services.control.api import create_api
from offbeat.services.control.auth import CALL_BURST, WRONG_TOKEN_BURST, TokenBucket
from offbeat.services.control.rights import Rights, TokenGrant, Tokens
from offbeat.services.control.run import RunSpec, RunState
from offbeat.services.control.service import HEALTH_CACHE_S, ControlService
from offbeat.services.control.store import RunStore
from tests.services.control.api_harness import ApiHarness, FakeRunFactory, api_harness, code


@pytest.fixture
async def api(redis_url: str) -> AsyncIterator[ApiHarness]:
    async with api_harness(redis_url) as made:
        yield made


async def test_with_a_token_only_who_carries_it_is_answered(redis_url: str):
    async with api_harness(redis_url, token="secret") as api:
        for headers in (
            {},
            {"Authorization": "Bearer secre"},
            {"Authorization": "Bearer SECRET"},
            {"Authorization": "secret"},
        ):
            refused = await api.http.get("/runs", headers=headers)
            assert (refused.status_code, code(refused)) == (401, "unauthorized")
        assert (await api.http.get("/healthz")).status_code == 200
        assert (await api.client.runs()).runs == []
        assert (await api.http.get("/runs", headers={"Authorization": "bearer secret"})).status_code == 200


async def test_a_token_that_reads_changes_nothing(redis_url: str):
    async with api_harness(redis_url, token="secret", read_token="look") as api:
        look = {"Authorization": "Bearer look"}
        assert (await api.http.get("/runs", headers=look)).status_code == 200
        for ask in (api.http.post, api.http.patch, api.http.delete):
            refused = await ask("/runs/a", headers=look)
            assert (refused.status_code, code(refused)) == (403, "read_only")
        assert (await api.client.runs()).runs == []


@pytest.fixture
def unrefilled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates at which no bucket is refilled during a flood, however slow the machine is."""
    for name in ("CALLS_PER_S", "WRONG_TOKENS_PER_S"):
        monkeypatch.setattr(f"offbeat.services.control.auth.{name}", 1e-6)


@pytest.mark.usefixtures("unrefilled")
async def test_who_guesses_tokens_gets_a_bounded_number_of_answers_and_others_do_not_wait(redis_url: str):
    async with api_harness(redis_url, token="secret") as api:
        wrong = {"Authorization": "Bearer guess"}
        answers = [await api.http.get("/runs", headers=wrong) for _ in range(WRONG_TOKEN_BURST + 5)]
        assert [answer.status_code for answer in answers[:WRONG_TOKEN_BURST]] == [401] * WRONG_TOKEN_BURST
        assert (answers[-1].status_code, answers[-1].headers["Retry-After"]) == (429, "1")
        assert (await api.client.runs()).runs == []


@pytest.mark.usefixtures("unrefilled")
async def test_calls_without_a_token_do_not_use_up_the_rate_of_others(redis_url: str):
    async with api_harness(redis_url, token="secret") as api:
        refused = [(await api.http.get("/runs")).status_code for _ in range(CALL_BURST + 20)]
        assert set(refused) == {401, 429}
        assert (await api.client.runs()).runs == []


@pytest.mark.usefixtures("unrefilled")
@pytest.mark.parametrize(
    ("path", "headers", "answers"),
    [
        ("/docs", {}, {200, 429}),
        ("/healthz", {}, {200}),
        ("/runs", {"Authorization": "Bearer look"}, {200, 429}),
        ("/runs", {"Authorization": "Bearer guess"}, {401, 429}),
    ],
    ids=["documentation", "health", "another token", "wrong token"],
)
async def test_no_calls_of_others_lock_out_a_token(
    redis_url: str, path: str, headers: dict[str, str], answers: set[int]
):
    async with api_harness(redis_url, token="secret", read_token="look") as api:
        flood = [(await api.http.get(path, headers=headers)).status_code for _ in range(CALL_BURST + 20)]
        assert set(flood) == answers
        assert (await api.client.runs()).runs == []


async def test_the_health_is_asked_of_redis_at_most_twice_a_second(redis_url: str):
    async with api_harness(redis_url) as api:
        before = (await api.redis.info("commandstats")).get("cmdstat_exists", {"calls": 0})["calls"]
        started = asyncio.get_running_loop().time()
        for _ in range(200):
            assert (await api.http.get("/healthz")).status_code == 200
        most = 2 + (asyncio.get_running_loop().time() - started) / HEALTH_CACHE_S
        assert (await api.redis.info("commandstats"))["cmdstat_exists"]["calls"] - before <= most


async def test_a_health_that_redis_does_not_answer_is_asked_once(redis_url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("offbeat.services.control.service.HEALTH_CACHE_S", 0.0)

    class SilentRedis:
        asked, answers = 0, asyncio.Event()

        async def exists(self, _: str) -> int:
            self.asked += 1
            await self.answers.wait()
            return 1

    redis = SilentRedis()
    async with Redis.from_url(redis_url) as other:
        service = ControlService(RunStore(cast(Redis, redis)), FakeRunFactory(other), wake=lambda: None)
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(service.healthy())
                await asyncio.sleep(0.01)
            assert redis.asked == 1
            redis.answers.set()
        assert await service.healthy()
        assert redis.asked == 2


async def test_the_rights_of_a_token_reach_the_validation(redis_url: str):
    students = Rights(("offbeat.*",), ("/data/students",))
    seen: list[Rights] = []

    class Factory(FakeRunFactory):
        async def validate(self, document: str | dict[str, Any], rights: Rights) -> RunSpec:
            seen.append(rights)
            return await super().validate(document, rights)

    async with Redis.from_url(redis_url) as redis:
        store = RunStore(redis)
        tokens = Tokens("all", rights=Rights(("*",)), others=(TokenGrant("student", "write", students),))
        api = create_api(ControlService(store, Factory(redis), wake=lambda: None), tokens=tokens)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://127.0.0.1") as http:

            async def call(method: str, path: str, token: str, **body: object) -> httpx.Response:
                headers = {"Authorization": f"Bearer {token}"}
                return await http.request(method, path, headers=headers, **({"json": body} if body else {}))

            assert (
                await call("POST", "/runs", "student", exp_name="a", output_dir="/data/students/a")
            ).status_code == 201
            assert (await call("POST", "/runs", "all", exp_name="b", output_dir="/data/others/b")).status_code == 201
            assert seen == [students, Rights(("*",))]
            for run_id in ("a", "b"):
                await store.update(run_id, state=RunState.FINISHED)
            refused = await call("DELETE", "/runs/b?files=true", "student")
            assert (refused.status_code, code(refused)) == (403, "not_allowed")
            assert "output_roots" in refused.json()["error"]["problems"][0]["message"]


def test_a_bucket_lets_its_burst_through_and_then_its_rate():
    now = 0.0
    bucket = TokenBucket(2.0, 3, clock=lambda: now)
    assert [bucket.take() for _ in range(3)] == [0.0] * 3
    assert bucket.take() == 0.5
    now = 0.5
    assert [bucket.take(), bucket.take()] == [0.0, 0.5]
    now = 100.0
    assert [bucket.take() for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]


async def test_the_documentation_needs_no_token_but_says_that_calls_do(redis_url: str):
    async with api_harness(redis_url, token="secret") as api:
        assert (await api.http.get("/docs")).status_code == 200
        document = (await api.http.get("/openapi.json")).json()
        assert document["paths"]["/runs"]["get"]["security"] == [{"HTTPBearer": []}]


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Origin": "https://evil.example"},
        {"Origin": "http://localhost:3000"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Host": "[::"},
        {"Origin": "https://["},
    ],
)
async def test_without_a_token_a_web_page_cannot_call(api: ApiHarness, headers: dict[str, str]):
    refused = await api.http.post("/runs", json={"exp_name": "a"}, headers=headers)
    assert (refused.status_code, code(refused)) == (403, "forbidden")
    seen = await api.http.get("/runs", headers=headers)
    assert (seen.status_code, code(seen)) == (403, "forbidden")


@pytest.mark.parametrize("headers", [{}, {"Origin": "http://127.0.0.1:8000"}, {"Sec-Fetch-Site": "same-origin"}])
async def test_without_a_token_our_own_pages_and_programs_may_call(api: ApiHarness, headers: dict[str, str]):
    assert (await api.http.get("/runs", headers={"Host": "127.0.0.1:8000", **headers})).status_code == 200
