"""Checkpoints: whole or not there, found again, collected."""

import errno
import json
import logging
import re
from pathlib import Path
from threading import Event

import pytest

from offbeat.services.durable_files import sync_tree
from offbeat.trainer.training.checkpoint import CheckpointError, LearnerState, RemoteCheckpoint, read_checkpoint
from offbeat.trainer.training.checkpoint_store import CheckpointStore, UnsavedError
from offbeat.trainer.training.fenced_folder import FencedFolder


def write(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"weights" * 100)
    (folder / "state").mkdir()
    (folder / "state" / "optimizer.pt").write_bytes(b"moments")


def state(step: int, lineage: str = "now") -> LearnerState:
    return LearnerState(step, lineage, entry_ids=(f"{step}-0", f"{step}-1"), next_number=8 * step, kl_coef=0.25)


def visible(folder: Path) -> list[str]:
    """Return what a user sees, the manifest aside."""
    return sorted(path.name for path in folder.glob("[!.]*") if path.name != "manifest.json")


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=2, epoch=1)


def test_what_was_saved_is_found_again(store: CheckpointStore) -> None:
    path = store.save(state(20), write).result()
    found = store.newest_complete("now")
    assert found is not None
    assert (found.path, found.state) == (path, state(20))
    assert path.name == "step-000020"
    assert (path / "state" / "optimizer.pt").read_bytes() == b"moments"


@pytest.mark.parametrize("keep", range(1, 10))
def test_only_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    store = CheckpointStore(tmp_path, keep=keep, epoch=1)
    for number in range(12):
        store.save(state(20 * number), write).result()
        assert visible(tmp_path) == [f"step-{20 * each:06d}" for each in range(max(number + 1 - keep, 0), number + 1)]


def test_a_release_removes_nothing_of_the_checkpoint_that_is_being_written(
    store: CheckpointStore, tmp_path: Path
) -> None:
    """An upload releases the checkpoint before, in its own thread."""
    store.save(state(20), write).result()

    def released_halfway(folder: Path) -> None:
        (folder / "policy").write_bytes(b"before")
        store.release("step-000020").result()
        (folder / "critic").write_bytes(b"after")

    path = store.save(state(40), released_halfway).result()
    read_checkpoint(path)
    assert {each.name for each in path.iterdir()} == {"policy", "critic", "learner.json", "manifest.json"}
    assert visible(tmp_path / "checkpoints") == ["step-000040"]
    assert not list((tmp_path / "checkpoints").glob(".writing*"))


