"""`offbeat track` with a tracker of a user's own, on folders as runs leave them."""

import fcntl
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from offbeat.deploy.cli.app import app
from offbeat.deploy.cli.track import TrackError, track_run
from offbeat.deploy.config.loader import dump_yaml, load_run
from tests.paths import QUICKSTART
from tests.trainer.trackers.test_delivery import append, evaluation, step
from tests.trainer.trackers.test_supervisor import NOTEBOOK, PROGRESS_FILE, notes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a run of three steps without the tracker, with rows of the first two."""
    config = load_run(QUICKSTART, ["max_steps=3", f"output_dir={tmp_path}"])
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    append(tmp_path, step(1), evaluation(1), step(2))
    return tmp_path


def track(folder: Path, *settings: str) -> str:
    console = Console(record=True, width=200)
    track_run(str(folder), NOTEBOOK, [f"path={folder / 'notes'}", *settings], console=console)
    return console.export_text()


def test_a_tracker_that_the_run_did_not_name_gets_all_and_later_the_rest(folder: Path):
    assert "has all 3 lines" in track(folder)
    assert notes(folder, "step") == [1, 1, 2]
    assert "had all 3 lines" in track(folder)
    append(folder, step(2), step(3))
    assert str(folder / "notes") in track(folder)
    assert notes(folder, "step") == [1, 1, 2, 3]
    assert notes(folder, "closed") == ["stopped", "finished"]
    assert notes(folder, "resumed") == [False, True]
    assert len(set(notes(folder, "opened"))) == 1
    (config,) = notes(folder, "config")[:1]
    assert config["max_steps"] == 3


def test_what_a_tracker_did_not_take_is_sent_by_the_next_call(folder: Path):
    down = folder / "down"
    down.touch()
    with pytest.raises(TrackError, match="takes nothing: ConnectionError: connection refused"):
        track(folder, f"down_while={down}")
    down.unlink()
    assert "has all 3 lines" in track(folder, f"down_while={down}")
    assert notes(folder, "step") == [1, 1, 2]


def test_one_call_at_a_time_sends(folder: Path):
    lock = (folder / PROGRESS_FILE).with_suffix(".lock")
    lock.parent.mkdir()
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(TrackError, match="being sent"):
            track(folder)


def test_a_folder_that_can_not_be_written_is_reported(folder: Path):
    (folder / PROGRESS_FILE).parent.touch()
    with pytest.raises(TrackError, match=r"position can't be written: .*trackers"):
        track(folder)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["FOLDER", "wandbb"], "did you mean wandb?"),
        (["FOLDER", "tensorboard"], "written by the learner itself"),
        (["FOLDER", NOTEBOOK], "path: required, and missing"),
        (["FOLDER", NOTEBOOK, "path=x", "pages=3"], "pages: no such argument: it takes path"),
        (["FOLDER", NOTEBOOK, "path"], "'path' is no KEY=VALUE"),
        (["FOLDER", NOTEBOOK, "path=[x"], "its value is no YAML"),
        (["FOLDER", NOTEBOOK, "path=x", "pages=2026-02-30"], "pages: no such argument"),
        (["nowhere", NOTEBOOK], "there is no run in nowhere"),
    ],
)
def test_a_user_s_mistake_is_reported_in_one_line(folder: Path, arguments: list[str], says: str):
    result = CliRunner().invoke(app, ["track", *(str(folder) if each == "FOLDER" else each for each in arguments)])
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.startswith("offbeat: ")
    assert not notes(folder, "opened")


def test_a_run_that_has_measured_nothing_is_reported(folder: Path):
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(TrackError, match="has measured nothing yet"):
        track(folder)
