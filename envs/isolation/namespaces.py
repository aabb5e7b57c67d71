"""User, process, network and mount namespaces of a program.

Started by root, the program has its own user id; else the user's, without capabilities.
"""

import ctypes
import os
import stat
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

from offbeat.envs.isolation import syscalls

NEW_NS, NEW_UTS, NEW_IPC, NEW_USER, NEW_PID, NEW_NET = (
    0x00020000,
    0x04000000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
BIND, RECURSIVE, PRIVATE, NOSUID, NODEV = 4096, 16384, 1 << 18, 2, 4
MOUNT_SETATTR, PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}
AT_FDCWD, AT_RECURSIVE, ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = -100, 0x8000, 1, 2, 4
PROGRAM_ID = 1000
"""User and group id inside."""
FIRST_OUTSIDE_ID = 1 << 30
"""Base of the outside user id under root, plus the supervisor's pid."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
WORK = "/sandbox"


def enter() -> int:
    """Enter new namespaces; return the user and group id inside, or 0 without its own.

    Children enter the process namespace. Raises OSError if the kernel refuses.
    """
    uid, gid, pid = os.getuid(), os.getgid(), os.getpid()
    if uid or not _is_world_readable(os.__file__):
        syscalls.unshare(NEW_USER | NEW_PID | NEW_NET | NEW_IPC | NEW_UTS)
        _write(pid, "setgroups", "deny")
        _write(pid, "gid_map", f"0 {gid} 1")
        _write(pid, "uid_map", f"0 {uid} 1")
        return 0
    read_end, write_end = os.pipe()
    mapper = os.fork()
    if not mapper:
        os.close(write_end)
        _map_ids(read_end, pid)
    try:
        syscalls.unshare(NEW_USER | NEW_PID | NEW_NET | NEW_IPC | NEW_UTS)
        os.write(write_end, b"x")
    finally:
        os.close(write_end)
        os.close(read_end)
        _, status = os.waitpid(mapper, 0)
    return PROGRAM_ID if status == 0 else 0


def new_root(
    folder: Path,
    readable: Iterable[str],
    *,
    hidden: Sequence[str] = (),
    writable: Sequence[str] = (),
    program_id: int,
    disk_mib: int,
    max_files: int,
) -> None:
    """Switch to a new root: read-only `readable`, four devices, and an empty, bounded `/sandbox`.

    hidden: folders that are empty inside, if they are below `readable`. writable: more empty folders, within the bounds of
    `/sandbox`. Raises OSError if a mount is refused.
    """
    syscalls.unshare(NEW_NS)
    syscalls.mount("none", "/", "none", RECURSIVE | PRIVATE)
    root = folder / "root"
    root.mkdir()
    syscalls.mount("none", str(root), "tmpfs", NOSUID | NODEV, "mode=755,size=1m,nr_inodes=1k")
    work = root / WORK.lstrip("/")
    work.mkdir()
    options = f"mode=700,uid={program_id},gid={program_id},size={disk_mib}m,nr_inodes={max_files}"
    syscalls.mount("none", str(work), "tmpfs", NOSUID | NODEV, options)
    for path in writable:
        _make_folder(path, root, work, program_id)
    if writable:  # over the others' parent, so that each has one path
        _make_folder(WORK, root, work, program_id)
    for path in readable:
        _bind_read_only(Path(path), root, hidden)
    for path in DEVICES:
        _bind(Path(path), root)
    for path in (root / "tmp", root / "dev/shm"):
        if not path.exists():
            path.symlink_to(WORK)
    _make_read_only(str(root))
    os.chdir(root)
    syscalls.call(PIVOT_ROOT[syscalls.machine], b".", b".")
    syscalls.detach(".")
    os.chdir(WORK)


def switch_user(program_id: int) -> None:
    os.setgroups([])
    os.setresgid(program_id, program_id, program_id)
    os.setresuid(program_id, program_id, program_id)


def _is_world_readable(path: str) -> bool:
    return bool(os.stat(path).st_mode & stat.S_IROTH)


def _map_ids(read_end: int, pid: int) -> None:
    """Map `pid`'s users from outside; exit with 0 if it has its own, 1 if only root."""
    if os.read(read_end, 1):
        for code, extra_mapping in enumerate((f"\n{PROGRAM_ID} {FIRST_OUTSIDE_ID + pid} 1", "")):
            try:
                for name in ("gid_map", "uid_map"):
                    _write(pid, name, f"0 0 1{extra_mapping}")
            except OSError:
                continue
            os._exit(code)
    os._exit(1)


def _write(pid: int, name: str, text: str) -> None:
    with open(f"/proc/{pid}/{name}", "w") as file:
        file.write(text)


def _bind_read_only(path: Path, root: Path, hidden: Sequence[str]) -> None:
    """Bind `path` below `root`, without the contents of hidden folders; copy symbolic links."""
    target = root / str(path).lstrip("/")
    if target.exists() or target.is_symlink():
        return
    if path.is_symlink():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(os.readlink(path))
    elif path.exists():
        _bind(path, root)
        for folder in map(Path, hidden):
            if path.resolve() in folder.resolve().parents:
                over = target / folder.resolve().relative_to(path.resolve())
                syscalls.mount("none", str(over), "tmpfs", NOSUID | NODEV, "mode=555,size=4k,nr_inodes=1")
        _make_read_only(str(target), recursive=True)


def _make_folder(path: str, root: Path, work: Path, program_id: int) -> None:
    """Mount an empty folder of `work` at `path`."""
    source = work / f".{path.strip('/').replace('/', '.')}"
    source.mkdir()
    os.chown(source, program_id, program_id)
    target = root / path.strip("/")
    target.mkdir(parents=True, exist_ok=True)
    syscalls.mount(str(source), str(target), "none", BIND)


def _bind(path: Path, root: Path) -> None:
    target = root / str(path).lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        target.mkdir(exist_ok=True)
    else:
        target.touch()
    syscalls.mount(str(path), str(target), "none", BIND | RECURSIVE)


def _make_read_only(path: str, *, recursive: bool = False) -> None:
    attributes = struct.pack("=4Q", ATTR_RDONLY | (ATTR_NOSUID | ATTR_NODEV if recursive else 0), 0, 0, 0)
    flags = AT_RECURSIVE if recursive else 0
    syscalls.call(MOUNT_SETATTR, AT_FDCWD, path.encode(), flags, ctypes.create_string_buffer(attributes, 32), 32)
