"""Memory of a machine's GPUs, with light imports: a Ray task reads it on each node."""

import shutil
import subprocess

QUERY = ("--query-gpu=memory.total", "--format=csv,noheader,nounits")
QUERY_TIMEOUT_S = 10.0


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
