"""podman for tests, and an image of this machine's own programs: nothing is downloaded."""

import functools
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import uuid
from pathlib import Path

import pytest

from tests.waiting import wait_until_sync

PODMAN = Path(__file__).parents[3] / ".venv/podman/podman"
"""Of `make podman`."""
IMAGE = "localhost/offbeat-test:2"
PROGRAMS = (
    *("awk", "base64", "basename", "bash", "cat", "chmod", "cmp", "comm", "cp", "cut", "date", "diff", "dirname"),
    *("env", "find", "grep", "head", "id", "join", "ln", "ls", "mkdir", "mknod", "mount", "mv", "paste", "ps"),
    *("readlink", "rm", "rmdir", "sed", "seq", "setsid", "sh", "sleep", "sort", "stat", "tail", "tar", "touch", "tr"),
    *("true", "uniq", "unshare", "wc", "xargs", "yes"),
)


OPTIONS = (
    *("--network=none", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--user=0:0"),
    *("--memory=64m", "--memory-swap=64m", "--pids-limit=16", "--ulimit=nofile=1024:1024", "--ulimit=nproc=4096:4096"),
    *("--log-driver=none", "--stop-timeout=0", "--tmpfs=/app:rw,exec,nosuid,nodev,size=1m", "--entrypoint=/bin/sh"),
)
"""What the kernel must allow podman, to each kind of limit."""
READ_LIMITS = """
cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/pids.max \
    /sys/fs/cgroup/pids/pids.max 2>/dev/null
grep Seccomp: /proc/self/status; ls /sys/class/net; touch /app/x && echo written
"""
LIMITS = f"{64 << 20} 16 Seccomp: 2 lo written"
PROBE_TIMEOUT_S = 120.0


def require_image() -> str:
    """Put podman on PATH and return an image; skip the test where podman can't run containers with limits.

    If OFFBEAT_PODMAN names podman, that fails the test.
    """
    path = os.environ.get("OFFBEAT_PODMAN") or (str(PODMAN) if PODMAN.exists() else shutil.which("podman"))
    if path is not None and str(Path(path).parent) not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] = f"{Path(path).parent}{os.pathsep}{os.environ['PATH']}"
    reason = _prepare(path)
    if reason and os.environ.get("OFFBEAT_PODMAN"):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    return IMAGE


def remove_images(*names: str) -> None:
    """Remove images once the containers of them are gone, which their supervisors remove by themselves."""
    command = ["podman", "rmi", "--ignore", *names]
    wait_until_sync(lambda: subprocess.run(command, capture_output=True, check=False).returncode == 0)


@functools.cache
def _prepare(path: str | None) -> str:
    """Make the image and run a container of it by podman alone; return why that fails here."""
    if path is None:
        return "podman is neither on PATH, nor named by OFFBEAT_PODMAN, nor made by `make podman`"
    if os.geteuid():
        return "containers are tested as root alone"
    if missing := [name for name in PROGRAMS if not _find_program(name)]:
        return f"the image of the tests needs {', '.join(missing)}, which this machine lacks"
    name = f"offbeat-probe-{uuid.uuid4().hex}"
    try:
        if not _has_image():
            _import_image()
        _podman("run", "--detach", "--name", name, *OPTIONS, IMAGE, "-c", "sleep 600")
        seen = " ".join(_podman("exec", name, "/bin/sh", "-c", READ_LIMITS).split())
    except (OSError, subprocess.SubprocessError) as error:
        lines = str(getattr(error, "stderr", None) or error).strip().splitlines()
        return f"podman does not run containers here: {lines[-1]}"
    finally:
        subprocess.run(["podman", "rm", "--force", "--volumes", name], capture_output=True, check=False)
    return "" if seen == LIMITS else f"podman runs containers without all limits here: {seen!r}, not {LIMITS!r}"


def _podman(*arguments: str) -> str:
    command = ["podman", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=PROBE_TIMEOUT_S).stdout


def _has_image() -> bool:
    return bool(_podman("images", "--quiet", IMAGE))


def _import_image() -> None:
    changes = ("ENV PATH=/usr/bin:/opt/own", "ENV OWN=/opt/own", "VOLUME /volume")
    with tempfile.NamedTemporaryFile(suffix=".tar") as archive:
        _write_image(Path(archive.name))
        _podman("import", *(word for change in changes for word in ("--change", change)), archive.name, IMAGE)


def _find_program(name: str) -> str | None:
    return shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin")


def _write_image(path: Path) -> None:
    """Pack programs and their libraries, as `ldd` lists them."""
    files: dict[str, str] = {}
    for name in PROGRAMS:
        program = _find_program(name)
        assert program is not None
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
