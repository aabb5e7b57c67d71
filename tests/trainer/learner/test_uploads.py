"""The loop with `checkpoint_config`: uploads beside training, a store that is down, and local copies that go."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat.services.errors import FencedError
from offbeat.trainer.config.checkpoints import CheckpointConfig
from offbeat.trainer.learner.reporter import LearnerReporter
from offbeat.trainer.learner.uploads import CheckpointUploads
from offbeat.trainer.training.checkpoint import LearnerState, read_uploaded
from offbeat.trainer.training.checkpoint_store import CheckpointStore
from offbeat.trainer.training.remote_checkpoints import RemoteFolder, fetch_by_url
from tests.fakes import DictBoard, ListSink
from tests.trainer.training.fenced_learner import write
from tests.trainer.training.object_store import BUCKET, SECRET, s3_bucket, s3_environment, s3_server
from tests.waiting import wait_until_sync


@pytest.fixture(scope="module")
def s3() -> Iterator[int]:
    with s3_bucket() as port:
        yield port


class Uploading:
    """A learner's checkpoints and their uploads."""

    def __init__(self, folder: Path, url: str, *, epoch: int = 1, is_async: bool = True, keep: bool = True) -> None:
        self.board, self.sink = DictBoard(), ListSink()
        self.store = CheckpointStore(folder / "checkpoints", 2, epoch)
        self.remote = RemoteFolder(url, epoch)
        config = CheckpointConfig(output_dir=url, async_upload=is_async, keep_local_file=keep)
        reporter = LearnerReporter(self.sink, self.board)
        self.uploads = CheckpointUploads(config, self.remote, self.store, reporter, keep=2)

    def save(self, step: int) -> Path:
        path = self.store.save(LearnerState(step, "now"), write).result()
        self.uploads.after_checkpoint(path, lambda: False)
        return path

    def total(self, name: str) -> float:
        return sum(record.values[name].total for record in self.sink.records if name in record.values)

    def end(self) -> None:
        """End a thread that would try again, and warn, during later tests."""

        def refuse(path: Path) -> None:
            raise FencedError(f"the test is over: {path}")

        self.uploads._upload = refuse
        wait_until_sync(lambda: self.uploads._fenced is not None)


@pytest.mark.usefixtures("s3")
def test_a_local_copy_goes_after_its_upload_and_the_best_stays_in_the_store(tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/gone/run"
    learner = Uploading(tmp_path, url, is_async=False, keep=False)
    for step in (2, 4, 6, 8):
        assert not learner.save(step).exists()
        learner.store.score(step, 1.0 if step == 2 else 0.0)
    assert [each.step for each in RemoteFolder(url).read_list()] == [2, 6, 8]
    assert learner.total("checkpoints_uploaded") == 4
    assert read_uploaded(tmp_path / "checkpoints")[1] == RemoteFolder(url).read_list()
    assert fetch_by_url(url, tmp_path / "restored").state.step == 8
    assert SECRET not in "".join(path.read_text() for path in (tmp_path / "checkpoints").glob("*.json"))


def test_a_store_that_is_down_holds_up_nothing_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Local copies stay while they wait; when the store is back, the first and the newest are uploaded in order."""
    monkeypatch.setattr("offbeat.trainer.learner.uploads.LONGEST_RETRY_S", 0.2)
    with s3_bucket() as port:
        url = f"s3://{BUCKET}/down/run"
        learner = Uploading(tmp_path, url, keep=False)
        learner.remote.take_over()
    for name, value in s3_environment(port).items():
        monkeypatch.setenv(name, value)
    paths = [learner.save(step) for step in (2, 4, 6, 8, 10)]
    wait_until_sync(lambda: learner.uploads.report() or learner.total("checkpoint_uploads_failed") > 0, timeout_s=60)
    assert "step-000002 could not be uploaded" in learner.board.fields["learner_trouble"]
    assert "checkpoint_config.output_dir" in learner.board.fields["learner_trouble"]
    assert SECRET not in json.dumps(learner.board.fields)
    assert [path.is_dir() for path in paths] == [True, False, True, True, True]
    assert not learner.uploads.wait(0.5)
    with s3_server(port):
        assert learner.uploads.wait(60)
        assert [each.step for each in RemoteFolder(url).read_list()] == [8, 10]
        assert learner.board.fields["learner_trouble"] == ""
        assert learner.total("checkpoint_uploads_skipped") == 2
        assert [path for path in paths if path.is_dir()] == [paths[2]], "skipped: kept until the next checkpoint"


@pytest.mark.usefixtures("s3")
def test_a_successor_ends_the_uploads_of_a_learner_that_wakes(tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/wakes/run"
    learner = Uploading(tmp_path / "a", url, is_async=False)
    learner.save(2)
    RemoteFolder(url, 2).take_over()
    with pytest.raises(FencedError, match="epoch 2"):
        learner.save(4)
    assert [each.step for each in RemoteFolder(url).read_list()] == [2]


@pytest.mark.usefixtures("s3")
def test_a_successor_uploads_what_was_left_and_nothing_twice(tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/left/run"
    first = Uploading(tmp_path, url, is_async=False)
    first.save(2)
    left = first.store.save(LearnerState(4, "now"), write).result()
    again = Uploading(tmp_path, url, epoch=2)
    for _ in range(2):
        again.uploads.add(left)
        assert again.uploads.wait(60)
    assert [(each.step, each.epoch) for each in RemoteFolder(url).read_list()] == [(2, 1), (4, 2)]


def test_a_stop_ends_the_wait_of_a_finished_run_for_a_store_that_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"STOP_TIMEOUT_S": 0.3, "FIRST_RETRY_S": 0.2, "LONGEST_RETRY_S": 0.2}.items():
        monkeypatch.setattr(f"offbeat.trainer.learner.uploads.{name}", value)
    with s3_bucket() as port:
        learner = Uploading(tmp_path, f"s3://{BUCKET}/stopped/run")
        learner.remote.take_over()
    for name, value in s3_environment(port).items():
        monkeypatch.setenv(name, value)
    learner.save(2)
    began = time.monotonic()
    learner.uploads.finish(900.0, lambda: time.monotonic() > began + 0.5)
    assert 0.7 < time.monotonic() - began < 30.0
    assert not learner.uploads.wait(0.0)
    learner.end()
