"""Commands and queries on runs, independent of HTTP.

A command sets the desired state and wakes the reconciler.
"""

import asyncio
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from offbeat.services.control.claims import claim_chosen
from offbeat.services.control.console.archive import RunArchive
from offbeat.services.control.event_schemas import MetricsView, MetricView
from offbeat.services.control.interfaces import Recipes, Removal
from offbeat.services.control.prometheus.exporter import PrometheusExporter
from offbeat.services.control.queries import BufferReader, Overview, reading
from offbeat.services.control.rights import UNRESTRICTED, Rights
from offbeat.services.control.run import (
    BusyError,
    DesiredState,
    ForeignRecordError,
    RunExistsError,
    RunRecord,
    RunSpec,
    RunState,
    UnknownRunError,
)
from offbeat.services.control.schemas import (
    DeletedView,
    ProblemView,
    QuarantinedView,
    QuarantineView,
    RunsView,
    RunView,
    SettingsPatch,
    UnreadableView,
    WhyView,
)
from offbeat.services.control.store import RunStore
from offbeat.services.errors import ControlError
from offbeat.services.keys import RUNS
from offbeat.services.live_settings import Settings, requested_settings
from offbeat.services.telemetry import AsyncRedisMetrics

MAX_CONCURRENT_VALIDATIONS = 4
MAX_ARCHIVES = 8
VALIDATION_WAIT_S = 5.0
"""Wait for a slot."""
HEALTH_CACHE_S = 0.5
"""Unauthenticated calls cause no more work."""


class InvalidRunError(ControlError):
    """Invalid configuration or settings."""

    def __init__(self, problems: Sequence[ProblemView]) -> None:
        self.problems = list(problems)
        super().__init__("; ".join(f"{problem.path}: {problem.message}" for problem in problems))


class NotAllowedError(ControlError):
    """Command beyond the caller's rights; `problems` names each key."""

    def __init__(self, problems: Sequence[ProblemView]) -> None:
        self.problems = list(problems)
        super().__init__("; ".join(f"{problem.path}: {problem.message}" for problem in problems))


class TooManyValidationsError(ControlError):
    """All slots of validation are taken."""


class InvalidPlaceError(ControlError):
    """Invalid position in a list of runs."""


class RunFactory(BufferReader, Recipes, Protocol):
    async def validate(self, document: str | dict[str, Any], rights: Rights) -> RunSpec:
        """Validate in limited time; raises `InvalidRunError`, `NotAllowedError` with every problem."""
        ...

    async def validate_change(self, record: RunRecord, requested: Settings, values: Mapping[str, float]) -> None:
        """Validate new settings in limited time; raises `InvalidRunError`."""
        ...

    async def write_report(self, record: RunRecord) -> None:
        """Write an ended run's report; raises `ControlError` with the command to retry."""
        ...

    def find_folder(self, record: RunRecord) -> Path:
        """Return a run's folder; raises `NotRecordedError` if it is on another host, or another run's by now."""
        ...

    def open_archive(self, record: RunRecord) -> RunArchive:
        """Open a run's folder; raises as `find_folder`."""
        ...

    def holds_run(self, folder: str) -> bool:
        """Return whether a folder has the files of a run."""
        ...

    def find_checkpoint(self, record: RunRecord, step: int) -> str:
        """Return the folder of a complete checkpoint, or its URL in a store; raises `NotRecordedError`."""
        ...

    def reproduce(self, record: RunRecord, step: int) -> tuple[bool, Mapping[str, Any]]:
        """Repeat training up to `step`; return whether compared weights are equal, and the result. Raises `ControlError`."""
        ...

    def plan(self, record: RunRecord, settings: Settings) -> Mapping[str, Any]:
        """Simulate a run from its folder, under the settings in force; raises `ControlError`."""
        ...

    def hold_files(self, record: RunRecord) -> AbstractContextManager[Callable[[], Removal]]:
        """Hold an ended run's folder; yield what removes its files. Raises `BusyError`."""
        ...


