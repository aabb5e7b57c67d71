# pyright: basic
"""Run factory under `serve deploy`, which checks runs against the cluster."""

import asyncio
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

from redis.asyncio import Redis as AsyncRedis

from offbeat.deploy.cluster.engine_matching import choose_app, use_app
from offbeat.deploy.cluster.offbeat_process import last_output, run_offbeat
from offbeat.deploy.cluster.reaper import ensure_reaper
from offbeat.deploy.cluster.run_factory import (
    MachineSize,
    MeshRunFactory,
    find_downloads,
    read_recorded,
)
from offbeat.deploy.cluster.size import Cluster, check_hosts
from offbeat.deploy.components.app_claims import find_app_conflict
from offbeat.deploy.components.serve_status import read_app_statuses
from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.run_folder import claim_id, read_claim
from offbeat.deploy.run_setup import identify_base
from offbeat.services.control.rights import UNRESTRICTED, Rights
from offbeat.services.control.run import ForeignRecordError, RunRecord, RunState
from offbeat.services.control.schemas import ProblemView
from offbeat.services.control.service import InvalidRunError
from offbeat.services.errors import ControlError
from offbeat.services.generation.config import app_name
from offbeat.services.generation.tenancy import EngineOffer, read_offers
from offbeat.services.keys import RunKeys
from offbeat.services.live_settings import Settings
from offbeat.services.redis.url import redact
from offbeat.trainer.config.issue import ConfigIssue

REPORT_TIMEOUT_S = 900.0


class RayRunFactory(MeshRunFactory):
    tries_episodes: ClassVar[bool] = True

    def __init__(self, redis: AsyncRedis, redis_url: str, working_dir: Path | None, max_cpus: float = 0.0) -> None:
        super().__init__(redis, redis_url, working_dir or Path.cwd(), max_cpus)
        ensure_reaper()

    async def load(self, document: str | dict[str, Any], rights: Rights = UNRESTRICTED) -> RunConfig:
        return await asyncio.to_thread(self._place, await super().load(document, rights))

    async def _size(self) -> MachineSize:
        cluster = await asyncio.to_thread(lambda: Cluster.from_ray().with_memory())
        return MachineSize(max(cluster.cpus, self._max_cpus), cluster.nodes)

    def _place(self, config: RunConfig) -> RunConfig:
        """Choose the generation application."""
        active = self._find_active_run(config.exp_name)
        if find_downloads(config):  # a model's architecture decides, of a tiny one the words of its rows
            app, problems = None, []
        elif config.actor_infer.app is None and active is not None:
            app, problems = active.actor_infer.app, []
        else:
            base = identify_base(config)
            app, problems = choose_app(
                config, self._read_deployed_offers(), lambda app: self._has_room(app, config.exp_name, base)
            )
        problems += check_cluster(config, Cluster.from_ray(), self._redis_url)
        if problems:
            raise ConfigError(problems)
        return use_app(config, app)

    async def validate_change(self, record: RunRecord, requested: Settings, values: Mapping[str, float]) -> None:
        app = read_recorded(record.run_id, record.config).actor_infer.app
        if "num_replicas" in values and app not in (None, app_name(record.run_id)):
            message = f"the run uses {app} of the deploy file: change num_replicas there and run `serve deploy`"
            raise InvalidRunError([ProblemView(path="actor_infer.num_replicas", message=message)])
        await super().validate_change(record, requested, values)

    def _find_active_run(self, run_id: str) -> RunConfig | None:
        """Return the active run, whose application a resubmission keeps."""
        names = ["config", "state", "downloads"]
        config, state, downloads = cast(list[bytes | None], self._redis.hmget(RunKeys(run_id).record, names))
        if config is None or state is None or downloads or RunState(state.decode()).is_terminal:
            return None
        try:
            return read_recorded(run_id, config)
        except ForeignRecordError:  # the start is refused, as its configuration is another one
            return None

    def _read_deployed_offers(self) -> dict[str, EngineOffer]:
        deployed = read_app_statuses()
        return {app: offer for app, offer in read_offers(self._redis).items() if app in deployed}

    def _has_room(self, app: str, run_id: str, base: str) -> bool:
        return not find_app_conflict(self._redis, app, run_id, base)

    def _claim_of(self, record: RunRecord) -> str:
        # Those of `offbeat train` claim none
        return "" if record.mesh else claim_id(record.run_id, record.created_at)

    async def write_report(self, record: RunRecord) -> None:
        """Run `offbeat report` in a process, as it renders the user's envs; raises `ControlError`."""
        folder, claim = Path(record.output_dir), self._claim_of(record)
        if not claim or read_claim(folder) != claim:
            return  # the run failed before it claimed the folder, which may belong to another run
        await asyncio.to_thread(self._run_report, folder)

    def _run_report(self, folder: Path) -> None:
        command = f"offbeat report {shlex.quote(str(folder))} --redis {redact(self._redis_url)}"
        try:
            process = run_offbeat(
                ["report", str(folder)],
                working_dir=self._working_dir or Path.cwd(),
                redis_url=self._redis_url,
                timeout_s=REPORT_TIMEOUT_S,
            )
        except ControlError as error:
            raise ControlError(f"{error}; write it with `{command}`") from error
        if process.returncode != 0:
            raise ControlError(f"exit code {process.returncode}: {last_output(process)}; write it with `{command}`")


def check_cluster(config: RunConfig, cluster: Cluster, redis_url: str) -> Iterator[ConfigIssue]:
    if config.redis.url not in (None, redis_url):
        yield ConfigIssue("redis.url", "runs of a deployed mesh use its Redis: remove this key")
    yield from check_hosts(config, cluster)
