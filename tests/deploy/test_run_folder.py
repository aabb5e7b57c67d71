import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from offbeat.deploy import run_folder
from offbeat.deploy.run_folder import Endpoints, LockHolder, hold_run_files, locked, remove_run_files
from offbeat.deploy.run_marker import MARKER, FolderInUseError, identify, mark
from offbeat.services.buffer.group_ledger import LEDGER_FILE
from offbeat.trainer.learner.step_ledger import STEPS_FILE
from offbeat.trainer.training.recorded_steps import FOLDER as BATCHES

NOBODY = 65534
"""A user without rights."""


def earlier_run(folder: Path, text: str = "old") -> None:
    folder.mkdir(exist_ok=True)
    mark(folder, "q")
    (folder / "config.yaml").write_text(text)


def test_claim_moves_an_earlier_run_to_the_first_free_name(tmp_path: Path):
    folder = tmp_path / "quickstart"
    for text in ("first", "second"):
        earlier_run(folder, text)
        run_folder.claim(folder, "q", resume=False)
        assert [path.name for path in folder.iterdir()] == [MARKER]
    assert (tmp_path / "quickstart.1" / "config.yaml").read_text() == "first"
    assert (tmp_path / "quickstart.2" / "config.yaml").read_text() == "second"


def test_claim_keeps_a_resumed_run(tmp_path: Path):
    earlier_run(tmp_path / "q")
    before = identify(tmp_path / "q")
    assert run_folder.claim(tmp_path / "q", "q", resume=True) is None
    assert (tmp_path / "q" / "config.yaml").exists()
    assert identify(tmp_path / "q") == before


def test_a_resumed_run_is_no_longer_that_of_the_mesh_which_had_it(tmp_path: Path):
    earlier_run(tmp_path / "q")
    (tmp_path / "q" / run_folder.CLAIM).write_text("q 1.0")
    run_folder.claim(tmp_path / "q", "q", resume=True)
    assert not (tmp_path / "q" / run_folder.CLAIM).exists()


def test_files_of_others_stay_when_a_run_is_moved_aside(tmp_path: Path):
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    assert run_folder.claim(folder, "q", resume=False) is None
    (folder / "config.yaml").write_text("first")
    assert run_folder.claim(folder, "q", resume=False) == tmp_path / "home.1"
    assert (tmp_path / "home.1" / "config.yaml").read_text() == "first"
    assert identify(tmp_path / "home.1") != identify(folder)
    assert sorted(path.name for path in folder.iterdir()) == [MARKER, "notes.txt"]


