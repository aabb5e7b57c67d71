"""Folders that a run can't have, and folders of runs without a marker."""

import tarfile
from pathlib import Path

import pytest

from offbeat.deploy import run_folder
from offbeat.deploy.run_folder import claim, find_problem
from offbeat.deploy.run_marker import MARKER, FolderInUseError, identify, mark
from tests.paths import QUICKSTART

OLD_RUN = Path(__file__).parents[1] / "integration" / "data" / "run-0.1.tar.xz"


def snapshot(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture
def mesh(tmp_path: Path) -> Path:
    """Return a folder of runs: a Redis' state, and two runs."""
    runs = tmp_path / "runs"
    (runs / "redis").mkdir(parents=True)
    (runs / "redis" / "redis.lock").touch()
    (runs / "redis" / "appendonly.aof").write_text("everything")
    for name in ("one", "two"):
        claim(runs / name, name, resume=False)
        (runs / name / "checkpoints").mkdir()
    return runs


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("runs", ("runs contains", "runs/one, the folder of run 'one'")),
        ("runs/redis", ("runs/redis is the state of a Redis",)),
        ("runs/redis/new", ("runs/redis/new is inside", "runs/redis, the state of a Redis")),
        ("runs/one/again", ("runs/one/again is inside", "runs/one, the folder of run 'one'")),
        ("runs/one/checkpoints", ("is inside", "runs/one, the folder of run 'one'")),
        (".", ("contains", "runs/one, the folder of run 'one'")),
    ],
)
def test_a_folder_above_or_below_another_runs_is_refused(
    tmp_path: Path, path: str, names: tuple[str, ...], resume: bool
):
    before = snapshot(tmp_path)
    with pytest.raises(FolderInUseError) as refused:
        claim(tmp_path / path, "new", resume=resume)
    assert all(name in str(refused.value) for name in names), refused.value
    assert snapshot(tmp_path) == before


def test_runs_side_by_side_have_their_folders(mesh: Path):
    assert claim(mesh / "three", "three", resume=False) is None
    assert claim(mesh / "one", "one", resume=False) == mesh / "one.1"
    assert (mesh / "one.1" / "checkpoints").is_dir()


def test_a_redis_without_runs_is_not_moved_either(tmp_path: Path):
    (tmp_path / "redis").mkdir()
    (tmp_path / "redis" / "redis.lock").touch()
    assert "contains" in find_problem(tmp_path)


@pytest.mark.parametrize("name", ["checkpoints", "logs", "policy", "redis"])
def test_a_repository_of_a_user_is_neither_moved_nor_used(tmp_path: Path, name: str):
    folder = tmp_path / "repository"
    (folder / name).mkdir(parents=True)
    (folder / name / "precious").touch()
    (folder / "config.yaml").write_text(QUICKSTART.read_text())
    before = snapshot(tmp_path)
    for resume in (False, True):
        with pytest.raises(FolderInUseError, match=rf"{name}.*no run of Offbeat has written.*choose a new or empty"):
            claim(folder, "new", resume=resume)
    assert snapshot(tmp_path) == before


def test_a_run_of_an_earlier_build_is_known_by_its_files_and_gets_the_marker(tmp_path: Path):
    folder = tmp_path / "run"
    with tarfile.open(OLD_RUN) as archive:
        archive.extractall(folder, filter="data")
    before = identify(folder)
    assert before is not None
    assert before.run_id == "before_offbeat"
    assert claim(folder, "before_offbeat", resume=True) is None
    assert (folder / MARKER).is_file()
    assert claim(folder, "before_offbeat", resume=False) == tmp_path / "run.1"


def test_checkpoints_alone_are_known(tmp_path: Path):
    (tmp_path / "checkpoints" / "step-000004").mkdir(parents=True)
    assert identify(tmp_path) is None
    (tmp_path / "checkpoints" / "step-000004" / "learner.json").touch()
    assert identify(tmp_path) is not None


def test_two_claims_at_once_do_not_both_succeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The outer folder is claimed after the inner one has been found free."""

    def mark_later(folder: Path, run_id: str) -> None:
        mark(tmp_path / "outer", "outer")
        mark(folder, run_id)

    monkeypatch.setattr(run_folder, "mark", mark_later)
    with pytest.raises(FolderInUseError, match="is inside"):
        claim(tmp_path / "outer" / "inner", "inner", resume=False)
    assert not (tmp_path / "outer" / "inner" / MARKER).exists()
