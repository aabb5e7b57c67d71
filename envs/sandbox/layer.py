"""What a policy wrote to a container's image, as podman tells from outside.

Invariant: what `check_layer` accepts leaves the programs of the shell's operations, and their libraries, as they were.
"""

import json
import re
import subprocess
import tarfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from hashlib import blake2b
from typing import NamedTuple

from offbeat.envs.sandbox.container_engine import PROGRAM_FOLDERS, Image, run_engine
from offbeat.envs.sandbox.run import IsolationError
from offbeat.envs.sandbox.shell import ShellError

LIBRARY_FOLDERS = ("/usr/lib", "/usr/lib64", "/lib", "/lib64")
LIBRARIES = r"(?:/usr)?/lib(?:32|64|x32)?"
OF_INTERPRETERS = r"(?!.*/(?:python[^/]*|perl[^/]*|ruby|node_modules|jvm|R)/)"
LIBRARY = re.compile(rf"{OF_INTERPRETERS}{LIBRARIES}/(?:.*/)?[^/]*\.so(?:\.[^/]*)?")
OF_MUSL = re.compile(r"/usr/local/lib/[^/]*\.so(?:\.[^/]*)?")
"""Besides, where musl's loader looks."""
PARENT = re.compile(rf"/usr|(?:/usr)?/s?bin|{LIBRARIES}(?:/[^/]+-linux-[^/]+)?")
"""Folders that a link must not replace; they are also listed for changes below them, which links have not."""
LOADER_FILES = re.compile(r"/etc/(?:ld\.so\.(?:cache|preload)|ld-.*\.path)")
"""What tells glibc's and musl's loaders where libraries are."""
UNLISTED = ("/etc", "/run")
"""Folders with files that podman writes itself, and does not list."""
MAX_NAMED = 3
"""Paths in a message."""
MAX_MEMBERS, MAX_BYTES, COPY_TIMEOUT_S = 500_000, 4 << 30, 120.0
"""Of a folder that is copied."""


class FileChange(NamedTuple):
    kind: str
    """`added`, `changed` or `deleted`."""
    path: str


class Original(NamedTuple):
    """What the shell's operations need of the image."""

    programs: frozenset[str]
    """Paths, also those that links lead to."""
    names: frozenset[str]
    """Of all commands in `PROGRAM_FOLDERS`."""
    path: tuple[str, ...]
    """Other folders of the image's PATH."""
    is_musl: bool
    files: dict[str, str]
    """Digests of the loader's files; of programs and libraries, too, if podman does not list changes of content."""


class CopiedFile(NamedTuple):
    path: str
    is_link: bool
    value: str
    """Target of a link, else digest; empty: neither."""


def read_changes(image: Image, name: str) -> list[FileChange]:
    """List what differs from the image in a stopped container; raises ShellError if podman does not say."""
    try:
        result = run_engine(*image.command, "diff", "--format", "json", name)
        listed: dict[str, list[str]] = json.loads(result.stdout or "null") or {}
    except (IsolationError, ValueError) as error:
        raise ShellError(f"diff: {error}") from error
    if result.returncode:
        raise ShellError(f"diff: {(result.stderr.strip().splitlines() or ['no message'])[-1]}")
    changes = [FileChange(kind, path) for kind in ("added", "changed", "deleted") for path in listed.get(kind) or ()]
    if any("\ufffd" in path or "\n" in path for _, path in changes):
        raise ShellError("diff: a file name is no UTF-8, or has a line break")
    return changes


def check_layer(changes: Iterable[FileChange], original: Original) -> None:
    """Raise ShellError if programs of the operations, or their libraries, differ from the image's, or are shadowed."""
    listed = list(changes)
    parents = {parent for change in listed for parent in _ancestors(change.path)}
    folders = {*original.path, *(parent for folder in original.path for parent in _ancestors(folder))}
    changed = [change.path for change in listed if _is_harmful(change, original, parents, folders)]
    if changed:
        more = f", and {len(changed) - MAX_NAMED} more" if len(changed) > MAX_NAMED else ""
        raise ShellError(f"programs of the image were changed: {', '.join(changed[:MAX_NAMED])}{more}")


