"""Each tracker against its real package, offline: a resumed learner continues one run, with each step once."""

import json
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offbeat.services.telemetry import MetricRecord, mean
from offbeat.services.text_samples import TextSample, to_columns, to_text
from offbeat.trainer.trackers import supervisor, worker
from offbeat.trainer.trackers.base import Ending, Row, TrackedRun
from offbeat.trainer.trackers.mlflow import MLflow
from offbeat.trainer.trackers.supervisor import TrackerProcesses
from offbeat.trainer.trackers.worker import StartMessage
from tests.fakes import ListSink
from tests.trainer.trackers.test_delivery import (
    GAUGE,
    append,
    evaluation,
    step,
)
from tests.waiting import wait_until_sync

pytestmark = pytest.mark.slow
CONFIG = {"max_steps": 6, "actor_train": {"training_args": {"learning_rate": 0.001}}}
SAMPLES = (
    TextSample(2, 1, "Lake", 0.0, "<b>[red]S F\x1b[2J", ("<answer>Left</answer>", "Up"), ("Left", "Up")),
    TextSample(2, 0, "Lake", 1.0, "\u65e5\u672c \U0001f600", ("Down",), ("Down",)),
)
FIRST = (step(1, 0.25), evaluation(0), GAUGE, replace(step(2, 0.25), samples=SAMPLES), step(3, 0.25))
SECOND = (
    step(3, 9.0),
    step(4, 0.5),
    evaluation(2, "greedy"),
    MetricRecord("learner", {"odd @ %": mean([1.0])}, step=5),
)
STEPS = [(1, 0.25), (2, 0.25), (3, 0.25), (4, 0.5)]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the end of a package's process, which is the nicest, for as long as the process itself does."""
    for name in ("STOP_S", "FINISH_S"):
        monkeypatch.setattr(supervisor, name, 2 * worker.END_S)


def live(
    folder: Path, name: str, ending: Ending, *records: MetricRecord, changed: dict[str, Any], **kwargs: Any
) -> None:
    """Run one learner's tracker until it has sent everything."""
    append(folder, *records)
    kept = folder / "trackers" / f"{name}.json"
    size = (folder / "metrics.jsonl").stat().st_size
    sink, messages = ListSink(), list[str]()
    order = StartMessage(name, kwargs, "exp", str(folder), "monday", False, 0, CONFIG | changed)
    with TrackerProcesses([order], messages.append, sink) as trackers:
        wait_until_sync(
            lambda: bool(messages) or (kept.exists() and json.loads(kept.read_text())["offset"] == size), 240.0
        )
        trackers.ending = ending
    assert (messages, sink.records) == ([], [])


