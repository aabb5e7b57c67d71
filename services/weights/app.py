"""The weight-sync broker as a Ray Serve application."""

import asyncio
from pathlib import Path

from ray import serve
from ray.serve import Application

from offbeat.services.log_format import set_process_log_fields
from offbeat.services.redis.connection import connect_async
from offbeat.services.telemetry import configure_logging
from offbeat.services.weights.broker import WeightBroker
from offbeat.services.weights.config import WeightsConfig

DEPLOYMENT = "weights"


def app_name(run_id: str) -> str:
    return f"weights-{run_id}"


class BrokerDeployment:
    def __init__(self, run_id: str, config: WeightsConfig, redis_url: str, output_dir: Path, uid: str) -> None:
        configure_logging("weights", output_dir / "logs")
        set_process_log_fields(run=run_id)
        self._broker = WeightBroker(connect_async(redis_url), run_id, config, output_dir, run_uid=uid)
        self._watching = asyncio.get_running_loop().create_task(self._broker.watch())

    async def check_health(self) -> None:
        """Raise the error that ended the watch."""
        if self._watching.done():
            self._watching.result()


def build(run_id: str, config: WeightsConfig, *, redis_url: str, output_dir: Path, uid: str = "") -> Application:
    deployment = serve.deployment(
        name=DEPLOYMENT,
        num_replicas=1,
        health_check_period_s=1.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_timeout_s=1.0,
        ray_actor_options={"num_cpus": 0},
    )(BrokerDeployment)
    return deployment.bind(run_id, config, redis_url, output_dir, uid)
