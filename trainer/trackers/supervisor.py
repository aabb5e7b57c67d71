"""The trackers' processes, as the learner sees them: started, started again when they fail, told of, ended.

Invariants: nothing here makes a step wait; a tracker's trouble is told once until it is over, and counted.
"""

import json
import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from offbeat.services.telemetry import MetricRecord, MetricsSink, Partial
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.trackers.base import Ending
from offbeat.trainer.trackers.cursor import folder_name
from offbeat.trainer.trackers.registry import IN_LEARNER, STOP_S
from offbeat.trainer.trackers.worker import Order

logger = logging.getLogger(__name__)

FIRST_RETRY_S, LAST_RETRY_S, MAX_DOUBLINGS = 2.0, 60.0, 16
FINISH_S = 30.0
"""What trackers get to take the last rows of a run that is trained to its end."""
COMMAND = (sys.executable, "-m", "offbeat.trainer.trackers.worker")


class TrackerProcess:
    """Keeps one tracker's process going."""

    def __init__(
        self, order: Order, say: Callable[[str], None], sink: MetricsSink, *, first_retry_s: float = FIRST_RETRY_S
    ) -> None:
        self._order = order
        self._say = say
        self._sink = sink
        self._first_retry_s = first_retry_s
        self._stop = threading.Event()
        self._ending: Ending = "died"
        self._process: subprocess.Popen[str] | None = None
        self._starting = threading.Lock()
        self._trouble = ""
        self._failures = 0
        """In a row."""
        self._refused = 0
        self._thread = threading.Thread(target=self._keep_going, name=f"tracker {order.tracker}", daemon=True)

    def start(self) -> None:
        """From now on, beside the learner."""
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Of its process, once there was one."""
        return self._process.pid if self._process else None

    def end(self, ending: Ending) -> None:
        """Let it send what is left."""
        with self._starting:
            self._ending = ending
            self._stop.set()
            if self._process is not None:
                _hang_up(self._process, ending)

    def wait(self, deadline: float) -> bool:
        """Whether it has ended by then (monotonic, s)."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def kill(self) -> None:
        """Wait no more. What it has not sent it will, when the run goes on."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
        self._say(f"{self._order.tracker} has not taken the last metrics; metrics.jsonl holds them.")

    def _keep_going(self) -> None:
        while True:
            try:
                if self._lived():
                    return
            except OSError as error:  # no memory for a process, or no file for its log
                self._has_trouble(f"no process: {error}")
            self._failures = min(self._failures + 1, MAX_DOUBLINGS)
            if self._stop.wait(min(LAST_RETRY_S, self._first_retry_s * 2 ** (self._failures - 1))):
                return

    def _lived(self) -> bool:
        """One life of the process; whether no other one is wanted."""
        with self._starting:
            if self._stop.is_set() and self._process is not None:
                return True
            process = self._process = self._spawn()
            if self._stop.is_set():
                _hang_up(process, self._ending)
        assert process.stdout is not None
        for line in process.stdout:
            self._hear(line)
        if process.wait() == 0:
            return True
        if not self._trouble:
            self._has_trouble(f"its process ended ({process.returncode}), logs/{_log_name(self._order.tracker)}")
        return False

    def _spawn(self) -> "subprocess.Popen[str]":
        log = Path(self._order.output_dir) / "logs" / _log_name(self._order.tracker)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as err:
            # A session of its own: Ctrl-C in the terminal is for the learner, which ends trackers in order
            process = subprocess.Popen(
                COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, text=True, start_new_session=True
            )
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(self._order.encode())
            process.stdin.flush()
        return process

    def _hear(self, line: str) -> None:
        try:
            told: dict[str, Any] = json.loads(line)
        except ValueError:
            logger.warning("%s says: %s", self._order.tracker, line.strip())
            return
        if "place" in told:
            self._refused = told["refused"]
            logger.info("%s is ready: %s", self._order.tracker, told["place"])
        if "slow_s" in told:
            self._has_trouble(f"it has not answered for {told['slow_s']:.0f} s")
        if "error" in told:
            self._has_trouble(told["error"])
        if "lines" in told:
            self._is_well(told["refused"])

    def _has_trouble(self, what: str) -> None:
        log = logger.info if self._trouble else logger.warning
        log("%s takes no metrics now: %s", self._order.tracker, what)
        if not self._trouble:
            self._say(f"{self._order.tracker} takes no metrics now, training goes on without it: {what}")
        self._trouble = what
        self._count(failures=1)

    def _is_well(self, refused: int) -> None:
        if self._trouble:
            logger.warning("%s takes metrics again", self._order.tracker)
            self._say(f"{self._order.tracker} takes metrics again.")
        self._trouble, self._failures = "", 0
        if refused > self._refused:
            logger.warning("%s has refused %d rows", self._order.tracker, refused - self._refused)
            self._count(refused=refused - self._refused)
            self._refused = refused

    def _count(self, **what: int) -> None:
        values = {f"{folder_name(self._order.tracker)}/{name}": Partial("sum", float(n)) for name, n in what.items()}
        try:
            self._sink.append(MetricRecord("trackers", values))
        except Exception:  # Redis is away: whoever needs it says so
            logger.info("not counted: %s", what)


class TrackerProcesses:
    """All of a learner's, for the time of its context."""

    def __init__(self, orders: Sequence[Order], say: Callable[[str], None], sink: MetricsSink) -> None:
        self._processes = [TrackerProcess(order, say, sink) for order in orders]
        self.ending: Ending = "died"
        """How the learner ends; set before the context is left."""

    def __enter__(self) -> Self:
        for process in self._processes:
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.end(self.ending)
        deadline = time.monotonic() + (FINISH_S if self.ending == "finished" else STOP_S)
        for process in self._processes:
            if not process.wait(deadline):
                process.kill()


def _hang_up(process: "subprocess.Popen[str]", ending: Ending) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        if ending != "died":
            process.stdin.write(f"{ending}\n")
        process.stdin.close()


def _log_name(tracker: str) -> str:
    return f"tracker-{folder_name(tracker)}.log"


SECRET = re.compile(r"(^|_)(api_key|password|secret|token)$", re.IGNORECASE)


def orders_of(run: LearnerRun, resumed_step: int) -> list[Order]:
    """What the processes of a run's trackers are told."""
    config = run.config
    told = without_secrets(config.model_dump(mode="json", exclude={"tracker_kwargs"}))
    return [
        Order(
            tracker=name,
            kwargs=config.tracker_kwargs.get(name, {}),
            run=run.run_id,
            output_dir=str(run.output_dir),
            lineage=run.lineage,
            goes_on=config.resume_from_checkpoint is True,
            resumed_step=resumed_step,
            config=told,
        )
        for name in config.track_with
        if name not in IN_LEARNER
    ]


def without_secrets(value: Any, key: str = "") -> Any:
    """A configuration as a tracker may see it."""
    if isinstance(value, Mapping):
        return {str(name): without_secrets(inner, str(name)) for name, inner in value.items()}
    return "***" if isinstance(value, str) and SECRET.search(key) else value
