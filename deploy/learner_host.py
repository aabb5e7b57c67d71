"""Hosts a managed learner: starts `python -m trainer.cli`, and tells Redis how it is.

Invariants: the learner dies with its host, even by kill -9; whoever wants to know or stop it needs Redis alone, so the
host may be the command line (which gives the first learner a head start) or an actor anywhere in the cluster.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from redis import Redis
from redis.exceptions import RedisError

from deploy.processes import dying_with_this_thread
from services.keys import RunKeys
from trainer.cli import REDIS_VARIABLE

logger = logging.getLogger(__name__)

BEAT_S = 0.2
ALIVE_S = 6.0
"""A host that has been silent for so long is gone, and its learner with it."""
KILL_S = 2.0
"""What the kernel gets to end a killed process."""
LOG = "logs/learner.out"


def learner_key(run_id: str) -> str:
    """Hash: how the managed learner is, and whether it shall stop."""
    return RunKeys(run_id).key("learner")


def alive_key(run_id: str) -> str:
    """String with expiry: there while a host looks after the learner."""
    return RunKeys(run_id).key("learner", "alive")


@dataclass(frozen=True, slots=True)
class LearnerStatus:
    """How a managed learner is, as Redis tells it."""

    started: bool
    """A host has started one, and nobody has forgotten it."""
    alive: bool
    exit_code: int | None = None
    stopping: bool = False
    """It was asked to end."""
    incarnation: str = ""

    @property
    def how_it_ended(self) -> str:
        if self.exit_code is None:
            return "its host is gone"
        return f"exit code {self.exit_code}" if self.exit_code >= 0 else f"killed by {_signal_name(-self.exit_code)}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def read_status(redis: Redis, run_id: str) -> LearnerStatus:
    """How the managed learner of a run is."""
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
    )


def ask_to_stop(redis: Redis, run_id: str, *, now: bool) -> None:
    """Tell the host to end its learner: by SIGTERM (it saves a checkpoint), or `now` by SIGKILL."""
    if redis.exists(learner_key(run_id)):
        redis.hset(learner_key(run_id), "stop", "kill" if now else "term")


def learner_command(run_id: str) -> list[str]:
    """The learner's command line."""
    return [sys.executable, "-m", "trainer.cli", run_id]


class LearnerHost:
    """Runs one learner at a time; a thread of its own watches it."""

    def __init__(
        self, run_id: str, redis_url: str, output_dir: Path, *, command: Sequence[str] | None = None, threads: int = 1
    ) -> None:
        self._run_id = run_id
        self._redis_url = redis_url
        self._output_dir = output_dir
        self._command = list(command or learner_command(run_id))
        self._threads = threads
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()

    def start(self) -> None:
        """Start the learner, unless this host's last one still runs; returns when Redis knows of it."""
        if self._thread and self._thread.is_alive():
            return
        self._ended.clear()
        incarnation = uuid.uuid4().hex
        with Redis.from_url(self._redis_url) as redis, redis.pipeline() as pipe:
            pipe.delete(learner_key(self._run_id))
            pipe.hset(learner_key(self._run_id), mapping={"incarnation": incarnation, "host": socket.gethostname()})
            pipe.set(alive_key(self._run_id), incarnation, px=int(ALIVE_S * 1000))
            pipe.execute()
        # The kernel ends the learner when the thread that forked it ends, so that thread must be the one that waits.
        self._thread = threading.Thread(target=self._watch, args=(incarnation,), name="learner host", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Whether the learner has ended by then."""
        return self._ended.wait(timeout_s)

    def end(self, grace_s: float) -> None:
        """End the learner without asking Redis, which may be gone: in order, or after `grace_s` by force."""
        for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_S)):
            if self._thread is None or not self._thread.is_alive():
                return
            if self._process is not None:
                self._process.send_signal(number)
            self.wait(patience_s)

    def _watch(self, incarnation: str) -> None:
        process = self._process = self._spawn()
        asked = ""
        redis = Redis.from_url(self._redis_url, socket_timeout=2.0, socket_connect_timeout=2.0)
        try:
            while True:
                try:
                    code = process.wait(BEAT_S)
                except subprocess.TimeoutExpired:
                    asked = self._beat(redis, process, incarnation, asked)
                    continue
                break
            self._report_end(redis, incarnation, code)
        finally:
            redis.close()
            self._ended.set()

    def _spawn(self) -> subprocess.Popen[bytes]:
        log = self._output_dir / LOG
        log.parent.mkdir(parents=True, exist_ok=True)
        told = {REDIS_VARIABLE: self._redis_url, "OMP_NUM_THREADS": str(self._threads), "PYTHONUNBUFFERED": "1"}
        with log.open("ab") as out:
            return subprocess.Popen(
                dying_with_this_thread(self._command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **told},
                # A session of its own: Ctrl-C in the terminal goes to the command line, which ends the learner in order.
                start_new_session=True,
            )

    def _beat(self, redis: Redis, process: subprocess.Popen[bytes], incarnation: str, asked: str) -> str:
        """Say that it lives, and do what was asked of it, once; returns what was."""
        try:
            with redis.pipeline() as pipe:
                pipe.set(alive_key(self._run_id), incarnation, px=int(ALIVE_S * 1000))
                pipe.hset(learner_key(self._run_id), mapping={"pid": process.pid})
                pipe.hmget(learner_key(self._run_id), ["stop", "incarnation"])
                _, _, (stop, current) = pipe.execute()
        except RedisError as error:
            logger.warning("learner %d: can't reach Redis: %s", process.pid, error)
            return asked
        wish = (stop or b"").decode()
        if current is not None and current.decode() != incarnation:
            wish = "kill"
        if wish and wish != asked:
            logger.info("learner %d: %s", process.pid, wish)
            process.send_signal(signal.SIGKILL if wish == "kill" else signal.SIGTERM)
        return wish

    def _report_end(self, redis: Redis, incarnation: str, code: int) -> None:
        logger.info("learner ended with %d", code)
        try:
            current = cast(bytes | None, redis.hget(learner_key(self._run_id), "incarnation"))
            if current is not None and current.decode() == incarnation:
                redis.hset(learner_key(self._run_id), "exit_code", str(code))
        except RedisError as error:
            # Redis went first; whoever looks next sees that the host fell silent.
            logger.warning("can't report the learner's end: %s", error)
