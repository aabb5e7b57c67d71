import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from offbeat.envs.sandbox.folder import MIN_AGE_S, PREFIX, SandboxFolder, remove_leftovers

KILLED = """
import os
from offbeat.envs.sandbox.folder import SandboxFolder
(SandboxFolder().path / "main.py").write_text("secret")
os._exit(9)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_folder_of_a_killed_process_is_removed_by_the_next(temporary: Path):
    subprocess.run([sys.executable, "-c", KILLED], env={**os.environ, "TMPDIR": str(temporary)}, check=False)
    [left] = temporary.iterdir()
    _make_old(left)
    SandboxFolder().remove()
    assert list(temporary.iterdir()) == []


def test_folders_in_use_and_those_of_others_stay(temporary: Path):
    held, closed = SandboxFolder(), SandboxFolder()
    young, other, file = temporary / f"{PREFIX}young", temporary / "other", temporary / f"{PREFIX}file"
    young.mkdir()
    other.mkdir()
    file.touch()
    link = temporary / f"{PREFIX}link"
    link.symlink_to(other)
    for path in (held.path, other, file):
        _make_old(path)
    closed.remove()
    remove_leftovers.cache_clear()
    another = SandboxFolder()
    assert {*temporary.iterdir()} == {held.path, another.path, young, other, file, link}
    held.remove()
    another.remove()


def _make_old(path: Path) -> None:
    before = time.time() - 2 * MIN_AGE_S
    os.utime(path, (before, before))
