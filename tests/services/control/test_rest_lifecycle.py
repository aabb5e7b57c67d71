"""Sequences of calls over runs in every state: a state machine over the API, a real Redis, the real store and the real
reconciler, with components that die and finish.

After each step every answer is of a documented status and shape, states only move forwards, the list and the single views
agree, and of what was deleted nothing is left. `OFFBEAT_REST_EXAMPLES` sets the number of sequences, shared among
the states in which their first run begins (8 by default, seconds; 2,000 run for about an hour).
"""

import asyncio
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from offbeat.services.control import auth
from offbeat.services.control.api import create_api
from offbeat.services.control.interfaces import Health
from offbeat.services.control.reconciler import Reconciler
from offbeat.services.control.restart_policy import RestartPolicy
from offbeat.services.control.run import RunRecord
from offbeat.services.control.service import ControlService
from offbeat.services.control.store import RunStore
from offbeat.services.keys import RUNS, RunKeys
from offbeat.services.live_settings import AT_ONCE
from offbeat.services.telemetry import AsyncRedisMetrics, MetricRecord, mean
from tests.services.control.control_fakes import FakeMesh
from tests.services.control.lifecycle_calls import (
    FOLDERS,
    NAMES,
    OVER,
    LifecycleCalls,
    ResumingFactory,
    Stack,
    TickingClock,
    UnevenRedis,
)

pytestmark = pytest.mark.slow

schemathesis = pytest.importorskip("schemathesis", reason="the extra `dev` has it")

EXAMPLES = int(os.environ.get("OFFBEAT_REST_EXAMPLES", "8"))
STEPS_EACH = 20
TARGETS: dict[str, tuple[str, ...]] = {
    "none": (),
    "starting": (),
    "running": (),
    "paused": ("pause",),
    "draining": ("stop",),
    "stopped": ("stop",),
    "finished": ("finish",),
    "failed": ("break",),
}
"""State of a run at the beginning -> how it gets there."""
CONCURRENT = ("create", "pause", "resume", "stop", "patch", "delete", "show", "list", "why", "reconcile")
names = st.sampled_from(NAMES)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=8), each, max_size=3),
    max_leaves=6,
)
bodies = st.binary(max_size=30) | json_values.map(lambda tree: json.dumps(tree).encode())
SETTINGS = {
    "num_workers": st.integers(1, 12),  # more than 8 are too many
    "learning_rate": st.floats(0, 1, allow_nan=False),
    "temperature": st.floats(0.1, 2, allow_nan=False),
    "max_staleness": st.floats(0, 8, allow_nan=False),
    "num_env_groups": st.integers(1, 64),
}