def read_copies(image: Image, name: str) -> list[CopiedFile]:
    """Copy `UNLISTED`, and the folders of `Original.files`; raises ShellError if podman does not answer."""
    others = () if lists_content(image.command) else (*PROGRAM_FOLDERS, *LIBRARY_FOLDERS)
    return [each for folder in (*UNLISTED, *others) for each in _copy(image, name, folder)]


def kept_files(copies: Iterable[CopiedFile]) -> dict[str, str]:
    """Return the digests, or targets, of the files that `Original.files` names."""
    return {each.path: each.value for each in copies if _is_kept(each.path)}


def check_files(files: dict[str, str], original: Original) -> None:
    """Raise ShellError if files of the image are no longer as they were, or the loader has new ones."""
    changed = sorted(path for path, digest in original.files.items() if files.get(path) != digest)
    changed += sorted(path for path in files.keys() - original.files.keys() if LOADER_FILES.fullmatch(path))
    if changed:
        raise ShellError(f"programs of the image were changed: {', '.join(changed[:MAX_NAMED])}")


def unlisted_links(copies: Iterable[CopiedFile]) -> dict[str, str]:
    """Return the symbolic links in `UNLISTED`, and their targets."""
    return {each.path: each.value for each in copies if each.is_link and each.path.startswith(UNLISTED)}


@cache
def lists_content(command: tuple[str, ...]) -> bool:
    """Return whether podman's storage notices each file that was written, whatever its size and times."""
    result = run_engine(*command, "info", "--format", '{{index .Store.GraphStatus "Native Overlay Diff"}}')
    return result.stdout.strip() == "true"


def _copy(image: Image, name: str, folder: str) -> list[CopiedFile]:
    """Read a container's folder from outside, links on the way to it followed; raises ShellError if it is too large."""
    command = [*image.command, "cp", f"{name}:{folder}/.", "-"]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as engine:
        timer = threading.Timer(COPY_TIMEOUT_S, engine.kill)
        timer.start()
        try:
            with tarfile.open(fileobj=engine.stdout, mode="r|") as tar:
                copies = list(_read_members(tar, folder))
        except tarfile.TarError as error:
            if folder in UNLISTED or engine.wait() == 0:  # podman makes these in each container
                raise ShellError(f"cp: {folder}: {error}") from error
            return []
        finally:
            timer.cancel()
            engine.kill()
    return copies


def _read_members(tar: tarfile.TarFile, folder: str) -> Iterator[CopiedFile]:
    num_bytes = 0
    for number, member in enumerate(tar):
        num_bytes += member.size
        if number > MAX_MEMBERS or num_bytes > MAX_BYTES:
            raise ShellError(f"cp: {folder} has more than {MAX_MEMBERS:,} files or {MAX_BYTES >> 30} GiB")
        path, value = f"{folder}/{member.name.removeprefix('./')}", ""
        if member.issym():
            value = member.linkname
        elif _is_kept(path) and (file := tar.extractfile(member)):
            value = blake2b(file.read()).hexdigest()
        yield CopiedFile(path, member.issym(), value)


def _is_kept(path: str) -> bool:
    return bool(LOADER_FILES.fullmatch(path) or LIBRARY.fullmatch(path)) or path.rpartition("/")[0] in PROGRAM_FOLDERS


def _is_harmful(change: FileChange, original: Original, parents: set[str], folders: set[str]) -> bool:
    kind, path = change
    parent, _, name = path.rpartition("/")
    if path in original.programs or LIBRARY.fullmatch(path) or (original.is_musl and OF_MUSL.fullmatch(path)):
        return True
    if parent in PROGRAM_FOLDERS:
        return kind != "added" or name in original.names
    if parent in original.path:
        return kind != "deleted" and name in original.names
    return bool(PARENT.fullmatch(path) or path in folders) and not (kind != "deleted" and path in parents)


def _ancestors(path: str) -> Sequence[str]:
    parts = path.split("/")
    return ["/".join(parts[:end]) for end in range(2, len(parts))]
