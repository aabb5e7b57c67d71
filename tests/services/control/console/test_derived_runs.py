"""A run is forked from a checkpoint with changed keys, its recorded steps are reproduced, and it is simulated."""

import asyncio
import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import ConnectionError

from offbeat.services.control.console.derived_runs import TooManyPlansError, fork_config
from offbeat.services.control.console.jobs import RunJobs
from offbeat.services.control.console.schemas import PlanState, PlanView
from offbeat.services.control.run import RunRecord, RunState, UnknownRunError
from offbeat.services.control.service import InvalidRunError
from offbeat.services.keys import RunKeys
from offbeat.services.live_settings import Settings
from offbeat.trainer.training.checkpoint import LearnerState
from offbeat.trainer.training.checkpoint_store import CheckpointStore
from tests.services.control.api_harness import PLAN, ApiHarness, api_harness, code
from tests.services.control.control_fakes import SETTINGS
from tests.trainer.training.test_checkpoint import write
from tests.waiting import wait_until

RECORD = RunRecord("lake", "{}", "/runs/lake", 7, SETTINGS)


@pytest.fixture
def checkpoint(runs: Path) -> Path:
    folder = runs / "lake" / "checkpoints"
    if not (folder / "step-000002").is_dir():
        state = LearnerState(step=2, lineage="now", next_number=4, kl_coef=0.0, num_processes=1, config={})
        CheckpointStore(folder, keep=2, epoch=1).save(state, write).result()
    return folder / "step-000002"


async def test_a_fork_is_a_new_run_from_the_checkpoint(api: ApiHarness, runs: Path, checkpoint: Path) -> None:
    body = {"actor_infer.num_replicas": 3, "max_steps": 9}
    answer = await api.http.post("/runs/lake/fork?step=2", json=body)
    assert (answer.status_code, answer.json()["id"]) == (201, "lake-fork-2")
    record = await api.record("lake-fork-2")
    assert record.output_dir == str(runs / "lake-fork-2")
    assert json.loads(record.config) == {
        "exp_name": "lake-fork-2",
        "output_dir": str(runs / "lake-fork-2"),
        "resume_from_checkpoint": str(checkpoint),
        "actor_infer": {"app": None, "num_replicas": 3},
        "max_steps": 9,
    }
    again = await api.http.post("/runs/lake/fork?step=2", json=body)
    assert again.status_code == 200


@pytest.mark.usefixtures("checkpoint")
@pytest.mark.parametrize("name", ["lake-fork-2", "pond"])
async def test_a_fork_neither_changes_nor_replaces_an_ended_run(api: ApiHarness, name: str) -> None:
    await api.http.post("/runs/lake/fork?step=2", json={"exp_name": name})
    await api.store.update(name, state=RunState.FINISHED)
    first = await api.record(name)
    again = await api.http.post("/runs/lake/fork?step=2", json={"exp_name": name, "max_steps": 10})
    assert (again.status_code, code(again)) == (409, "run_exists")
    message = again.json()["error"]["message"]
    assert f"`offbeat runs delete {name} --files`" in message
    assert f"`offbeat runs start {first.output_dir}/config.yaml`" in message
    assert await api.record(name) == first


@pytest.mark.usefixtures("checkpoint")
async def test_an_equal_fork_of_one_that_failed_resumes_it(api: ApiHarness) -> None:
    await api.http.post("/runs/lake/fork?step=2", json={"max_steps": 9})
    first = await api.record("lake-fork-2")
    await api.store.update("lake-fork-2", state=RunState.FAILED)
    api.factory.occupied.add(first.output_dir)
    again = await api.http.post("/runs/lake/fork?step=2", json={"max_steps": 9})
    record = await api.record("lake-fork-2")
    assert (again.status_code, record.uid, record.attempt) == (201, first.uid, first.attempt + 1)


@pytest.mark.usefixtures("checkpoint")
async def test_a_fork_is_refused_in_the_folder_of_a_deleted_run(api: ApiHarness, runs: Path) -> None:
    """Its files would be mixed with the fork's."""
    await api.http.post("/runs/lake/fork?step=2", json={})
    await api.store.update("lake-fork-2", state=RunState.FINISHED)
    await api.http.delete("/runs/lake-fork-2")
    api.factory.occupied.add(str(runs / "lake-fork-2"))
    for keys in ({}, {"exp_name": "other", "output_dir": str(runs / "lake-fork-2")}):
        answer = await api.http.post("/runs/lake/fork?step=2", json=keys)
        assert (answer.status_code, code(answer)) == (409, "run_exists")
        assert f"{runs / 'lake-fork-2'} has the files of a run" in answer.json()["error"]["message"]
    assert (await api.http.post("/runs/lake/fork?step=2", json={"exp_name": "other"})).status_code == 201


