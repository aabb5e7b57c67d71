"""The page and the read routes over run folders, without a mesh."""

import asyncio
from pathlib import Path

from fastapi import FastAPI

from offbeat.deploy.console.archive import FolderArchive
from offbeat.deploy.console.folder_run import find_folders, view_folder
from offbeat.services.control.auth import AuthMiddleware
from offbeat.services.control.console.archive import NotRecordedError, RunArchive
from offbeat.services.control.console.pages import add_page
from offbeat.services.control.console.routes import RunId, archive_routes
from offbeat.services.control.http_errors import answer_errors, refusals
from offbeat.services.control.rights import NO_TOKENS
from offbeat.services.control.run import UnknownRunError
from offbeat.services.control.schemas import RunsView, RunView, UnreadableView


class FolderRuns:
    """By name; of equal names, the newest."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._archives: dict[Path, FolderArchive] = {}
        self.unreadable: dict[str, str] = {}
        """By the folder's name: why its run can't be read."""

    def refresh(self) -> dict[str, FolderArchive]:
        runs: dict[str, FolderArchive] = {}
        unreadable: dict[str, str] = {}
        for folder in find_folders(self._root):
            archive = self._archives.setdefault(folder, FolderArchive(folder))
            try:
                runs.setdefault(archive.run_config.exp_name, archive)
            except NotRecordedError as error:
                unreadable[folder.name] = str(error)
        self.unreadable = unreadable
        return runs

    async def archive(self, run_id: str) -> FolderArchive:
        """Raises `UnknownRunError`, `NotRecordedError`."""
        runs = await asyncio.to_thread(self.refresh)
        if run_id in self.unreadable.keys() - runs.keys():
            raise NotRecordedError(self.unreadable[run_id])
        if run_id not in runs:
            raise UnknownRunError(f"there is no run {run_id!r} in {self._root}: {', '.join(runs) or 'none at all'}")
        return runs[run_id]

    async def view(self, run_id: str) -> RunView:
        return await asyncio.to_thread(view_folder, await self.archive(run_id))

    async def views(self) -> list[RunView]:
        runs = await asyncio.to_thread(self.refresh)
        return [await asyncio.to_thread(view_folder, archive) for archive in runs.values()]


def create_folder_api(runs: FolderRuns) -> FastAPI:
    """Build the API, for local programs."""
    api = FastAPI(title="Offbeat", version="1")

    async def open_archive(run_id: str) -> RunArchive:
        return await runs.archive(run_id)

    @api.get("/runs", responses=refusals())
    async def list_runs() -> RunsView:
        """List the folders' runs, newest first."""
        views = await runs.views()
        unreadable = [UnreadableView(id=name, reason=reason) for name, reason in runs.unreadable.items()]
        return RunsView(runs=views, unreadable=unreadable)

    @api.get("/runs/{run_id}", responses=refusals(404, 422))
    async def show_run(run_id: RunId) -> RunView:
        return await runs.view(run_id)

    api.include_router(archive_routes(open_archive, runs.view))
    add_page(api, NO_TOKENS, access="read")
    answer_errors(api)
    api.add_middleware(AuthMiddleware, tokens=NO_TOKENS)
    return api
