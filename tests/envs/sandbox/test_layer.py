"""What of a writable container's changes would let a policy answer for the operations."""

import json
from pathlib import Path
from typing import Any

import pytest

from offbeat.envs.sandbox import layer
from offbeat.envs.sandbox.container_engine import Image
from offbeat.envs.sandbox.layer import (
    FileChange,
    Original,
    check_files,
    check_layer,
    kept_files,
    read_changes,
    read_copies,
)
from offbeat.envs.sandbox.shell import ShellError

IMAGE = Image(("podman",), "ubuntu:24.04", {}, ())
KINDS = {"A": "added", "C": "changed", "D": "deleted"}
ORIGINAL = Original(
    programs=frozenset({"/usr/bin/find", "/usr/lib/cargo/bin/coreutils/coreutils", "/usr/local/bin/bash"}),
    names=frozenset({"find", "cmp", "python3"}),
    path=("/usr/local/bin", "/opt/conda/bin"),
    is_musl=False,
    files={},
)


def changes(text: str) -> list[FileChange]:
    return [FileChange(KINDS[line[0]], line[2:]) for line in text.split(", ")]


@pytest.mark.parametrize(
    "text",
    [
        "C /testbed, A /testbed/x",
        "C /usr, C /usr/bin, A /usr/bin/black",
        "C /usr, C /usr/local, C /usr/local/bin, A /usr/local/bin/pytest",
        "C /usr, C /usr/local, C /usr/local/lib, A /usr/local/lib/libfoo.so.1",
        "C /usr, C /usr/lib, C /usr/lib/python3.11, A /usr/lib/python3.11/__pycache__/os.pyc",
        "C /usr, C /usr/lib, C /usr/lib/python3, A /usr/lib/python3/dist-packages/_speed.so",
        "C /etc, C /etc/passwd",
        "C /opt, C /opt/conda, C /opt/conda/bin, A /opt/conda/bin/pytest, C /opt/conda/bin/pip",
        "C /root, D /root/.bashrc",
        "C /usr, A /usr/local, A /usr/local/bin, A /usr/local/bin/pytest",
        "A /bin2, A /binary/ls, A /libs/x.so",
    ],
)
def test_what_a_task_writes_elsewhere_is_its_own(text: str):
    check_layer(changes(text), ORIGINAL)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("C /usr, C /usr/bin, C /usr/bin/find", "/usr/bin/find"),
        ("C /usr, C /usr/bin, D /usr/bin/ls", "/usr/bin/ls"),
        ("C /usr, C /usr/sbin, A /usr/sbin/find", "/usr/sbin/find"),
        ("C /bin", "/bin"),
        ("C /usr, C /usr/local, C /usr/local/bin, A /usr/local/bin/cmp", "/usr/local/bin/cmp"),
        ("C /usr, C /usr/local, C /usr/local/bin, C /usr/local/bin/bash", "/usr/local/bin/bash"),
        ("C /usr, C /usr/local", "/usr/local"),
        ("C /opt, A /opt/conda", "/opt/conda"),
        ("C /usr, C /usr/local, A /usr/local/bin", "/usr/local/bin"),
        ("C /usr, C /usr/lib, C /usr/lib/cargo/bin/coreutils/coreutils", "/usr/lib/cargo/bin/coreutils/coreutils"),
        ("C /usr, C /usr/lib, A /usr/lib/libc.so.6", "/usr/lib/libc.so.6"),
        (
            "C /usr, C /usr/lib, A /usr/lib/x86_64-linux-gnu/glibc-hwcaps/x86-64-v3/libc.so.6",
            "/usr/lib/x86_64-linux-gnu/.*",
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
        check_layer(changes(text), ORIGINAL)


def test_musl_looks_for_libraries_below_local_too():
    listed = changes("C /usr, C /usr/local, C /usr/local/lib, A /usr/local/lib/libacl.so.1")
    check_layer(listed, ORIGINAL)
    with pytest.raises(ShellError, match="libacl"):
        check_layer(listed, ORIGINAL._replace(is_musl=True))


def test_of_many_changed_programs_three_are_named():
    listed = changes("D /bin/a, D /bin/b, D /bin/c, D /bin/d, D /bin/e, C /bin")
    with pytest.raises(ShellError, match="/bin/a, /bin/b, /bin/c, and 2 more"):
        check_layer(listed, ORIGINAL)


def listing(value: Any, code: int = 0) -> Image:
    """Return an image whose engine prints `value`."""
    script = f"cat <<'END'\n{json.dumps(value)}\nEND\necho no container >&2; exit {code} # "
    return IMAGE._replace(command=("sh", "-c", script))


def test_changes_are_read_by_kind():
    found = read_changes(listing({"added": ["/a b"], "changed": ["/etc"], "deleted": ["/x"]}), "one")
    assert found == [FileChange("added", "/a b"), FileChange("changed", "/etc"), FileChange("deleted", "/x")]
    assert read_changes(listing(None), "one") == []


@pytest.mark.parametrize("path", ["/app/x\nC /usr/bin", "/app/\ufffd"])
def test_names_that_a_list_can_not_show_are_an_error(path: str):
    with pytest.raises(ShellError, match="no UTF-8, or has a line break"):
        read_changes(listing({"added": [path]}), "one")


def test_a_list_that_can_not_be_read_is_an_error():
    with pytest.raises(ShellError, match="diff: no container"):
        read_changes(listing({}, code=125), "one")
    with pytest.raises(ShellError, match="diff: "):
        read_changes(IMAGE._replace(command=("sh", "-c", "echo { # ")), "one")


def read_files(image: Image, name: str) -> dict[str, str]:
    return kept_files(read_copies(image, name))


def tar_of(folder: Path) -> Image:
    """Return an image whose engine copies `folder` for each folder, and lists each write."""
    script = f'[ "$1" = info ] && echo true && exit; tar -cf - -C {folder} .'
    return IMAGE._replace(command=("sh", "-c", script, "sh"))


def test_what_a_loader_reads_is_compared(tmp_path: Path):
    image = tar_of(tmp_path)
    (tmp_path / "passwd").write_text("root")
    assert read_files(image, "one") == {}
    (tmp_path / "ld.so.cache").write_text("a")
    original = ORIGINAL._replace(files=read_files(image, "one"))
    (tmp_path / "passwd").write_text("other")
    check_files(read_files(image, "one"), original)
    (tmp_path / "ld.so.cache").write_text("b")
    with pytest.raises(ShellError, match=r"/etc/ld\.so\.cache"):
        check_files(read_files(image, "one"), original)
    (tmp_path / "ld.so.cache").write_text("a")
    (tmp_path / "ld.so.preload").symlink_to("passwd")
    with pytest.raises(ShellError, match=r"/etc/ld\.so\.preload"):
        check_files(read_files(image, "one"), original)


def test_an_engine_without_a_tar_is_an_error():
    script = '[ "$1" = info ] && echo true && exit; exit 125'
    with pytest.raises(ShellError, match=r"^cp: /etc: "):
        read_files(IMAGE._replace(command=("sh", "-c", script, "sh")), "one")


def test_a_folder_with_too_many_files_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layer, "MAX_MEMBERS", 2)
    for number in range(4):
        (tmp_path / str(number)).touch()
    with pytest.raises(ShellError, match="/etc has more than 2 files"):
        read_files(tar_of(tmp_path), "one")
