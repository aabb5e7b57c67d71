"""Replays of episodes are few at a time, and other routes do not wait for them."""

import asyncio
import threading
from pathlib import Path

import httpx
from fastapi import FastAPI

from offbeat.deploy.console.archive import FolderArchive
from offbeat.services.control.console.replays import MAX_REPLAYS
from offbeat.services.control.console.routes import archive_routes
from offbeat.services.control.console.schemas import FramesView
from offbeat.services.control.http_errors import answer_errors
from offbeat.services.control.schemas import RunView
from tests.services.control.api_harness import code
from tests.waiting import wait_until


class HeldArchive(FolderArchive):
    """A folder whose episodes play until they are released."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.release = threading.Event()
        self.playing = threading.Semaphore(0)

    def frames(self, number: int, index: int) -> FramesView:
        self.playing.release()
        self.release.wait()
        return FramesView(frames=[f"{number}/{index}"])


async def view_run(run_id: str) -> RunView:
    raise NotImplementedError(run_id)


async def test_more_replays_are_refused_until_one_has_ended(runs: Path) -> None:
    archive, api = HeldArchive(runs / "lake"), FastAPI()

    async def open_archive(run_id: str) -> FolderArchive:
        assert run_id == "lake"
        return archive

    api.include_router(archive_routes(open_archive, view_run))
    answer_errors(api)
    transport = httpx.ASGITransport(api)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http, asyncio.TaskGroup() as tasks:
        paths = [f"/runs/lake/trajectories/6/{index}/frames" for index in range(MAX_REPLAYS)]
        replays = [tasks.create_task(http.get(path)) for path in paths]
        try:
            for _ in paths:
                await asyncio.to_thread(archive.playing.acquire)
            replays[0].cancel()  # its browser leaves: it plays on
            refused = await http.get(paths[0])
            assert (refused.status_code, code(refused)) == (429, "too_many_replays")
            assert (await http.get("/runs/lake/groups/6")).status_code == 200
        finally:
            archive.release.set()
        assert (await replays[1]).json() == {"frames": ["6/1"]}

        async def has_room() -> bool:
            return (await http.get(paths[0])).json() == {"frames": ["6/0"]}

        await wait_until(has_room)
