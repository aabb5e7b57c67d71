"""The allocator of processes that compute."""

import os
import subprocess
import sys

from offbeat.services.malloc import KEEP_FREED_MEMORY, keep_freed_memory

STEPS = """
import resource
def faults():
    for _ in range(40):
        layers = [b"x" * (12 << 20) for _ in range(4)]
        del layers
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(faults())
"""


HERE = "from offbeat.services.malloc import keep_freed_memory_here\nkeep_freed_memory_here()\n"


def faults(environment: dict[str, str], first: str = "") -> int:
    clean = {name: value for name, value in os.environ.items() if name not in KEEP_FREED_MEMORY}
    done = subprocess.run(
        [sys.executable, "-c", first + STEPS], env=clean | environment, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_memory_that_a_step_frees_is_not_mapped_again_in_the_next() -> None:
    step = 4 * 12 * 256  # pages
    assert faults({}) > 20 * step
    assert faults(keep_freed_memory({})) < 3 * step
    assert faults({}, HERE) < 3 * step


def test_what_the_user_sets_stays() -> None:
    own = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    assert faults(own, HERE) > 20 * 4 * 12 * 256
    assert keep_freed_memory({"MALLOC_TRIM_THRESHOLD_": "1"}).keys() == KEEP_FREED_MEMORY.keys() - {
        "MALLOC_TRIM_THRESHOLD_"
    }
