"""Measurements of memory that other threads, as earlier tests may leave, have no part in."""

import multiprocessing
import tracemalloc
from collections.abc import Callable

_fork = multiprocessing.get_context("fork")


def measure_memory(action: Callable[[], object]) -> tuple[int, int]:
    """Return the bytes that an action has allocated at its end, with its result, and at most; in a fork."""
    receiver, sender = _fork.Pipe(duplex=False)

    def measure() -> None:
        tracemalloc.start()
        result = action()
        sender.send(tracemalloc.get_traced_memory())
        del result

    process = _fork.Process(target=measure)
    process.start()
    sender.close()
    try:
        return receiver.recv()
    finally:
        process.join()
        receiver.close()
