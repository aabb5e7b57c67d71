"""One tracker's process: `python -m offbeat.trainer.trackers.worker`, started by the learner, commanded over standard input.

Invariants: it waits for the learner's metrics and never the learner for it; standard input ends when the learner does,
however that comes about, and then it sends what is left and ends, at the latest `END_S` later; a tracker that fails ends
the process, and the next one goes on from where this one came to. Standard output carries one JSON object per line, for
the learner; what libraries print goes to the log.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from offbeat.trainer.trackers.base import Ending, TrackedRun
from offbeat.trainer.trackers.cursor import (
    Progress,
    progress_file,
    read_progress,
    tracker_folder,
    write_progress,
)
from offbeat.trainer.trackers.delivery import Delivery, DownError
from offbeat.trainer.trackers.metrics_file import METRICS_FILE
from offbeat.trainer.trackers.registry import arguments, find_tracker

logger = logging.getLogger(__name__)

NICENESS = 10
"""Libraries of trackers take seconds of CPU to import; the learner's step goes first."""
POLL_S = 0.5
END_S = 30.0
"""What sending the rest may take once the learner has ended."""
SLOW_S = 60.0
"""A tracker that has not come back for so long is told of."""
WATCH_S = 5.0
FAILED, TIMED_OUT = 1, 3


@dataclass(frozen=True, slots=True)
class Order:
    """What a tracker's process is told, as JSON."""

    tracker: str
    """Name or class path."""
    kwargs: dict[str, Any]
    run: str
    output_dir: str
    lineage: str
    goes_on: bool
    """See `Progress.open`."""
    resumed_step: int
    config: dict[str, Any]

    def encode(self) -> str:
        """One line."""
        return json.dumps(asdict(self)) + "\n"


class StdinCommands:
    """Standard input behind the order: the ending, and the learner's own end."""

    def __init__(self) -> None:
        self._descriptor = sys.stdin.fileno()
        self._read = b""
        self.ended = False

    def order(self) -> Order | None:
        """The first line; None if the learner ended before it had written it."""
        while not self.ended and b"\n" not in self._read:
            self.wait(None)
        first, _, self._read = self._read.partition(b"\n")
        return Order(**json.loads(first)) if first else None

    def wait(self, timeout_s: float | None) -> None:
        """Until something comes, or the learner ends."""
        if select.select([self._descriptor], [], [], timeout_s)[0]:
            some = os.read(self._descriptor, 1 << 16)
            self._read += some
            self.ended = not some

    @property
    def ending(self) -> Ending:
        """How the learner ended; one that could not say so died."""
        words: dict[bytes, Ending] = {b"finished\n": "finished", b"stopped\n": "stopped"}
        return words.get(self._read, "died")


class StdoutReplies:
    """Tells the learner, as long as there is one."""

    def __init__(self) -> None:
        self._out: TextIO | None = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(self, **what: Any) -> None:
        """Send one object."""
        try:
            if self._out is not None:
                self._out.write(json.dumps(what) + "\n")
        except BrokenPipeError:
            self._out = None


def main() -> None:
    """Track until the learner ends, or the tracker fails."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    inbox, outbox = StdinCommands(), StdoutReplies()
    order = inbox.order()
    code = 0 if order is None else _track(order, inbox, outbox)
    sys.stderr.flush()
    os._exit(code)  # what libraries registered for the end of the process may wait for a network that is not there


def _track(order: Order, inbox: StdinCommands, outbox: StdoutReplies) -> int:
    with _alone(order, inbox) as alone:
        if not alone:
            return TIMED_OUT
        try:
            _TrackerSession(order, inbox, outbox).run()
        except DownError as error:
            outbox.tell(error=str(error))
            logger.error("takes nothing now: %s", error)
            return FAILED
        except Exception as error:
            outbox.tell(error=" ".join(f"{type(error).__name__}: {error}".split()))
            logger.exception("failed")
            return FAILED
    return 0


@contextmanager
def _alone(order: Order, inbox: StdinCommands) -> Iterator[bool]:
    """Wait for the process of an earlier learner, which may still send what was left; False if this one's learner ended."""
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
    """From the tracker's start to its end."""

    def __init__(self, order: Order, inbox: StdinCommands, outbox: StdoutReplies) -> None:
        self._order = order
        self._inbox = inbox
        self._outbox = outbox
        self._output_dir = Path(order.output_dir)
        self._busy_since: float | None = time.monotonic()
        self._delivery: Delivery | None = None

    def run(self) -> None:
        """Until the learner has ended and everything is sent.

        Raises:
            DownError: the tracker takes nothing.
        """
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        kept = progress_file(self._output_dir, self._order.tracker)
        progress = read_progress(kept)
        run = self._open(progress)
        write_progress(kept, progress)  # the key is known before the tracker hears it
        kind = find_tracker(self._order.tracker)
        tracker = kind(run, **arguments(kind, self._order.kwargs))
        progress.place = tracker.place
        self._outbox.tell(place=tracker.place, refused=progress.refused)
        self._delivery = Delivery(self._output_dir / METRICS_FILE, kept, progress, tracker)
        self._busy_since = None
        told = progress.number
        while True:
            ended = self._inbox.ended
            count = self._delivery.round()
            if progress.number > told:
                self._outbox.tell(**_counts(progress))
                told = progress.number
            if ended and not count:
                break
            if not ended and not count:
                self._inbox.wait(POLL_S)
        self._busy_since = time.monotonic()
        tracker.close(self._inbox.ending)
        logger.info("%s with line %d: %s", self._inbox.ending, progress.number, _counts(progress))

    def _open(self, progress: Progress) -> TrackedRun:
        order = self._order
        resumed = progress.open(order.lineage, goes_on=order.goes_on)
        folder = tracker_folder(self._output_dir, order.tracker)
        folder.mkdir(parents=True, exist_ok=True)
        return TrackedRun(order.run, progress.key, resumed, order.resumed_step, folder, order.config)

    def _watch(self) -> None:
        """Tell of a tracker that does not come back; once the learner has ended, do not wait for it for long."""
        ended_at: float | None = None
        told = False
        while True:
            time.sleep(WATCH_S)
            busy_since = self._busy_since or (self._delivery and self._delivery.busy_since)
            busy_s = time.monotonic() - busy_since if busy_since else 0.0
            if busy_s > SLOW_S and not told:
                self._outbox.tell(slow_s=busy_s)
            told = busy_s > SLOW_S
            ended_at = ended_at or (time.monotonic() if _hung_up() else None)
            if ended_at and time.monotonic() > ended_at + END_S:
                logger.error("the learner ended %.0f s ago: what is left stays in %s", END_S, METRICS_FILE)
                os._exit(TIMED_OUT)


def _hung_up() -> bool:
    """Whether nobody has the other end of standard input any more."""
    poll = select.poll()
    poll.register(sys.stdin.fileno(), 0)
    return bool(poll.poll(0))


def _counts(progress: Progress) -> dict[str, int]:
    return {"lines": progress.number, "repeated": progress.repeated, "refused": progress.refused}


if __name__ == "__main__":
    main()
