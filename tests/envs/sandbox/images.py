"""podman for tests, and an image of this machine's own programs: nothing is downloaded."""

import functools
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest

PODMAN = Path(__file__).parents[3] / ".venv/podman/podman"
"""Of `make podman`."""
IMAGE = "localhost/offbeat-test:2"
PROGRAMS = (
    *("awk", "base64", "basename", "bash", "cat", "chmod", "cmp", "comm", "cp", "cut", "date", "diff", "dirname"),
    *("env", "find", "grep", "head", "id", "join", "ln", "ls", "mkdir", "mknod", "mount", "mv", "paste", "ps"),
    *("readlink", "rm", "rmdir", "sed", "seq", "setsid", "sh", "sleep", "sort", "stat", "tail", "tar", "touch", "tr"),
    *("true", "uniq", "unshare", "wc", "xargs", "yes"),
)


def find_podman() -> str | None:
    return os.environ.get("OFFBEAT_PODMAN") or (str(PODMAN) if PODMAN.exists() else shutil.which("podman"))


needs_container = pytest.mark.skipif(
    find_podman() is None, reason="podman is neither on PATH, nor named by OFFBEAT_PODMAN, nor made by `make podman`"
)


@functools.cache
def make_image() -> str:
    """Put podman on PATH and make the image; return its name."""
    path = find_podman()
    assert path is not None
    os.environ["PATH"] = f"{Path(path).parent}{os.pathsep}{os.environ['PATH']}"
    if subprocess.run([path, "image", "exists", IMAGE], check=False).returncode:
        with tempfile.NamedTemporaryFile(suffix=".tar") as archive:
            _write_image(Path(archive.name))
            command = [
                path,
                "import",
                "--change",
                "ENV PATH=/usr/bin:/opt/own",
                "--change",
                "ENV OWN=/opt/own",
            ]
            subprocess.run(
                [*command, "--change", "VOLUME /volume", archive.name, IMAGE], check=True, capture_output=True
            )
    return IMAGE


def _write_image(path: Path) -> None:
    """Pack programs and their libraries, as `ldd` lists them."""
    files: dict[str, str] = {}
    for name in PROGRAMS:
        program = shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin")
        assert program is not None, f"this machine has no {name}"
        files[f"usr/bin/{name}"] = program
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
        for library in re.findall(r"(/\S+) \(0x", listed):
            files[library.removeprefix("/") if library.startswith("/usr") else f"usr{library}"] = library
    with tarfile.open(path, "w", dereference=True) as tar:
        for folder in ("bin", "lib", "lib64"):
            link = tarfile.TarInfo(folder)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{folder}"
            tar.addfile(link)
        folder = tarfile.TarInfo("opt/own")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(folder)
        for name, source in files.items():
            tar.add(os.path.realpath(source), name)
