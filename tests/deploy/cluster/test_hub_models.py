"""Runs over REST that need a download: answered at once, started when it is there, failed with the reason."""

import math
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from huggingface_hub import constants
from redis.asyncio import Redis as AsyncRedis

from offbeat.deploy.cluster.run_factory import MeshRunFactory
from offbeat.services.control.api import create_api
from offbeat.services.control.interfaces import RunMesh
from offbeat.services.control.reconciler import Reconciler
from offbeat.services.control.run import RunRecord, RunState
from offbeat.services.control.service import ControlService
from offbeat.services.control.store import RunStore
from tests.dataset_repository import write_repository
from tests.hub import DATASET, NAME, SHA, DatasetHub
from tests.services.control.control_fakes import FakeMesh
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

MODEL = f"{NAME}@{SHA}"
MARK = "offbeat.deploy.config.hub"


class SlowHub(DatasetHub):
    """Sends no weights and rows before it may, and none at all once they are forbidden."""

    may_send: threading.Event
    is_forbidden = False

    def _send(self, content: bytes, body: bool, kind: str, status: int = 200, error: str = "") -> None:
        if body and self.path.endswith((".safetensors", ".parquet")):
            self.may_send.wait(60)
            if self.is_forbidden:
                content, status = b"quota exceeded", 403
        super()._send(content, body, kind, status, error)


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[SlowHub]]:
    rows = write_repository(tmp_path / "repository")
    folders = {"folder": folder / "policy", "rows": rows, "export": rows, "requested": []}
    handler = type("FolderHub", (SlowHub,), {**folders, "may_send": threading.Event()})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url, home = f"http://127.0.0.1:{server.server_port}", tmp_path / "hf"
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setenv("HF_HOME", str(home))
        monkeypatch.setattr(constants, "ENDPOINT", url)  # read when the library was imported
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(home / "assets"))
        yield handler
        handler.may_send.set()
        server.shutdown()


@dataclass
class Control:
    http: httpx.AsyncClient
    reconciler: Reconciler
    store: RunStore
    folder: Path

    async def post(self, name: str = NAME, **keys: Any) -> httpx.Response:
        tree = yaml.safe_load((self.folder / "run.yaml").read_text())
        document = {**tree, "exp_name": "boxes", "output_dir": "runs/boxes", "pretrain": name, **keys}
        return await self.http.post("/runs", json=document)

    async def show(self) -> dict[str, Any]:
        return (await self.http.get("/runs/boxes")).json()

    async def reaches(self, state: RunState) -> bool:
        return await self.reconciler.reconcile("boxes") is state


