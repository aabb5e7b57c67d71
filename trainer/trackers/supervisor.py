"""Supervision of tracker processes.

Invariants: training never waits for a tracker; a failure is counted, and reported once until recovery.
"""

import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self, cast

from offbeat.services.process import JsonLines
from offbeat.services.telemetry import MetricRecord, MetricsSink, Partial
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.trackers.base import Ending
from offbeat.trainer.trackers.cursor import folder_name
from offbeat.trainer.trackers.registry import IN_LEARNER, STOP_S
from offbeat.trainer.trackers.worker import ENDING, StartMessage

logger = logging.getLogger(__name__)

FIRST_RETRY_S, LAST_RETRY_S, MAX_DOUBLINGS = 2.0, 60.0, 16
FINISH_S = 30.0
"""For rows after a finished run."""
COMMAND = (sys.executable, "-m", "offbeat.trainer.trackers.worker")


class TrackerProcess:
    def __init__(
        self,
        order: StartMessage,
        echo: Callable[[str], None],
        sink: MetricsSink,
        *,
        first_retry_s: float = FIRST_RETRY_S,
    ) -> None:
        self._order = order
        self._say = echo
        self._sink = sink
        self._first_retry_s = first_retry_s
        self._stop = threading.Event()
        self._ending: Ending = "died"
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: JsonLines | None = None
        self._starting = threading.Lock()
        self._last_error = ""
        self._failures = 0
        """Consecutive."""
        self._refused = 0
        self._thread = threading.Thread(target=self._supervise, name=f"tracker {order.tracker}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def end(self, ending: Ending) -> None:
        with self._starting:
            self._ending = ending
            self._stop.set()
            if self._pipe is not None:
                _send_ending(self._pipe, ending)

    def wait(self, deadline: float) -> bool:
        """Return whether it ended before `deadline` (monotonic, s)."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def kill(self) -> None:
        """Kill the process; a resumed run sends unsent rows."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
        self._say(f"{self._order.tracker} did not accept the last metrics in time; they are in metrics.jsonl.")

    def _supervise(self) -> None:
        while True:
            try:
                if self._run_process():
                    return
            except OSError as error:  # no memory for a process, or no file for its log
                self._report_failure(f"cannot start its process: {error}")
            self._failures = min(self._failures + 1, MAX_DOUBLINGS)
            if self._stop.wait(min(LAST_RETRY_S, self._first_retry_s * 2 ** (self._failures - 1))):
                return

    def _run_process(self) -> bool:
        """Run one process; return whether it needs no restart."""
        with self._starting:
            if self._stop.is_set() and self._process is not None:
                return True
            process = self._process = self._spawn()
            assert process.stdin is not None
            assert process.stdout is not None
            pipe = self._pipe = JsonLines(process.stdout, process.stdin)
            pipe.send(asdict(self._order))
            if self._stop.is_set():
                _send_ending(pipe, self._ending)
        self._handle_replies(pipe)
        if process.wait() == 0:
            return True
        if not self._last_error:
            name = _log_name(self._order.tracker)
            self._report_failure(f"its process exited with code {process.returncode}, see logs/{name}")
        return False

    def _spawn(self) -> "subprocess.Popen[bytes]":
        log = Path(self._order.output_dir) / "logs" / _log_name(self._order.tracker)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as err:
            # A session of its own: Ctrl-C in the terminal must reach only the learner, which shuts trackers down
            return subprocess.Popen(
                COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, start_new_session=True
            )

    def _handle_replies(self, pipe: JsonLines) -> None:
        while True:
            try:
                reply = pipe.receive()
            except ValueError as error:
                logger.warning("%s: unexpected output: %s", self._order.tracker, error)
                continue
            if reply is None:
                return
            self._handle_reply(reply)

    def _handle_reply(self, reply: Mapping[str, Any]) -> None:
        if "place" in reply:
            self._refused = reply["refused"]
            logger.info("%s is ready: %s", self._order.tracker, reply["place"])
        if "slow_s" in reply:
            self._report_failure(f"no response for {reply['slow_s']:.0f} s")
        if "error" in reply:
            self._report_failure(reply["error"])
        if "lines" in reply:
            self._report_progress(reply["refused"])

    def _report_failure(self, error: str) -> None:
        log = logger.info if self._last_error else logger.warning
        log("%s accepts no metrics: %s", self._order.tracker, error)
        if not self._last_error:
            self._say(f"{self._order.tracker} accepts no metrics, training continues without it: {error}")
        self._last_error = error
        self._count(failures=1)

    def _report_progress(self, refused: int) -> None:
        if self._last_error:
            logger.warning("%s accepts metrics again", self._order.tracker)
            self._say(f"{self._order.tracker} accepts metrics again.")
        self._last_error, self._failures = "", 0
        if refused > self._refused:
            logger.warning("%s refused %d rows", self._order.tracker, refused - self._refused)
            self._count(refused=refused - self._refused)
            self._refused = refused

    def _count(self, **counts: int) -> None:
        values = {f"{folder_name(self._order.tracker)}/{name}": Partial("sum", float(n)) for name, n in counts.items()}
        try:
            self._sink.append(MetricRecord("trackers", values))
        except Exception:  # Redis is unreachable, which its other users report
            logger.info("not counted: %s", counts)


class TrackerProcesses:
    def __init__(self, orders: Sequence[StartMessage], echo: Callable[[str], None], sink: MetricsSink) -> None:
        self._processes = [TrackerProcess(order, echo, sink) for order in orders]
        self.ending: Ending = "died"
        """To be set before the context exits."""

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


def _send_ending(pipe: JsonLines, ending: Ending) -> None:
    if ending != "died":
        pipe.send({ENDING: ending})
    pipe.close()


def _log_name(tracker: str) -> str:
    return f"tracker-{folder_name(tracker)}.log"


SECRET = re.compile(
    r"(^|[_-]|(?<=[a-z0-9])(?=[A-Z]))"
    r"(?i:(access|api|private|secret)[_-]?key|authorization|credentials?|passw(or)?d|secret|token)$"
)
ENVIRONMENT = "system_envs"
URL_USER = re.compile(r"://[^/\s@]+@")
MASK = "***"


def make_start_messages(run: LearnerRun, resumed_step: int) -> list[StartMessage]:
    config = run.config
    public_config = without_secrets(config.model_dump(mode="json", exclude={"tracker_kwargs"}))
    return [
        StartMessage(
            tracker=name,
            kwargs=config.tracker_kwargs.get(name, {}),
            run=run.run_id,
            output_dir=str(run.output_dir),
            lineage=run.lineage,
            keep_key=config.resume_from_checkpoint is True,
            resumed_step=resumed_step,
            config=public_config,
            logging_steps=config.logging_steps,
            last_step=config.max_steps,
        )
        for name in config.track_with
        if name not in IN_LEARNER
    ]


def without_secrets(value: Any, key: str = "") -> Any:
    """Mask values of secret keys and of `system_envs`, and users of URLs."""
    if isinstance(value, Mapping):
        table = cast(Mapping[str, Any], value)
        is_secret = key == ENVIRONMENT or SECRET.search(key)
        return {str(name): MASK if is_secret else without_secrets(table[name], str(name)) for name in table}
    if isinstance(value, list | tuple):
        return [without_secrets(each, key) for each in cast(Sequence[Any], value)]
    if isinstance(value, str | int | float) and not isinstance(value, bool) and SECRET.search(key):
        return MASK
    return URL_USER.sub(f"://{MASK}@", value) if isinstance(value, str) else value
