"""SIGINT and SIGTERM: the first stops the learner after the step, the second kills it."""

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


@contextmanager
def stop_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at the first signal; main thread only."""

    def handle(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        logger.info("signal %d: stopping after the running step", number)
        stop()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous: dict[int, Callable[..., object] | int | None] = {
        number: signal.signal(number, handle) for number in numbers
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
