"""Rewards as Ray Serve applications, one per reward with `num_replicas`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from ray import serve
from ray.serve import Application
from ray.serve.schema import LoggingConfig

from offbeat.services.devices import EngineDevices
from offbeat.services.placement import claim_devices, deployment_options
from offbeat.services.reward.caller import run_attempt
from offbeat.services.reward.client import DEPLOYMENT
from offbeat.services.reward.config import AnyReward
from offbeat.services.reward.errors import RewardError
from offbeat.services.reward.factory import build_function, build_group_function
from offbeat.services.reward.function import MAX_HUNG_THREADS, RewardFunction, count_hung
from offbeat.services.reward.kinds.llm_judge import LlmJudge
from offbeat.services.reward.reply import encode_failure, encode_score
from offbeat.services.reward.sample import decode_group, decode_sample
from offbeat.services.telemetry import configure_logging


@dataclass(frozen=True, slots=True)
class RewardReplicaSettings:
    reward_json: str
    log_dir: Path
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    slots: tuple[EngineDevices, ...] = ()


class RewardDeployment:
    """A reward function in a process of its own; callers retry."""

    async def __init__(self, settings: RewardReplicaSettings) -> None:
        configure_logging(f"reward-{serve.get_replica_context().replica_tag}", settings.log_dir)
        os.environ.update(settings.environment)
        self._devices = claim_devices(settings.slots, "reward")
        self._config: AnyReward = TypeAdapter(AnyReward).validate_json(settings.reward_json)
        build = build_group_function if self._config.is_of_group else build_function
        self._function: RewardFunction[Any, Any] = build(self._config)
        if isinstance(self._function, LlmJudge):
            await self._function.start()

    async def score(self, blob: bytes) -> bytes:
        """Return an encoded score, or list of a group's, or failure."""
        try:
            sample = (decode_group if self._config.is_of_group else decode_sample)(blob)
            return encode_score(await run_attempt(self._function, sample, self._config.timeout_s))
        except RewardError as error:
            return encode_failure(error)

    async def check_health(self) -> None:
        """Raise if Serve must replace the replica."""
        if (num_hung := count_hung(self._function)) >= MAX_HUNG_THREADS:
            raise RuntimeError(f"{num_hung} calls hang")
        if isinstance(self._function, LlmJudge):
            await self._function.check()


def build(
    reward: AnyReward,
    *,
    output_dir: Path,
    environment: Mapping[str, str],
    slots: tuple[EngineDevices, ...] = (),
) -> Application:
    """Build a reward's application. slots: devices of the replicas; empty: Ray chooses."""
    deployment = serve.deployment(
        name=DEPLOYMENT,
        num_replicas=reward.num_replicas,
        max_ongoing_requests=reward.max_concurrent,
        health_check_period_s=1.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=2.0,
        logging_config=LoggingConfig(enable_access_log=False),
        **deployment_options(cpus=reward.cpus_per_replica, gpus=reward.gpus_per_replica, slots=slots),
    )(RewardDeployment)
    settings = RewardReplicaSettings(reward.model_dump_json(), output_dir / "logs", dict(environment), slots)
    return deployment.bind(settings)
