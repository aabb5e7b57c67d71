"""Host of `offbeat.trainer.cli`, with an optional standby.

Invariants: the learner dies with its host, even on SIGKILL; Redis is the only interface.
"""

import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from redis import Redis
from redis.exceptions import RedisError

from offbeat.services.control.run import LearnerReport
from offbeat.services.errors import RetryableError
from offbeat.services.keys import RunKeys
from offbeat.services.process import bind_to_thread
from offbeat.services.redis.connection import OutageRetry, connect
from offbeat.services.redis.lease import LEASE_NONCE, free_lease_of, owner_of
from offbeat.services.redis.run_writes import RunWrites
from offbeat.trainer.cli import MESSAGE, REDIS_VARIABLE, UNUSABLE
from offbeat.trainer.watchdog import EXIT_HUNG

logger = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 0.2
REDIS_RETRY_TIMEOUT_S = 0.5
HEARTBEAT_TTL_S = 6.0
"""Time until a host and its learner count as dead."""
KILL_TIMEOUT_S = 2.0
SAVING_POLL_S = 1.0
HANG_TIMEOUT_S = 30.0
"""Time until a learner without lease is killed."""
STANDBY_START_INTERVAL_S = 5.0
"""Minimum interval, for the active learner to catch up."""
FINAL_EXIT_CODES = (0, 2, 4)
"""No restart helps."""
LEARNER_LOG = "logs/learner.out"


def learner_key(run_id: str) -> str:
    return RunKeys(run_id).key("learner")


def alive_key(run_id: str) -> str:
    return RunKeys(run_id).key("learner", "alive")


@dataclass(frozen=True, slots=True)
class LearnerStatus:
    started: bool
    alive: bool
    exit_code: int | None = None
    message: str = ""
    """Why no restart helps, as the learner wrote it."""
    stopping: bool = False
    incarnation: str = ""
    died: str = ""
    """Incarnation last replaced by the standby."""
    death_reason: str = ""

    @property
    def end_reason(self) -> str:
        if self.exit_code is None:
            return "its host is gone"
        return self.message or _describe_exit(self.exit_code)


def _describe_exit(code: int) -> str:
    if code == EXIT_HUNG:
        return "its main thread hung: see its stack in logs/learner.log"
    return f"exit code {code}" if code >= 0 else f"killed by {_signal_name(-code)}"


def _signal_name(signal_number: int) -> str:
    try:
        return signal.Signals(signal_number).name
    except ValueError:
        return f"signal {signal_number}"


def read_status(redis: Redis, run_id: str) -> LearnerStatus:
    raw = cast(dict[bytes, bytes], redis.hgetall(learner_key(run_id)))
    if b"incarnation" not in raw:
        return LearnerStatus(started=False, alive=False)
    code = raw.get(b"exit_code")
    return LearnerStatus(
        started=True,
        alive=code is None and bool(redis.exists(alive_key(run_id))),
        exit_code=int(code) if code is not None else None,
        message=raw.get(b"message", b"").decode(),
        stopping=b"stop" in raw,
        incarnation=raw[b"incarnation"].decode(),
        died=raw.get(b"died", b"").decode(),
        death_reason=raw.get(b"died_how", b"").decode(),
    )


def read_report(redis: Redis, run_id: str) -> LearnerReport:
    values = cast(list[bytes | None], redis.hmget(RunKeys(run_id).record, list(LearnerReport.FIELDS)))
    return LearnerReport.decode(values)


def request_stop(redis: Redis, run_id: str, *, now: bool) -> None:
    """Request a stop by SIGTERM (saves a checkpoint), or `now` by SIGKILL."""
    if redis.exists(learner_key(run_id)):
        redis.hset(learner_key(run_id), "stop", "kill" if now else "term")


def learner_command(run_id: str) -> list[str]:
    return [sys.executable, "-m", "offbeat.trainer.cli", run_id]


