"""A run that is resumed reads the metrics that are newer than its saved history."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from offbeat.deploy.report.history import RunHistory
from offbeat.deploy.report.saved_history import HISTORY_FILE, count_unread_bytes, read_history_file, save_history
from offbeat.services.telemetry import MetricRecord, Partial, mean
from offbeat.services.text_samples import TextSample
from offbeat.trainer.trackers.metrics_file import METRICS_FILE, MetricsFile

SAMPLE = TextSample(3, 2, "lake", 1.0, "Go.", ("right",), ("right",))


def make_record(i: int) -> MetricRecord:
    match i % 4:
        case 0:
            values = {"reward": mean([i / 10, 1.0]), "tokens_trained": Partial("sum", 100.0)}
            return MetricRecord("learner", values, i // 4 + 1, time=float(i), samples=(SAMPLE,) if i % 8 == 0 else ())
        case 1:
            values = {"success": mean([0.5]), "reward": mean([0.5] * 4)}
            return MetricRecord("eval", values, i // 4, {"when": "during", "sampling": "greedy"}, float(i))
        case 2:
            values = {"began" if i % 12 == 2 else "lag": Partial("last" if i % 12 == 2 else "max", float(i))}
            return MetricRecord("command" if i % 12 == 2 else "weights", values, time=float(i))
        case _:
            values = {"tokens": Partial("sum", float(i)), "pause_max_s": Partial("max", i / 7)}
            return MetricRecord("generation", values, labels={"replica": "a"}, time=float(i))


def write(folder: Path, numbers: range) -> None:
    file = MetricsFile(folder / METRICS_FILE)
    for i in numbers:
        file.write(f"{i + 1}-0", make_record(i))
    file.flush()
    file.close()


def read(folder: Path) -> RunHistory:
    history = RunHistory()
    read_history_file(folder, history)
    return history


def contents(history: RunHistory) -> dict[str, object]:
    """What a history says, without samples, which a file's reader leaves out."""
    kept = {each.name: getattr(history, each.name) for each in fields(history) if each.name not in ("steps", "samples")}
    return {**kept, "steps": [repr(each) for each in history.steps.newest()]}


def test_a_saved_history_and_newer_metrics_are_the_whole(tmp_path: Path) -> None:
    write(tmp_path, range(800))
    save_history(tmp_path, read(tmp_path))
    assert count_unread_bytes(tmp_path) == 0
    write(tmp_path, range(800, 1000))
    assert count_unread_bytes(tmp_path) > 0
    resumed = read(tmp_path)
    (tmp_path / HISTORY_FILE).unlink()
    assert repr(contents(resumed)) == repr(contents(read(tmp_path)))
    assert resumed.position == "1000-0"


def test_what_is_saved_is_not_read_again(tmp_path: Path) -> None:
    write(tmp_path, range(4000))
    history = read(tmp_path)
    save_history(tmp_path, history)
    path = tmp_path / METRICS_FILE
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(b"?" * (len(line) - 1) + b"\n" for line in lines[:-1]) + lines[-1])
    assert repr(contents(read(tmp_path))) == repr(contents(history))


def test_records_that_reach_the_file_late_are_counted_once(tmp_path: Path) -> None:
    """`offbeat train` has them from Redis before the learner has written them."""
    write(tmp_path, range(100))
    history = read(tmp_path)
    history.add((f"{i + 1}-0", make_record(i)) for i in range(100, 120))
    save_history(tmp_path, history)
    write(tmp_path, range(100, 150))
    resumed = read(tmp_path)
    assert resumed.samples == (SAMPLE,)
    (tmp_path / HISTORY_FILE).unlink()
    assert repr(contents(resumed)) == repr(contents(read(tmp_path)))


@pytest.mark.parametrize("damage", ["another run", "shorter", "no history"])
def test_a_history_of_other_metrics_is_not_used(tmp_path: Path, damage: str) -> None:
    write(tmp_path, range(200))
    save_history(tmp_path, read(tmp_path))
    path = tmp_path / METRICS_FILE
    match damage:
        case "another run":
            path.unlink()
            write(tmp_path, range(3, 230))
        case "shorter":
            path.write_bytes(path.read_bytes()[:3000])
        case _:
            (tmp_path / HISTORY_FILE).write_bytes(b"\x81\xa1")
    resumed = read(tmp_path)
    (tmp_path / HISTORY_FILE).unlink()
    assert repr(contents(resumed)) == repr(contents(read(tmp_path)))


def test_a_run_without_metrics_has_nothing_to_save(tmp_path: Path) -> None:
    save_history(tmp_path, read(tmp_path))
    assert not (tmp_path / HISTORY_FILE).exists()
    assert count_unread_bytes(tmp_path) == 0


def test_half_of_a_surrogate_pair_in_a_sample_leaves_the_earlier_history(tmp_path: Path) -> None:
    """`offbeat train` saves while it watches the run, which must go on."""
    write(tmp_path, range(100))
    history = read(tmp_path)
    save_history(tmp_path, history)
    earlier = (tmp_path / HISTORY_FILE).read_bytes()
    history.samples = (replace(SAMPLE, actions=("\ud800",)),)
    save_history(tmp_path, history)
    assert (tmp_path / HISTORY_FILE).read_bytes() == earlier
