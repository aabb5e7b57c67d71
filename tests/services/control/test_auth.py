"""Who may call, and how often."""

from collections.abc import AsyncIterator

import pytest

from offbeat.services.control.auth import CALL_BURST, WRONG_TOKEN_BURST, TokenBucket
from tests.services.control.api_harness import ApiHarness, api_harness, code


@pytest.fixture
async def api(redis_url: str) -> AsyncIterator[ApiHarness]:
    async with api_harness(redis_url) as made:
        yield made


async def test_with_a_token_only_who_carries_it_is_answered(redis_url: str):
    async with api_harness(redis_url, token="secret") as api:
        for headers in ({}, {"Authorization": "Bearer secre"}, {"Authorization": "secret"}):
            refused = await api.http.get("/runs", headers=headers)
            assert (refused.status_code, code(refused)) == (401, "unauthorized")
        assert (await api.http.get("/healthz")).status_code == 200
        assert (await api.client.runs()).runs == []


async def test_a_token_that_reads_changes_nothing(redis_url: str):
    async with api_harness(redis_url, token="secret", read_token="look") as api:
        look = {"Authorization": "Bearer look"}
        assert (await api.http.get("/runs", headers=look)).status_code == 200
        for ask in (api.http.post, api.http.patch, api.http.delete):
            refused = await ask("/runs/a", headers=look)
            assert (refused.status_code, code(refused)) == (403, "read_only")
        assert (await api.client.runs()).runs == []


async def test_who_guesses_tokens_gets_one_answer_a_second_and_nobody_else_waits(redis_url: str):
    async with api_harness(redis_url, token="secret") as api:
        wrong = {"Authorization": "Bearer guess"}
        answers = [(await api.http.get("/runs", headers=wrong)).status_code for _ in range(WRONG_TOKEN_BURST + 5)]
        assert answers[:WRONG_TOKEN_BURST] == [401] * WRONG_TOKEN_BURST
        assert 429 in answers
        assert (await api.client.runs()).runs == []


async def test_calls_without_a_token_do_not_use_up_the_rate_of_others(redis_url: str):
    async with api_harness(redis_url, token="secret") as api:
        refused = [(await api.http.get("/runs")).status_code for _ in range(CALL_BURST + 200)]
        assert set(refused) == {401, 429}
        assert (await api.client.runs()).runs == []


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
