"""Hosts a managed learner: starts `offbeat.trainer.cli`, reports to Redis, and may keep a standby learner.

Invariants: the learner dies with its host, even by SIGKILL; Redis is the only interface, so the host may be the command
line (which starts the first learner early) or an actor anywhere in the cluster.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from redis import Redis
from redis.exceptions import RedisError

from offbeat.services.errors import RetryableError
from offbeat.services.keys import RunKeys
from offbeat.services.process import die_with_this_thread
from offbeat.services.redis.connection import OutageRetry, connect
from offbeat.services.redis.lease import free_lease_of, owner_of
from offbeat.trainer.cli import REDIS_VARIABLE
from offbeat.trainer.watchdog import EXIT_HUNG

logger = logging.getLogger(__name__)

BEAT_S = 0.2
PATIENCE_S = 0.5
"""Retry timeout of Redis calls between two checks of the learner."""
ALIVE_S = 6.0
"""Time without a heartbeat after which a host counts as dead, and its learner with it."""
KILL_S = 2.0
"""Time for the kernel to end a killed process."""
HUNG_S = 30.0
"""Time without the lease after which a learner that has held it is killed."""
SETTLE_S = 5.0
"""Interval between starts of a standby learner: the active one has to catch up after a takeover."""
FINAL = (0, 2, 4)
"""Exit codes after which a restart would fail again, or has nothing to do; see `offbeat.trainer.cli`."""
LOG = "logs/learner.out"


def learner_key(run_id: str) -> str:
    """Hash: how the managed learner is, and whether it shall stop."""
    return RunKeys(run_id).key("learner")


def alive_key(run_id: str) -> str:
    """Return the key of a string with expiry, which exists while a host watches the learner."""
    return RunKeys(run_id).key("learner", "alive")


@dataclass(frozen=True, slots=True)
class LearnerStatus:
    """State of a managed learner, as stored in Redis."""

    started: bool
    """True from the start of a learner until it is forgotten."""
    alive: bool
    exit_code: int | None = None
    stopping: bool = False
    """True once it was asked to stop."""
    incarnation: str = ""
    died: str = ""
    """Incarnation whose place the standby has taken, the last one if there were several."""
    died_how: str = ""

    @property
    def how_it_ended(self) -> str:
        return "its host is gone" if self.exit_code is None else _how(self.exit_code)


def _how(code: int) -> str:
    if code == EXIT_HUNG:
        return "its main thread hung: logs/learner.log tells where"
    return f"exit code {code}" if code >= 0 else f"killed by {_signal_name(-code)}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def read_status(redis: Redis, run_id: str) -> LearnerStatus:
    """Return the state of a run's managed learner."""
    raw = cast(dict[bytes, bytes], redis.hgetall(learner_key(run_id)))
    if b"incarnation" not in raw:
        return LearnerStatus(started=False, alive=False)
    code = raw.get(b"exit_code")
    return LearnerStatus(
        started=True,
        alive=code is None and bool(redis.exists(alive_key(run_id))),
        exit_code=int(code) if code is not None else None,
        stopping=b"stop" in raw,
        incarnation=raw[b"incarnation"].decode(),
        died=raw.get(b"died", b"").decode(),
        died_how=raw.get(b"died_how", b"").decode(),
    )


def ask_to_stop(redis: Redis, run_id: str, *, now: bool) -> None:
    """Ask the host to stop its learner: by SIGTERM (it saves a checkpoint), or `now` by SIGKILL."""
    if redis.exists(learner_key(run_id)):
        redis.hset(learner_key(run_id), "stop", "kill" if now else "term")


def learner_command(run_id: str) -> list[str]:
    """Return the learner's command line."""
    return [sys.executable, "-m", "offbeat.trainer.cli", run_id]