def two_lives(folder: Path, name: str, **kwargs: Any) -> dict[str, Any]:
    """Kill a learner after step 3, resume from step 2, and return the stored progress."""
    live(folder, name, "died", *FIRST, changed={}, **kwargs)
    live(folder, name, "finished", *SECOND, changed={"max_steps": 8}, **kwargs)
    return json.loads((folder / "trackers" / f"{name}.json").read_text())


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of an offline run: LevelDB's log format behind a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at < len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(whole)
            whole = b""


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    kept = two_lives(tmp_path, "wandb", mode="offline", project="agents")
    files = sorted(tmp_path.rglob("run-*.wandb"), key=lambda path: path.stat().st_mtime)
    records = [record for path in files for record in wandb_records(path)]
    runs = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert {(run.run_id, run.project, run.display_name) for run in runs} == {(kept["key"], "agents", "exp")}
    rows = [
        {(item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    assert [(row["step"], row["learner/reward"]) for row in rows if "learner/reward" in row] == STEPS
    assert [(row["step"], row["eval/greedy/success"]) for row in rows if "eval/greedy/success" in row] == [(2, 0.5)]
    assert [row["_step"] for row in rows] == [1, 2, 3, 4, 5, 7, 8, 9]
    [file] = [row["samples.path"] for row in rows if "samples.path" in row]
    [table] = [json.loads(path.read_text()) for path in tmp_path.rglob(Path(file).name)]
    assert dict(zip(table["columns"], map(list, zip(*table["data"], strict=True)), strict=True)) == to_columns(SAMPLES)
    config = {
        (item.key or item.nested_key[0]): json.loads(item.value_json)
        for record in records
        if record.WhichOneof("record_type") == "config"
        for item in record.config.update
    }
    assert (config["max_steps"], config["actor_train"]) == (8, CONFIG["actor_train"])


def test_mlflow_takes_samples_of_any_number_of_steps_and_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tracker = MLflow(TrackedRun("exp", "key", False, 0, tmp_path, {}))
    for number in range(1, 171):
        tracker.write(Row(number, number, 0.0, {}, SAMPLES))
    tracker.write(Row(171, 170, 0.0, {}, SAMPLES))
    paths = list((tmp_path / "artifacts").rglob("*.json"))
    assert len(paths) == 170
    assert {len(json.loads(path.read_text())["data"]) for path in paths} == {2}


def test_mlflow_on_sqlite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import mlflow

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    kept = two_lives(tmp_path, "mlflow", tags={"team": "a"})
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/trackers/mlflow/mlflow.db")
    [run] = client.search_runs([client.get_experiment_by_name("offbeat").experiment_id])
    history = client.get_metric_history(run.info.run_id, "learner/reward")
    assert sorted((each.step, each.value) for each in history) == STEPS
    assert client.get_metric_history(run.info.run_id, "eval/sampled/success")[0].step == 0
    assert [file.path for file in client.list_artifacts(run.info.run_id, "samples")] == ["samples/step-2.json"]
    table = json.loads(
        Path(client.download_artifacts(run.info.run_id, "samples/step-2.json", str(tmp_path))).read_text()
    )
    assert dict(zip(table["columns"], map(list, zip(*table["data"], strict=True)), strict=True)) == to_columns(SAMPLES)
    assert client.get_metric_history(run.info.run_id, "learner/odd _ _")[0].value == 1.0
    assert (run.info.run_name, run.info.status) == ("exp", "FINISHED")
    assert run.data.params["actor_train.training_args.learning_rate"] == "0.001"
    assert (run.data.params["max_steps"], run.data.tags["resumed.max_steps"]) == ("6", "8")
    assert (run.data.tags["team"], run.data.tags["offbeat.key"]) == ("a", kept["key"])


def test_swanlab_offline(tmp_path: Path):
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    kept = two_lives(tmp_path, "swanlab", mode="offline", project="agents")
    folders = sorted((tmp_path / "trackers" / "swanlab").glob("run-*"))
    assert [folder.name.endswith(kept["key"]) for folder in folders] == [True, True]
    found: list[tuple[int, float]] = []
    media: list[tuple[str, int]] = []
    for folder in folders:
        [path] = folder.glob("*.swanlab")
        reader = DataStoreReader()
        reader.open(path)
        for blob in reader:
            record = Record.FromString(blob)
            media += [(record.media.key, record.media.step)] if record.HasField("media") else []
            scalar = record.scalar
            if scalar.key == "learner/reward":
                found.append((scalar.step, scalar.value.number))
        reader.close()
    assert found == STEPS
    assert media == [("samples/0", 2), ("samples/1", 2)]
    texts = [path.read_text() for path in (tmp_path / "trackers" / "swanlab").rglob("*.txt")]
    assert {to_text(sample) for sample in SAMPLES} <= set(texts)


def test_trackio_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    kept = two_lives(tmp_path, "trackio", project="agents")
    import sqlite3

    [database] = (tmp_path / "trackio").glob("agents*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    assert {name for name, _, _ in rows} == {f"exp-{kept['key'][:6]}"}
    logged = [(at, json.loads(metrics)) for _, at, metrics in rows]
    assert [(at, values["learner/reward"]) for at, values in logged if "learner/reward" in values] == STEPS
    assert [at for at, values in logged if "eval/greedy/success" in values] == [2]
    [(at, table)] = [(at, values["samples"]) for at, values in logged if "samples" in values]
    assert at == 2
    columns = to_columns(SAMPLES)
    assert {name: [row[name] for row in table["_value"]] for name in columns} == columns
