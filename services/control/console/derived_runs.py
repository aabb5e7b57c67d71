"""Forks, repetitions of recorded steps, and plans."""

import asyncio
import copy
import json
import re
from collections.abc import Mapping
from typing import Any, cast

from offbeat.services.control.console.jobs import RunJobs
from offbeat.services.control.console.schemas import PlanState, PlanView, ReproductionState, ReproductionView
from offbeat.services.control.rights import Rights
from offbeat.services.control.run import RUN_ID, RunRecord
from offbeat.services.control.schemas import ProblemView, RunView
from offbeat.services.control.service import ControlService, InvalidRunError
from offbeat.services.errors import ControlError

MAX_REPRODUCTIONS = 2
"""Each trains in a process of its own, for an hour at most."""
MAX_PLANS = 1
"""Each takes a core for some 15 s."""


class TooManyReproductionsError(ControlError):
    """Too many reproductions are running."""


class TooManyPlansError(ControlError):
    """Another plan is being made."""


class DerivedRuns:
    def __init__(self, service: ControlService) -> None:
        self._service = service
        self._reproductions = RunJobs(
            service.store, "reproduction", ReproductionView, MAX_REPRODUCTIONS, TooManyReproductionsError
        )
        self._plans = RunJobs(service.store, "plan", PlanView, MAX_PLANS, TooManyPlansError)

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
        view, created = await self._service.create(tree, is_fork=True, rights=rights)
        assert view is not None
        return view, created

    async def reproduce(self, run_id: str, step: int) -> ReproductionView:
        """Start a reproduction; raises as `RunJobs.begin`."""
        record = await self._service.store.load(run_id)

        def work() -> dict[str, Any]:
            equal, result = self._service.factory.reproduce(record, step)
            state = ReproductionState.EQUAL if equal else ReproductionState.DIFFERENT
            return {"state": state if result["compared"] else ReproductionState.TRAINED, "result": dict(result)}

        return await self._reproductions.begin(
            record, ReproductionView(state=ReproductionState.RUNNING, step=step), work
        )

    async def reproduction(self, run_id: str) -> ReproductionView:
        return await self._reproductions.newest(run_id)

    async def plan(self, run_id: str) -> PlanView:
        """Start a plan from what the run measured, under its settings in force; raises as `RunJobs.begin`."""
        store = self._service.store
        record = await store.load(run_id)
        settings = await store.settings(record)

        def work() -> dict[str, Any]:
            return {"state": PlanState.DONE, "result": dict(self._service.factory.plan(record, settings))}

        return await self._plans.begin(record, PlanView(state=PlanState.RUNNING), work)

    async def newest_plan(self, run_id: str) -> PlanView:
        return await self._plans.newest(run_id)


def fork_config(
    config: Mapping[str, Any], record: RunRecord, step: int, checkpoint: str, changes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the configuration of a fork; raises `InvalidRunError`."""
    if "resume_from_checkpoint" in changes:
        message = f"is the checkpoint of step {step}, which the parameter `step` names: leave the key out"
        raise InvalidRunError([ProblemView(path="resume_from_checkpoint", message=message)])
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
    # Folders of the run's alone: evaluations rendered there would count as the fork's
    tree |= {key: None for key in ("logging_dir", "render_save_dir") if key in tree}
    for key, value in changes.items():
        _set(tree, key.split("."), value, key)
    folder = changes.get("output_dir", f"{parent}/{name}")
    return tree | {"exp_name": name, "output_dir": folder, "resume_from_checkpoint": checkpoint}


def _set(node: Any, path: list[str], value: Any, key: str) -> None:
    """Set a key, also of a list's element (`rewards.0.weight`), merging a mapping; raises `InvalidRunError`."""
    part, *rest = path
    place: Any = part
    if isinstance(node, list):
        place = _index(cast(list[Any], node), part, key)
    elif rest:
        node.setdefault(part, {})
    old = node[place] if isinstance(node, list) else node.get(place)
    if rest:
        if not isinstance(old, dict | list):
            raise InvalidRunError([ProblemView(path=key, message=f"{part} is a value, and has no keys")])
        _set(old, rest, value, key)
    elif isinstance(value, dict) and isinstance(old, dict):
        for name, inner in value.items():
            _set(old, [name], inner, f"{key}.{name}")
    else:
        node[place] = value


def _index(elements: list[Any], part: str, key: str) -> int:
    if part.isdecimal() and int(part) < len(elements):
        return int(part)
    message = (
        f"{part!r} is no element of a list of {len(elements)}: expected a number from 0, or the whole list as value"
    )
    raise InvalidRunError([ProblemView(path=key, message=message)])
