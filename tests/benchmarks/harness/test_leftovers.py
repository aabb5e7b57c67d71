"""However a benchmark ends, nothing of it is left."""

import os
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import pytest

from offbeat.benchmarks.harness.environment import bench_environment
from offbeat.services.weights.config import WeightsConfig
from offbeat.services.weights.transports.base import write_bytes
from offbeat.services.weights.transports.factory import make_transport
from tests.paths import ROOT
from tests.processes import has_ended
from tests.waiting import wait_until_sync

pytestmark = pytest.mark.slow

BENCHMARK = """
    import os, sys
    from offbeat.benchmarks.harness.environment import bench_environment
    from offbeat.deploy.local.signals import raise_interrupt_on_signals
    from tests.benchmarks.harness.test_leftovers import put

    raise_interrupt_on_signals()
    with bench_environment() as base:
        put(base.folder)
        print(base.folder, base.server_pid, flush=True)
        sys.stdin.read()
        os._exit(1)
"""


def put(folder: Path) -> None:
    """A run's version, and a file that is no run's."""
    run = folder / "bench-x"
    run.mkdir()
    transport = make_transport(WeightsConfig(), run.name, run)
    transport.store(0, 1, ".safetensors", lambda path: write_bytes(path, b"weights"))
    Path("/dev/shm", f"{folder.name}-copy").write_bytes(b"copy")
    assert len(left_by(folder)) == 2


def left_by(folder: Path) -> list[str]:
    """Names in shared memory."""
    files = make_transport(WeightsConfig(), "bench-x", folder / "bench-x").stored()
    return [*(Path(file.location).name for file in files), *(p.name for p in Path("/dev/shm").glob(f"{folder.name}-*"))]


def test_a_benchmark_that_ends_by_itself_or_by_an_error_leaves_nothing():
    with bench_environment() as base:
        put(base.folder)
    assert (left_by(base.folder), base.folder.exists()) == ([], False)
    with suppress(ZeroDivisionError), bench_environment() as base:
        put(base.folder)
        raise ZeroDivisionError
    assert (left_by(base.folder), base.folder.exists()) == ([], False)
    assert has_ended(base.server_pid)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, "exit"])
def test_a_benchmark_that_is_ended_leaves_nothing(end: signal.Signals | str):
    bench = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(BENCHMARK)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert bench.stdin is not None
    assert bench.stdout is not None
    try:
        name, server = bench.stdout.readline().split()
        if isinstance(end, signal.Signals):
            os.kill(bench.pid, end)
        bench.stdin.close()
        bench.wait(60)
    finally:
        bench.kill()
        bench.stdout.close()
    folder = Path(name)
    wait_until_sync(lambda: not (left_by(folder) or folder.exists()) and has_ended(int(server)))