class LearnerHost:
    """Runs one learner at a time, watched by a thread."""

    def __init__(
        self,
        run_id: str,
        redis_url: str,
        output_dir: Path,
        *,
        command: Sequence[str] | None = None,
        threads: int = 1,
        standby: bool = False,
    ) -> None:
        """standby: keep a second learner, which waits for the lease of the first one (`control.standby_learner`)."""
        self._standby = standby
        self._spare: subprocess.Popen[bytes] | None = None
        self._spare_at = 0.0
        """Monotonic time before which no other one is started."""
        self._held_at: float | None = None
        """Monotonic time at which the learner last held its lease."""
        self._run_id = run_id
        self._redis_url = redis_url
        self._output_dir = output_dir
        self._command = list(command or learner_command(run_id))
        self._threads = threads
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()
        self._ending = False

    def start(self) -> None:
        """Start the learner unless one is running; return when Redis has its state."""
        if self._thread and self._thread.is_alive():
            return
        self._ended.clear()
        self._ending = False
        incarnation = uuid.uuid4().hex
        with connect(self._redis_url) as redis, redis.pipeline() as pipe:
            pipe.delete(learner_key(self._run_id))
            pipe.hset(learner_key(self._run_id), mapping={"incarnation": incarnation, "host": socket.gethostname()})
            pipe.set(alive_key(self._run_id), incarnation, px=int(ALIVE_S * 1000))
            pipe.execute()
        # The kernel ends the learner when the thread that forked it ends, so that thread must be the one that waits.
        self._thread = threading.Thread(target=self._watch, args=(incarnation,), name="learner host", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Return True if the learner exits within the timeout."""
        return self._ended.wait(timeout_s)

    def end(self, grace_s: float) -> None:
        """End the learner without asking Redis, which may be gone: in order, or after `grace_s` by force."""
        self._ending = True
        for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_S)):
            if self._thread is None or not self._thread.is_alive():
                return
            if self._process is not None:
                self._process.send_signal(number)
            self.wait(patience_s)

    def _watch(self, incarnation: str) -> None:
        process = self._process = self._spawn()
        self._held_at = None
        asked = ""
        retry = OutageRetry(PATIENCE_S)
        redis = Redis.from_url(self._redis_url, socket_timeout=2.0, socket_connect_timeout=2.0, retry=retry)
        try:
            while True:
                try:
                    code = process.wait(BEAT_S)
                except subprocess.TimeoutExpired:
                    asked = self._beat(redis, process, incarnation, asked)
                    self._keep_spare(redis, wanted=self._standby and not asked)
                    continue
                self._free_lease(redis, process.pid)
                if asked or self._ending or code in FINAL or self._spare is None or self._spare.poll() is not None:
                    break
                process = self._process = self._spare
                self._spare, self._spare_at = None, time.monotonic() + SETTLE_S
                self._held_at = None
                incarnation = self._take_over(redis, incarnation, code, process)
            self._report_end(redis, incarnation, code)
        finally:
            self._keep_spare(redis, wanted=False)
            redis.close()
            self._ended.set()

    def _keep_spare(self, redis: Redis, *, wanted: bool) -> None:
        """Keep a standby learner once the first one has weights, or none."""
        if self._spare is not None and not wanted:
            self._spare.kill()  # it holds nothing
            self._spare.wait()
            self._spare = None
        if not wanted or (self._spare is not None and self._spare.poll() is None) or time.monotonic() < self._spare_at:
            return
        try:
            if redis.exists(RunKeys(self._run_id).progress):
                self._spare, self._spare_at = self._spawn(), time.monotonic() + SETTLE_S
                logger.info("learner %d stands by", self._spare.pid)
        except RedisError as error:
            logger.warning("can't reach Redis: %s", error)
        except OSError as error:  # no memory, no process to be had: the one that trains must not end with this thread
            self._spare_at = time.monotonic() + SETTLE_S
            logger.warning("no learner can stand by: %s", error)

    def _take_over(self, redis: Redis, before: str, code: int, process: subprocess.Popen[bytes]) -> str:
        """Make the standby learner the active one; return its incarnation."""
        incarnation = uuid.uuid4().hex
        logger.warning("learner ended (%s), learner %d takes over", _how(code), process.pid)
        told = {"incarnation": incarnation, "pid": process.pid, "died": before, "died_how": _how(code)}
        while True:
            try:
                redis.hset(learner_key(self._run_id), mapping=told)
                return incarnation
            except RedisError as error:  # the beat would take it for a stranger's
                logger.warning("can't tell Redis of the new learner: %s", error)
                if self._ending:
                    return incarnation
                time.sleep(BEAT_S)

    def _free_lease(self, redis: Redis, pid: int) -> None:
        try:
            free_lease_of(redis, self._run_id, owner_of(pid))
        except RetryableError as error:
            logger.warning("the lease of learner %d will expire: %s", pid, error)

    def _spawn(self) -> subprocess.Popen[bytes]:
        log = self._output_dir / LOG
        log.parent.mkdir(parents=True, exist_ok=True)
        told = {REDIS_VARIABLE: self._redis_url, "OMP_NUM_THREADS": str(self._threads), "PYTHONUNBUFFERED": "1"}
        with log.open("ab") as out:
            return subprocess.Popen(
                die_with_this_thread(self._command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **told},
                # A session of its own: Ctrl-C in the terminal goes to the command line, which ends the learner in order.
                start_new_session=True,
            )

    def _beat(self, redis: Redis, process: subprocess.Popen[bytes], incarnation: str, asked: str) -> str:
        """Write a heartbeat and carry out a pending request once; return the request."""
        try:
            with redis.pipeline() as pipe:
                pipe.set(alive_key(self._run_id), incarnation, px=int(ALIVE_S * 1000))
                pipe.hset(learner_key(self._run_id), mapping={"pid": process.pid})
                pipe.hmget(learner_key(self._run_id), ["stop", "incarnation"])
                pipe.get(RunKeys(self._run_id).lease)
                _, _, (stop, current), holder = pipe.execute()
        except RedisError as error:
            logger.warning("learner %d: can't reach Redis: %s", process.pid, error)
            self._held_at = None if self._held_at is None else time.monotonic()  # it can't renew its lease either
            return asked
        if self._hangs((holder or b"").decode(), process.pid):
            logger.error("learner %d has not renewed its lease for %.0f s and is killed", process.pid, HUNG_S)
            process.kill()
        wish = (stop or b"").decode()
        if current is not None and current.decode() != incarnation:
            wish = "kill"
        if wish and wish != asked:
            logger.info("learner %d: %s", process.pid, wish)
            process.send_signal(signal.SIGKILL if wish == "kill" else signal.SIGTERM)
        return wish

    def _hangs(self, holder: str, pid: int) -> bool:
        """Return True if the learner has held the lease but lost it for `HUNG_S`: it is stopped, or its threads don't
        run."""
        if holder.startswith(f"{owner_of(pid)} "):
            self._held_at = time.monotonic()
        return self._held_at is not None and time.monotonic() > self._held_at + HUNG_S

    def _report_end(self, redis: Redis, incarnation: str, code: int) -> None:
        logger.info("learner ended with %d", code)
        try:
            current = cast(bytes | None, redis.hget(learner_key(self._run_id), "incarnation"))
            if current is not None and current.decode() == incarnation:
                redis.hset(learner_key(self._run_id), "exit_code", str(code))
        except RedisError as error:
            # Redis went first; whoever looks next sees that the host fell silent.
            logger.warning("can't report the learner's end: %s", error)
