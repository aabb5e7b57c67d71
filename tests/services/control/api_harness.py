"""The API over a real Redis and a real buffer, without a mesh behind it."""

import json
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
from redis.asyncio import Redis

from offbeat.deploy.cluster.packaged_recipes import PackagedRecipes
from offbeat.deploy.console.archive import FolderArchive, find_checkpoint
from offbeat.services.buffer.admin import BufferWatch
from offbeat.services.buffer.api import GroupProgress, Quarantined, Snapshot
from offbeat.services.control.api import create_api
from offbeat.services.control.client import ControlClient
from offbeat.services.control.console.archive import RunArchive
from offbeat.services.control.interfaces import Removal
from offbeat.services.control.rights import Rights, Tokens
from offbeat.services.control.run import RunRecord, RunSpec, RunState
from offbeat.services.control.schemas import ProblemView
from offbeat.services.control.service import ControlService, InvalidRunError
from offbeat.services.control.store import RunStore
from offbeat.services.errors import ControlError
from offbeat.services.live_settings import Settings
from tests.copying import replace
from tests.services.control.control_fakes import SETTINGS

MOST_WORKERS = 8
PLAN: Mapping[str, Any] = json.loads((Path(__file__).parent / "plan.json").read_text())
"""Of `offbeat plan --json`."""
YAML = {"Content-Type": "application/yaml"}


class FakeRunFactory(PackagedRecipes):
    """Stands in for `deploy`'s validation: any mapping with a name is a run. The buffer is the real one."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self.may_reproduce = threading.Event()
        self.may_reproduce.set()
        self.may_plan = threading.Event()
        self.may_plan.set()
        self.occupied: set[str] = set()

    async def validate(self, document: str | dict[str, Any], rights: Rights) -> RunSpec:
        del rights
        try:
            tree = json.loads(document) if isinstance(document, str) else document
        except ValueError as error:
            raise InvalidRunError([ProblemView(path="", message=str(error))]) from error
        if not isinstance(tree, dict) or not isinstance(tree.get("exp_name"), str):
            raise InvalidRunError([ProblemView(path="exp_nam", message="unknown key", suggestion="exp_name")])
        name = tree["exp_name"]
        folder = tree.get("output_dir", f"/runs/{name}")
        resume = bool(tree.get("resume_from_checkpoint"))
        return RunSpec(name, json.dumps(tree), folder, 7, SETTINGS, resume=resume, claims={"folder": folder})

    async def validate_change(self, record: RunRecord, requested: Settings, values: Mapping[str, float]) -> None:
        del record, requested
        if values.get("num_workers", 0) > MOST_WORKERS:
            raise InvalidRunError([ProblemView(path="rollout.num_workers", message="there are not enough CPUs")])

    async def write_report(self, record: RunRecord) -> None:
        del record

    def find_folder(self, record: RunRecord) -> Path:
        return Path(record.output_dir)

    def open_archive(self, record: RunRecord) -> RunArchive:
        return FolderArchive(Path(record.output_dir))

    def holds_run(self, folder: str) -> bool:
        return folder in self.occupied

    def find_checkpoint(self, record: RunRecord, step: int) -> str:
        return find_checkpoint(Path(record.output_dir), step)

    def reproduce(self, record: RunRecord, step: int) -> tuple[bool, Mapping[str, Any]]:
        if step > record.max_steps:
            raise ControlError(f"no way to step {step} from a checkpoint before it")
        self.may_reproduce.wait()
        compared = [{"step": step, "equal": True}] if step % 2 == 0 else []
        return True, {"start": 0, "steps": [step], "compared": compared}

    def plan(self, record: RunRecord, settings: Settings) -> Mapping[str, Any]:
        del record
        if settings.num_workers > 1:
            raise ControlError("the run has 0 steps in its metrics")
        self.may_plan.wait()
        return PLAN

    @contextmanager
    def hold_files(self, record: RunRecord) -> Iterator[Callable[[], Removal]]:
        yield lambda: self.remove_files(record)

    def remove_files(self, record: RunRecord) -> Removal:
        shutil.rmtree(Path(record.output_dir))
        return Removal([record.output_dir], [])

    async def snapshot(self, run_id: str) -> Snapshot:
        return await BufferWatch(self._redis, run_id).snapshot()

    async def groups(self, run_id: str) -> list[GroupProgress]:
        return await BufferWatch(self._redis, run_id).groups()

    async def quarantine(self, run_id: str) -> list[Quarantined]:
        return await BufferWatch(self._redis, run_id).quarantine()


class ApiHarness:
    """An API, a client of it, and the store behind it."""

    def __init__(self, redis: Redis, redis_url: str, token: str | None, read_token: str | None) -> None:
        self.redis = redis
        self.redis_url = redis_url
        self.store = RunStore(redis)
        self.wakes = 0
        self.factory = FakeRunFactory(redis)
        service = ControlService(self.store, self.factory, wake=self.wake)
        self.api = create_api(service, tokens=Tokens(token, read_token))
        transport = httpx.ASGITransport(self.api, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")
        self.client = ControlClient("http://127.0.0.1", token=token, transport=transport)

    def wake(self) -> None:
        self.wakes += 1

    async def start(self, run_id: str, state: RunState = RunState.RUNNING, **keys: object) -> None:
        """A run that has come so far."""
        await self.client.create(json.dumps({"exp_name": run_id, **keys}))
        await self.store.update(run_id, state=state)

    async def record(self, run_id: str) -> RunRecord:
        return replace(await self.store.load(run_id))

    async def uid(self, run_id: str) -> str:
        return (await self.store.load(run_id)).uid


@asynccontextmanager
async def api_harness(
    redis_url: str, token: str | None = None, read_token: str | None = None
) -> AsyncIterator[ApiHarness]:
    async with Redis.from_url(redis_url) as redis:
        made = ApiHarness(redis, redis_url, token, read_token)
        async with made.http, made.client:
            yield made


def code(response: httpx.Response) -> str:
    return response.json()["error"]["code"]
