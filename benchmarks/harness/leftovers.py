"""`python -m offbeat.benchmarks.harness.leftovers FOLDER`: clears away after a benchmark that can't do so itself any more.

Invariant: whatever ends a benchmark, SIGKILL and a crash included, its folder and what its runs hold in shared memory go.
"""

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from offbeat.deploy.local.processes import SHARED_MEMORY

CLEAN = b"clean"


@contextmanager
def cleaned_up_after(folder: Path) -> Iterator[Path]:
    """`folder`, in which each run has a folder of its name. What they hold in shared memory, and what else lies there under
    a name that begins with the folder's, goes when the context or the process ends."""
    with subprocess.Popen(
        [sys.executable, "-m", "offbeat.benchmarks.harness.leftovers", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the benchmark
    ) as sweeper:
        assert sweeper.stdin is not None
        try:
            yield folder
        finally:
            sweep(folder)
            with suppress(BrokenPipeError):  # somebody has ended it
                sweeper.stdin.write(CLEAN)
                sweeper.stdin.flush()


def sweep(folder: Path) -> None:
    """Remove what the runs in `folder` hold in shared memory."""
    from offbeat.services.weights.config import WeightsConfig
    from offbeat.services.weights.transports.factory import cleanup

    for run in folder.iterdir():
        cleanup(run.name, WeightsConfig(), run)
    for file in SHARED_MEMORY.glob(f"{folder.name}-*"):
        file.unlink(missing_ok=True)


def main(folder: Path) -> None:
    """Wait for the end of the benchmark, and sweep unless it says that it has."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.buffer.read() != CLEAN and folder.exists():
        sweep(folder)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