async def test_a_fork_needs_a_checkpoint_of_that_step(api: ApiHarness, checkpoint: Path) -> None:
    answer = await api.http.post("/runs/lake/fork?step=3", json={})
    assert (answer.status_code, code(answer)) == (404, "not_recorded")
    assert checkpoint.name in answer.json()["error"]["message"]


def test_changes_are_merged_into_the_configuration() -> None:
    config = {"a": {"b": 1, "c": {"d": 2}}, "actor_infer": {"app": "x"}, "render_save_dir": "/r", "logging_dir": "/l"}
    changes = {"a.c.d": 3, "a": {"b": 5}, "exp_name": "other", "logging_dir": "/m"}
    tree = fork_config(config, RECORD, 4, "/c", changes)
    assert tree == {
        "a": {"b": 5, "c": {"d": 3}},
        "actor_infer": {"app": None},
        "exp_name": "other",
        "logging_dir": "/m",
        "output_dir": "/runs/other",
        "render_save_dir": None,
        "resume_from_checkpoint": "/c",
    }
    assert config["a"] == {"b": 1, "c": {"d": 2}}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"exp_name": "../x"}, "exp_name: '../x' is no name of a run"),
        ({"exp_name": "lake"}, "exp_name: lake is the name of the run itself"),
        ({"a.b": 1}, "a.b: a is a value"),
        ({"rewards.1.weight": 2}, "rewards.1.weight: '1' is no element of a list of 1"),
        ({"rewards.weight": 2}, "rewards.weight: 'weight' is no element of a list of 1"),
        ({"resume_from_checkpoint": False}, "resume_from_checkpoint: is the checkpoint of step 4, which the parameter"),
    ],
)
def test_a_change_that_fits_nothing_is_refused(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(InvalidRunError, match=problem):
        fork_config({"a": 1, "rewards": [{"weight": 1}]}, RECORD, 4, "/c", changes)


def test_a_change_of_a_list_is_of_its_element() -> None:
    config = {"rewards": [{"name": "a", "weight": 1}, {"name": "b"}], "tags": ["x", "y"]}
    changes = {"rewards.0.weight": 2, "rewards.1": {"weight": 3}, "tags.1": "z"}
    tree = fork_config(config, RECORD, 4, "/c", changes)
    assert tree["rewards"] == [{"name": "a", "weight": 2}, {"name": "b", "weight": 3}]
    assert tree["tags"] == ["x", "z"]


@pytest.mark.parametrize(("step", "state"), [(2, "equal"), (3, "trained")])
async def test_a_reproduction_runs_beside_and_its_result_is_kept(api: ApiHarness, step: int, state: str) -> None:
    """It is not said to be equal where there is no checkpoint to compare."""
    assert (await api.http.get("/runs/lake/reproduce")).json()["state"] == "none"
    begun = await api.http.post(f"/runs/lake/reproduce?step={step}")
    assert (begun.status_code, begun.json()["state"]) == (202, "running")

    async def has_ended() -> bool:
        return (await api.http.get("/runs/lake/reproduce")).json()["state"] != "running"

    await wait_until(has_ended)
    ended = (await api.http.get("/runs/lake/reproduce")).json()
    assert (ended["state"], ended["step"], ended["result"]["steps"]) == (state, step, [step])
    assert ended["ended_at"] >= ended["began_at"]


async def test_a_reproduction_that_fails_says_why(api: ApiHarness) -> None:
    await api.http.post("/runs/lake/reproduce?step=8")

    async def has_failed() -> bool:
        return (await api.http.get("/runs/lake/reproduce")).json()["state"] == "failed"

    await wait_until(has_failed)
    assert (await api.http.get("/runs/lake/reproduce")).json()[
        "error"
    ] == "no way to step 8 from a checkpoint before it"


async def test_more_reproductions_than_two_are_refused(redis_url: str, runs: Path) -> None:
    async with api_harness(redis_url) as harness:
        harness.factory.may_reproduce.clear()
        try:
            for name in ("lake", "pond", "sea"):
                await harness.start(name, output_dir=str(runs / name))
            begun = [await harness.http.post(f"/runs/{name}/reproduce?step=2") for name in ("lake", "pond", "sea")]
            assert [answer.status_code for answer in begun] == [202, 202, 429]
            assert code(begun[2]) == "too_many_reproductions"
            assert (await harness.http.get("/runs/sea/reproduce")).json()["state"] == "none"
        finally:
            harness.factory.may_reproduce.set()

        async def has_room() -> bool:
            return (await harness.http.post("/runs/sea/reproduce?step=2")).status_code == 202

        await wait_until(has_room)


async def plan_of(api: ApiHarness) -> dict[str, Any]:
    """Return the plan of `lake`, once it is made."""

    async def has_ended() -> bool:
        return (await api.http.get("/runs/lake/plan")).json()["state"] != "running"

    await wait_until(has_ended)
    return (await api.http.get("/runs/lake/plan")).json()


async def test_a_plan_is_made_beside_and_kept(api: ApiHarness) -> None:
    assert (await plan_of(api))["state"] == "none"
    begun = await api.http.post("/runs/lake/plan")
    assert (begun.status_code, begun.json()["state"]) == (202, "running")
    made = await plan_of(api)
    assert (made["state"], made["result"]) == ("done", PLAN)


async def test_a_plan_is_of_the_settings_in_force_and_says_why_it_fails(api: ApiHarness) -> None:
    await api.http.patch("/runs/lake", json={"num_workers": 2})
    await api.http.post("/runs/lake/plan")
    made = await plan_of(api)
    assert (made["state"], made["error"]) == ("failed", "the run has 0 steps in its metrics")


async def test_a_job_of_a_run_that_was_deleted_meanwhile_does_not_begin(api: ApiHarness) -> None:
    record = await api.record("lake")
    await api.store.update("lake", state=RunState.FINISHED)
    await api.client.delete("lake")
    jobs = RunJobs(api.store, "plan", PlanView, 1, TooManyPlansError)
    with pytest.raises(UnknownRunError):
        await jobs.begin(record, PlanView(state=PlanState.RUNNING), lambda: {"state": PlanState.DONE, "result": {}})
    assert not jobs._tasks
    assert not await api.redis.exists(RunKeys("lake").key("plan"))


async def test_a_plan_with_an_unexpected_error_has_failed_with_it(api: ApiHarness) -> None:
    def fail(record: RunRecord, settings: Settings) -> Mapping[str, Any]:
        del record, settings
        raise OSError(errno.ENOSPC, "No space left on device")

    api.factory.plan = fail
    await api.http.post("/runs/lake/plan")
    made = await plan_of(api)
    assert (made["state"], made["error"]) == ("failed", "OSError: [Errno 28] No space left on device")
    assert made["ended_at"] >= made["began_at"]


async def test_of_plans_requested_at_once_one_is_started(api: ApiHarness) -> None:
    api.factory.may_plan.clear()
    try:
        answers = await asyncio.gather(*(api.http.post("/runs/lake/plan") for _ in range(2)))
        assert sorted(answer.status_code for answer in answers) == [202, 409]
    finally:
        api.factory.may_plan.set()
    assert (await plan_of(api))["state"] == "done"


async def test_a_second_plan_is_refused(redis_url: str, runs: Path) -> None:
    async with api_harness(redis_url) as harness:
        harness.factory.may_plan.clear()
        try:
            for name in ("lake", "pond"):
                await harness.start(name, output_dir=str(runs / name))
            begun = [await harness.http.post(f"/runs/{name}/plan") for name in ("lake", "lake", "pond")]
            assert [answer.status_code for answer in begun] == [202, 409, 429]
            assert [code(answer) for answer in begun[1:]] == ["run_state", "too_many_plans"]
        finally:
            harness.factory.may_plan.set()
        assert (await plan_of(harness))["state"] == "done"


async def test_a_result_of_a_deleted_run_is_not_its_successors(api: ApiHarness, runs: Path) -> None:
    api.factory.may_plan.clear()
    try:
        await api.http.post("/runs/lake/plan")
        await api.store.update("lake", state=RunState.FINISHED)
        await api.client.delete("lake")
        await api.start("lake", output_dir=str(runs / "lake"))
        assert (await api.http.get("/runs/lake/plan")).json()["state"] == "none"
        again = await api.http.post("/runs/lake/plan")
        assert (again.status_code, code(again)) == (429, "too_many_plans")
    finally:
        api.factory.may_plan.set()

    async def has_room() -> bool:
        return (await api.http.post("/runs/pond/plan")).status_code == 202

    await wait_until(has_room)
    assert (await api.http.get("/runs/lake/plan")).json()["state"] == "none"


async def test_a_result_waits_until_redis_takes_it(api: ApiHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    write, refusals = api.redis.evalsha, [ConnectionError("no answer")] * 2

    async def refuse_the_end(*arguments: Any) -> Any:
        if refusals and '"running"' not in arguments[-1]:
            raise refusals.pop()
        return await write(*arguments)

    monkeypatch.setattr(api.redis, "evalsha", refuse_the_end)
    await api.http.post("/runs/lake/plan")
    assert (await plan_of(api))["state"] == "done"
    assert not refusals


async def test_a_token_for_reading_can_neither_fork_nor_reproduce(redis_url: str, runs: Path) -> None:
    async with api_harness(redis_url, "operate", "look") as harness:
        await harness.start("lake", RunState.FINISHED, output_dir=str(runs / "lake"))
        headers = {"Authorization": "Bearer look"}
        for path in ("fork", "reproduce", "plan"):
            refused = await harness.http.post(f"/runs/lake/{path}?step=2", json={}, headers=headers)
            assert (refused.status_code, code(refused)) == (403, "read_only")
        assert (await harness.http.get("/runs/lake/groups", headers=headers)).status_code == 200
        assert (await harness.http.get("/runs/lake/groups")).status_code == 401