def lock_elsewhere(folder: Path) -> subprocess.Popen[str]:
    """Lock the folder in another process, which holds the lock until it is killed."""
    code = f"""
from pathlib import Path
from offbeat.deploy.run_folder import locked
with locked(Path({str(folder)!r})):
    print("locked", flush=True)
    input()
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout
    assert holder.stdout.readline() == "locked\n"
    return holder


def test_claim_refuses_a_locked_folder(tmp_path: Path):
    folder = tmp_path / "q"
    earlier_run(folder)
    holder = lock_elsewhere(folder)
    with pytest.raises(FolderInUseError, match=str(holder.pid)):
        run_folder.claim(folder, "q", resume=False)
    with pytest.raises(FolderInUseError), run_folder.locked(folder):
        pass
    holder.kill()
    holder.wait()
    with run_folder.locked(folder):
        assert (folder / "config.yaml").exists()


def test_a_refused_resume_under_another_name_leaves_the_marker(tmp_path: Path):
    earlier_run(tmp_path / "q")
    before = identify(tmp_path / "q")
    with locked(tmp_path / "q"), pytest.raises(FolderInUseError):
        run_folder.claim(tmp_path / "q", "other", resume=True)
    assert identify(tmp_path / "q") == before
    run_folder.claim(tmp_path / "q", "other", resume=True)
    assert identify(tmp_path / "q") != before


def test_a_run_is_not_resumed_in_a_folder_that_another_process_uses(tmp_path: Path):
    """A mesh would train it beside the `offbeat train` of that name."""
    earlier_run(tmp_path / "q")
    with locked(tmp_path / "q"), pytest.raises(FolderInUseError, match=rf"is used by process {os.getpid()}: stop it"):
        run_folder.claim(tmp_path / "q", "q", resume=True)
    run_folder.claim(tmp_path / "q", "q", resume=True)


@pytest.mark.parametrize("resume", [False, True])
def test_the_folder_of_an_active_run_of_a_mesh_is_refused(tmp_path: Path, resume: bool):
    folder = tmp_path / "q"
    earlier_run(folder)
    (folder / run_folder.CLAIM).write_text("q 1.0")
    assert run_folder.lock_claim(folder, "q 2.0") is None, "of a run that has not the folder"
    lock = run_folder.lock_claim(folder, "q 1.0")
    assert lock is not None
    with lock, pytest.raises(FolderInUseError, match="is used by run 'q' of a mesh: stop it"):
        run_folder.claim(folder, "q", resume=resume)
    assert (folder / "config.yaml").exists()
    run_folder.claim(folder, "q", resume=resume)
    assert run_folder.lock_claim(folder, "q 1.0") is None, "another run has it"


def test_a_file_system_without_locks_serves_a_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "q"
    earlier_run(folder)
    for name, text in ((run_folder.CLAIM, "q 1.0"), (run_folder.LOCK, "")):
        (folder / name).write_text(text)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert run_folder.lock_claim(folder, "q 1.0") is None
    run_folder.claim(folder, "q", resume=True)


def test_find_holder_is_none_once_the_process_has_exited(tmp_path: Path):
    assert run_folder.find_holder(tmp_path) is None
    process = lock_elsewhere(tmp_path)
    holder = run_folder.find_holder(tmp_path)
    assert holder is not None
    assert (holder.pid, holder.is_here) == (process.pid, True)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert run_folder.find_holder(tmp_path) is None, "a zombie"
    process.wait()
    assert run_folder.find_holder(tmp_path) is None


def test_find_holder_ignores_the_text_of_a_lock_that_nobody_holds(tmp_path: Path):
    """Its pid may be another process by now, or be of another host or container."""
    (tmp_path / run_folder.LOCK).write_bytes(LockHolder.own().encode())
    assert run_folder.find_holder(tmp_path) is None


def test_a_folder_that_is_locked_on_another_host_names_it(tmp_path: Path):
    with locked(tmp_path):
        (tmp_path / run_folder.LOCK).write_bytes(LockHolder(7, "boot/pid:[1]", "node-3").encode())
        with pytest.raises(FolderInUseError, match="is used by process 7 of node-3: stop it"), locked(tmp_path):
            pass
        (tmp_path / run_folder.LOCK).write_text("7")  # by 0.1
        with pytest.raises(FolderInUseError, match="is used by process 7: stop it"), locked(tmp_path):
            pass


def test_a_folder_is_locked_although_its_holder_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A look takes the lock for a moment."""
    lock = tmp_path / run_folder.LOCK
    lock.touch()
    descriptor = os.open(lock, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    monkeypatch.setattr("offbeat.deploy.run_folder.time.sleep", lambda _: fcntl.flock(descriptor, fcntl.LOCK_UN))
    with locked(tmp_path):
        assert run_folder.find_holder(tmp_path) == LockHolder.own()
    os.close(descriptor)


def test_read_endpoints_returns_none_when_the_command_has_ended(tmp_path: Path):
    assert run_folder.read_endpoints(tmp_path) is None
    here = Endpoints(os.getpid(), "redis://x", "http://y")
    with locked(tmp_path):
        run_folder.write_endpoints(tmp_path, here)
        assert run_folder.read_endpoints(tmp_path) == here
        run_folder.write_endpoints(tmp_path, Endpoints(os.getpid() + 1, "redis://x", "http://y"))
        assert run_folder.read_endpoints(tmp_path) is None, "of an earlier command"
        run_folder.write_endpoints(tmp_path, here)
    assert run_folder.read_endpoints(tmp_path) is None
    run_folder.remove_endpoints(tmp_path)
    run_folder.remove_endpoints(tmp_path)


def run_in(folder: Path) -> Path:
    folder.mkdir()
    mark(folder, "run")
    for name in (
        *("checkpoints/step-000001", "checkpoints/step-1000000", "logs", "tensorboard", "trackers/wandb"),
        *(BATCHES, LEDGER_FILE.parent),
    ):
        (folder / name).mkdir(parents=True)
    for name in ("config.yaml", "report.json", "checkpoints/step-000001/learner.json", LEDGER_FILE, STEPS_FILE):
        (folder / name).write_text("{}")
    return folder


def test_remove_run_files_removes_the_run_and_its_folder(tmp_path: Path):
    folder = run_in(tmp_path / "run")
    removal = remove_run_files(folder, "run")
    assert not folder.exists()
    assert str(folder / "checkpoints") in removal.removed
    assert str(folder) in removal.removed
    assert removal.left == []


def test_remove_run_files_keeps_files_that_no_run_writes(tmp_path: Path):
    folder = run_in(tmp_path / "home")
    (folder / "thesis.tex").write_text("years of work")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    (folder / "logs").rmdir()
    (folder / "logs").symlink_to(elsewhere)
    (folder / "checkpoints" / "step-000001-mine").mkdir()
    removal = remove_run_files(folder, "run")
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoints", "thesis.tex"]
    assert removal.left == [str(folder / "checkpoints" / "step-000001-mine"), str(folder / "thesis.tex")]
    assert (elsewhere / "precious").exists()


def test_remove_run_files_keeps_a_folder_without_a_run(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "checkpoints").mkdir()
    assert remove_run_files(tmp_path, "run").left == [str(tmp_path)]
    assert not remove_run_files(tmp_path / "nowhere", "run").removed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "logs"]


