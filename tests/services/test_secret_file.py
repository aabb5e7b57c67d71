import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from offbeat.services.secret_file import create_secret_file


def test_a_secret_is_for_its_owner_alone_and_is_kept(tmp_path: Path):
    path = tmp_path / "control" / "token"
    before = os.umask(0)
    try:
        create_secret_file(path, "first")
    finally:
        os.umask(before)
    create_secret_file(path, "second")
    assert path.read_text() == "first\n"
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert [each.name for each in path.parent.iterdir()] == ["token"]


def test_writers_at_once_agree_on_one_secret(tmp_path: Path):
    def create(number: int) -> str:
        create_secret_file(tmp_path / "token", str(number))
        return (tmp_path / "token").read_text()

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(create, range(64)))) == 1
    assert [each.name for each in tmp_path.iterdir()] == ["token"]
