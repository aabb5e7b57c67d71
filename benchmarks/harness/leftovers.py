"""`python -m offbeat.benchmarks.harness.leftovers FOLDER`: cleanup, even after SIGKILL."""

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
def clean_up_on_exit(folder: Path) -> Iterator[Path]:
    """Yield `folder` (a subfolder per run); at the end, remove it and shared memory of the runs or with its name as
    prefix.
    """
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
    """Remove the runs' shared memory."""
    from offbeat.services.weights.config import WeightsConfig
    from offbeat.services.weights.transports.factory import cleanup

    for run in folder.iterdir():
        cleanup(run.name, WeightsConfig(), run)
    for file in SHARED_MEMORY.glob(f"{folder.name}-*"):
        file.unlink(missing_ok=True)


def main(folder: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.buffer.read() != CLEAN and folder.exists():
        sweep(folder)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
