import os
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.deploy import run_folder
from offbeat.deploy.run_folder import Endpoints, FolderInUseError


def earlier_run(folder: Path, text: str = "old") -> None:
    folder.mkdir()
    (folder / "config.yaml").write_text(text)


def test_an_earlier_run_is_moved_aside_to_the_first_free_name(tmp_path: Path):
    folder = tmp_path / "quickstart"
    for text in ("first", "second"):
        earlier_run(folder, text)
        run_folder.claim(folder, resume=False)
        assert not folder.exists()
    assert (tmp_path / "quickstart.1" / "config.yaml").read_text() == "first"
    assert (tmp_path / "quickstart.2" / "config.yaml").read_text() == "second"


def test_a_resumed_run_stays_where_it_is(tmp_path: Path):
    earlier_run(tmp_path / "q")
    assert run_folder.claim(tmp_path / "q", resume=True) is None
    assert (tmp_path / "q" / "config.yaml").exists()


def test_a_folder_without_a_run_is_used_as_it_is(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    assert run_folder.claim(tmp_path, resume=False) is None
    assert (tmp_path / "notes.txt").exists()


def test_a_folder_in_use_is_neither_taken_nor_moved(tmp_path: Path):
    folder = tmp_path / "q"
    earlier_run(folder)
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
    with pytest.raises(FolderInUseError, match=str(holder.pid)):
        run_folder.claim(folder, resume=False)
    with pytest.raises(FolderInUseError), run_folder.locked(folder):
        pass
    holder.kill()
    holder.wait()
    with run_folder.locked(folder):
        assert (folder / "config.yaml").exists()


def test_endpoints_are_told_only_while_their_process_lives(tmp_path: Path):
    assert run_folder.read_endpoints(tmp_path) is None
    here = Endpoints(os.getpid(), "redis://x", "http://y")
    run_folder.write_endpoints(tmp_path, here)
    assert run_folder.read_endpoints(tmp_path) == here
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    run_folder.write_endpoints(tmp_path, Endpoints(child.pid, "redis://x", "http://y"))
    assert run_folder.read_endpoints(tmp_path) is None
    run_folder.remove_endpoints(tmp_path)
    run_folder.remove_endpoints(tmp_path)
