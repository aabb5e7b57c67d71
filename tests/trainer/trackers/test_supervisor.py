"""A tracker by class path, in a process of its own: it hears all, and whatever it does, nobody waits for it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from offbeat.services.telemetry import MetricRecord
from offbeat.trainer.trackers.supervisor import TrackerProcess, TrackerProcesses
from offbeat.trainer.trackers.worker import Order
from tests.paths import ROOT
from tests.trainer.trackers.test_delivery import append, step
from tests.waiting import wait_until_sync

pytestmark = pytest.mark.slow

NOTEBOOK = "tests.trainer.trackers.notebook:Notebook"
KEPT = "trackers/tests.trainer.trackers.notebook.Notebook.json"


class Sink:
    def __init__(self) -> None:
        self.records: list[MetricRecord] = []

    def append(self, record: MetricRecord) -> None:
        self.records.append(record)

    def sum(self, name: str) -> float:
        return sum(record.values[name].total for record in self.records if name in record.values)


def order(folder: Path, **told: Any) -> Order:
    kwargs = {"path": str(folder / "notes"), **told}
    return Order(NOTEBOOK, kwargs, "run", str(folder), "monday", False, 0, {"max_steps": 6})


def notes(folder: Path, what: str) -> list[Any]:
    path = folder / "notes"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row[what] for row in rows if what in row]


@contextmanager
def tracked(order: Order) -> Iterator[tuple[TrackerProcess, list[str], Sink]]:
    said: list[str] = []
    sink = Sink()
    process = TrackerProcess(order, said.append, sink, first_retry_s=0.05)
    process.start()
    try:
        yield process, said, sink
    finally:
        process.end("died")
        if not process.wait(time.monotonic() + 20.0):
            process.kill()


def test_a_class_of_the_user_s_hears_the_configuration_every_row_and_how_the_learner_ended(tmp_path: Path):
    said: list[str] = []
    append(tmp_path, step(1))
    with TrackerProcesses([order(tmp_path)], said.append, Sink()) as trackers:
        wait_until_sync(lambda: notes(tmp_path, "step") == [1])
        append(tmp_path, step(2))
        wait_until_sync(lambda: notes(tmp_path, "step") == [1, 2])
        append(tmp_path, step(3))
        trackers.ending = "finished"
    assert notes(tmp_path, "step") == [1, 2, 3]
    assert notes(tmp_path, "config") == [{"max_steps": 6}]
    assert notes(tmp_path, "closed") == ["finished"]
    assert said == []
    assert json.loads((tmp_path / KEPT).read_text())["place"] == str(tmp_path / "notes")


def test_a_killed_learner_s_tracker_sends_the_rest_and_the_next_one_goes_on_with_the_same_run(tmp_path: Path):
    append(tmp_path, step(1), step(2))
    command = [
        sys.executable,
        "-m",
        "tests.trainer.trackers.stand_in",
        json.dumps(json.loads(order(tmp_path).encode())),
    ]
    learner = subprocess.Popen(command, cwd=ROOT)
    wait_until_sync(lambda: notes(tmp_path, "step") == [1, 2])
    append(tmp_path, step(3))
    learner.kill()
    learner.wait()
    with tracked(order(tmp_path)):  # at once: it waits for the other one
        append(tmp_path, step(2), step(3), step(4))
        wait_until_sync(lambda: 4 in notes(tmp_path, "step"))
    assert notes(tmp_path, "step") == [1, 2, 3, 4]
    assert notes(tmp_path, "closed") == ["died", "died"]
    assert notes(tmp_path, "resumed") == [False, True]
    assert len(set(notes(tmp_path, "opened"))) == 1


def test_a_tracker_that_is_down_is_told_of_once_counted_and_gets_everything_later(tmp_path: Path):
    gate = tmp_path / "down"
    gate.touch()
    append(tmp_path, *map(step, range(1, 5)))
    with tracked(order(tmp_path, down_while=str(gate))) as (_, said, sink):
        failures = "tests.trainer.trackers.notebook.Notebook/failures"
        wait_until_sync(lambda: sink.sum(failures) >= 2)
        gate.unlink()
        wait_until_sync(lambda: notes(tmp_path, "step") == [1, 2, 3, 4])
        wait_until_sync(lambda: len(said) == 2)
    assert "training goes on without it: ConnectionError: nobody answers" in said[0]
    assert "takes metrics again" in said[1]


def test_a_row_that_it_refuses_is_counted(tmp_path: Path):
    append(tmp_path, step(1))
    with tracked(order(tmp_path, refuses="eval/sampled/success")) as (_, said, sink):
        append(tmp_path, MetricRecord("eval", step(1).values | {"success": step(1).values["reward"]}, step=1), step(2))
        wait_until_sync(lambda: sink.sum("tests.trainer.trackers.notebook.Notebook/refused") == 1)
    assert notes(tmp_path, "step") == [1, 2]
    assert said == []


def test_a_tracker_that_dies_is_started_again(tmp_path: Path):
    with tracked(order(tmp_path)) as (process, said, _):
        wait_until_sync(lambda: len(notes(tmp_path, "opened")) == 1)
        assert process.pid is not None
        os.kill(process.pid, 9)
        append(tmp_path, step(1))
        wait_until_sync(lambda: notes(tmp_path, "step") == [1])
        wait_until_sync(lambda: len(said) == 2)
    assert "its process ended (-9)" in said[0]


def test_one_that_never_comes_back_is_not_waited_for_and_what_it_has_not_taken_is_kept(tmp_path: Path):
    append(tmp_path, step(1), step(2), step(3))
    with tracked(order(tmp_path, hangs_at=2)) as (process, said, _):
        wait_until_sync(lambda: notes(tmp_path, "step") == [1])
        process.end("finished")
        assert not process.wait(time.monotonic() + 0.2)
        process.kill()
        assert process.wait(time.monotonic() + 20.0)
    assert "has not taken the last metrics" in said[0]
    with tracked(order(tmp_path)):
        wait_until_sync(lambda: notes(tmp_path, "step")[-1:] == [3])
    assert notes(tmp_path, "closed") == ["died"]


def test_one_that_can_t_be_started_is_tried_again(tmp_path: Path):
    (tmp_path / "logs").write_text("in the way")
    append(tmp_path, step(1))
    with tracked(order(tmp_path)) as (_, said, _sink):
        wait_until_sync(lambda: len(said) == 1)
        (tmp_path / "logs").unlink()
        wait_until_sync(lambda: notes(tmp_path, "step") == [1])
    assert "no process: " in said[0]
