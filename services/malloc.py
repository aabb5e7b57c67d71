"""glibc's allocator in processes that compute on a CPU.

By default it returns the memory of freed activations to the kernel, which zeroes and maps it again in the next step.
"""

import ctypes
import os
from collections.abc import Mapping

KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # the largest that mallopt(3) allows
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
PARAMETERS = {"MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_TOP_PAD_": -2}
"""Of mallopt(3), in malloc.h."""


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return variables for a process to start, without those that `environment` sets."""
    return {name: value for name, value in KEEP_FREED_MEMORY.items() if name not in environment}


def keep_freed_memory_here() -> None:
    """Set the same in this process, as far as glibc has it and the environment does not set it."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for name, value in keep_freed_memory().items():
        mallopt(PARAMETERS[name], int(value))
