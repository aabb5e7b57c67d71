"""Records and reports that another version of Offbeat wrote."""

import pytest

from offbeat.services.keys import RunKeys
from tests.services.control.api_harness import (
    ApiHarness,
    code,
)


@pytest.mark.parametrize(
    ("name", "value"),
    [("settings", None), ("settings", '{"num_workers": 1}'), ("state", "dreaming"), ("max_steps", "many")],
)
async def test_a_foreign_record_hides_no_other_run_and_can_be_deleted(api: ApiHarness, name: str, value: str | None):
    for run_id in ("a", "old", "b"):
        await api.start(run_id, output_dir=f"/runs/{run_id}")
    key = RunKeys("old").record
    await (api.redis.hdel(key, name) if value is None else api.redis.hset(key, name, value))  # pyright: ignore[reportGeneralTypeIssues]
    found = (await api.http.get("/runs")).json()
    assert [run["id"] for run in found["runs"]] == ["b", "a"]
    (unreadable,) = found["unreadable"]
    assert unreadable["id"] == "old"
    assert name in unreadable["reason"]
    assert [run["id"] for run in (await api.http.get("/runs?limit=1")).json()["runs"]] == ["b"]
    assert code(await api.http.get("/runs/old")) == "foreign_record"
    assert code(await api.http.delete("/runs/old?files=true")) == "foreign_record"
    busy = await api.http.post("/runs", json={"exp_name": "c", "output_dir": "/runs/old"})
    assert "in use by run 'old'" in busy.json()["error"]["message"]
    assert code(await api.http.delete("/runs/old")) == "run_state", "its own version may look after it still"
    await api.redis.hset(key, "beat", "0")  # pyright: ignore[reportGeneralTypeIssues]
    assert (await api.http.delete("/runs/old")).json() == {"id": "old", "files": [], "left": []}
    assert (await api.http.get("/runs")).json()["unreadable"] == []
    assert (await api.http.post("/runs", json={"exp_name": "c", "output_dir": "/runs/old"})).status_code == 201


LATER_FIELDS = {
    "record": ("priority", "7"),
    "restarts": ("learner", '{"count": 1, "total": 2, "last_at": 3.0, "incident": "x", "step": 4, "host": "later"}'),
    "components": ("learner", '{"health": "ready", "detail": "", "log": "", "incident": "", "since": 1.0}'),
    "weights:served": (
        "r",
        '{"version": 1, "at": 1e12, "load": {"running": 2, "waiting": 0, "queued": 1}, "zone": "b"}',
    ),
}


@pytest.mark.parametrize("key", LATER_FIELDS)
async def test_fields_that_a_later_version_added_are_left_out(api: ApiHarness, key: str):
    for run_id in ("a", "later", "b"):
        await api.start(run_id)
    keys = RunKeys("later")
    place = {"record": keys.record, "weights:served": keys.served}.get(key, keys.key(key))
    field, value = LATER_FIELDS[key]
    await api.redis.hset(place, field, value)  # pyright: ignore[reportGeneralTypeIssues]
    listed = (await api.http.get("/runs")).json()
    assert ([run["id"] for run in listed["runs"]], listed["unreadable"]) == (["b", "later", "a"], [])
    for path in ("/runs/later", "/runs/later/metrics", "/runs/later/why"):
        assert (await api.http.get(path)).status_code == 200, path


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("restarts", '{"host": "elsewhere", "count": [1]'),
        ("components", '{"health": "dreaming"}'),
        ("components", '{"detail": "no health"}'),
        ("components", "7"),
    ],
)
async def test_a_run_with_reports_of_another_version_is_listed_as_such(api: ApiHarness, key: str, value: str):
    for run_id in ("a", "other", "b"):
        await api.start(run_id)
    await api.redis.hset(RunKeys("other").key(key), "learner", value)  # pyright: ignore[reportGeneralTypeIssues]
    listed = (await api.http.get("/runs")).json()
    assert [run["id"] for run in listed["runs"]] == ["b", "a"]
    assert [run["id"] for run in listed["unreadable"]] == ["other"]
    assert "recorded by another version of Offbeat" in listed["unreadable"][0]["reason"]
    assert [run["id"] for run in (await api.http.get("/runs?limit=1")).json()["runs"]] == ["b"]
    assert code(await api.http.get("/runs/other")) == "foreign_record"


async def test_metrics_of_another_version_are_reported_as_such(api: ApiHarness):
    await api.start("other")
    await api.redis.xadd(RunKeys("other").metrics, {"r": b"\x93later"})
    assert code(await api.http.get("/runs/other/metrics")) == "foreign_record"
    assert [run["id"] for run in (await api.http.get("/runs")).json()["unreadable"]] == ["other"]
