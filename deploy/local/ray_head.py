"""Process of Ray, Serve and the control service, restarted when it or Ray's head is killed.

Invariant: nothing of a killed Ray is left at the next start.
"""

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from offbeat.deploy.local.parent_guard import guard_command
from offbeat.deploy.local.ray_process import (
    CONTROL,
    DIED,
    FAILED,
    REASON,
    RETRYING,
    STATE,
    UP,
    LocalControlArgs,
    RaySettings,
)
from offbeat.services.errors import MeshError
from offbeat.services.process import JsonLines

logger = logging.getLogger(__name__)

STARTUP_TIMEOUT_S = 600.0
SHUTDOWN_TIMEOUT_S = 3.0
EXIT_CHECK_INTERVAL_S = 0.5
MAX_STARTS = 3
"""Consecutive starts, each ended by a killed process."""
SLOW_START_MESSAGE = "Ray did not start within its 30 s, probably because the machine is busy; retrying."
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Task events are for Ray's dashboard, which does not run here; the GCS keeps 3 KiB for each of 100,000 calls
    "RAY_task_events_report_interval_ms": "0",
    # Ray's own metrics are unused here, and made an idle raylet grow by half a MiB a minute
    "RAY_enable_metrics_collection": "false",
    # Detects a dead HTTP proxy after 4 s instead of half a minute
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1.0",
    # Otherwise Ray starts a worker for each core, a CPU second each, of which a mesh uses a few
    "RAY_prestart_worker_first_driver": "0",
    # Otherwise the workers of `uv run offbeat train` run in a copy of the current folder, with an environment of their own
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}


class RayDiedError(MeshError):
    """Death of a process of Ray's head, retryable."""


class RayHead:
    def __init__(
        self,
        settings: RaySettings,
        log: Path,
        *,
        end_processes: Callable[[], object],
        on_progress: Callable[[str], object],
    ) -> None:
        """log: the process's stderr. end_processes: ends a dead Ray's remains."""
        self._settings = settings
        self._log = log
        self._end_processes = end_processes
        self._on_progress = on_progress
        self._control: LocalControlArgs | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: JsonLines | None = None
        self._started = asyncio.Event()

    def launch(self) -> None:
        """Start the process, which dies with the calling thread."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                guard_command([sys.executable, "-m", "offbeat.deploy.local.ray_process"]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **ENVIRONMENT},
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._pipe = JsonLines(self._process.stdout, self._process.stdin)
        self._send(self._settings)

    async def wait_until_up(self) -> None:
        """Wait for Ray and Serve; raises `MeshError`."""
        await self._reach([UP])

    async def start_control(self, arguments: LocalControlArgs) -> None:
        """Start the control service; raises `MeshError`."""
        self._control = arguments
        self._send(arguments)
        await self._reach([CONTROL])
        self._started.set()

    async def supervise(self) -> None:
        """Restart a dead Ray and its control service until cancelled; raises `MeshError`."""
        await self._started.wait()
        while True:
            try:
                await self._receive("")  # no state follows: this returns by an error
            except RayDiedError as error:
                await self._restart(error)
                await self._reach([UP, CONTROL])

    def stop(self) -> None:
        """Ask a started Ray to exit."""
        if self._process is None or self._process.stdin is None or not self._started.is_set():
            return
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(SHUTDOWN_TIMEOUT_S)

    async def _reach(self, states: list[str]) -> None:
        """Wait for `states` in turn, restarting after a kill."""
        for attempt in range(1, MAX_STARTS + 1):
            try:
                for state in states:
                    await self._receive(state)
                    if state == UP and self._control is not None:
                        self._send(self._control)
                return
            except RayDiedError as error:
                if attempt == MAX_STARTS:
                    raise
                await self._restart(error)
                states = [UP] if self._control is None else [UP, CONTROL]

    async def _restart(self, error: RayDiedError) -> None:
        message = f"{error}: starting Ray again."
        logger.warning("%s", message)
        self._on_progress(message)
        await asyncio.to_thread(self._end_processes)
        self.launch()

    def _send(self, message: RaySettings | LocalControlArgs) -> None:
        assert self._pipe is not None
        self._pipe.send(asdict(message))  # if the process has exited, `_receive` raises

    async def _receive(self, expected: str) -> None:
        try:
            async with asyncio.timeout(STARTUP_TIMEOUT_S if expected else None):
                while (answer := await self._next_answer()) == {STATE: RETRYING}:
                    logger.warning(SLOW_START_MESSAGE)
                    self._on_progress(SLOW_START_MESSAGE)
        except TimeoutError:
            raise MeshError(f"Ray did not start in {STARTUP_TIMEOUT_S:.0f} s; see {self._log}") from None
        if answer is None:
            raise RayDiedError("Ray's process was killed")
        if answer[STATE] == DIED:
            raise RayDiedError(str(answer[REASON]))
        if answer[STATE] == FAILED:
            raise MeshError(f"Ray failed to start: {answer[REASON]}; see {self._log}")
        if answer != {STATE: expected}:
            raise MeshError(f"unexpected answer of Ray's process: {answer}; see {self._log}")

    async def _next_answer(self) -> dict[str, Any] | None:
        """Return the next answer, or None after the process's end."""
        assert self._pipe is not None
        assert self._process is not None
        receiving = asyncio.create_task(asyncio.to_thread(self._pipe.receive))
        while not receiving.done():
            await asyncio.wait({receiving}, timeout=EXIT_CHECK_INTERVAL_S)
            if not receiving.done() and self._process.poll() is not None:
                return None  # orphans of a killed guard hold the pipe
        return receiving.result()