class Lifecycle(LifecycleCalls):
    first: str
    """Target of the first run."""

    @initialize(others=st.lists(st.sampled_from(tuple(TARGETS)), min_size=2, max_size=2))
    def begin_in_some_states(self, others: list[str]) -> None:
        async def bring(name: str, target: str) -> None:
            assert (await self.create(name, "own", 0, resume=False)).status_code == 201
            await self.reconcile(name)
            mesh = next(mesh for key, mesh in self.stack.meshes.items() if key.startswith(f"{name} "))
            for component in mesh.components if target == "starting" else ():
                component.health = Health.STARTING
            await self.reconcile(name)
            for call in TARGETS[target]:
                match call:
                    case "finish" | "break":
                        mesh["learner"].health = Health.DONE if call == "finish" else Health.BROKEN
                    case verb:
                        assert (await self.command(name, verb, now=False)).status_code == 202
                for _ in range(1 if target == "draining" else 4):
                    await self.reconcile(name)
            view = await self.view(name)
            assert view
            assert view["state"] == target

        async def step() -> None:
            for name, target in zip(NAMES, (self.first, *others), strict=True):
                if target != "none":
                    await bring(name, target)

        self.run(step())

    @rule(name=names, folder=st.sampled_from(FOLDERS), seed=st.integers(0, 1), resume=st.booleans())
    def start_a_run(self, name: str, folder: str, seed: int, resume: bool) -> None:
        async def step() -> None:
            before = await self.view(name)
            holder = await self._holder(name, folder)
            answer = await self.create(name, folder, seed, resume)
            if before is not None and before["state"] not in OVER:
                assert answer.status_code in (200, 409)
                again = await self.create(name, folder, seed, resume)
                assert again.status_code == answer.status_code
                assert (await self.view(name))["attempt"] == before["attempt"]  # type: ignore[index]
            elif holder is not None:
                assert (answer.status_code, answer.json()["error"]["code"]) == (409, "busy")
                assert await self.view(name) == before
            else:
                assert answer.status_code == 201
                body = answer.json()
                assert (body["state"], body["wanted"], body["error"]) == ("preparing", "running", "")
                assert body["attempt"] == (before["attempt"] + 1 if before and resume else 1)
                again = await self.create(name, folder, seed, resume)
                assert again.status_code == 200

        self.stack.clock.now += 1
        self.run(step())

    async def _holder(self, name: str, folder: str) -> str | None:
        """Another active run on the folder."""
        for other in NAMES:
            view = await self.view(other)
            place = str(self.folder / (name if folder == "own" else folder))
            if other != name and view and view["state"] not in OVER and view["paths"]["output_dir"] == place:
                return other
        return None

    @rule(name=names, verb=st.sampled_from(["pause", "resume", "stop"]), now=st.booleans())
    def steer(self, name: str, verb: str, now: bool) -> None:
        async def step() -> None:
            before = await self.view(name)
            answer = await self.command(name, verb, now)
            if before is None:
                assert answer.status_code == 404
                return
            is_over, is_ending = before["state"] in OVER, before["wanted"] in ("stopped", "killed")
            if verb != "stop" and (is_over or is_ending or before["state"] == "draining"):
                assert (answer.status_code, answer.json()["error"]["code"]) == (409, "run_state")
                assert await self.view(name) == before
                return
            assert answer.status_code == 202
            wanted = {"pause": "paused", "resume": "running", "stop": "killed" if now else "stopped"}[verb]
            wanted = before["wanted"] if is_over or before["wanted"] == "killed" else wanted
            assert answer.json()["wanted"] == wanted
            assert (await self.view(name))["wanted"] == wanted  # type: ignore[index]
            assert (await self.command(name, verb, now)).status_code == 202, "repeated"

        self.run(step())

    @rule(name=names, values=st.fixed_dictionaries({}, optional=SETTINGS))
    def change_settings(self, name: str, values: dict[str, float]) -> None:
        async def step() -> None:
            before = await self.view(name)
            answer = await self.of("PATCH", name, json=values)
            if before is None:
                assert answer.status_code == 404
            elif not values:
                assert answer.status_code == 422
            elif before["state"] in OVER or before["wanted"] in ("stopped", "killed"):
                assert answer.status_code in (409, 422)
            elif values.get("num_workers", 0) > 8:
                assert answer.status_code == 422
            else:
                assert answer.status_code == 200
                at_once = {key: value for key, value in values.items() if key in AT_ONCE}  # others: at the next step
                assert answer.json()["settings"] == before["settings"] | at_once
                assert answer.json()["changes"][-1]["values"] == values
                assert len(answer.json()["changes"]) == len(before["changes"]) + 1
                return
            assert await self.view(name) == before

        self.run(step())

    @rule(name=names, files=st.booleans())
    def delete(self, name: str, files: bool) -> None:
        async def step() -> None:
            before = await self.view(name)
            answer = await self.of("DELETE", name, params={"files": str(files).lower()})
            if before is None:
                assert answer.status_code == 404
            elif before["state"] not in OVER:
                assert (answer.status_code, answer.json()["error"]["code"]) == (409, "run_state")
                assert await self.view(name) == before
            else:
                assert answer.status_code == 200
                assert not files or not os.path.exists(before["paths"]["output_dir"])  # noqa: ASYNC240
                self.seen.pop(name, None)
                await self._check_gone(name)

        self.run(step())

    async def _check_gone(self, name: str) -> None:
        for suffix in ("", "/why", "/metrics", "/quarantine", "/events"):
            assert (await self.of("GET", name, suffix)).status_code == 404, suffix
        for verb in ("pause", "resume", "stop"):
            assert (await self.command(name, verb, now=False)).status_code == 404
        assert (await self.of("DELETE", name)).status_code == 404
        left = {key.decode() async for key in self.stack.redis.scan_iter(match=RunKeys(name).prefix + "*")}
        assert left <= {RunKeys(name).epoch}
        assert await self.stack.redis.zscore(RUNS, name) is None

    @rule(name=names, passes=st.integers(1, 4))
    def reconcile_a_run(self, name: str, passes: int) -> None:
        async def step() -> None:
            for _ in range(passes):
                await self.reconcile(name)

        self.stack.clock.now += 1
        self.run(step())

    @rule(
        name=names,
        component=st.sampled_from(["learner", "env-workers", "generation"]),
        health=st.sampled_from([Health.DEAD, Health.DONE, Health.BROKEN, Health.STARTING]),
        detail=st.text(max_size=5),
    )
    def change_a_component(self, name: str, component: str, health: Health, detail: str) -> None:
        for key, mesh in self.stack.meshes.items():
            if key.startswith(f"{name} ") and mesh[component].health is not Health.ABSENT:
                mesh[component].deaths += 1
                mesh[component].health, mesh[component].detail = health, detail

    @rule(name=names, count=st.integers(1, 3))
    def train_a_step(self, name: str, count: int) -> None:
        async def step() -> None:
            if await self.view(name) is None:
                return
            record = MetricRecord("learner", {"loss": mean([1.0])}, step=count)
            before = (await self.of("GET", name, "/metrics")).json()
            uid = (await self.stack.store.load(name)).uid
            for _ in range(count):
                await AsyncRedisMetrics(self.stack.redis, name, uid).append(record)
            after = (await self.of("GET", name, "/metrics", params={"after": before["next"]})).json()
            assert [each["step"] for each in after["records"]] == [count] * count

        self.run(step())

    @rule(name=names)
    def read_the_rest(self, name: str) -> None:
        async def step() -> None:
            view = await self.view(name)
            expected = 200 if view else 404
            for suffix in ("/why", "/quarantine", "/metrics"):
                assert (await self.of("GET", name, suffix)).status_code == expected
            if view is None or view["state"] not in OVER:
                return  # an active run's stream continues: test_event_stream.py
            stream = await self.of("GET", name, "/events", params={"from_start": "true"})
            assert stream.status_code == 200
            events = [line.removeprefix("data: ") for line in stream.text.splitlines() if line.startswith("data: {")]
            assert json.loads(events[-1])["state"] == view["state"]
            ids = [line.removeprefix("id: ") for line in stream.text.splitlines() if line.startswith("id: ")]
            again = await self.of("GET", name, "/events", headers={"Last-Event-ID": ids[-1]})
            assert again.status_code == 204

        self.run(step())

    @rule(name=names, route=st.sampled_from(["/runs", "/runs/{run_id}"]), body=bodies, is_yaml=st.booleans())
    def send_nonsense(self, name: str, route: str, body: bytes, is_yaml: bool) -> None:
        async def step() -> None:
            before = await self.view(name)
            headers = {"Content-Type": "application/yaml" if is_yaml else "application/json"}
            method, path = ("POST", "/runs") if route == "/runs" else ("PATCH", f"/runs/{name}")
            answer = await self.call(method, path, route, content=body, headers=headers)
            assert 400 <= answer.status_code < 500
            assert await self.view(name) == before

        self.run(step())

    @rule(
        seed=st.integers(0, 2**32),
        name=names,
        calls=st.lists(st.sampled_from(CONCURRENT), min_size=2, max_size=10),
        other=st.none() | st.tuples(names, st.sampled_from(CONCURRENT)),
    )
    def call_at_once(self, seed: int, name: str, calls: list[str], other: tuple[str, str] | None) -> None:
        chosen = [(what, name) for what in calls if what != "reconcile"]
        if "reconcile" in calls:
            chosen.append(("reconcile", name))  # one pass per run at a time, as the reconciler's loop keeps it
        if other and other[0] != name:
            chosen.append((other[1], other[0]))
        self.run(self._call_all(seed, chosen))

    @rule(
        seed=st.integers(0, 2**32), name=names, calls=st.permutations(["delete", "create", "patch", "delete", "create"])
    )
    def call_at_once_where_a_run_has_ended(self, seed: int, name: str, calls: list[str]) -> None:
        async def step() -> None:
            await self.command(name, "stop", now=True)
            for _ in range(4):
                if await self.view(name):
                    await self.reconcile(name)
            await self._call_all(seed, [(what, name) for what in calls])

        self.run(step())

    async def _call_all(self, seed: int, calls: list[tuple[str, str]]) -> None:
        rng = UnevenRedis.rng = random.Random(seed)
        self.stack.clock.now += 1
        answers = await asyncio.gather(*(self._act(rng, what, name) for what, name in calls))
        for (what, name), answer in zip(calls, answers, strict=True):
            if what == "create" and answer is not None and answer.status_code == 201:
                assert await self.view(name), "a run that was started in these calls can't be deleted by them"
            if what == "delete":
                self.seen.pop(name, None)

    async def _act(self, rng: random.Random, what: str, name: str) -> httpx.Response | None:
        await asyncio.sleep(rng.choice((0, 0, 0.001)))
        match what:
            case "create":
                return await self.create(name, rng.choice(FOLDERS), rng.randrange(2), rng.random() < 0.5)
            case "patch":
                return await self.of("PATCH", name, json={"learning_rate": rng.random()})
            case "delete":
                return await self.of("DELETE", name)
            case "show":
                return await self.of("GET", name)
            case "why":
                return await self.of("GET", name, "/why")
            case "list":
                return await self.call("GET", "/runs", "/runs")
            case "reconcile":
                return await self.reconcile(name)
            case verb:
                return await self.command(name, verb, now=rng.random() < 0.5)


