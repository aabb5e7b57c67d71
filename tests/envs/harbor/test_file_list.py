"""Lists of files from a sandbox: what its programs write into one leaves no folder of the host."""

import base64
import subprocess
from pathlib import Path

import pytest

from offbeat.envs.harbor.file_list import SCRIPT, read_entries


def encode(*entries: str) -> str:
    return base64.b64encode("".join(f"{entry}\0" for entry in entries).encode()).decode()


def test_folders_and_files_of_any_name_are_listed_without_links(tmp_path: Path):
    (tmp_path / "sub/..a").mkdir(parents=True)
    (tmp_path / "sub/a\nb..").write_text("x")
    (tmp_path / "link").symlink_to("/etc/passwd")
    command = ["bash", "-o", "pipefail", "-c", SCRIPT, "bash", str(tmp_path)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert sorted(read_entries(output)) == [("d", "sub"), ("d", "sub/..a"), ("f", "sub/a\nb..")]
    assert read_entries("") == []


@pytest.mark.parametrize(
    "entry",
    ["f.//etc/passwd", "f/etc/passwd", "f./../x", "d..", "f./a/../../x", "d./", "f", "l./link", "x./a"],
)
def test_an_entry_outside_of_the_folder_is_refused(entry: str):
    with pytest.raises(ValueError, match="not below the folder"):
        read_entries(encode("f./fine", entry))


def test_a_list_that_was_cut_is_refused():
    """`join_output` puts a sentence into the middle, whose letters are digits of base64."""
    whole = encode(*(f"f./{number}" for number in range(99)))
    with pytest.raises(ValueError, match="too long"):
        read_entries(f"{whole[:100]}\n... 44 characters left out ...\n{whole[144:]}")