def test_a_write_that_breaks_off_leaves_the_older_one_newest(store: CheckpointStore, tmp_path: Path) -> None:
    store.save(state(20), write).result()

    def breaks(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError("no space left on device")

    with pytest.raises(UnsavedError, match="no space"):
        store.save(state(40), breaks).result()
    found = store.newest_complete("now")
    assert found is not None
    assert found.state.step == 20
    store.save(state(40), write).result()
    assert visible(tmp_path / "checkpoints") == ["step-000020", "step-000040"]


@pytest.mark.parametrize("harm", ["truncate", "flip", "remove", "no manifest", "no learner"])
def test_a_damaged_one_is_skipped_and_said_so(
    store: CheckpointStore, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.save(state(20), write).result()
    path = store.save(state(40), write).result()
    weights = path / "model.safetensors"
    match harm:
        case "truncate":
            weights.write_bytes(weights.read_bytes()[:-1])
        case "flip":
            weights.write_bytes(b"W" + weights.read_bytes()[1:])
        case "remove":
            (path / "state" / "optimizer.pt").unlink()
        case "no manifest":
            (path / "manifest.json").unlink()
        case _:
            (path / "learner.json").unlink()
    with caplog.at_level(logging.WARNING):
        found = store.newest_complete("now")
    assert found is not None
    assert found.state.step == 20
    assert re.search(r"skipping checkpoint .*step-000040: ", caplog.text)
    with pytest.raises(CheckpointError):
        read_checkpoint(path)


def test_a_damaged_one_is_replaced_when_its_step_is_trained_again(store: CheckpointStore) -> None:
    path = store.save(state(40), write).result()
    (path / "model.safetensors").write_bytes(b"")
    store.save(state(40), write).result()
    assert read_checkpoint(path).state == state(40)


def test_another_runs_checkpoints_are_passed_over(store: CheckpointStore) -> None:
    store.save(state(60, lineage="earlier"), write).result()
    assert store.newest_complete("now") is None
    found = store.newest_complete()
    assert found is not None
    assert found.state.lineage == "earlier"
    store.save(state(0), write).result()
    store.save(state(20), write).result()
    found = store.newest_complete("now")
    assert found is not None
    assert found.state.step == 20


def test_a_run_reset_to_an_earlier_step_ignores_later_checkpoints(
    tmp_path: Path,
) -> None:
    store = CheckpointStore(tmp_path, keep=9, epoch=1)
    for step, lineage in ((20, "first"), (40, "first"), (25, "first/2"), (30, "first")):
        store.save(state(step, lineage), write).result()
        found = store.newest_complete()
        assert found is not None
        assert found.state == state(step, lineage)
    (tmp_path / "step-000030" / "model.safetensors").unlink()
    found = store.newest_complete()
    assert found is not None
    assert found.state == state(25, "first/2")


def test_the_manifest_names_every_file(store: CheckpointStore) -> None:
    path = store.save(state(20), write).result()
    manifest = json.loads((path / "manifest.json").read_text())
    files = {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}
    assert set(manifest) == files - {"manifest.json"}


def test_no_checkpoints_is_none(store: CheckpointStore) -> None:
    assert store.newest_complete() is None


def test_the_best_is_kept_beside_the_newest_and_best_links_to_it(store: CheckpointStore, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for step, score in ((20, 0.5), (40, 0.9), (60, 0.7), (80, float("nan")), (100, 0.6)):
        store.save(state(step), write).result()
        store.score(step, score)
    store.score(999, 1.0)
    assert visible(folder) == ["best", "best.json", "step-000040", "step-000080", "step-000100"]
    assert (folder / "best" / "model.safetensors").is_file()
    assert json.loads((folder / "best.json").read_text()) == {"step": 40, "score": 0.9}
    again = CheckpointStore(folder, keep=1, epoch=2)
    again.score(100, 0.9)
    again.save(state(120), write).result()
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-000100", "step-000120"]
    newest = again.newest_complete()
    assert newest is not None
    assert newest.state.step == 120


def test_best_links_to_no_earlier_checkpoint_once_the_best_is_in_the_store_alone(
    store: CheckpointStore, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    for step in (20, 40, 60):
        store.save(state(step), write).result()
        if step == 20:
            store.score(20, 0.5)
    store.note_elsewhere([RemoteCheckpoint("step-000040.000001-000002", 40, "first", 2, 1)], "s3://store")
    store.release("step-000040").result()
    store.score(40, 0.9)
    assert store.best == "step-000040"
    assert not list(folder.rglob("*-best")), "the earlier link"
    for step in (80, 100):
        store.save(state(step), write).result()
    assert not (folder / "best").is_symlink()


def test_a_score_that_comes_before_its_checkpoint_counts(store: CheckpointStore, tmp_path: Path) -> None:
    """Data pipelines evaluate a step before they write its checkpoint; this one overfits."""
    for step, loss in ((2, 0.2), (4, 0.4), (6, 0.6), (8, 0.7)):
        store.score(step, -loss)
        store.save(LearnerState(step, "now"), write).result()
    assert store.best == "step-000002"
    assert (tmp_path / "checkpoints" / "best").readlink() == Path("step-000002")
    assert [path.name for path in store.paths] == ["step-000002", "step-000006", "step-000008"]


def test_a_score_that_a_full_disk_refuses_is_written_with_the_next_checkpoint(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store.save(LearnerState(2, "now"), write).result()
    with monkeypatch.context() as full:
        full.setattr(FencedFolder, "write_json", refuse)
        store.score(2, 0.5)
    assert store.best is None
    store.save(LearnerState(4, "now"), write).result()
    assert store.best == "step-000002"


def test_the_score_of_a_step_is_that_of_the_weights_that_it_has_now(store: CheckpointStore, tmp_path: Path) -> None:
    for lineage, score in (("first", 0.9), ("first/2", 0.4)):
        store.save(state(20, lineage), write).result()
        store.score(20, score)
    assert json.loads((tmp_path / "checkpoints" / "best.json").read_text()) == {"step": 20, "score": 0.4}


def test_a_run_that_goes_back_forgets_a_better_score_of_later_weights(store: CheckpointStore, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for step, score in ((10, 0.8), (20, 0.95)):
        store.save(state(step, "first"), write).result()
        store.score(step, score)
    successor = CheckpointStore(folder, keep=2, epoch=2)
    successor.discard_score_after(20)
    assert successor.best == "step-000020"
    successor.discard_score_after(10)
    assert visible(folder) == ["step-000010", "step-000020"]
    successor.save(state(20, "second"), write).result()
    assert successor.best is None, "of the same name, and not evaluated"
    successor.score(20, 0.7)
    assert (folder / "best").readlink() == Path("step-000020")
    successor.discard_score_after(10)
    assert visible(folder) == ["step-000010", "step-000020"]


def test_what_is_saved_is_not_found_before_it_is_durable(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_continue = Event()
    monkeypatch.setattr(
        "offbeat.trainer.training.checkpoint_store.sync_tree", lambda folder: (may_continue.wait(), sync_tree(folder))
    )
    saving = store.save(state(20), write)
    assert store.newest_complete() is None
    may_continue.set()
    assert saving.result().is_dir()
    assert store.newest_complete() is not None
