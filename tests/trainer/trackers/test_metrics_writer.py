"""Metric records are written exactly once, across learner restarts."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from offbeat.services import telemetry
from offbeat.services.buffer.learner_client import RedisLearnerBuffer
from offbeat.services.jsonl import LinesFile
from offbeat.services.keys import RunKeys
from offbeat.services.telemetry import (
    MetricRecord,
    Partial,
    RedisMetrics,
    mean,
)
from offbeat.services.text_samples import TextSample
from offbeat.trainer.learner.step_ledger import StepLedger
from offbeat.trainer.trackers import metrics_writer
from offbeat.trainer.trackers.base import LoggedSteps
from offbeat.trainer.trackers.metrics_file import MetricsFile, read_records
from offbeat.trainer.trackers.metrics_writer import MetricsWriter
from tests.memory import measure_memory
from tests.services.buffer.buffer_play import next_epoch
from tests.waiting import wait_until_sync


def record(step: int, value: float) -> MetricRecord:
    return MetricRecord("learner", {"reward": mean([value])}, step=step)


def rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def open_files() -> list[str]:
    """Return the targets of this process's descriptors."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return [os.readlink(link) for link in links if os.path.islink(link)]


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """Return the steps and values of a tag, none before its first row is written."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    if tag not in accumulator.Tags()["scalars"]:
        return []
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def test_records_reach_metrics_file_and_tensorboard(redis_url: str, tmp_path: Path) -> None:
    with Redis.from_url(redis_url) as redis:
        sink = RedisMetrics(redis, "run")
        with MetricsWriter(redis, "run", tmp_path, ["tensorboard"], 0):
            sink.append(record(1, 0.25))
            wait_until_sync(lambda: len(rows(tmp_path)) == 1)
            sink.append(MetricRecord("eval", {"success": mean([0.5])}, step=1, labels={"sampling": "greedy"}))
            sink.append(MetricRecord("learner", {"loss": Partial("last", float("nan"))}, step=2))
        assert [row["values"] for row in rows(tmp_path)] == [{"reward": 0.25}, {"success": 0.5}, {"loss": None}]
    assert scalars(tmp_path, "learner/reward") == [(1, 0.25)]
    assert scalars(tmp_path, "eval/greedy/success") == [(1, 0.5)]


@pytest.mark.parametrize("resumed_step", [0, 1])
def test_resume_continues_after_last_record_and_purges_repeated_steps(
    redis_url: str, tmp_path: Path, resumed_step: int
) -> None:
    with Redis.from_url(redis_url) as redis:
        sink = RedisMetrics(redis, "run")
        with MetricsWriter(redis, "run", tmp_path, ["tensorboard"], 0):
            for step in (1, 2, 3):
                sink.append(record(step, 0.0))
        repeated = range(resumed_step + 1, 4)
        with MetricsWriter(redis, "run", tmp_path, ["tensorboard"], resumed_step):
            for step in repeated:
                sink.append(record(step, 1.0))
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, *repeated]
    assert scalars(tmp_path, "learner/reward") == [(step, float(step > resumed_step)) for step in (1, 2, 3)]


def test_truncated_last_line_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write("1-0", record(1, 0.0))
    file.write("2-0", record(2, 0.0))
    file.close()
    path.write_bytes(path.read_bytes()[:-5])
    again = MetricsFile(path)
    assert again.position == "1-0"
    again.close()
    assert len(path.read_text().splitlines()) == 1


def test_a_learner_that_wakes_after_its_replacement_repeats_no_record_for_readers(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    records = {number: record(number, 0.0) for number in (1, 2, 3)}
    stopped = MetricsFile(path)
    stopped.write("1-0", records[1])
    stopped.flush()
    stopped.write("2-0", records[2])
    successor = MetricsFile(path)
    for number in (2, 3):
        successor.write(f"{number}-0", records[number])
    successor.flush()
    stopped.flush()
    assert [row["step"] for row in read_records(path)] == [1, 2, 3]
    assert MetricsFile(path).position == "3-0"


def test_a_long_file_is_read_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with path.open("w") as file:
        file.writelines(f'{{"id": "{number}-0", "source": "rollout"}}\n' for number in range(1, 100_001))
    assert sum(1 for _ in read_records(path)) == 100_000
    assert measure_memory(lambda: sum(1 for _ in read_records(path)))[1] < 4_000_000


def test_a_malformed_record_is_left_out_alone(redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Redis.from_url(redis_url) as redis:
        for step in (1, 2, 3):
            RedisMetrics(redis, "run").append(record(step, 0.25))
            redis.xadd(RunKeys("run").metrics, {"r": b"no record"})
        with MetricsWriter(redis, "run", tmp_path, ["tensorboard"], 0):
            wait_until_sync(lambda: len(rows(tmp_path)) == 3)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3]
    assert caplog.text.count("malformed metric record") == 1


def test_records_stay_in_the_stream_while_the_file_is_unwritable(
    redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    in_the_way = tmp_path / "metrics.jsonl"
    in_the_way.mkdir()
    with Redis.from_url(redis_url) as redis, MetricsWriter(redis, "run", tmp_path, ["tensorboard"], 0):
        RedisMetrics(redis, "run").append(record(1, 0.25))
        wait_until_sync(lambda: "cannot write metrics" in caplog.text)
        in_the_way.rmdir()
        wait_until_sync(lambda: len(rows(tmp_path)) == 1)
    assert scalars(tmp_path, "learner/reward") == [(1, 0.25)]


@pytest.mark.parametrize("ends", [False, True])
def test_tensorboard_gets_the_rows_of_a_time_when_it_could_not_be_written(
    redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, ends: bool
) -> None:
    """At the next try, or at the end of the run; `metrics.jsonl` goes on meanwhile."""
    in_the_way = tmp_path / "tensorboard"
    in_the_way.write_text("a file")
    with Redis.from_url(redis_url) as redis, MetricsWriter(redis, "run", tmp_path, ["tensorboard"], 0):
        sink = RedisMetrics(redis, "run")
        for step in (1, 2, 3):
            sink.append(record(step, 0.25))
            wait_until_sync(lambda step=step: len(rows(tmp_path)) == step)
        wait_until_sync(lambda: "tensorboard can't be written" in caplog.text)
        in_the_way.unlink()
        if not ends:
            wait_until_sync(lambda: in_the_way.is_dir() and len(scalars(tmp_path, "learner/reward")) == 3)
            sink.append(record(4, 0.25))
    assert scalars(tmp_path, "learner/reward") == [(step, 0.25) for step in ((1, 2, 3) if ends else (1, 2, 3, 4))]


def test_any_error_of_a_tracker_keeps_no_row_from_the_file(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorFlow's writer has errors of its own."""
    from tensorboard.summary.writer import event_file_writer

    open_writer = event_file_writer.EventFileWriter
    failed: list[int] = []

    def fail_first(folder: str) -> Any:
        failed.append(1)
        if len(failed) == 1:
            raise RuntimeError("ResourceExhaustedError")
        return open_writer(folder)

    monkeypatch.setattr(event_file_writer, "EventFileWriter", fail_first)
    with Redis.from_url(redis_url) as redis, MetricsWriter(redis, "run", tmp_path, ["tensorboard"], 0):
        sink = RedisMetrics(redis, "run")
        sink.append(record(1, 0.25))
        wait_until_sync(lambda: bool(failed))
        sink.append(record(2, 0.25))
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]
    assert scalars(tmp_path, "learner/reward") == [(1, 0.25), (2, 0.25)]


