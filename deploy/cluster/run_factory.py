"""Composition root of runs.

Invariant: components are found by name, so control replicas are interchangeable.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple

from pydantic import ValidationError
from pydantic.config import ExtraValues
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from offbeat.deploy import run_folder
from offbeat.deploy.cluster.live_values import set_values, to_overrides
from offbeat.deploy.cluster.offbeat_process import last_output, read_json, run_offbeat
from offbeat.deploy.cluster.packaged_recipes import PackagedRecipes
from offbeat.deploy.components.env_workers import WorkerPool
from offbeat.deploy.components.hub_download import DownloadMesh
from offbeat.deploy.components.learner import ExternalLearner, ManagedLearner
from offbeat.deploy.components.scorers import ScorerPool
from offbeat.deploy.components.serve_app import ServeApp, broker_component, generation_component, reward_components
from offbeat.deploy.components.serve_status import ServeStatus
from offbeat.deploy.components.shared_generation import SharedGeneration
from offbeat.deploy.config.checks.run import check_settings
from offbeat.deploy.config.checks.trials import check_trials
from offbeat.deploy.config.device_plan import ClusterNode
from offbeat.deploy.config.devices import choose_devices
from offbeat.deploy.config.errors import ConfigError, RightsError
from offbeat.deploy.config.hub import missing_models
from offbeat.deploy.config.hub_datasets import missing_datasets
from offbeat.deploy.config.loader import dump_yaml, read_document
from offbeat.deploy.config.rights import check_rights
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.config.sharing import choose_turns
from offbeat.deploy.config.transport import choose_transport
from offbeat.deploy.config.validation import check_in_process
from offbeat.deploy.console.archive import FolderArchive, find_checkpoint
from offbeat.deploy.play.agent_check import try_agents
from offbeat.deploy.run_folder import hold_run_files
from offbeat.deploy.run_marker import FolderInUseError, identify
from offbeat.deploy.run_setup import (
    generation_app,
    model_folder,
    prepare_buffer,
    prepare_folder,
    run_spec,
)
from offbeat.services.buffer.admin import BufferWatch, release_all_workers
from offbeat.services.buffer.api import GroupProgress, Quarantined, Snapshot
from offbeat.services.control.console.archive import NotRecordedError
from offbeat.services.control.interfaces import Component, Removal, RunMesh
from offbeat.services.control.rights import UNRESTRICTED, Rights
from offbeat.services.control.run import BusyError, ForeignRecordError, RunRecord, RunSpec
from offbeat.services.control.schemas import ProblemView
from offbeat.services.control.service import InvalidRunError, NotAllowedError
from offbeat.services.durable_files import FULL_DISK
from offbeat.services.errors import ControlError
from offbeat.services.generation.config import app_name
from offbeat.services.live_settings import Settings
from offbeat.services.redis.connection import connect
from offbeat.trainer.config.aliases import canonical_json
from offbeat.trainer.config.issue import ConfigIssue
from offbeat.trainer.config.scored_roles import scored_roles

logger = logging.getLogger(__name__)

REPRODUCTION_TIMEOUT_S = 3600.0
PLAN_TIMEOUT_S = 1800.0
PLANNED_EPISODES = 2_000
"""Simulated for each setting and seed."""


class RunComponents:
    """In stop order."""

    def __init__(
        self,
        config: RunConfig,
        redis: Redis,
        watch: BufferWatch,
        redis_url: str,
        serve_status: ServeStatus,
        *,
        uid: str,
        claim: str | None = None,
    ) -> None:
        """uid: of the run's record. claim: id of this start, for the folder; None: already claimed."""
        self._uid = uid
        self._config = config
        self._claim = claim
        self._folder_lock: BinaryIO | None = None
        self._redis = redis
        self._watch = watch
        external = config.control.learner == "external"
        learner = ExternalLearner(config, redis) if external else ManagedLearner(config, redis, redis_url, uid)
        self._workers = WorkerPool(config, redis_url, uid)
        scorers = [ScorerPool(config, role, redis_url, uid) for role in scored_roles(config, config.reference)]
        self._generation: ServeApp | SharedGeneration | None = None
        rewards = reward_components(config, serve_status)
        self._components: tuple[Component, ...] = (learner, *scorers, self._workers, *rewards)
        if config.uses_engine:
            self._generation = _build_generation(config, redis, redis_url, serve_status, uid)
            broker = broker_component(config, redis_url, serve_status, uid)
            self._components = (*self._components, self._generation, broker)

    @property
    def components(self) -> Sequence[Component]:
        return self._components

    async def prepare(self) -> None:
        if self._claim is not None:
            await asyncio.to_thread(claim_folder, self._config, self._claim)
        await self._lock_folder()
        await asyncio.to_thread(prepare_folder, self._config)
        await asyncio.to_thread(prepare_buffer, self._redis, self._config, self._uid)
        await asyncio.to_thread(release_all_workers, self._redis, self._config.exp_name)
        await self._watch.set_paused(False)

    async def _lock_folder(self) -> None:
        """Keep other meshes and `offbeat train` from the folder as long as the run is active."""
        if self._claim and self._folder_lock is None:
            self._folder_lock = await asyncio.to_thread(run_folder.lock_claim, self._config.output_dir, self._claim)

    async def apply_settings(self, settings: Settings, *, paused: bool) -> None:
        await self._lock_folder()  # in a new control replica
        await self._watch.set_paused(paused)
        await self._workers.resize(settings.num_workers)
        if self._generation is not None:
            await self._generation.resize(settings.num_replicas)

    async def drain(self) -> None:
        await self._lock_folder()
        await self._watch.set_paused(True)

    async def clean_up(self) -> None:
        for component in self._components:
            if isinstance(component, ManagedLearner):
                await component.forget()
        await asyncio.to_thread(self._clean_weights)
        if self._folder_lock is not None:
            self._folder_lock.close()
            self._folder_lock = None

    def _clean_weights(self) -> None:
        """Remove the published weights, unless another run has the folder, whose weights have the same names."""
        from offbeat.services.weights.transports.factory import cleanup  # noqa: PLC0415

        folder = self._config.output_dir
        with suppress(OSError):  # of a folder that can't be read
            if folder.exists() and self._claim not in (None, run_folder.read_claim(folder)):
                return
        cleanup(self._config.exp_name, self._config.weights, folder)