def test_remove_run_files_keeps_those_of_another_run(tmp_path: Path):
    folder = run_in(tmp_path / "run")
    assert remove_run_files(folder, "other").left == [str(folder)]
    assert (folder / "config.yaml").exists()


def test_the_state_of_a_redis_is_left_and_stays_known_as_the_runs(tmp_path: Path):
    folder = run_in(tmp_path / "run")
    (folder / "redis").mkdir()
    assert remove_run_files(folder, "run").left == [str(folder / "redis")]
    assert identify(folder) is not None
    assert run_folder.claim(folder, "run", resume=False) == tmp_path / "run.1"
    assert (tmp_path / "run.1" / "redis").is_dir()


def test_remove_run_files_keeps_a_locked_folder(tmp_path: Path):
    folder = run_in(tmp_path / "run")
    with locked(folder), pytest.raises(FolderInUseError):
        remove_run_files(folder, "run")
    assert (folder / "config.yaml").exists()


def test_no_run_starts_in_a_folder_whose_files_are_being_removed(tmp_path: Path):
    folder = run_in(tmp_path / "run")
    with hold_run_files(folder, "run") as remove:
        with pytest.raises(FolderInUseError):
            run_folder.claim(folder, "run", resume=False)
        remove()
    assert not folder.exists()


@contextmanager
def without_root() -> Iterator[None]:
    """Root may write everywhere."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_remove_run_files_leaves_and_names_what_it_may_not_remove():
    with TemporaryDirectory() as place:
        folder = Path(place) / "run"
        (folder / "logs").mkdir(parents=True)
        (folder / "logs" / "engine.log").touch()
        (folder / "metrics.jsonl").touch()
        mark(folder, "run")
        for path in (Path(place), folder, *folder.iterdir()) if os.geteuid() == 0 else ():
            os.chown(path, NOBODY, NOBODY)
        (folder / "logs").chmod(0o500)
        with without_root():
            removal = remove_run_files(folder, "run")
            (folder / "logs").chmod(0o700)
            again = remove_run_files(folder, "run")
    assert removal.removed == [str(folder / "metrics.jsonl")]
    assert removal.left == [str(folder / "logs")]
    assert (again.removed, again.left) == ([str(folder / "logs"), str(folder)], []), "the marker has stayed"