def test_tensorboard_gets_each_row_of_a_write_that_was_cut_short(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_cut: list[bool] = []
    append = LinesFile.append

    def cut_first(lines: LinesFile, rows: Any) -> None:
        if is_cut:
            return append(lines, rows)
        is_cut.append(True)
        append(lines, rows[:1])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LinesFile, "append", cut_first)
    with Redis.from_url(redis_url) as redis:
        for step in (1, 2):
            RedisMetrics(redis, "run").append(record(step, 0.25))
        with MetricsWriter(redis, "run", tmp_path, ["tensorboard"], 0):
            wait_until_sync(lambda: len(rows(tmp_path)) == 2)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]
    assert scalars(tmp_path, "learner/reward") == [(1, 0.25), (2, 0.25)]


def test_retries_at_a_full_disk_double_nothing_and_leak_no_descriptor(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offbeat.trainer.trackers.metrics_writer.RETRY_S", 0.01)
    failures: list[int] = []
    append = LinesFile.append

    def fail_first(lines: LinesFile, rows: Any) -> None:
        if len(failures) < 21:
            failures.append(open_files().count(str(tmp_path / "metrics.jsonl")))
            raise OSError(28, "No space left on device")
        append(lines, rows)

    monkeypatch.setattr(LinesFile, "append", fail_first)
    with Redis.from_url(redis_url) as redis, MetricsWriter(redis, "run", tmp_path, ["tensorboard"], 0):
        RedisMetrics(redis, "run").append(record(1, 0.25))
        path = tmp_path / "metrics.jsonl"  # unread until the end, as its descriptors are counted
        wait_until_sync(lambda: path.exists() and path.stat().st_size > 0)
    assert set(failures) == {1}
    assert len(rows(tmp_path)) == 1
    assert scalars(tmp_path, "learner/reward") == [(1, 0.25)]


def test_stdout_gets_steps_and_evaluations_but_no_gauges(
    redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Redis.from_url(redis_url) as redis:
        sink = RedisMetrics(redis, "run")
        with MetricsWriter(redis, "run", tmp_path, ["stdout"], 0):
            sink.append(record(1, 0.25))
            sink.append(MetricRecord("generation", {"running": mean([3.0])}))
            sink.append(MetricRecord("eval", {"success": mean([0.5])}, step=1, labels={"sampling": "greedy"}))
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["step"], line["metrics"]) for line in printed] == [
        (1, {"learner/reward": 0.25}),
        (1, {"eval/greedy/success": 0.5}),
    ]


