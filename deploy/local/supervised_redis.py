"""Embedded Redis of a mesh, restarted when it dies or hangs, with the same writes, port and password."""

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from offbeat.services.buffer.config import RedisConfig
from offbeat.services.errors import MeshError
from offbeat.services.redis.server import EmbeddedRedis

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 0.2
PING_INTERVAL_S, HANG_TIMEOUT_S = 2.0, 15.0
"""Interval, and time without an answer until a kill; a restart fits into clients' retry timeout."""
RESTART_TIMEOUT_S = 60.0
"""Limit of failed restarts before the run ends."""


class SupervisedRedis:
    def __init__(self, folder: Path, config: RedisConfig) -> None:
        # Linux kills Redis with the *thread* that started it, so this thread has to live as long as the server.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="redis")
        self._server = EmbeddedRedis(folder, config)
        self._started = asyncio.Event()

    @property
    def url(self) -> str:
        """Return the URL with password; valid after `start`."""
        return self._server.url

    @property
    def pid(self) -> int | None:
        return self._server.pid

    async def start(self) -> None:
        """Start the server; raises `MeshError`."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._server.start)
        self._started.set()

    async def supervise(self) -> None:
        """Restart the started server until cancelled; raises `MeshError`."""
        await self._started.wait()
        last_answer_at = last_ping_at = time.monotonic()
        while True:
            now = time.monotonic()
            if self._server.is_alive() and now > last_ping_at + PING_INTERVAL_S:
                last_ping_at = now
                answers = await asyncio.to_thread(self._server.answers)
                last_answer_at = time.monotonic() if answers else last_answer_at
            if not self._server.is_alive() or now > last_answer_at + HANG_TIMEOUT_S:
                await self._restart()
                last_answer_at = time.monotonic()
            await asyncio.sleep(CHECK_INTERVAL_S)

    async def _restart(self) -> None:
        logger.warning("redis-server %s: restarting it", "hangs" if self._server.is_alive() else "died")
        deadline = time.monotonic() + RESTART_TIMEOUT_S
        while True:
            try:
                await asyncio.get_running_loop().run_in_executor(self._thread, self._server.restart)
                return
            except (MeshError, OSError) as error:
                if time.monotonic() > deadline:
                    raise MeshError(f"redis-server died and can't be restarted: {error}") from error
                logger.error("can't restart redis-server, retrying: %s", error)
            await asyncio.sleep(CHECK_INTERVAL_S)

    def stop(self) -> None:
        """Stop the server, after a restart in progress."""
        self._thread.submit(self._server.stop).result()
