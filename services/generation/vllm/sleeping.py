"""vLLM's sleep on GPUs that other processes use."""

from collections.abc import Callable
from functools import wraps
from typing import Any

MEMORY_GREW = "Memory usage increased after sleeping"
"""vLLM's message where a GPU has less free memory after a worker's sleep than before it."""

Sleep = Callable[..., None]
"""Method of vLLM's worker: (worker, level)."""


def beside_others(sleep: Sleep) -> Sleep:
    """Ignore what others allocate meanwhile: the check, which would take the engine out of service, reads the whole GPU's
    memory, and comes after all is freed.
    """

    @wraps(sleep)
    def patched(worker: Any, *args: Any, **kwargs: Any) -> None:
        try:
            sleep(worker, *args, **kwargs)
        except AssertionError as error:
            if MEMORY_GREW not in str(error):
                raise

    return patched