def test_tensorboard_log_dir_is_used(redis_url: str, tmp_path: Path) -> None:
    kwargs = {"tensorboard": {"log_dir": str(tmp_path / "elsewhere" / "tensorboard")}}
    with Redis.from_url(redis_url) as redis, MetricsWriter(redis, "run", tmp_path, ["tensorboard"], 0, kwargs):
        RedisMetrics(redis, "run").append(record(1, 0.25))
    assert scalars(tmp_path / "elsewhere", "learner/reward") == [(1, 0.25)]


SAMPLE = TextSample(4, 3, "Lake", 1.0, "# no heading\n<script>x</script>", ("Left",), ("Left",))


def test_tensorboard_gets_every_nth_step_and_its_samples_as_text(redis_url: str, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.context import RequestContext
    from tensorboard.plugins.base_plugin import TBContext
    from tensorboard.plugins.text.text_plugin import TextPlugin

    logged = LoggedSteps(4, 6)
    with (
        Redis.from_url(redis_url) as redis,
        MetricsWriter(redis, "run", tmp_path, ["tensorboard"], 0, logged=logged),
    ):
        for number in range(1, 7):
            samples = (SAMPLE,) if number == 4 else ()
            RedisMetrics(redis, "run").append(replace(record(number, 0.5), samples=samples))
        wait_until_sync(lambda: len(rows(tmp_path)) == 6)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert scalars(tmp_path, "learner/reward") == [(4, 0.5), (6, 0.5)]
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(tmp_path / "tensorboard"))
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, str(tmp_path))
    plugin: Any = TextPlugin(TBContext(logdir=str(tmp_path), data_provider=provider))
    [(run, tags)] = plugin.index_impl(RequestContext(), "x").items()
    assert tags == ["samples/0"]
    [shown] = plugin.text_impl(RequestContext(), run, "samples/0", "x", enable_markdown=True)
    assert shown["step"] == 4
    assert shown["text"].startswith("<pre><code>step 4, version 3, tag Lake, score 1\n")
    assert "# no heading\n" in shown["text"]
    assert "<script>" not in shown["text"]