@pytest.fixture
async def control(redis_url: str, tmp_path: Path, folder: Path) -> AsyncIterator[Control]:
    async with AsyncRedis.from_url(redis_url) as redis:
        factory = MeshRunFactory(redis, redis_url, tmp_path)
        store = RunStore(redis, orphaned_after_s=math.inf)  # a test reconciles by hand, and a check may take long

        def build_mesh(record: RunRecord) -> RunMesh:
            return factory.build_mesh(record) if record.downloads else FakeMesh()

        reconciler = Reconciler(store, build_mesh, complete=factory.complete)
        service = ControlService(store, factory, wake=reconciler.wake)
        transport = httpx.ASGITransport(create_api(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60.0) as http:
            yield Control(http, reconciler, store, folder)


SUMS: dict[str, Any] = {
    "exp_name": "boxes",
    "output_dir": "runs/boxes",
    "pipeline": "sft",
    "data": {
        "dataset_name": f"{DATASET}:main",
        "prompt_key": "question",
        "response_key": "answer",
        "num_train_epochs": 2,
    },
    "sequence_length": 128,
    "rollout_batch_size": 8,
    "eval_steps": 0,
}
"""A run on 32 rows of the hub's dataset."""


async def test_a_run_is_answered_while_its_dataset_is_downloaded(control: Control, hub: type[SlowHub]):
    rows = f"{DATASET}:main/train@{SHA}"
    answer = await control.http.post("/runs", json=SUMS)
    assert answer.status_code == 201, answer.text
    assert answer.json()["phase"] == f"downloading {rows}"
    assert await control.reaches(RunState.STARTING)
    assert await control.reaches(RunState.STARTING)
    assert (await control.show())["components"] == {
        f"download of {rows}": {"health": "starting", "detail": "takes the dataset from the hub", "restarts": 0}
    }
    hub.may_send.set()
    await wait_until(lambda: control.reaches(RunState.RUNNING))
    record = await control.store.load("boxes")
    tree = yaml.safe_load(record.config)
    assert Path(tree["data"]["dataset_name"]).parts[-3:] == (SHA, "main", "train")
    assert (tree["max_steps"], record.max_steps) == (8, 8), "2 epochs of 32 rows, 8 a step"
    assert (await control.http.post("/runs", json=SUMS)).status_code == 200, "the same run again"


async def test_a_dataset_that_can_not_be_downloaded_fails_the_run(control: Control, hub: type[SlowHub]):
    hub.is_forbidden = True
    hub.may_send.set()
    assert (await control.http.post("/runs", json=SUMS)).status_code == 201
    await wait_until(lambda: control.reaches(RunState.FAILED))
    error = (await control.show())["error"]
    assert error.startswith(f"download of {DATASET}:main/train@{SHA}: {DATASET}:main/train@{SHA} can't be downloaded ")
    assert downloads() == []


@pytest.mark.usefixtures("hub")
async def test_a_split_that_is_not_there_is_refused_with_the_request(control: Control):
    data = {**SUMS["data"], "dataset_name": f"{DATASET}:main/dev"}
    answer = await control.http.post("/runs", json={**SUMS, "data": data})
    assert answer.status_code == 422
    (problem,) = answer.json()["error"]["problems"]
    assert problem["path"] == "data.dataset_name"
    assert "config main has no split 'dev'; there is train, test" in problem["message"]


def downloads() -> list[psutil.Process]:
    """Return the live downloads; one that calls `exec` at this moment has no command line and is left out."""
    children = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
    return [each for each in children if MARK in " ".join(each.cmdline())]


async def only_download() -> psutil.Process:
    found: list[psutil.Process] = []

    def is_found() -> bool:
        found[:] = downloads()
        return len(found) == 1

    await wait_until(is_found)
    return found[0]


async def test_a_run_is_answered_while_its_model_is_downloaded(control: Control, hub: type[SlowHub]):
    answer = await control.post()
    assert answer.status_code == 201, answer.text
    assert answer.json()["phase"] == f"downloading {MODEL}"
    assert await control.reconciler.reconcile("boxes") is RunState.STARTING
    assert await control.reconciler.reconcile("boxes") is RunState.STARTING
    view = await control.show()
    assert view["components"] == {
        f"download of {MODEL}": {"health": "starting", "detail": "takes the model from the hub", "restarts": 0}
    }
    assert f"download of {MODEL} is starting" in (await control.http.get("/runs/boxes/why")).json()["sentence"]
    assert (await control.post()).status_code == 200, "the same run again"
    hub.may_send.set()
    await wait_until(lambda: control.reaches(RunState.RUNNING))
    snapshot = Path(yaml.safe_load((await control.store.load("boxes")).config)["pretrain"])
    assert snapshot.name == SHA
    for path in (control.folder / "policy").iterdir():
        assert (snapshot / path.name).read_bytes() == path.read_bytes()
    assert (await control.show())["phase"] == ""
    again = await control.post()
    assert again.status_code == 200, again.text


async def test_a_model_in_the_cache_is_checked_with_the_request(control: Control, hub: type[SlowHub]):
    hub.may_send.set()
    assert (await control.post()).status_code == 201
    await wait_until(lambda: control.reaches(RunState.RUNNING))
    rejected = await control.post(sequence_length=1_000_000, exp_name="other", output_dir="runs/other")
    assert rejected.status_code == 422
    assert [each["path"] for each in rejected.json()["error"]["problems"]] == ["sequence_length"]


async def test_a_failed_download_is_the_error_of_the_run(control: Control, hub: type[SlowHub]):
    hub.is_forbidden = True
    hub.may_send.set()
    assert (await control.post()).status_code == 201
    await wait_until(lambda: control.reaches(RunState.FAILED))
    view = await control.show()
    assert view["error"].startswith(f"download of {MODEL}: {MODEL} can't be downloaded from the hub: ")
    assert "403" in view["error"]
    assert downloads() == []


async def test_a_model_that_does_not_fit_fails_the_run_with_the_key(control: Control, hub: type[SlowHub]):
    hub.may_send.set()
    assert (await control.post(sequence_length=1_000_000)).status_code == 201
    await wait_until(lambda: control.reaches(RunState.FAILED))
    assert (await control.show())["error"].startswith("sequence_length: 1000000 ")


@pytest.mark.usefixtures("hub")
async def test_what_needs_no_model_is_refused_with_the_request(control: Control):
    for name, keys, path, says in (
        (NAME, {"rollout_batch_size": 7}, "rollout_batch_size", "not a multiple"),
        ("tiny/none", {}, "pretrain", "no model tiny/none on the hub"),
    ):
        answer = await control.post(name, **keys)
        assert answer.status_code == 422
        problems = answer.json()["error"]["problems"]
        assert [each["path"] for each in problems] == [path]
        assert says in problems[0]["message"]


@pytest.mark.usefixtures("hub")
async def test_a_stop_ends_the_download(control: Control):
    await control.post()
    assert await control.reaches(RunState.STARTING)
    process = await only_download()
    assert (await control.http.post("/runs/boxes/stop")).status_code == 202
    began = time.monotonic()
    await wait_until(lambda: control.reaches(RunState.STOPPED))
    assert time.monotonic() - began < 30
    assert not process.is_running()
