"""Calls of the sequences of `test_rest_lifecycle.py`, the service that answers them, and what holds after each step."""

import asyncio
import json
import random
import shutil
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import httpx
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant
from redis.asyncio import Redis

from offbeat.services.control.interfaces import Removal
from offbeat.services.control.reconciler import Reconciler
from offbeat.services.control.rights import Rights
from offbeat.services.control.run import RunRecord, RunSpec
from offbeat.services.control.store import RunStore
from offbeat.services.keys import RunKeys
from tests.copying import replace
from tests.services.control.api_harness import FakeRunFactory
from tests.services.control.control_fakes import FakeClock, FakeMesh

schemathesis = pytest.importorskip("schemathesis", reason="the extra `dev` has it")

from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

T = TypeVar("T")

CHECKS = (content_type_conformance, response_schema_conformance, status_code_conformance)
NAMES = ("a", "b", "c")
FOLDERS = ("own", "shared")
RANK = {
    "preparing": 0,
    "starting": 1,
    "running": 2,
    "paused": 2,
    "draining": 3,
    "finished": 4,
    "stopped": 4,
    "failed": 4,
}
OVER = ("finished", "stopped", "failed")


class ResumingFactory(FakeRunFactory):
    """Runs that may be resumed, with files."""

    async def validate(self, document: str | dict[str, Any], rights: Rights) -> RunSpec:
        spec = await super().validate(document, rights)
        return replace(spec, resume=bool(json.loads(spec.config).get("resume_from_checkpoint")))

    def remove_files(self, record: RunRecord) -> Removal:
        shutil.rmtree(record.output_dir, ignore_errors=True)
        return Removal([record.output_dir], [])


class UnevenRedis(Redis):
    """A client whose commands take differently long, so that concurrent calls interleave in many ways."""

    rng = random.Random(0)

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        await asyncio.sleep(self.rng.choice((0, 0, 0.0005)))
        return await super().execute_command(*args, **options)


@dataclass
class TickingClock(FakeClock):
    """Time that differs at each look, as its time distinguishes a start from others."""

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


@dataclass
class Seen:
    """The newest view of a run."""

    created_at: float
    attempt: int
    state: str


@dataclass
class Stack:
    """The service of one sequence."""

    redis: Redis
    http: httpx.AsyncClient
    store: RunStore
    reconciler: Reconciler
    clock: TickingClock
    meshes: dict[str, FakeMesh] = field(default_factory=dict[str, FakeMesh])


class Runner(Protocol):
    def __call__(self, call: Coroutine[Any, Any, T], /) -> T: ...


class LifecycleCalls(RuleBasedStateMachine):
    """Calls over runs, and what holds after each step."""

    folder: Path
    schema: Any
    stack: Stack
    run: Runner
    """Shared by all sequences: building the API takes longer than one."""
    reached: set[str]

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Seen] = {}
        self.stack.meshes.clear()
        self.run(self.stack.redis.flushdb())
        self.stack.store.attended.clear()  # these runs are forgotten on purpose

    # Calls

    async def call(self, method: str, path: str, route: str, **arguments: Any) -> httpx.Response:
        """Call, and hold the answer against the API's document."""
        answer = await self.stack.http.request(method, path, **arguments)
        assert answer.status_code < 500, (method, path, arguments, answer.text)
        operation = self.schema[route][method]
        assert str(answer.status_code) in operation.definition.raw["responses"], (method, path, answer.text)
        if answer.headers.get("content-type", "").startswith("application/json"):
            case = operation.Case(path_parameters={"run_id": "a"} if "{" in route else {})
            case.validate_response(schemathesis.Response.from_any(answer), checks=CHECKS)
        return answer

    async def of(self, method: str, name: str, suffix: str = "", **arguments: Any) -> httpx.Response:
        return await self.call(
            method,
            f"/runs/{name}{suffix.partition('?')[0]}",
            f"/runs/{{run_id}}{suffix.partition('?')[0]}",
            **arguments,
        )

    async def view(self, name: str) -> dict[str, Any] | None:
        answer = await self.of("GET", name)
        assert answer.status_code in (200, 404)
        return answer.json() if answer.status_code == 200 else None

    async def create(self, name: str, folder: str, seed: int, resume: bool) -> httpx.Response:
        place = self.folder / (name if folder == "own" else folder)
        place.mkdir(exist_ok=True, parents=True)
        tree = {"exp_name": name, "output_dir": str(place), "seed": seed, "resume_from_checkpoint": resume}
        return await self.call("POST", "/runs", "/runs", json=tree)

    async def command(self, name: str, verb: str, now: bool) -> httpx.Response:
        return await self.of("POST", name, f"/{verb}", params={"now": str(now).lower()} if verb == "stop" else {})

    async def reconcile(self, name: str) -> None:
        await self.stack.reconciler._try_reconcile(name)

    # What holds after each step

    @invariant()
    def list_and_views_agree_and_states_move_forwards(self) -> None:
        async def check() -> None:
            views = {name: view for name in NAMES if (view := await self.view(name))}
            listed = (await self.call("GET", "/runs", "/runs")).json()
            assert listed["unreadable"] == []
            assert {run["id"]: run for run in listed["runs"]} == views
            paged: list[str] = []
            after = None
            while True:
                params = {"limit": "1", **({"after": after} if after else {})}
                page = (await self.call("GET", "/runs", "/runs", params=params)).json()
                paged += [run["id"] for run in page["runs"]]
                if (after := page["next"]) is None:
                    break
            assert paged == [run["id"] for run in listed["runs"]]
            for name, view in views.items():
                self._check_progress(name, view)
            self._check_folders(views)
            for name in set(NAMES) - set(views):
                left = {key.decode() async for key in self.stack.redis.scan_iter(match=RunKeys(name).prefix + "*")}
                assert left <= {RunKeys(name).epoch}, "nothing of a deleted run is left"

        self.run(check())

    def _check_progress(self, name: str, view: dict[str, Any]) -> None:
        state = view["state"]
        self.reached.add(state)
        assert (view["ended_at"] > 0) == (state in OVER)
        assert view["error"] == "" or state in ("draining", "failed")
        before = self.seen.get(name)
        if before and (before.created_at, before.attempt) == (view["created_at"], view["attempt"]):
            assert RANK[state] >= RANK[before.state], (before.state, state)
            assert before.state not in OVER or state == before.state
        self.seen[name] = Seen(view["created_at"], view["attempt"], state)

    @staticmethod
    def _check_folders(views: dict[str, dict[str, Any]]) -> None:
        used = [view["paths"]["output_dir"] for view in views.values() if view["state"] not in OVER]
        assert len(used) == len(set(used)), "two active runs on one folder"