def test_a_promoted_redis_whose_clock_is_behind_continues_the_file(redis_url: str, tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(f"{int(time.time() * 1000) + 60_000}-3", record(7, 0.0))
    file.close()
    with Redis.from_url(redis_url) as redis:
        learner = RedisLearnerBuffer(redis, "run", next_epoch(redis, "run"))
        ledger = StepLedger(tmp_path, learner.epoch)
        for _ in range(2):
            learner.reconcile(ledger.prove(0, 0, 0))
        ledger.close()
        with MetricsWriter(redis, "run", tmp_path, [], 0):
            RedisMetrics(redis, "run").append(record(8, 1.0))
    assert [row["step"] for row in read_records(tmp_path / "metrics.jsonl")] == [7, 8]


def lost(folder: Path) -> list[dict[str, float]]:
    return [row["values"] for row in rows(folder) if row["source"] == "trackers"]


def test_time_without_writers_is_not_lost(redis_url: str, tmp_path: Path) -> None:
    """A stopped run is resumed with another Redis: all of its records had been copied."""
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(f"{int(time.time() * 1000) - 86_400_000}-0", record(7, 0.0))
    file.close()
    with Redis.from_url(redis_url) as redis:
        RedisMetrics(redis, "run").append(record(8, 1.0))
        with MetricsWriter(redis, "run", tmp_path, [], 0):
            pass
    assert [row["step"] for row in rows(tmp_path)] == [7, 8]
    assert lost(tmp_path) == []


def test_records_that_redis_trimmed_uncopied_are_reported_once(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner was away for longer than the stream reaches back."""
    monkeypatch.setattr(telemetry, "MAX_METRIC_RECORDS", 30)
    monkeypatch.setattr(telemetry, "TRIMMED_AT_ONCE", 10)
    with Redis.from_url(redis_url) as redis:
        sink, key = RedisMetrics(redis, "run"), RunKeys("run").metrics
        with MetricsWriter(redis, "run", tmp_path, [], 0):
            sink.append(record(0, 0.25))
        at_s = int(rows(tmp_path)[0]["id"].partition("-")[0]) // 1000

        def write(seconds: range) -> None:
            for second in seconds:
                monkeypatch.setattr(telemetry, "_ENTRY", (f"{1000 * (at_s + second)}-0", "r"))
                sink.append(record(1, 0.25))

        write(range(1, 35))
        with MetricsWriter(redis, "run", tmp_path, [], 0):
            pass
        write(range(35, 45))
        with MetricsWriter(redis, "run", tmp_path, [], 0):
            pass
        assert redis.xlen(key) == 35, "ten are trimmed, which had been copied"
        assert len(rows(tmp_path)) == 45
        assert lost(tmp_path) == []
        write(range(100_000, 100_025))
        write(range(200_000, 200_045))
        assert redis.xlen(key) == 35
        monkeypatch.setattr(telemetry, "_ENTRY", (f"{1000 * (at_s + 300_000)}-0", "r"))
        for _ in range(2):
            with MetricsWriter(redis, "run", tmp_path, [], 0):
                pass
    assert lost(tmp_path) == [{"metrics_lost_s": 24.0 + 10.0}], "without the times between the stretches"
    assert len(rows(tmp_path)) == 45 + 35 + 1


def test_copied_records_leave_redis_and_others_do_not(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_writer, "KEPT_METRIC_RECORDS", 10)
    monkeypatch.setattr(metrics_writer, "TRIM_INTERVAL_S", 0.0)
    with Redis.from_url(redis_url) as redis:
        sink, key = RedisMetrics(redis, "run"), RunKeys("run").metrics
        for step in range(500):
            sink.append(record(step, 0.25))
        assert redis.xlen(key) == 500
        with MetricsWriter(redis, "run", tmp_path, [], 0):
            wait_until_sync(lambda: len(redis.xrange(key)) < 200)  # pyright: ignore[reportArgumentType]
    assert [row["step"] for row in rows(tmp_path)] == list(range(500))
