"""Backup files of one name, written at once or one after the other."""

import errno
import fcntl
from pathlib import Path

import msgspec
import pytest

from offbeat.deploy.backup import archive
from offbeat.deploy.backup.archive import FORMAT, KEYS, BackupReader, BackupWriter, Contents
from offbeat.deploy.backup.errors import BackupError
from offbeat.deploy.backup.redis_keys import KeysDump

DUMP = msgspec.msgpack.encode(KeysDump("lake", "7", "running", 0.0, 1, "", 0, {}))


def describe(files: dict[str, tuple[int, int]]) -> Contents:
    return Contents(FORMAT, "0.2.0", "lake", "/runs/lake", 0.0, 1, files)


def fill(writer: BackupWriter, weights: bytes) -> None:
    writer.add_bytes(KEYS, DUMP)
    writer.add_bytes("folder/weights", weights)


def restored_weights(path: Path, tmp_path: Path) -> bytes:
    with BackupReader(path) as reader:
        reader.extract(tmp_path / "restored")
    return (tmp_path / "restored" / "weights").read_bytes()


def test_a_backup_of_a_name_that_is_being_written_is_refused(tmp_path: Path):
    target = tmp_path / "daily.tar"
    with BackupWriter(target) as first:
        fill(first, b"A" * 3_000_000)
        with pytest.raises(BackupError, match=r"another backup is being written to .*daily\.tar: wait for it"):
            BackupWriter(target)
        first.finish(describe)
    assert restored_weights(target, tmp_path) == b"A" * 3_000_000


def test_a_backup_that_ends_while_another_opens_its_part_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = tmp_path / "daily.tar"
    with BackupWriter(target) as first:
        fill(first, b"A" * 1_000)

        def finish_and_lock(file: object, operation: int) -> None:
            first.finish(describe)
            fcntl.flock(file, operation)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(archive, "fcntl", type("Late", (), {**vars(fcntl), "flock": staticmethod(finish_and_lock)}))
            with pytest.raises(BackupError, match="another backup"):
                BackupWriter(target)
    assert restored_weights(target, tmp_path) == b"A" * 1_000


def test_the_part_of_a_killed_backup_is_replaced(tmp_path: Path):
    target = tmp_path / "daily.tar"
    (tmp_path / ".daily.tar.part").write_bytes(b"B" * 100_000)
    with BackupWriter(target) as writer:
        fill(writer, b"A")
        size = writer.finish(describe)
    assert [(path.name, path.stat().st_size) for path in tmp_path.iterdir()] == [("daily.tar", size)]
    assert restored_weights(target, tmp_path) == b"A"


def test_a_backup_is_written_where_the_file_system_has_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    target = tmp_path / "daily.tar"
    with BackupWriter(target) as writer:
        fill(writer, b"A")
        writer.finish(describe)
    assert restored_weights(target, tmp_path) == b"A"


def test_a_file_that_got_the_name_meanwhile_is_left(tmp_path: Path):
    target = tmp_path / "daily.tar"
    with BackupWriter(target) as writer:
        fill(writer, b"A")
        target.write_text("mine")
        with pytest.raises(BackupError, match="exists: choose another name"):
            writer.finish(describe)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("daily.tar", "mine")]
