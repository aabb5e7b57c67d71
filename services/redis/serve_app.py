"""A redis-server as a Ray Serve application.

The server ends with its replica; the next one loads the same append-only file.
"""

import logging
import pkgutil
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ray import serve
from ray.serve import Application

from offbeat.services.buffer.config import RedisConfig
from offbeat.services.errors import RetryableError
from offbeat.services.redis.server import EmbeddedRedis
from offbeat.services.telemetry import configure_logging

DEPLOYMENT = "redis"
HEAD_NODE = "node:__internal_head__"
"""Keeps the replica at its folder and address."""
SHUTDOWN_TIMEOUT_S = 640.0
"""Limit of `RedisSettings.before_end`, in which learners save."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RedisSettings:
    port: int
    password: str
    """May be empty."""
    folder: Path
    config: RedisConfig
    before_end: str | None = None
    """`module:name` of a callable (redis_url), called before the server ends."""

    @classmethod
    def of(cls, url: str, folder: Path, config: RedisConfig, before_end: str | None = None) -> "RedisSettings":
        """Return settings for the server at `url`.

        Raises:
            ValueError: `url` is not on loopback.
        """
        parts = urlsplit(url)
        if parts.scheme != "redis" or parts.hostname not in ("127.0.0.1", "localhost") or not parts.port:
            raise ValueError(
                f"redis_url: expected redis://127.0.0.1:PORT/0 (this server listens on loopback), got {url!r}"
            )
        return cls(parts.port, unquote(parts.password or ""), folder, config, before_end)


class RedisDeployment:
    def __init__(self, settings: RedisSettings) -> None:
        configure_logging(DEPLOYMENT, settings.folder)
        self._before_end = settings.before_end
        self._server = EmbeddedRedis(
            settings.folder, settings.config, port=settings.port, password=settings.password
        ).start()
        logger.info("redis-server %s listens on port %d", self._server.pid, settings.port)

    async def check_health(self) -> None:
        if not self._server.is_alive():
            raise RetryableError("redis-server has died")

    def __del__(self) -> None:
        server: EmbeddedRedis | None = self.__dict__.get("_server")
        if server is None:
            return
        try:
            if self._before_end is not None and server.is_alive():
                pkgutil.resolve_name(self._before_end)(server.url)
        finally:
            server.stop()


def build(settings: RedisSettings) -> Application:
    """Return the application; its folder is exclusive."""
    deployment = serve.deployment(
        name=DEPLOYMENT,
        num_replicas=1,
        health_check_period_s=0.5,
        health_check_timeout_s=10.0,
        graceful_shutdown_timeout_s=SHUTDOWN_TIMEOUT_S,
        ray_actor_options={"num_cpus": 0, "resources": {HEAD_NODE: 0.001}},
    )(RedisDeployment)
    return deployment.bind(settings)
