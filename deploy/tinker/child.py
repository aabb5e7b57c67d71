import asyncio
import logging
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from offbeat.services.errors import MeshError
from offbeat.services.process import bind_to_thread, terminate

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 10.0
STEADY_S, STEADY_AFTER_ERROR_S = 30.0, 600.0
"""Uptime that resets the count of deaths: by a signal, and by an error, which may return with each request."""
MAX_DEATHS = 8
"""Consecutive deaths that end the server."""
STOP_TIMEOUT_S = 60.0


class SupervisedChild:
    """Restarted child that reads its settings from stdin and logs to a file."""

    def __init__(
        self, name: str, command: Sequence[str], settings: bytes, log: Path, descriptors: Sequence[int] = ()
    ) -> None:
        self._name = name
        self._command = command
        self._settings = settings
        self._log = log
        self._descriptors = descriptors
        self._process: subprocess.Popen[bytes] | None = None

    async def supervise(self) -> None:
        """Keep the process running until cancelled; raises MeshError if it dies repeatedly."""
        deaths = 0
        while True:
            started_at = time.monotonic()
            self._start()
            assert self._process is not None
            status = await asyncio.to_thread(self._process.wait)
            steady_s = STEADY_S if status < 0 else STEADY_AFTER_ERROR_S
            deaths = 1 if time.monotonic() - started_at > steady_s else deaths + 1
            logger.warning("the %s died with status %d: restarting it (%s)", self._name, status, self._log)
            if deaths >= MAX_DEATHS:
                raise MeshError(
                    f"the {self._name} died {deaths} times in a row, last with status {status}: see {self._log}"
                )
            await asyncio.sleep(min(FIRST_BACKOFF_S * 2 ** (deaths - 1), MAX_BACKOFF_S))

    def stop(self) -> None:
        if self._process is not None and not terminate(self._process, STOP_TIMEOUT_S):
            logger.warning("the %s did not end in %.0f s: killed", self._name, STOP_TIMEOUT_S)

    def _start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                bind_to_thread(self._command),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=self._descriptors,
                start_new_session=True,  # Ctrl-C is for the parent
            )
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            stdin.write(self._settings)
