"""Signs of life that one process of the learner gives another, over a pipe.

Invariants: clocks of two processes are never compared; signs that lie in the pipe count before their absence does, so that
a reader which was itself held up accuses nobody.
"""

import os
import threading
import time

PULSE = "OFFBEAT_PULSE_FD"
"""Environment variable: where a process writes its signs of life."""
START_S = 600.0
"""What a process gets from its start to its first sign of life: it imports torch, perhaps beside many others."""
SIGNS_PER_SILENCE = 16
"""Signs that are given in the time after which silence means that a process hangs."""


class Heartbeat:
    """Reads one process's signs of life."""

    def __init__(self, silent_s: float) -> None:
        """silent_s: a process that gives no sign for so long hangs."""
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
        """For how long it has hung, s; 0 while it lives, and while it may be starting."""
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
    """From a thread of its own, give whoever started this process signs that it lives, if that one wants any."""
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
