"""What a person asks of a run: that it stop, pause, continue, or change."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from offbeat.services.control.client import ControlRefusedError
from offbeat.services.control.run import DesiredState, RunRecord, RunState
from offbeat.services.control.schemas import ProblemView
from offbeat.services.control.service import InvalidRunError
from offbeat.services.keys import RunKeys
from offbeat.services.live_settings import Settings
from tests.services.control.api_harness import (
    MOST_WORKERS,
    ApiHarness,
    api_harness,
    code,
)


@pytest.fixture
async def api(redis_url: str) -> AsyncIterator[ApiHarness]:
    async with api_harness(redis_url) as made:
        yield made


@pytest.mark.parametrize(("now", "wanted"), [(False, "stopped"), (True, "killed")])
async def test_stopping_says_what_is_wanted(api: ApiHarness, now: bool, wanted: str):
    await api.start("a")
    assert (await api.client.stop("a", now=now)).wanted == wanted
    assert api.wakes == 2


async def test_stopping_a_run_that_is_over_changes_nothing(api: ApiHarness):
    await api.start("a", RunState.FINISHED)
    assert (await api.client.stop("a")).wanted is DesiredState.RUNNING


async def test_a_run_pauses_and_resumes_and_neither_once_it_ends(api: ApiHarness):
    await api.start("a")
    assert (await api.client.pause("a")).wanted is DesiredState.PAUSED
    assert (await api.client.pause("a")).wanted is DesiredState.PAUSED
    assert (await api.client.resume("a")).wanted is DesiredState.RUNNING
    await api.client.stop("a")
    for command in (api.client.pause, api.client.resume):
        with pytest.raises(ControlRefusedError, match="'a' is ending") as caught:
            await command("a")
        assert (caught.value.status, caught.value.error.error.code) == (409, "run_state")


async def test_process_counts_change_at_once_and_others_when_adopted(api: ApiHarness):
    await api.start("a")
    view = await api.client.change("a", {"num_workers": 2, "learning_rate": 3e-4, "max_staleness": 2})
    assert (view.settings.num_workers, view.settings.learning_rate, view.settings.max_staleness) == (2, 1e-3, 1.0)
    assert [(change.values, change.from_step) for change in view.changes] == [
        ({"num_workers": 2, "learning_rate": 3e-4, "max_staleness": 2.0}, None)
    ]
    redis: Any = api.redis
    await redis.hset(RunKeys("a").adopted, 0, 4)
    view = await api.client.show("a")
    assert (view.settings.num_workers, view.settings.learning_rate, view.settings.max_staleness) == (2, 3e-4, 2.0)
    assert view.changes[0].from_step == 4
    assert api.wakes == 2


@pytest.mark.parametrize(
    ("body", "path", "message", "suggestion"),
    [
        ({"learning_rat": 1.0}, "learning_rat", "did you mean `learning_rate`", "learning_rate"),
        ({"rollout.num_workers": 1}, "rollout.num_workers", "did you mean `num_workers`", "num_workers"),
        ({"exp_name": "b"}, "exp_name", "can't be changed; these can: num_workers", None),
        ({"temperature": "hot"}, "temperature", "valid number", None),
        ({"temperature": 0.009}, "temperature", "greater than or equal to 0.01", None),
        ({"num_workers": 1.5}, "num_workers", "valid integer", None),
        ({"num_workers": True}, "num_workers", "valid integer", None),
        ({"num_replicas": 0}, "num_replicas", "greater than or equal to 1", None),
        ({"max_staleness": -1}, "max_staleness", "greater than or equal to 0", None),
        ({"num_workers": MOST_WORKERS + 1}, "rollout.num_workers", "not enough CPUs", None),
        ({}, "", "nothing to change: set at least one of num_workers", None),
    ],
)
async def test_a_change_that_cannot_be_names_the_key(
    api: ApiHarness, body: dict[str, object], path: str, message: str, suggestion: str | None
):
    await api.start("a")
    refused = await api.http.patch("/runs/a", json=body)
    assert refused.status_code == 422
    (problem,) = refused.json()["error"]["problems"]
    assert (problem["path"], problem["suggestion"]) == (path, suggestion)
    assert message in problem["message"]
    assert (await api.client.show("a")).changes == []


async def test_changes_at_once_are_validated_together(api: ApiHarness, monkeypatch: pytest.MonkeyPatch):
    both = asyncio.Barrier(2)
    validated = list[Settings]()

    async def validate(record: RunRecord, requested: Settings, values: Mapping[str, float]) -> None:
        """Refuse more than four processes; the first two validations begin before either ends."""
        del record
        validated.append(settings := requested.changed(values))
        if len(validated) <= 2:
            await both.wait()
        if settings.num_workers + settings.num_replicas > 4:
            raise InvalidRunError([ProblemView(path="rollout.num_workers", message="there are not enough CPUs")])

    monkeypatch.setattr(api.factory, "validate_change", validate)
    await api.start("a")
    answers = await asyncio.gather(
        api.http.patch("/runs/a", json={"num_workers": 3}), api.http.patch("/runs/a", json={"num_replicas": 3})
    )
    assert sorted(answer.status_code for answer in answers) == [200, 422]
    (change,) = (await api.client.show("a")).changes
    assert change.values in ({"num_workers": 3}, {"num_replicas": 3})
    assert [(each.num_workers, each.num_replicas) for each in validated[2:]] == [(3, 3)]


async def test_changes_at_once_that_fit_are_both_stored(api: ApiHarness):
    await api.start("a")
    bodies = [{"num_workers": 3}, {"num_replicas": 3}, {"temperature": 0.5}]
    answers = await asyncio.gather(*(api.http.patch("/runs/a", json=body) for body in bodies))
    assert [answer.status_code for answer in answers] == [200] * 3
    changes = [change.values for change in (await api.client.show("a")).changes]
    assert sorted(changes, key=str) == sorted(bodies, key=str)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_a_number_that_is_none_is_refused(api: ApiHarness, number: str):
    await api.start("a")
    content = f'{{"learning_rate": {number}}}'
    refused = await api.http.patch("/runs/a", content=content, headers={"Content-Type": "application/json"})
    assert refused.status_code == 422
    assert refused.json()["error"]["problems"][0]["path"] == "learning_rate"


async def test_settings_of_a_run_that_is_over_do_not_change(api: ApiHarness):
    await api.start("a", RunState.FAILED)
    refused = await api.http.patch("/runs/a", json={"temperature": 0.5})
    assert (refused.status_code, code(refused)) == (409, "run_state")


@pytest.mark.parametrize("state", [RunState.RUNNING, RunState.DRAINING])
async def test_an_ending_run_is_not_started_again_before_its_end(api: ApiHarness, state: RunState):
    """The same configuration answers 200 only while the run goes on."""
    await api.start("a")
    assert (await api.http.post("/runs", json={"exp_name": "a"})).status_code == 200
    await api.client.stop("a")
    await api.store.update("a", state=state)
    refused = await api.http.post("/runs", json={"exp_name": "a"})
    assert (refused.status_code, code(refused)) == (409, "run_exists")
    assert "is ending: start it again after its end (`offbeat runs watch a`)" in refused.json()["error"]["message"]
    await api.store.update("a", state=RunState.STOPPED)
    assert (await api.http.post("/runs", json={"exp_name": "a"})).status_code == 201


@pytest.mark.parametrize("outcome", [RunState.FINISHED, RunState.FAILED])
async def test_settings_of_a_run_that_drains_do_not_change(api: ApiHarness, outcome: RunState):
    await api.start("a", RunState.DRAINING)
    await api.store.update("a", outcome=outcome)
    refused = await api.http.patch("/runs/a", json={"temperature": 0.5})
    assert (refused.status_code, code(refused)) == (409, "run_state")
    assert "is ending" in refused.json()["error"]["message"]
    assert (await api.client.show("a")).changes == []
