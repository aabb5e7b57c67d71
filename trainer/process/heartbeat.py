"""Heartbeats between processes of the learner, over a pipe.

Invariants: clocks of two processes are never compared; heartbeats waiting in the pipe are read before silence is
measured, so a reader that was itself held up does not report a hang.
"""

import os
import threading
import time

PULSE = "OFFBEAT_PULSE_FD"
"""Environment variable: where a process writes its signs of life."""
START_S = 600.0
"""Startup timeout until the first heartbeat: the process imports torch, perhaps next to many others."""
SIGNS_PER_SILENCE = 16
"""Signs that are given in the time after which silence means that a process hangs."""


class Heartbeat:
    """Reads one process's signs of life."""

    def __init__(self, silent_s: float) -> None:
        """silent_s: silence after which a process counts as hung."""
        self._silent_s = silent_s
        self._read, self.write_end = os.pipe()
        """write_end: to be handed to the process, then closed here by `handed_over`."""
        os.set_blocking(self._read, False)
        self._seen_at = time.monotonic()
        self._allowed_s = max(START_S, silent_s)

    def handed_over(self) -> None:
        """The process has its end."""
        os.close(self.write_end)

    def silence_s(self) -> float:
        """Return how long the process has been hung, s; 0 while it is alive or may still be starting."""
        try:
            given = os.read(self._read, 65536)
        except BlockingIOError:
            given = b""
        now = time.monotonic()
        if given:
            self._seen_at, self._allowed_s = now, self._silent_s
        silent_s = now - self._seen_at
        return silent_s if silent_s > self._allowed_s else 0.0


def give_signs(silent_s: float) -> None:
    """Send heartbeats to the parent process from a background thread, if the parent expects any."""
    told = os.environ.pop(PULSE, None)
    if told is not None:
        threading.Thread(
            target=_give, args=(int(told), silent_s / SIGNS_PER_SILENCE), name="pulse", daemon=True
        ).start()


def _give(write_end: int, every_s: float) -> None:
    while True:
        try:
            os.write(write_end, b".")
        except BrokenPipeError:
            return  # the reader is gone
        time.sleep(every_s)
