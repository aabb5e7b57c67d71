"""Memory of a machine's GPUs, with light imports: a Ray task reads it on each node."""

import shutil
import subprocess
from functools import cache
from pathlib import Path

QUERY = ("--query-gpu=memory.total", "--format=csv,noheader,nounits")
QUERY_TIMEOUT_S = 10.0
WSL_GPU = Path("/dev/dxg")
"""GPU of Windows in WSL 2."""


def shares_memory() -> bool:
    """Return whether processes on this machine can map each other's GPU memory (CUDA IPC): not in WSL 2."""
    return not WSL_GPU.exists()


@cache
def read_memory_gib() -> float | None:
    """Return the memory of this machine's smallest GPU, if known."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        output = subprocess.run(
            [program, *QUERY], capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=True
        ).stdout
        return min(float(line) for line in output.split()) / 1024
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
