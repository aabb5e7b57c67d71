"""Heartbeats over a pipe.

Invariants: clocks of different processes are never compared; pending heartbeats are read before silence is measured.
"""

import os
import threading
import time

from offbeat.trainer.watchdog import STARTUP_TIMEOUT_S

HEARTBEAT_FD = "OFFBEAT_HEARTBEAT_FD"
"""Environment variable: heartbeat file descriptor."""
BEATS_PER_TIMEOUT = 16
HEARTBEAT_TIMEOUTS = 4
"""Of `buffer.learner_timeout_s`."""


class Heartbeat:
    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._read, self.write_end = os.pipe()
        """write_end: for the process; close it here by `close_write_end`."""
        os.set_blocking(self._read, False)
        self._received_at = time.monotonic()
        self._allowed_s = max(STARTUP_TIMEOUT_S, timeout_s)

    def close_write_end(self) -> None:
        os.close(self.write_end)

    def silence_s(self) -> float:
        """Return the silence, or 0 below the timeout."""
        try:
            beats = os.read(self._read, 65536)
        except BlockingIOError:
            beats = b""
        now = time.monotonic()
        if beats:
            self._received_at, self._allowed_s = now, self._timeout_s
        silent_s = now - self._received_at
        return silent_s if silent_s > self._allowed_s else 0.0


def start_heartbeats(timeout_s: float) -> None:
    write_end = os.environ.pop(HEARTBEAT_FD, None)
    if write_end is not None:
        arguments = (int(write_end), timeout_s / BEATS_PER_TIMEOUT)
        threading.Thread(target=_send, args=arguments, name="heartbeat", daemon=True).start()


def _send(write_end: int, interval_s: float) -> None:
    while True:
        try:
            os.write(write_end, b".")
        except BrokenPipeError:
            return  # the parent has exited
        time.sleep(interval_s)
