"""vLLM's sleep on GPUs that other processes use."""

from collections.abc import Callable
from functools import wraps
from typing import Any

MEMORY_GREW = "Memory usage increased after sleeping"
"""vLLM's message where a GPU has less free memory after a worker's sleep than before it."""

Sleep = Callable[..., None]
"""Method of vLLM's worker: (worker, level)."""


def tolerate_memory_growth(sleep: Sleep) -> Sleep:
    """Return a sleep that ignores what other processes allocate meanwhile.

    vLLM's check reads the memory of the whole GPU, and fails after all of the worker's is freed.
    """

    @wraps(sleep)
    def patched(worker: Any, *args: Any, **kwargs: Any) -> None:
        try:
            sleep(worker, *args, **kwargs)
        except AssertionError as error:
            if MEMORY_GREW not in str(error):
                raise

    return patched