@pytest.fixture
def machine(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Lifecycle]]:
    monkeypatch.setattr(auth, "CALLS_PER_S", 1e9)
    meshes: dict[str, FakeMesh] = {}

    def build_mesh(record: RunRecord) -> FakeMesh:
        return meshes.setdefault(f"{record.run_id} {record.started_at} {record.attempt}", FakeMesh())

    class Machine(Lifecycle):
        pass

    with asyncio.Runner() as loop:
        redis, clock = UnevenRedis.from_url(redis_url), TickingClock()
        store = RunStore(redis, clock, orphaned_after_s=float("inf"))
        reconciler = Reconciler(store, build_mesh, policy=RestartPolicy(max_restarts=1, backoff_s=0.0))
        api = create_api(ControlService(store, ResumingFactory(redis), wake=reconciler.wake))
        transport = httpx.ASGITransport(api, raise_app_exceptions=False)
        http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")
        Machine.run = loop.run
        Machine.stack = Stack(redis, http, store, reconciler, clock, meshes)
        Machine.folder, Machine.reached = tmp_path, set()
        Machine.schema = schemathesis.openapi.from_dict(api.openapi())
        yield Machine
        loop.run(http.aclose())
        loop.run(redis.aclose())


def test_any_sequence_of_calls_over_the_life_of_runs(machine: type[Lifecycle]):
    limits = settings(
        max_examples=-(-EXAMPLES // len(TARGETS)),
        stateful_step_count=STEPS_EACH,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    for machine.first in TARGETS:
        run_state_machine_as_test(machine, settings=limits)
    assert machine.reached >= set(TARGETS) - {"none"}
