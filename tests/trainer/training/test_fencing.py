"""A learner stopped or killed before any of its file operations harms neither its successor's checkpoints nor its own."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from offbeat.services.errors import FencedError
from offbeat.trainer.training.checkpoint import (
    LearnerState,
    newest_complete,
    read_checkpoint,
    read_epoch,
    read_manifest,
)
from offbeat.trainer.training.checkpoint_store import CheckpointStore
from offbeat.trainer.training.fenced_folder import FencedFolder
from tests.trainer.training import fenced_learner
from tests.trainer.training.fenced_learner import EPOCH, STEP, checkpoint, write

FENCED = 3
THREADS = 2


def start(folder: Path, stop_before: int, number: int) -> "subprocess.Popen[str]":
    command = [sys.executable, fenced_learner.__file__, str(folder), str(stop_before), str(number)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return checkpoints of epoch 1: step 8 is there, and step 12 of another lineage, which is older."""
    folder = tmp_path_factory.mktemp("earlier") / "checkpoints"
    store = CheckpointStore(folder, 9, 1)
    for step, lineage in ((STEP, "left"), (8, "now")):
        store.save(LearnerState(step, lineage), write).result()
    return folder


@pytest.fixture(scope="module")
def num_operations(earlier: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    folder = shutil.copytree(earlier, tmp_path_factory.mktemp("count") / "checkpoints", symlinks=True)
    process = start(folder, 0, signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    return int(output)


def folders(earlier: Path, tmp_path: Path, num_operations: int) -> Iterator[tuple[int, Path]]:
    for operation in range(1, num_operations + 1):
        yield operation, shutil.copytree(earlier, tmp_path / str(operation), symlinks=True)


def visible_steps(folder: Path) -> list[int]:
    return sorted(read_checkpoint(path).state.step for path in folder.glob("step-*"))


@pytest.mark.slow
@pytest.mark.parametrize(("step", "lineage"), [(16, "now"), (STEP, "now/2")], ids=["next step", "same step"])
def test_a_learner_that_wakes_changes_nothing_of_its_successors(
    earlier: Path, tmp_path: Path, num_operations: int, step: int, lineage: str
) -> None:
    assert num_operations > 50

    def try_one(operation: int, folder: Path) -> int:
        stopped = start(folder, operation, signal.SIGSTOP)
        try:
            os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            checkpoint(folder, EPOCH + 1, step, lineage=lineage)
            before = {path: path.read_bytes() for path in sorted(folder.glob("step-*/**/*")) if path.is_file()}
            stopped.send_signal(signal.SIGCONT)
            assert stopped.wait(60) in (0, FENCED)
        finally:
            stopped.kill()
            stopped.wait()
        assert before == {path: path.read_bytes() for path in sorted(folder.glob("step-*/**/*")) if path.is_file()}
        newest = newest_complete(folder)
        assert newest is not None
        assert (newest.state.step, newest.state.lineage, newest.state.epoch) == (step, lineage, EPOCH + 1), operation
        assert (folder / "best").resolve() == newest.path
        assert read_epoch(folder) == EPOCH + 1
        # Step 12 is there as well where it was the best when the successor saved its own
        assert [each.step for each in read_manifest(folder)] == visible_steps(folder)
        assert visible_steps(folder) in ([step], [STEP, step]), operation
        checkpoint(folder, EPOCH + 2, 20, lineage=lineage)
        assert visible_steps(folder) == [step, 20], operation
        assert {path.name for path in folder.glob(".*")} == {f".epoch-{EPOCH + 2:06d}"}
        return stopped.returncode

    with ThreadPoolExecutor(THREADS) as pool:
        codes = list(pool.map(lambda each: try_one(*each), folders(earlier, tmp_path, num_operations)))
    assert codes.count(FENCED) > num_operations // 2


@pytest.mark.slow
def test_a_learner_killed_anywhere_leaves_a_loadable_newest(earlier: Path, tmp_path: Path, num_operations: int) -> None:
    def try_one(operation: int, folder: Path) -> int:
        process = start(folder, operation, signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
        newest = newest_complete(folder)
        assert newest is not None, operation
        assert (newest.state.step, newest.state.lineage) in ((8, "now"), (STEP, "now")), operation
        resumed = CheckpointStore(folder, 1, EPOCH + 1).newest_complete("now")
        assert resumed is not None
        assert resumed.state.step == newest.state.step, operation
        checkpoint(folder, EPOCH + 2, 16)
        assert visible_steps(folder) in ([16], [STEP, 16])
        return newest.state.step

    with ThreadPoolExecutor(THREADS) as pool:
        steps = list(pool.map(lambda each: try_one(*each), folders(earlier, tmp_path, num_operations)))
    assert steps == sorted(steps)
    assert set(steps) == {8, STEP}


def test_an_earlier_or_equal_epoch_can_neither_take_over_nor_write(tmp_path: Path) -> None:
    first = CheckpointStore(tmp_path, 2, 1)
    saving = first.save(LearnerState(4, "now"), write)
    saving.result()
    CheckpointStore(tmp_path, 2, 3)
    for epoch in (2, 3):
        with pytest.raises(FencedError):
            CheckpointStore(tmp_path, 2, epoch)
    with pytest.raises(FencedError):
        first.save(LearnerState(8, "now"), write)
    with pytest.raises(FencedError):
        first.score(4, 1.0)
    assert visible_steps(tmp_path) == [4]


def test_a_copy_without_hidden_folders_keeps_its_epoch(tmp_path: Path) -> None:
    CheckpointStore(tmp_path / "a", 2, 7).save(LearnerState(4, "now"), write).result()
    shutil.copytree(tmp_path / "a", tmp_path / "b", ignore=shutil.ignore_patterns(".*"))
    assert read_epoch(tmp_path / "b") == 7
    with pytest.raises(FencedError, match="epoch 7"):
        CheckpointStore(tmp_path / "b", 2, 6)
    assert CheckpointStore(tmp_path / "b", 2, 8).newest_complete("now") is not None


def test_retention_ignores_modification_times(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2, 1)
    for step in (4, 8, 12):
        path = store.save(LearnerState(step, "now"), write).result()
        os.utime(path, (10**9 - step, 10**9 - step))
    assert visible_steps(tmp_path) == [8, 12]


def test_checkpoints_of_earlier_builds_are_taken_over(tmp_path: Path) -> None:
    """They have no manifest of the folder and no epoch, and a temporary folder is named by host and process."""
    import json

    store = CheckpointStore(tmp_path / "new", 9, 1)
    for step in (4, 8):
        store.save(LearnerState(step, "now"), write).result()
    old = tmp_path / "old"
    old.mkdir()
    for step in (4, 8):
        folder = shutil.copytree(tmp_path / "new" / f"step-{step:06d}", old / f"step-{step:06d}")
        tree = json.loads((folder / "learner.json").read_text())
        del tree["epoch"]
        (folder / "learner.json").write_text(json.dumps(tree))
        digests = json.loads((folder / "manifest.json").read_text())
        from offbeat.trainer.training.checkpoint import fingerprint

        digests["learner.json"] = fingerprint(folder / "learner.json")
        (folder / "manifest.json").write_text(json.dumps(digests))
    (old / ".writing-host~17-0-step-000012").mkdir()
    (old / "step-000004-mine").mkdir()
    again = CheckpointStore(old, 2, 1)
    found = again.newest_complete("now")
    assert found is not None
    assert found.state.step == 8
    again.save(LearnerState(12, "now"), write).result()
    assert sorted(path.name for path in old.glob("[!.]*")) == [
        "manifest.json",
        "step-000004-mine",
        "step-000008",
        "step-000012",
    ]
    assert not list(old.glob(".writing-*"))


def test_the_folders_above_the_first_checkpoint_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    CheckpointStore(tmp_path / "run" / "checkpoints", 2, 1)
    assert synced[:3] == [str(tmp_path.parent), str(tmp_path), str(tmp_path / "run")]


def test_of_two_that_take_over_at_once_the_later_epoch_has_the_folder(tmp_path: Path) -> None:
    """The later one takes over between any two operations of the earlier one's takeover."""
    moment = 0
    for moment in itertools.count(1):
        folder = tmp_path / str(moment)
        FencedFolder(folder, 1)
        process = start_takeover(folder, moment)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        later = FencedFolder(folder, 3)
        process.send_signal(signal.SIGCONT)
        code = process.wait(60)
        later.write("file", b"later")
        assert (folder / "file").read_bytes() == b"later"
        if code == 0:
            break
        assert code == FENCED
    assert moment > 3


def start_takeover(folder: Path, stop_before: int) -> "subprocess.Popen[str]":
    program = f"""
import signal, os, sys
from pathlib import Path
from offbeat.services.errors import FencedError
from offbeat.trainer.training.fenced_folder import FencedFolder
from tests.trainer.training.fenced_learner import count_operations
folder = Path({str(folder)!r})
count_operations(folder, {stop_before}, signal.SIGSTOP)
try:
    FencedFolder(folder, 2)
except FencedError:
    os._exit(3)
os._exit(0)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    return subprocess.Popen([sys.executable, "-c", program], env=environment, text=True)
