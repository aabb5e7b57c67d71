"""Changes of a writable container that would let a policy answer for the operations."""

from pathlib import Path

import pytest

from offbeat.envs.sandbox.container_engine import Image
from offbeat.envs.sandbox.layer import FileChange, check_programs, read_changes, read_loader_files
from offbeat.envs.sandbox.shell import ShellError

IMAGE = Image(("podman",), "ubuntu:24.04", {}, ())


def changes(text: str) -> list[FileChange]:
    return [FileChange(*line.split(" ", 1)) for line in text.split(", ")]


@pytest.mark.parametrize(
    "text",
    [
        "C /testbed, A /testbed/x",
        "C /usr, C /usr/local, C /usr/local/bin, A /usr/local/bin/pytest",
        "C /usr, C /usr/lib, C /usr/lib/python3.11, A /usr/lib/python3.11/__pycache__/os.pyc",
        "C /usr, C /usr/lib, C /usr/lib/python3, A /usr/lib/python3/dist-packages/_speed.so",
        "C /etc",
        "C /etc, C /etc/passwd",
        "C /root, D /root/.bashrc",
        "A /bin2, A /binary/ls, A /libs/x.so",
    ],
)
def test_what_a_task_writes_elsewhere_is_its_own(text: str):
    check_programs(changes(text))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("C /usr, C /usr/bin, A /usr/bin/find", "/usr/bin, /usr/bin/find"),
        ("C /bin", "/bin"),
        ("D /sbin/init", "/sbin/init"),
        ("C /usr, C /usr/lib, A /usr/lib/libc.so.6", "/usr/lib/libc.so.6"),
        (
            "C /usr, C /usr/lib, C /usr/lib/x86_64-linux-gnu, A /usr/lib/x86_64-linux-gnu/libc.so.6",
            "/usr/lib/x86_64-linux-gnu/libc.so.6",
        ),
        ("C /usr, C /usr/lib, C /usr/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu"),
        ("C /lib64", "/lib64"),
        ("C /lib, C /lib/ld-musl-x86_64.so.1", "/lib/ld-musl-x86_64.so.1"),
        ("C /usr", "/usr"),
        ("D /usr, A /usr2/x", "/usr"),
    ],
)
def test_programs_and_libraries_of_the_operations_are_named(text: str, named: str):
    """A folder that a link replaced is one without changes below it."""
    with pytest.raises(ShellError, match=f"^programs of the image were changed: {named}$"):
        check_programs(changes(text))


def test_of_many_changed_programs_three_are_named():
    listed = changes("A /bin/a, A /bin/b, A /bin/c, A /bin/d, A /bin/e")
    with pytest.raises(ShellError, match="/bin/a, /bin/b, /bin/c, and 2 more"):
        check_programs(listed)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("printf 'C /app\\nno change\\n'", "a file name has a line break"),
        ("printf 'C /app\\nelsewhere\\n'", "a file name has a line break"),
        ("echo 'Error: no container one' >&2; exit 125", "Error: no container one"),
    ],
)
def test_a_list_that_can_not_be_read_is_an_error(script: str, says: str):
    with pytest.raises(ShellError, match=f"diff: {says}"):
        read_changes(IMAGE._replace(command=("sh", "-c", f"{script} # ")), "one")


def test_names_that_are_no_utf8_are_read():
    image = IMAGE._replace(command=("sh", "-c", "printf 'A /app/\\377\\n' # "))
    assert read_changes(image, "one") == [FileChange("A", "/app/\udcff")]


def tar_of(folder: Path) -> Image:
    """Return an image whose engine copies `folder` for /etc."""
    return IMAGE._replace(command=("sh", "-c", f"tar -cf - -C {folder} . # "))


def test_what_a_loader_reads_is_told_apart(tmp_path: Path):
    (tmp_path / "passwd").write_text("root")
    states = [read_loader_files(tar_of(tmp_path), "one")]
    (tmp_path / "ld.so.cache").write_text("a")
    states.append(read_loader_files(tar_of(tmp_path), "one"))
    (tmp_path / "ld.so.cache").write_text("b")
    states.append(read_loader_files(tar_of(tmp_path), "one"))
    (tmp_path / "ld-musl-x86_64.path").symlink_to("passwd")
    states.append(read_loader_files(tar_of(tmp_path), "one"))
    (tmp_path / "passwd").write_text("other")
    assert read_loader_files(tar_of(tmp_path), "one") == states[-1]
    assert [len(state) for state in states] == [0, 1, 1, 2]
    assert states[1] != states[2]


def test_an_engine_without_a_tar_is_an_error():
    with pytest.raises(ShellError, match=r"^cp: "):
        read_loader_files(IMAGE._replace(command=("sh", "-c", "exit 125 # ")), "one")
