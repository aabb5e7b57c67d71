"""Forks, and repetitions of recorded steps."""

import asyncio
import copy
import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from offbeat.services.control.console.schemas import ReproductionState, ReproductionView
from offbeat.services.control.rights import Rights
from offbeat.services.control.run import RUN_ID, RunRecord, RunStateError
from offbeat.services.control.schemas import ProblemView, RunView
from offbeat.services.control.service import ControlService, InvalidRunError
from offbeat.services.errors import ControlError
from offbeat.services.keys import RunKeys

MAX_REPRODUCTIONS = 2
"""Each trains in a process of its own, for an hour at most."""


class TooManyReproductionsError(ControlError):
    """Too many reproductions are running."""


class DerivedRuns:
    def __init__(self, service: ControlService) -> None:
        self._service = service
        self._threads = ThreadPoolExecutor(MAX_REPRODUCTIONS, thread_name_prefix="reproduce")
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def fork(self, run_id: str, step: int, changes: Mapping[str, Any], rights: Rights) -> tuple[RunView, bool]:
        """Start a run from a checkpoint of another one.

        changes: configuration keys, dotted or nested; `exp_name` and `output_dir` are derived by default.

        Raises:
            NotRecordedError: no complete checkpoint of that step.
            InvalidRunError, NotAllowedError, RunExistsError, BusyError: as for `ControlService.create`.
        """
        record = await self._service.store.load(run_id)
        checkpoint = await asyncio.to_thread(self._service.factory.find_checkpoint, record, step)
        tree = fork_config(json.loads(record.config), record, step, checkpoint, changes)
        view, created = await self._service.create(tree, rights=rights)
        assert view is not None
        return view, created

    async def reproduce(self, run_id: str, step: int) -> ReproductionView:
        """Start a reproduction.

        Raises:
            RunStateError: one of this run is running.
            TooManyReproductionsError: of other runs.
        """
        record = await self._service.store.load(run_id)
        if run_id in self._tasks:
            raise RunStateError(f"a reproduction of run {run_id!r} is running: wait for its end")
        if len(self._tasks) >= MAX_REPRODUCTIONS:
            raise TooManyReproductionsError(
                f"reproductions of runs {', '.join(sorted(self._tasks))} are running: wait for the end of one"
            )
        view = ReproductionView(state=ReproductionState.RUNNING, step=step, began_at=self._service.store.clock())
        await self._save(run_id, view)
        task = asyncio.create_task(self._reproduce(record, view), name=f"reproduce {run_id}")
        self._tasks[run_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(run_id, None))
        return view

    async def reproduction(self, run_id: str) -> ReproductionView:
        """Return the newest one; failed if the service died during it."""
        await self._service.store.load(run_id)
        text = await cast(Any, self._service.store.redis.get(_key(run_id)))
        if text is None:
            return ReproductionView(state=ReproductionState.NONE)
        view = ReproductionView.model_validate_json(text)
        if view.state is ReproductionState.RUNNING and run_id not in self._tasks:
            return view.model_copy(update={"state": ReproductionState.FAILED, "error": "the service was restarted"})
        return view

    async def _reproduce(self, record: RunRecord, view: ReproductionView) -> None:
        assert view.step is not None
        try:
            calling = asyncio.get_running_loop().run_in_executor(
                self._threads, self._service.factory.reproduce, record, view.step
            )
            equal, result = await calling
            state = ReproductionState.EQUAL if equal else ReproductionState.DIFFERENT
            outcome: dict[str, Any] = {"state": state, "result": dict(result)}
        except ControlError as error:
            outcome = {"state": ReproductionState.FAILED, "error": str(error)}
        await self._save(record.run_id, view.model_copy(update={**outcome, "ended_at": self._service.store.clock()}))

    async def _save(self, run_id: str, view: ReproductionView) -> None:
        await cast(Any, self._service.store.redis.set(_key(run_id), view.model_dump_json()))


def _key(run_id: str) -> str:
    return RunKeys(run_id).key("reproduction")


def fork_config(
    config: Mapping[str, Any], record: RunRecord, step: int, checkpoint: str, changes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the configuration of a fork; raises `InvalidRunError`."""
    tree = copy.deepcopy(dict(config))
    name = changes.get("exp_name", f"{record.run_id}-fork-{step}")
    if not isinstance(name, str) or not re.fullmatch(RUN_ID, name):
        raise InvalidRunError([ProblemView(path="exp_name", message=f"{name!r} is no name of a run")])
    if name == record.run_id:
        message = f"{name} is the name of the run itself: choose another one, or resume it"
        raise InvalidRunError([ProblemView(path="exp_name", message=message)])
    parent = record.output_dir.rstrip("/").rpartition("/")[0]
    # The application that the mesh chose for the other run is in use as long as that runs
    tree.setdefault("actor_infer", {})["app"] = None
    for key, value in changes.items():
        _set(tree, key.split("."), value, key)
    folder = changes.get("output_dir", f"{parent}/{name}")
    return tree | {"exp_name": name, "output_dir": folder, "resume_from_checkpoint": checkpoint}


def _set(tree: dict[str, Any], path: list[str], value: Any, key: str) -> None:
    """Set a key, merging a mapping; raises `InvalidRunError`."""
    *parents, leaf = path
    node = tree
    for part in parents:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            raise InvalidRunError([ProblemView(path=key, message=f"{part} is a value, and has no keys")])
        node = child
    if isinstance(value, dict) and isinstance(node.get(leaf), dict):
        for name, inner in value.items():
            _set(node[leaf], [name], inner, f"{key}.{name}")
    else:
        node[leaf] = value
