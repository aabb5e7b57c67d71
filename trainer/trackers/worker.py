"""Process of one tracker, `python -m offbeat.trainer.trackers.worker`, controlled over stdin.

Invariants: the learner never waits for it; when stdin closes, it sends the remaining rows and exits within `END_S`;
after a failure, its replacement resumes at the stored position. Stdout carries JSON lines for the learner; library
output goes to the log.
"""

import fcntl
import json
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from offbeat.services.process import JsonLines, claim_stdout
from offbeat.trainer.trackers.base import Ending, LoggedSteps, TrackedRun
from offbeat.trainer.trackers.cursor import (
    DeliveryCursor,
    progress_file,
    read_progress,
    tracker_folder,
    write_progress,
)
from offbeat.trainer.trackers.delivery import Delivery, TrackerDownError
from offbeat.trainer.trackers.metrics_file import METRICS_FILE
from offbeat.trainer.trackers.registry import arguments, find_tracker

logger = logging.getLogger(__name__)

NICENESS = 10
"""Below the learner, as imports take seconds of CPU."""
POLL_S = 0.5
END_S = 30.0
"""For rows after the learner's end."""
SLOW_S = 60.0
"""Of a call."""
WATCH_S = 5.0
FAILED, TIMED_OUT = 1, 3
ENDING = "ending"


@dataclass(frozen=True, slots=True)
class StartMessage:
    tracker: str
    """Name or class path."""
    kwargs: dict[str, Any]
    run: str
    output_dir: str
    lineage: str
    keep_key: bool
    """As in `DeliveryCursor.open`."""
    resumed_step: int
    config: dict[str, Any]
    logging_steps: int = 1
    last_step: int = 0


class StdinCommands:
    """JSON lines: the start message and `{"ending": ...}`; end of file is the learner's exit."""

    def __init__(self) -> None:
        self._descriptor = sys.stdin.fileno()
        self._read = b""
        self.ended = False

    def order(self) -> StartMessage | None:
        """Read the start message; None if the learner ended."""
        while not self.ended and b"\n" not in self._read:
            self.wait(None)
        first, _, self._read = self._read.partition(b"\n")
        return StartMessage(**json.loads(first)) if first else None

    def wait(self, timeout_s: float | None) -> None:
        if select.select([self._descriptor], [], [], timeout_s)[0]:
            chunk = os.read(self._descriptor, 1 << 16)
            self._read += chunk
            self.ended = not chunk

    @property
    def ending(self) -> Ending:
        """`died` if unsent."""
        return cast(Ending, json.loads(self._read)[ENDING]) if self._read.endswith(b"\n") else "died"


class StdoutReplies:
    """JSON objects for the running learner."""

    def __init__(self) -> None:
        self._lines: JsonLines | None = JsonLines(sys.stdin.buffer, claim_stdout())

    def send(self, **fields: Any) -> None:
        if self._lines is not None and not self._lines.send(fields):
            self._lines = None


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    inbox, outbox = StdinCommands(), StdoutReplies()
    order = inbox.order()
    code = 0 if order is None else _track(order, inbox, outbox)
    sys.stderr.flush()
    os._exit(code)  # exit handlers of libraries may block on an unreachable network


def _track(order: StartMessage, inbox: StdinCommands, outbox: StdoutReplies) -> int:
    with _lock(order, inbox) as locked:
        if not locked:
            return TIMED_OUT
        try:
            _TrackerSession(order, inbox, outbox).run()
        except TrackerDownError as error:
            outbox.send(error=str(error))
            logger.error("tracker accepts no metrics: %s", error)
            return FAILED
        except Exception as error:
            outbox.send(error=" ".join(f"{type(error).__name__}: {error}".split()))
            logger.exception("failed")
            return FAILED
    return 0


@contextmanager
def _lock(order: StartMessage, inbox: StdinCommands) -> Iterator[bool]:
    """Wait for an earlier learner's process; yield False if it outlasts this learner by `END_S`."""
    path = progress_file(Path(order.output_dir), order.tracker).with_suffix(".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        deadline = None
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                inbox.wait(POLL_S) if not inbox.ended else time.sleep(POLL_S)
            if inbox.ended:
                deadline = deadline or time.monotonic() + END_S
                if time.monotonic() > deadline:
                    yield False
                    return
        yield True


class _TrackerSession:
    def __init__(self, order: StartMessage, inbox: StdinCommands, outbox: StdoutReplies) -> None:
        self._order = order
        self._inbox = inbox
        self._outbox = outbox
        self._output_dir = Path(order.output_dir)
        self._busy_since: float | None = time.monotonic()
        self._delivery: Delivery | None = None

    def run(self) -> None:
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        path = progress_file(self._output_dir, self._order.tracker)
        progress = read_progress(path)
        run = self._open(progress)
        write_progress(path, progress)  # store the key before the tracker uses it
        tracker_class = find_tracker(self._order.tracker)
        tracker = tracker_class(run, **arguments(tracker_class, self._order.kwargs))
        progress.place = tracker.place
        self._outbox.send(place=tracker.place, refused=progress.refused)
        logged = LoggedSteps(self._order.logging_steps, self._order.last_step)
        self._delivery = Delivery(self._output_dir / METRICS_FILE, path, progress, tracker, logged)
        self._busy_since = None
        reported = progress.number
        while True:
            ended = self._inbox.ended
            count = self._delivery.round()
            if progress.number > reported:
                self._outbox.send(**_counts(progress))
                reported = progress.number
            if ended and not count:
                break
            if not ended and not count:
                self._inbox.wait(POLL_S)
        self._busy_since = time.monotonic()
        tracker.close(self._inbox.ending)
        logger.info("closed as %s: %s", self._inbox.ending, _counts(progress))

    def _open(self, progress: DeliveryCursor) -> TrackedRun:
        order = self._order
        resumed = progress.open(order.lineage, keep_key=order.keep_key)
        folder = tracker_folder(self._output_dir, order.tracker)
        folder.mkdir(parents=True, exist_ok=True)
        return TrackedRun(order.run, progress.key, resumed, order.resumed_step, folder, order.config)

    def _watch(self) -> None:
        """Report slow calls; exit `END_S` after the learner's end."""
        ended_at: float | None = None
        reported = False
        while True:
            time.sleep(WATCH_S)
            busy_since = self._busy_since or (self._delivery and self._delivery.busy_since)
            busy_s = time.monotonic() - busy_since if busy_since else 0.0
            if busy_s > SLOW_S and not reported:
                self._outbox.send(slow_s=busy_s)
            reported = busy_s > SLOW_S
            ended_at = ended_at or (time.monotonic() if _is_stdin_closed() else None)
            if ended_at and time.monotonic() > ended_at + END_S:
                logger.error("the learner ended %.0f s ago; unsent rows stay in %s", END_S, METRICS_FILE)
                os._exit(TIMED_OUT)


def _is_stdin_closed() -> bool:
    poll = select.poll()
    poll.register(sys.stdin.fileno(), 0)
    return bool(poll.poll(0))


def _counts(progress: DeliveryCursor) -> dict[str, int]:
    return {"lines": progress.number, "repeated": progress.repeated, "refused": progress.refused}


if __name__ == "__main__":
    main()
