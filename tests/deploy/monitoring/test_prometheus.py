"""A real Prometheus (`make monitoring`) with deploy/monitoring's configuration, on a real API with a token."""

import asyncio
import re
import shutil
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse

from tests.deploy.monitoring.recorded import MONITORING, RARE, RECORDED, dashboard_queries
from tests.services.control.api_harness import api_harness
from tests.waiting import wait_until

UNPACKED = Path(sys.prefix) / "prometheus" / "usr" / "bin" / "prometheus"
PROMETHEUS = str(UNPACKED) if UNPACKED.is_file() else shutil.which("prometheus")
pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="`make monitoring` downloads Prometheus")


@asynccontextmanager
async def served(api: FastAPI) -> AsyncIterator[str]:
    """Serve the API on a socket; yield its address."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(api, log_level="error", lifespan="off"))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


def write_configuration(folder: Path, target: str, token: str) -> Path:
    """Copy the packaged files, with this test's target, a token of its own and a faster pace."""
    shutil.copytree(MONITORING, folder / "deploy" / "monitoring")
    place = folder / "runs" / "control" / "token"
    place.parent.mkdir(parents=True)
    place.write_text(token)
    path = folder / "deploy" / "monitoring" / "prometheus.yaml"
    text = path.read_text().replace("127.0.0.1:8000", target)
    path.write_text(re.sub(r"(scrape|evaluation)_interval: 15s", r"\1_interval: 1s", text))
    return path


@asynccontextmanager
async def prometheus(folder: Path, target: str, token: str) -> AsyncIterator[httpx.AsyncClient]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [
        str(PROMETHEUS),
        f"--config.file={write_configuration(folder, target, token)}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
    try:
        async with httpx.AsyncClient(base_url=f"http://{address}") as client:
            yield client
    finally:
        process.kill()
        await process.wait()


async def query(client: httpx.AsyncClient, expression: str) -> list[dict[str, Any]]:
    try:
        answer = await client.get("/api/v1/query", params={"query": expression})
    except httpx.TransportError:  # it starts
        return []
    return answer.json()["data"]["result"] if answer.status_code == 200 else []


async def test_prometheus_scrapes_runs_with_a_reading_token(redis_url: str, tmp_path: Path):
    async with api_harness(redis_url, token="all", read_token="eyes") as api:
        await api.start("a")
        async with served(api.api) as target, prometheus(tmp_path, target, "eyes") as client:
            found: list[dict[str, Any]] = []

            async def is_scraped() -> bool:
                found[:] = await query(client, 'offbeat_run_state{state="running"} == 1')
                return found != []

            await wait_until(is_scraped, every_s=0.2)
            (state,) = found
            assert state["metric"]["run"] == "a"
            assert state["metric"]["instance"] == target
            rules = (await client.get("/api/v1/rules")).json()["data"]["groups"]
            assert {rule["health"] for group in rules for rule in group["rules"]} <= {"ok", "unknown"}


async def test_without_a_token_the_target_is_down(redis_url: str, tmp_path: Path):
    async with (
        api_harness(redis_url, token="all") as api,
        served(api.api) as target,
        prometheus(tmp_path, target, "wrong") as client,
    ):
        await wait_until(lambda: query(client, 'up{job="offbeat"} == 0'), every_s=0.2)


async def test_every_query_of_the_dashboard_has_an_answer_in_what_was_recorded(tmp_path: Path):
    api = FastAPI()

    @api.get("/metrics")
    async def show_recorded() -> PlainTextResponse:
        return PlainTextResponse(RECORDED.read_text())

    async with served(api) as target, prometheus(tmp_path, target, "any") as client:
        found: list[dict[str, Any]] = []

        async def is_scraped() -> bool:
            found[:] = await query(client, "count_over_time(offbeat_run_step[1m]) > 2 and offbeat_run_step")
            return found != []

        await wait_until(is_scraped, every_s=0.2)
        at = found[0]["value"][0]  # for all queries: a scrape that takes a second marks what is there as gone
        for title, expression, _ in dashboard_queries():
            answer = await client.get("/api/v1/query", params={"query": expression, "time": at})
            assert answer.status_code == 200, f"{title}: {answer.text}"
            is_rare = any(name in expression for name in RARE)
            assert answer.json()["data"]["result"] or is_rare, f"{title}: {expression}"
