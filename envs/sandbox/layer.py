"""Changes to the files of a container with a writable root, as podman and docker list them from outside.

Invariant: while no change is refused by `check_programs`, operations in the container do what they say.
"""

import re
import subprocess
import tarfile
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from offbeat.envs.sandbox.container_engine import Image, run_engine
from offbeat.envs.sandbox.shell import ShellError

LIBRARIES = r"(?:/usr)?/lib(?:32|64|x32)?(?:/[^/]+-linux-[^/]+)?"
PROTECTED = re.compile(rf"(?:/usr)?/s?bin(?:/.*)?|{LIBRARIES}/[^/]*\.so(?:\.[^/]*)?")
"""Programs of the operations and their libraries; /usr/local is the task's."""
PARENTS = re.compile(rf"/usr|{LIBRARIES}")
"""Folders that a link must not replace; they are listed for changes below them, too."""
LOADER_FILES = re.compile(r"(?:\./)?ld\.so\.(?:cache|preload)|(?:\./)?ld-.*\.path")
"""Below /etc: what tells glibc's and musl's loaders where libraries are."""
MAX_ETC_BYTES = 256 << 20
CHANGE = re.compile(r"([ACD]) (/.*)")
MAX_NAMED = 3
"""Paths in a message."""


class FileChange(NamedTuple):
    kind: str
    """`A` added, `C` changed, `D` deleted."""
    path: str


def read_changes(image: Image, name: str) -> list[FileChange]:
    """List what differs from the image in a container; raises ShellError if its engine does not answer."""
    result = run_engine(*image.command, "diff", name)
    matches = [CHANGE.fullmatch(line) for line in result.stdout.split("\n")[:-1]]
    if result.returncode or not all(matches):
        lines = result.stderr.strip().splitlines()
        raise ShellError(f"diff: {lines[-1] if lines else 'a file name has a line break'}")
    return [FileChange(match[1], match[2]) for match in matches if match]


def check_programs(changes: Iterable[FileChange]) -> None:
    """Raise ShellError if the programs of operations, or their libraries, differ from the image's."""
    listed = list(changes)
    parents = {parent for change in listed for parent in _ancestors(change.path)}
    changed = [
        path
        for kind, path in listed
        if PROTECTED.fullmatch(path) or (PARENTS.fullmatch(path) and not (kind == "C" and path in parents))
    ]
    if changed:
        more = f", and {len(changed) - MAX_NAMED} more" if len(changed) > MAX_NAMED else ""
        raise ShellError(f"programs of the image were changed: {', '.join(changed[:MAX_NAMED])}{more}")


def read_loader_files(image: Image, name: str) -> dict[str, str]:
    """Return what a container's `LOADER_FILES` are, by name; raises ShellError if its engine does not answer."""
    command = [*image.command, "cp", f"{name}:/etc/.", "-"]
    found: dict[str, str] = {}
    num_bytes = 0
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as engine:
        try:
            with tarfile.open(fileobj=engine.stdout, mode="r|") as tar:
                for member in tar:
                    num_bytes += member.size
                    if num_bytes > MAX_ETC_BYTES:
                        raise ShellError(f"cp: /etc has more than {MAX_ETC_BYTES >> 20} MiB")
                    if LOADER_FILES.fullmatch(member.name):
                        file = tar.extractfile(member) if member.isreg() else None
                        content = file.read() if file else member.linkname.encode(errors="surrogateescape")
                        found[member.name] = f"{member.type!r} {blake2b(content).hexdigest()}"
        except tarfile.TarError as error:
            raise ShellError(f"cp: {error}") from error
        finally:
            engine.kill()
    return found


def _ancestors(path: str) -> Sequence[str]:
    parts = path.split("/")
    return ["/".join(parts[:end]) for end in range(2, len(parts))]