def _build_generation(
    config: RunConfig, redis: Redis, redis_url: str, status: ServeStatus, uid: str
) -> ServeApp | SharedGeneration:
    app = generation_app(config)
    if app != app_name(config.exp_name):
        return SharedGeneration(config.exp_name, app, redis, status)
    return generation_component(config, redis_url, model_folder(config), status, uid)


AT_START = ("model_update_frequency", "train_env_manager.num_groups_partition")
"""Keys that have to fit live settings when a run starts: under a lowered bound the learner publishes more often, and a
partition is of shares.
"""


class MachineSize(NamedTuple):
    """Resources; None: this machine's."""

    cpus: float | None = None
    nodes: Sequence[ClusterNode] | None = None


class MeshRunFactory(PackagedRecipes):
    tries_episodes: ClassVar[bool] = False
    """Whether envs and agents are tried before a run."""

    def __init__(self, redis: AsyncRedis, redis_url: str, working_dir: Path | None, max_cpus: float = 0.0) -> None:
        self._max_cpus = max_cpus
        self._async_redis = redis
        self._working_dir = working_dir
        self._redis = connect(redis_url)
        self._redis_url = redis_url
        self._serve_status = ServeStatus()

    async def validate(self, document: str | dict[str, Any], rights: Rights = UNRESTRICTED) -> RunSpec:
        """Return a document's run; raises `InvalidRunError` or `NotAllowedError` with all issues.

        Checks that need a missing model or dataset are left to `complete`.
        """
        try:
            config = await self.load(document, rights)
            downloads = find_downloads(config)
            if self.tries_episodes and not downloads and (issues := await asyncio.to_thread(_try_episodes, config)):
                raise ConfigError(issues)
        except RightsError as error:
            raise NotAllowedError([_to_problem_view(issue) for issue in error.issues]) from error
        except ConfigError as error:
            raise InvalidRunError([_to_problem_view(issue) for issue in error.issues]) from error
        if problem := run_folder.find_problem(config.output_dir):
            raise InvalidRunError([ProblemView(path="output_dir", message=problem)])
        return await asyncio.to_thread(run_spec, config, downloads)

    async def complete(self, record: RunRecord) -> RunSpec:
        """Return the run of a record after its downloads; raises `ControlError`."""
        spec = await self.validate(json.loads(record.config))
        if spec.downloads:
            raise ControlError(f"{', '.join(spec.downloads)} was removed from the hub's cache: start the run again")
        return spec

    async def load(self, document: str | dict[str, Any], rights: Rights = UNRESTRICTED) -> RunConfig:
        """Return a document's configuration, checked in another process.

        Raises `RightsError` beyond the sender's rights, `ConfigError` with all issues.
        """
        config = await asyncio.to_thread(read_document, document, working_dir=self._working_dir)
        if refused := list(check_rights(config, rights)):
            raise RightsError(refused)
        size = await self._size()
        if size.nodes is not None:
            config = choose_turns(choose_devices(config, sum(node.gpus for node in size.nodes)), size.nodes)
        missing = find_downloads(config)
        if missing:
            issues = check_settings(config, cores=size.cpus, nodes=size.nodes)
            if issues := [each for each in issues if not any(name in each.message for name in missing)]:
                raise ConfigError(issues)
        elif size.nodes is not None:
            config = choose_transport(config, size.nodes)
        await check_in_process(config, cores=size.cpus, nodes=size.nodes, rights=rights, models=not missing)
        return config

    async def _size(self) -> MachineSize:
        return MachineSize()

    def build_mesh(self, record: RunRecord) -> RunMesh:
        """Return the components; raises `ForeignRecordError`."""
        if record.downloads:
            return DownloadMesh(record.downloads.split())
        # Keys of another version matter no more to a run that ends
        config = read_recorded(record.run_id, record.config, extra="ignore" if record.is_ending else None)
        watch = BufferWatch(self._async_redis, record.run_id)
        claim = self._claim_of(record)
        return RunComponents(
            config, self._redis, watch, self._redis_url, self._serve_status, uid=record.uid, claim=claim
        )

    def _claim_of(self, record: RunRecord) -> str | None:
        """Return the claim of a run's folder (`read_claim`); None: its runs claim none."""
        del record
        return None

    async def validate_change(self, record: RunRecord, requested: Settings, values: Mapping[str, float]) -> None:
        """Check a change of the requested settings; raises `InvalidRunError` with all issues."""
        before, size = set_values(json.loads(record.config), asdict(requested)), await self._size()
        issues = await asyncio.to_thread(self._added_issues, before, set_values(before, values), size)
        if issues:
            raise InvalidRunError([_to_problem_view(issue) for issue in sorted(issues, key=str)])

    async def write_report(self, record: RunRecord) -> None:
        """Do nothing: `offbeat train` writes it."""

    @contextmanager
    def hold_files(self, record: RunRecord) -> Iterator[Callable[[], Removal]]:
        with ExitStack() as stack:
            try:
                folder, claim = Path(record.output_dir), self._claim_of(record)
                remove = stack.enter_context(hold_run_files(folder, record.run_id, claim))
            except FolderInUseError as error:
                raise BusyError(str(error)) from error
            yield remove

    def open_archive(self, record: RunRecord) -> FolderArchive:
        return FolderArchive(self.find_folder(record))

    def find_folder(self, record: RunRecord) -> Path:
        folder = Path(record.output_dir)
        if not folder.is_dir():
            raise NotRecordedError(f"{folder} is not on the host of the control service")
        if self._claim_of(record) not in (None, run_folder.read_claim(folder)):
            raise NotRecordedError(
                f"{folder} has the files of another run, which has moved those of this run {record.run_id!r} to "
                f"{folder.name}.1 or a later number, or resumed them, if there were any"
            )
        return folder

    def holds_run(self, folder: str) -> bool:
        return identify(Path(folder)) is not None

    def find_checkpoint(self, record: RunRecord, step: int) -> str:
        return find_checkpoint(self.find_folder(record), step)

    def reproduce(self, record: RunRecord, step: int) -> tuple[bool, dict[str, Any]]:
        process = run_offbeat(
            ["learner", "reproduce", str(self.find_folder(record)), "--step", str(step), "--json"],
            working_dir=self._working_dir or Path.cwd(),
            redis_url=self._redis_url,
            timeout_s=REPRODUCTION_TIMEOUT_S,
        )
        if process.returncode not in (0, 1):
            raise ControlError(last_output(process))
        return process.returncode == 0, read_json(process)

    def plan(self, record: RunRecord, settings: Settings) -> dict[str, Any]:
        in_force = to_overrides(json.loads(record.config), asdict(settings))
        config = str(self.find_folder(record) / run_folder.CONFIG)
        process = run_offbeat(
            ["plan", config, *in_force, "--from", record.output_dir, "--json", "--episodes", str(PLANNED_EPISODES)],
            working_dir=self._working_dir or Path.cwd(),
            redis_url=self._redis_url,
            timeout_s=PLAN_TIMEOUT_S,
        )
        if process.returncode:
            raise ControlError(last_output(process).removeprefix("offbeat: "))
        return read_json(process)

    def _added_issues(self, before: dict[str, Any], after: dict[str, Any], size: MachineSize) -> set[ConfigIssue]:
        """Return the issues that a change of settings adds; all of `after` if one of both can't be read."""
        try:
            new = self._setting_issues(after, size)
        except ConfigError as error:
            return set(error.issues)
        try:
            old = self._setting_issues(before, size)
        except ConfigError:
            return new
        return {issue for issue in new - old if issue.path not in AT_START}

    def _setting_issues(self, tree: dict[str, Any], size: MachineSize) -> set[ConfigIssue]:
        """Raise `ConfigError` if the configuration can't be read."""
        config = read_document(tree, working_dir=self._working_dir)
        return set(check_settings(config, cores=size.cpus, nodes=size.nodes))

    async def snapshot(self, run_id: str) -> Snapshot:
        return await BufferWatch(self._async_redis, run_id).snapshot()

    async def groups(self, run_id: str) -> list[GroupProgress]:
        return await BufferWatch(self._async_redis, run_id).groups()

    async def quarantine(self, run_id: str) -> list[Quarantined]:
        return await BufferWatch(self._async_redis, run_id).quarantine()


