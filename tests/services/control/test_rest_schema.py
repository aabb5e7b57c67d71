"""Every call that the API's own document allows is answered as the document says: no 5xx, no undocumented status, no body of
another shape. `OFFBEAT_SCHEMA_CASES` sets how many calls each route gets."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from redis.asyncio import Redis

from offbeat.deploy.cluster.run_factory import MeshRunFactory
from offbeat.services.control import auth
from offbeat.services.control.api import create_api
from offbeat.services.control.rights import Tokens
from offbeat.services.control.service import ControlService
from offbeat.services.control.store import RunStore

pytestmark = pytest.mark.slow

schemathesis = pytest.importorskip("schemathesis", reason="the extra `dev` has it")

from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = (content_type_conformance, response_schema_conformance, status_code_conformance)
CASES = int(os.environ.get("OFFBEAT_SCHEMA_CASES", "25"))
STREAMS = "/runs/{run_id}/events"
"""Goes on until its run is over: tests/services/control/test_event_stream.py has it."""


@pytest.fixture
def http(redis_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[TestClient]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(auth, "CALLS_PER_S", 1e9)
    redis = Redis.from_url(redis_url)
    service = ControlService(RunStore(redis), MeshRunFactory(redis, redis_url, tmp_path), wake=lambda: None)
    api = create_api(service, tokens=Tokens("secret"))
    headers = {"Authorization": "Bearer secret"}
    with TestClient(api, base_url="http://127.0.0.1", raise_server_exceptions=False, headers=headers) as client:
        yield client
        client.portal.call(redis.aclose)  # type: ignore[union-attr]


def test_the_api_answers_as_its_document_says(http: TestClient, capsys: pytest.CaptureFixture[str]):
    schema = schemathesis.openapi.from_dict(http.get("/openapi.json").json())
    operations = [result.ok() for result in schema.get_all_operations() if result.ok().path != STREAMS]
    calls = {f"{operation.method} {operation.path}": _hold(http, operation) for operation in operations}
    with capsys.disabled():
        sys.stdout.write(f"{sum(calls.values())} calls: {calls}\n" if "OFFBEAT_SCHEMA_CASES" in os.environ else "")
    assert len(operations) >= 10
    assert all(calls.values())


@pytest.mark.parametrize("text", ["1", "-.inf", "true", "2026-01-01", "~", "- a", "words"])
def test_a_document_that_is_no_mapping_is_refused_in_words(http: TestClient, text: str):
    refused = http.post("/runs", content=text, headers={"Content-Type": "application/yaml"})
    assert refused.status_code == 422
    assert refused.json()["error"]["problems"]


def _hold(http: TestClient, operation: Any) -> int:
    """How many calls it took."""
    made = 0

    @settings(
        max_examples=CASES,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    @given(case=operation.as_strategy())
    def calls(case: Any) -> None:
        arguments = case.as_transport_kwargs(base_url="http://127.0.0.1")
        arguments = {name: value for name, value in arguments.items() if name not in ("cookies", "timeout", "verify")}
        headers = {**dict(arguments.pop("headers", None) or {}), "Authorization": "Bearer secret"}
        body = arguments.pop("data", None)
        nonlocal made
        made += 1
        answer = http.request(**arguments, content=body, headers=headers)
        assert answer.status_code < 500, (arguments, answer.text)
        documented = operation.definition.raw["responses"]
        assert str(answer.status_code) in documented, (arguments, answer.status_code, answer.text)
        if answer.status_code != 204 and answer.headers["content-type"].startswith("application/json"):
            case.validate_response(schemathesis.Response.from_any(answer), checks=CHECKS)

    calls()
    return made
