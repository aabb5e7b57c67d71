"""A tracker given by class path, in its own process: it receives every row, and the learner never waits for it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from offbeat.services.telemetry import MetricRecord
from offbeat.trainer.trackers.supervisor import TrackerProcess, TrackerProcesses
from offbeat.trainer.trackers.worker import StartMessage
from tests.paths import ROOT
from tests.trainer.trackers.test_delivery import append, step
from tests.waiting import wait_until_sync

pytestmark = pytest.mark.slow

NOTEBOOK = "tests.trainer.trackers.notebook:Notebook"
PROGRESS_FILE = "trackers/tests.trainer.trackers.notebook.Notebook.json"


class Sink:
    def __init__(self) -> None:
        self.records: list[MetricRecord] = []

    def append(self, record: MetricRecord, once: str = "") -> None:
        del once
        self.records.append(record)

    def sum(self, name: str) -> float:
        return sum(record.values[name].total for record in self.records if name in record.values)


def order(folder: Path, **kwargs: Any) -> StartMessage:
    kwargs = {"path": str(folder / "notes"), **kwargs}
    return StartMessage(NOTEBOOK, kwargs, "run", str(folder), "monday", False, 0, {"max_steps": 6})


def notes(folder: Path, key: str) -> list[Any]:
    path = folder / "notes"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row[key] for row in rows if key in row]


@contextmanager
def tracked(order: StartMessage) -> Iterator[tuple[TrackerProcess, list[str], Sink]]:
    messages: list[str] = []
    sink = Sink()
    process = TrackerProcess(order, messages.append, sink, first_retry_s=0.05)
    process.start()
    try:
        yield process, messages, sink
    finally:
        process.end("died")
        if not process.wait(time.monotonic() + 60.0):
            process.kill()


def test_user_class_receives_config_rows_and_ending(tmp_path: Path):
    messages: list[str] = []
    append(tmp_path, step(1))
    with TrackerProcesses([order(tmp_path)], messages.append, Sink()) as trackers:
        wait_until_sync(lambda: notes(tmp_path, "step") == [1])
        append(tmp_path, step(2))
        wait_until_sync(lambda: notes(tmp_path, "step") == [1, 2])
        append(tmp_path, step(3))
        trackers.ending = "finished"
    assert notes(tmp_path, "step") == [1, 2, 3]
    assert notes(tmp_path, "config") == [{"max_steps": 6}]
    assert notes(tmp_path, "closed") == ["finished"]
    assert messages == []
    assert json.loads((tmp_path / PROGRESS_FILE).read_text())["place"] == str(tmp_path / "notes")


def test_tracker_of_killed_learner_sends_rest_and_next_resumes_run(tmp_path: Path):
    append(tmp_path, step(1), step(2))
    command = [
        sys.executable,
        "-m",
        "tests.trainer.trackers.stand_in",
        json.dumps(asdict(order(tmp_path))),
    ]
    learner = subprocess.Popen(command, cwd=ROOT)
    wait_until_sync(lambda: notes(tmp_path, "step") == [1, 2])
    append(tmp_path, step(3))
    learner.kill()
    learner.wait()
    with tracked(order(tmp_path)):  # started at once: it waits for the other process
        append(tmp_path, step(2), step(3), step(4))
        wait_until_sync(lambda: 4 in notes(tmp_path, "step"))
    assert notes(tmp_path, "step") == [1, 2, 3, 4]
    assert notes(tmp_path, "closed") == ["died", "died"]
    assert notes(tmp_path, "resumed") == [False, True]
    assert len(set(notes(tmp_path, "opened"))) == 1


def test_down_tracker_is_reported_once_and_catches_up(tmp_path: Path):
    gate = tmp_path / "down"
    gate.touch()
    append(tmp_path, *map(step, range(1, 5)))
    with tracked(order(tmp_path, down_while=str(gate))) as (_, messages, sink):
        failures = "tests.trainer.trackers.notebook.Notebook/failures"
        wait_until_sync(lambda: sink.sum(failures) >= 2)
        gate.unlink()
        wait_until_sync(lambda: notes(tmp_path, "step") == [1, 2, 3, 4])
        wait_until_sync(lambda: len(messages) == 2)
    assert "training continues without it: ConnectionError: connection refused" in messages[0]
    assert "accepts metrics again" in messages[1]


def test_refused_row_is_counted(tmp_path: Path):
    append(tmp_path, step(1))
    with tracked(order(tmp_path, refuses="eval/sampled/success")) as (_, messages, sink):
        append(tmp_path, MetricRecord("eval", step(1).values | {"success": step(1).values["reward"]}, step=1), step(2))
        wait_until_sync(lambda: sink.sum("tests.trainer.trackers.notebook.Notebook/refused") == 1)
    assert notes(tmp_path, "step") == [1, 2]
    assert messages == []


def test_dead_tracker_is_restarted(tmp_path: Path):
    with tracked(order(tmp_path)) as (process, messages, _):
        wait_until_sync(lambda: len(notes(tmp_path, "opened")) == 1)
        assert process.pid is not None
        os.kill(process.pid, 9)
        append(tmp_path, step(1))
        wait_until_sync(lambda: notes(tmp_path, "step") == [1])
        wait_until_sync(lambda: len(messages) == 2)
    assert "its process exited with code -9" in messages[0]


def test_hanging_tracker_is_killed_and_resumes_later(tmp_path: Path):
    append(tmp_path, step(1), step(2), step(3))
    with tracked(order(tmp_path, hangs_at=2)) as (process, messages, _):
        wait_until_sync(lambda: notes(tmp_path, "step") == [1])
        process.end("finished")
        assert not process.wait(time.monotonic() + 0.2)
        process.kill()
        assert process.wait(time.monotonic() + 60.0)
    assert "did not accept the last metrics" in messages[0]
    with tracked(order(tmp_path)):
        wait_until_sync(lambda: notes(tmp_path, "step")[-1:] == [3])
    assert notes(tmp_path, "closed") == ["died"]


def test_tracker_start_is_retried(tmp_path: Path):
    (tmp_path / "logs").write_text("in the way")
    append(tmp_path, step(1))
    with tracked(order(tmp_path)) as (_, messages, _sink):
        wait_until_sync(lambda: len(messages) == 1)
        (tmp_path / "logs").unlink()
        wait_until_sync(lambda: notes(tmp_path, "step") == [1])
    assert "cannot start its process: " in messages[0]