class LearnerHost:
    def __init__(
        self,
        run_id: str,
        redis_url: str,
        output_dir: Path,
        *,
        uid: str = "",
        command: Sequence[str] | None = None,
        threads: int = 1,
        standby: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """uid: of the run's record; writes to others of this name are refused. environment: additional variables of the
        learner.
        """
        self._environment = dict(environment or {})
        self._is_standby_enabled = standby
        self._standby: subprocess.Popen[bytes] | None = None
        self._next_standby_at = 0.0
        """Monotonic time."""
        self._lease_held_at: float | None = None
        """Monotonic time."""
        self._run_id = run_id
        self._uid = uid
        self._redis_url = redis_url
        self._output_dir = output_dir
        self._command = list(command or learner_command(run_id))
        self._threads = threads
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._nonces: dict[int, str] = {}
        """Process id -> random part of its lease holder's name."""
        self._exited = threading.Event()
        self._stopping = False

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in (self._process, self._standby) if process is not None]

    def start(self) -> None:
        """Start a missing learner; wait for its state in Redis.

        Raises:
            RetryableError: Redis has no record of this run.
        """
        if self._thread and self._thread.is_alive():
            if not self._exited.is_set():
                return
            self._thread.join()  # it has reported the exit, and ends
        self._exited.clear()
        self._stopping = False
        incarnation = uuid.uuid4().hex
        key = learner_key(self._run_id)
        with connect(self._redis_url) as redis:
            write = RunWrites(redis, self._run_id, self._uid)
            is_accepted = (
                self._write_alive(write, incarnation)
                and write("DEL", key)
                and write("HSET", key, "incarnation", incarnation, "host", socket.gethostname())
            )
        if not is_accepted:
            raise RetryableError(f"no learner is started: Redis has no record of this run {self._run_id}")
        # The kernel kills the learner when the thread that forked it ends, so that thread has to wait for it.
        self._thread = threading.Thread(target=self._watch, args=(incarnation,), name="learner host", daemon=True)
        self._thread.start()

    def _write_alive(self, write: RunWrites, incarnation: str) -> bool:
        return write("SET", alive_key(self._run_id), incarnation, "PX", int(HEARTBEAT_TTL_S * 1000))

    def wait(self, timeout_s: float) -> bool:
        return self._exited.wait(timeout_s)

    def stop(self, grace_s: float) -> None:
        """Terminate the learner, also without Redis; kill it `grace_s` after that, or after its last checkpoint."""
        self._stopping = True
        if self._send_signal(signal.SIGTERM):
            deadline = time.monotonic() + grace_s
            while not self.wait(min(SAVING_POLL_S, grace_s)):
                if self._is_saving():
                    deadline = time.monotonic() + grace_s
                elif time.monotonic() > deadline:
                    break
        if self._send_signal(signal.SIGKILL):
            self.wait(KILL_TIMEOUT_S)

    def _send_signal(self, number: signal.Signals) -> bool:
        """Return False if the learner has exited."""
        if self._thread is None or not self._thread.is_alive():
            return False
        if self._process is not None:
            self._process.send_signal(number)
        return True

    def _is_saving(self) -> bool:
        try:
            with connect(self._redis_url, patience_s=REDIS_RETRY_TIMEOUT_S) as redis:
                return read_report(redis, self._run_id).is_saving
        except RedisError as error:
            logger.warning("can't read whether the learner writes a checkpoint: %s", error)
            return False

    def _watch(self, incarnation: str) -> None:
        process = self._process = self._spawn()
        self._lease_held_at = None
        handled = ""
        retry = OutageRetry(REDIS_RETRY_TIMEOUT_S)
        redis = Redis.from_url(self._redis_url, socket_timeout=2.0, socket_connect_timeout=2.0, retry=retry)
        write = RunWrites(redis, self._run_id, self._uid)
        try:
            while True:
                try:
                    code = process.wait(HEARTBEAT_INTERVAL_S)
                except subprocess.TimeoutExpired:
                    handled = self._send_heartbeat(redis, write, process, incarnation, handled)
                    self._ensure_standby(redis, required=self._is_standby_enabled and not handled)
                    continue
                self._free_lease(redis, process.pid)
                if (
                    handled
                    or self._stopping
                    or code in FINAL_EXIT_CODES
                    or self._standby is None
                    or self._standby.poll() is not None
                ):
                    break
                process = self._process = self._standby
                self._standby, self._next_standby_at = None, time.monotonic() + STANDBY_START_INTERVAL_S
                self._lease_held_at = None
                incarnation = self._take_over(write, incarnation, code, process)
            self._report_exit(redis, write, incarnation, code)
        finally:
            self._ensure_standby(redis, required=False)
            redis.close()
            self._exited.set()

    def _ensure_standby(self, redis: Redis, *, required: bool) -> None:
        """Start a standby once the run has weights, or kill one not `required`."""
        if self._standby is not None and not required:
            self._standby.kill()  # it has no state to save
            self._standby.wait()
            self._standby = None
        if (
            not required
            or (self._standby is not None and self._standby.poll() is None)
            or time.monotonic() < self._next_standby_at
        ):
            return
        try:
            if redis.exists(RunKeys(self._run_id).progress):
                self._standby, self._next_standby_at = self._spawn(), time.monotonic() + STANDBY_START_INTERVAL_S
                logger.info("standby learner %d started", self._standby.pid)
        except RedisError as error:
            logger.warning("can't reach Redis: %s", error)
        except OSError as error:  # out of memory or processes; must not end this thread, and the learner with it
            self._next_standby_at = time.monotonic() + STANDBY_START_INTERVAL_S
            logger.warning("can't start a standby learner: %s; retrying in %g s", error, STANDBY_START_INTERVAL_S)

    def _take_over(self, write: RunWrites, before: str, code: int, process: subprocess.Popen[bytes]) -> str:
        incarnation = uuid.uuid4().hex
        reason = _describe_exit(code)
        logger.warning("learner exited (%s); standby learner %d takes over", reason, process.pid)
        update = ("incarnation", incarnation, "pid", process.pid, "died", before, "died_how", reason)
        while True:
            try:
                write("HSET", learner_key(self._run_id), *update)
                return incarnation
            except RedisError as error:  # without it, the next heartbeat would kill the new learner
                logger.warning("can't report the new learner: %s; retrying", error)
                if self._stopping:
                    return incarnation
                time.sleep(HEARTBEAT_INTERVAL_S)

    def _free_lease(self, redis: Redis, pid: int) -> None:
        try:
            free_lease_of(redis, self._run_id, owner_of(pid), self._nonces.pop(pid))
        except RetryableError as error:
            logger.warning("can't free the lease of learner %d, waiting for it to expire: %s", pid, error)

    def _spawn(self) -> subprocess.Popen[bytes]:
        log = self._output_dir / LEARNER_LOG
        log.parent.mkdir(parents=True, exist_ok=True)
        nonce = secrets.token_hex(6)
        environment = {
            REDIS_VARIABLE: self._redis_url,
            LEASE_NONCE: nonce,
            "OMP_NUM_THREADS": str(self._threads),
            "PYTHONUNBUFFERED": "1",
            **self._environment,
        }
        with log.open("ab") as out:
            process = subprocess.Popen(
                bind_to_thread(self._command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                # Own session: Ctrl-C in the terminal must reach only the command, which stops the learner gracefully.
                start_new_session=True,
            )
        self._nonces[process.pid] = nonce
        return process

    def _send_heartbeat(
        self, redis: Redis, write: RunWrites, process: subprocess.Popen[bytes], incarnation: str, handled: str
    ) -> str:
        """Write a heartbeat; execute and return a stop request."""
        try:
            if self._write_alive(write, incarnation):
                write("HSET", learner_key(self._run_id), "pid", process.pid)
                write("HSETNX", learner_key(self._run_id), "incarnation", incarnation)  # unless Redis was emptied
            with redis.pipeline() as pipe:
                pipe.hmget(learner_key(self._run_id), ["stop", "incarnation"])
                pipe.get(RunKeys(self._run_id).lease)
                (stop, current), holder = pipe.execute()
        except RedisError as error:
            logger.warning("learner %d: can't reach Redis: %s", process.pid, error)
            self._lease_held_at = (
                None if self._lease_held_at is None else time.monotonic()
            )  # it can't renew its lease either
            return handled
        if self._is_hung((holder or b"").decode(), process.pid):
            logger.error("learner %d has not renewed its lease for %.0f s: killed", process.pid, HANG_TIMEOUT_S)
            process.kill()
        request = (stop or b"").decode()
        if current is not None and current.decode() != incarnation:
            request = "kill"
        if request and request != handled:
            logger.info("learner %d: %s", process.pid, request)
            process.send_signal(signal.SIGKILL if request == "kill" else signal.SIGTERM)
        return request

    def _is_hung(self, holder: str, pid: int) -> bool:
        if holder == f"{owner_of(pid)} {self._nonces[pid]}":
            self._lease_held_at = time.monotonic()
        return self._lease_held_at is not None and time.monotonic() > self._lease_held_at + HANG_TIMEOUT_S

    def _last_message(self) -> str:
        """Return the last message in the learner's log; empty without one."""
        lines = (self._output_dir / LEARNER_LOG).read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line.removeprefix(MESSAGE) for line in reversed(lines) if line.startswith(MESSAGE)), "")

    def _report_exit(self, redis: Redis, write: RunWrites, incarnation: str, code: int) -> None:
        logger.info("learner exited: %s", _describe_exit(code))
        try:
            current = cast(bytes | None, redis.hget(learner_key(self._run_id), "incarnation"))
            if current is not None and current.decode() == incarnation:
                message = self._last_message() if code == UNUSABLE else ""
                write("HSET", learner_key(self._run_id), "message", message, "exit_code", code)
        except RedisError as error:
            # If Redis is gone for good, the heartbeat's expiry reports it.
            logger.warning("can't report the learner's exit: %s", error)
