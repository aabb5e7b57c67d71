"""Starts of `offbeat train` whose processes are killed, or that are interrupted."""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from offbeat.deploy.cli.audit import examine
from offbeat.deploy.run_folder import newest_checkpoint
from tests.integration.mesh import HF_INFER, TrainProcess, left_behind

pytestmark = [pytest.mark.alone, pytest.mark.timeout(600)]

Start = Callable[..., TrainProcess]
MARK = "OFFBEAT_TEST"


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setenv(MARK, str(tmp_path))
    started: list[TrainProcess] = []

    def run(name: str = "run") -> TrainProcess:
        started.append(TrainProcess(tmp_path / name, HF_INFER))
        return started[-1]

    yield run
    for process in started:
        process.close()


def living(folder: Path) -> list[str]:
    """Command lines of the processes that a start in `folder` has left; redis-server writes over its environment."""
    found: list[str] = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get(MARK) == str(folder) or folder in Path(process.cwd()).parents
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


@pytest.mark.nightly
def test_every_part_may_die_from_the_first_second_on(start: Start):
    """One start in which Redis dies three times, Ray's head, learner, control replica and engine once, and a run whose GCS
    dies."""
    train = start()
    train.kill("redis-server")
    train.kill("raylet/raylet")
    train.kill("redis-server")
    train.kill("offbeat.trainer.cli")
    train.kill("ServeReplica:control", timeout_s=120)
    train.kill("redis-server")
    train.kill("ServeReplica:generation", timeout_s=120)
    train.wait_for_step(2)
    train.kill("gcs_server")
    assert train.wait() == 0, train.output
    assert "Ray's raylet was killed: starting Ray again." in train.output
    assert "Ray's gcs_server was killed: starting Ray again." in train.output
    report = train.report()
    assert (report["steps"], report["groups_trained"]) == (12, 12 * 8)
    assert left_behind(train) == []
    found, _ = examine(train.output_dir)
    assert found.proven, found.findings


@pytest.mark.parametrize("phase", ["redis-server", "raylet/raylet", "ServeReplica:control"])
def test_ctrl_c_in_each_phase_of_the_start_leaves_nothing(start: Start, tmp_path: Path, phase: str):
    train = start()
    wait_for(train, phase)
    train.process.send_signal(signal.SIGINT)
    asked = time.monotonic()
    assert train.wait(30) == 130, train.output
    assert time.monotonic() - asked < 12
    saved = newest_checkpoint(train.output_dir)  # the learner may have saved step 0 before the control service is there
    assert ("Stopped before the first checkpoint." in train.output) == (saved is None), train.output
    assert ("Resume with" in train.output) == (saved is not None), train.output
    assert "Traceback" not in train.output
    assert living(tmp_path) == []
    assert left_behind(train) == []
    assert list(Path("/tmp").glob(f"offbeat-{train.process.pid}-*")) == []


def wait_for(train: TrainProcess, mark: str, timeout_s: float = 120.0) -> None:
    """Return once a process of the run has `mark` in its command line."""
    deadline = time.monotonic() + timeout_s
    while train.find(mark) is None:
        assert time.monotonic() < deadline, train.output
        time.sleep(0.05)
