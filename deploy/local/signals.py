"""Termination signals."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


def termination_signals() -> tuple[signal.Signals, ...]:
    """Return termination signals, without ignored SIGHUP (`nohup`)."""
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, *hangup)


def raise_interrupt_on_signals() -> None:
    """Raise KeyboardInterrupt on termination signals."""
    for number in termination_signals():
        signal.signal(number, signal.default_int_handler)


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGINT at once, also in a call that blocks an event loop.

    Without effect outside of the main thread, which alone handles signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # asyncio replaces `default_int_handler` by one that waits for the loop
    before = signal.signal(signal.SIGINT, lambda *_: signal.default_int_handler(signal.SIGINT, None))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