def read_recorded(run_id: str, config: str | bytes, *, extra: ExtraValues | None = None) -> RunConfig:
    """Read a record's configuration; raises `ForeignRecordError`."""
    try:
        return RunConfig.model_validate_json(canonical_json(config), extra=extra)
    except ValidationError as error:
        details = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False))
        raise ForeignRecordError(
            f"run {run_id!r} was configured by another version of Offbeat ({details}): run that version's control "
            "service, or stop the run (`offbeat runs stop`)"
        ) from error


def find_downloads(config: RunConfig) -> list[str]:
    """Return the ids of missing models and datasets."""
    tree = config.model_dump(mode="json")
    return [*missing_models(tree), *missing_datasets(tree)]


def _to_problem_view(issue: ConfigIssue) -> ProblemView:
    return ProblemView(path=issue.path, message=issue.message, suggestion=issue.hint)


def _try_episodes(config: RunConfig) -> list[ConfigIssue]:
    return check_trials(config) or try_agents(config)


def claim_folder(config: RunConfig, claim: str) -> None:
    """Claim the run's folder, moving an earlier run aside unless resumed, and write its configuration.

    claim: id of the run, for idempotence; a resumed run has it already, and its own configuration.

    Raises `FolderInUseError`.
    """
    is_claimed = run_folder.read_claim(config.output_dir) == claim
    if not is_claimed:
        run_folder.claim(config.output_dir, config.exp_name, resume=bool(config.resume_from_checkpoint))
        run_folder.make_private(config.output_dir)
    try:
        run_folder.write_config(config.output_dir, dump_yaml(config))
    except OSError as error:
        if not is_claimed or error.errno not in FULL_DISK:
            raise
        logger.warning("config.yaml stays as it was: %s", error)  # the learner waits for room
    if not is_claimed:
        (config.output_dir / run_folder.CLAIM).write_text(claim)