class ControlService:
    """REST operations; an unknown run raises `UnknownRunError`."""

    def __init__(
        self,
        store: RunStore,
        factory: RunFactory,
        *,
        wake: Callable[[], None],
        redis_trouble: Callable[[], str] = lambda: "",
    ) -> None:
        self.store = store
        self.factory = factory
        self._overview = Overview(store, factory, redis_trouble)
        self.exporter = PrometheusExporter(store, factory, redis_trouble)
        self._wake = wake
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_VALIDATIONS)
        self._health: asyncio.Task[bool] | None = None
        self._health_at = float("-inf")
        self._archives: OrderedDict[tuple[str, float], RunArchive] = OrderedDict()

    @asynccontextmanager
    async def _validation_slot(self) -> AsyncIterator[None]:
        """Limit concurrent validations."""
        try:
            async with asyncio.timeout(VALIDATION_WAIT_S):
                await self._slots.acquire()
        except TimeoutError:
            raise TooManyValidationsError(
                f"{MAX_CONCURRENT_VALIDATIONS} configurations are being validated: try again"
            ) from None
        try:
            yield
        finally:
            self._slots.release()

    async def create(
        self,
        document: str | dict[str, Any],
        *,
        dry_run: bool = False,
        is_fork: bool = False,
        rights: Rights = UNRESTRICTED,
    ) -> tuple[RunView | None, bool]:
        """Start a run, or validate it with `dry_run`; return its view and whether it is new.

        Raises:
            InvalidRunError: invalid configuration.
            NotAllowedError: beyond the caller's rights.
            TooManyValidationsError: try again.
            RunExistsError: active with another configuration, or ending; for a fork, ended with another one, or its
                folder has the files of a run without a record, too.
            BusyError: another run has claimed a resource.
        """

        async def validate() -> RunSpec:
            async with self._validation_slot():
                return await self.factory.validate(document, rights)

        if dry_run:
            await validate()
            return None, False

        async def record_run(spec: RunSpec) -> tuple[RunRecord, bool]:
            if is_fork:
                await self._refuse_occupied(spec)
            return await self.store.create(spec, is_fork=is_fork)

        record, created = await claim_chosen(validate, record_run)
        self._wake()
        return await self._overview.view(record), created

    async def _refuse_occupied(self, spec: RunSpec) -> None:
        """Refuse a fork that would write into the files of a run without a record; raises `RunExistsError`."""
        try:
            await self.store.load(spec.run_id)
        except UnknownRunError:
            if await asyncio.to_thread(self.factory.holds_run, spec.output_dir):
                raise RunExistsError(
                    f"{spec.output_dir} has the files of a run: choose another exp_name or output_dir, move or remove "
                    f"that folder, or resume its run (`offbeat runs start {spec.output_dir}/config.yaml`)"
                ) from None

    async def runs(self, *, states: Sequence[RunState], name: str, after: str | None, limit: int) -> RunsView:
        """Return runs, newest first; `name` is a glob. Raises `InvalidPlaceError`."""
        views: list[RunView] = []
        unreadable: list[UnreadableView] = []
        place: tuple[float, str] | None = None
        for place_of_run in await self.store.page(_place(after), name):
            try:
                record = await self.store.load(place_of_run[1])
                if states and record.state not in states:
                    continue
                if len(views) == limit:
                    following = f"{place[0]!r}~{place[1]}" if place else None
                    return RunsView(runs=views, unreadable=unreadable, next=following)
                views.append(await self._overview.view(record))
            except UnknownRunError:
                continue
            except ForeignRecordError as error:
                unreadable.append(UnreadableView(id=place_of_run[1], reason=str(error)))
            place = place_of_run
        return RunsView(runs=views, unreadable=unreadable)

    async def view(self, run_id: str) -> RunView:
        return await self._overview.view(await self.store.load(run_id))

    async def archive(self, run_id: str) -> RunArchive:
        """Return a reader of the run's folder; raises `NotRecordedError`."""
        record = await self.store.load(run_id)
        key = record.output_dir, record.created_at
        if key in self._archives:
            await asyncio.to_thread(self.factory.find_folder, record)  # another run may have taken it
        else:
            self._archives[key] = await asyncio.to_thread(self.factory.open_archive, record)
            if len(self._archives) > MAX_ARCHIVES:
                self._archives.popitem(last=False)
        self._archives.move_to_end(key)
        return self._archives[key]

    async def want(self, run_id: str, wanted: DesiredState) -> RunView:
        """Stop, pause or resume a run; raises `RunStateError`."""
        record = await self.store.want(run_id, wanted)
        self._wake()
        return await self._overview.view(record)

    async def change(self, run_id: str, body: SettingsPatch) -> RunView:
        """Change live settings.

        Raises:
            InvalidRunError: invalid settings.
            RunStateError: the run is over or ending.
        """
        await self.store.load(run_id)
        values = body.values()
        if not values:
            known = ", ".join(SettingsPatch.model_fields)
            raise InvalidRunError([ProblemView(path="", message=f"nothing to change: set at least one of {known}")])
        is_stored = False
        while not is_stored:  # again if another change was stored meanwhile
            record, changes = await self.store.load(run_id), await self.store.changes(run_id)
            if not record.state.is_terminal:
                requested = requested_settings(record.settings, changes)
                async with self._validation_slot():
                    await self.factory.validate_change(record, requested, values)
            is_stored = await self.store.change(run_id, values, after=len(changes))
        self._wake()
        return await self.view(run_id)

    async def why(self, run_id: str) -> WhyView:
        return WhyView.of(run_id, await self._overview.why(await self.store.load(run_id)))

    async def quarantine(self, run_id: str) -> QuarantineView:
        await self.store.load(run_id)
        trajectories = await self.factory.quarantine(run_id)
        return QuarantineView(
            trajectories=[
                QuarantinedView(
                    group=int(trajectory.unit.partition(":")[2]),
                    member=trajectory.index,
                    complaint=trajectory.complaint,
                    size=len(trajectory.blob),
                    head=trajectory.blob[:64].hex(),
                )
                for trajectory in trajectories
            ]
        )

    async def delete(self, run_id: str, *, files: bool, rights: Rights = UNRESTRICTED) -> DeletedView:
        """Delete an ended run, and with `files` its files.

        Raises:
            NotAllowedError: its files are outside the caller's folders.
            RunStateError: the run is not over.
            BusyError: its files are in use.
            ForeignRecordError: its record does not yield the folder.
        """
        with ExitStack() as stack:
            remove = await self._hold_files(stack, run_id, rights) if files else None
            # Before the files: after a death in between, a later run moves them aside, and a fork is refused
            await self.store.delete(run_id)
            removal = await asyncio.to_thread(remove) if remove is not None else Removal([], [])
        return DeletedView(id=run_id, files=removal.removed, left=removal.left)

    async def _hold_files(self, stack: ExitStack, run_id: str, rights: Rights) -> Callable[[], Removal] | None:
        """Return what removes an ended run's files."""
        record = await self.store.load(run_id)
        if not rights.allows_folder(record.output_dir):
            message = (
                f"{record.output_dir} is in none of your token's output_roots; without `files` only the record goes"
            )
            raise NotAllowedError([ProblemView(path="files", message=message)])
        if self.store.is_active(record):
            return None
        if record.output_dir in self.store.reported:
            raise BusyError(
                f"the report of run {run_id!r} is being written into {record.output_dir}: try again after it"
            )
        return await asyncio.to_thread(stack.enter_context, self.factory.hold_files(record))

    async def metrics(self, run_id: str, after: str, limit: int) -> MetricsView:
        await self.store.load(run_id)
        with reading(run_id):
            entries = await AsyncRedisMetrics(self.store.redis, run_id).read(after, count=limit)
        records = [MetricView.of(entry_id, record) for entry_id, record in entries]
        return MetricsView(records=records, next=records[-1].id if records else after)

    async def healthy(self) -> bool:
        """Check that Redis responds."""
        now = asyncio.get_running_loop().time()
        if self._health is None or (self._health.done() and now - self._health_at > HEALTH_CACHE_S):
            self._health = asyncio.create_task(self._check_redis())
            self._health_at = now
        return await asyncio.shield(self._health)

    async def _check_redis(self) -> bool:
        await self.store.redis.exists(RUNS)  # Redis answers no PING while its disk is full
        return True


def _place(text: str | None) -> tuple[float, str] | None:
    if text is None:
        return None
    at, _, run_id = text.partition("~")
    with suppress(ValueError):
        if math.isfinite(created_at := float(at)):
            return created_at, run_id
    raise InvalidPlaceError(f"{text!r} is not a position in the list: use `next` of the previous page")
