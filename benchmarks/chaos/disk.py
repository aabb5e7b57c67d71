"""Small checkpoint disk: a tmpfs in this process's mount namespace; needs root or user namespaces."""

import ctypes
import os
import shutil
from contextlib import suppress
from pathlib import Path

SIZE_BYTES = 48 * 2**20
SPARE_BYTES = 64 * 1024
"""Too few to finish a file."""
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_REC, MS_PRIVATE = 0x4000, 1 << 18
CHECKPOINTS, BALLAST = "checkpoints", "ballast"


class SmallDisk:
    def __init__(self, output_dir: Path) -> None:
        """Mount it, in a single thread; failures are in `refusal`."""
        self._output_dir = output_dir
        self._place = output_dir.with_name(f"{output_dir.name}.disk")
        self.refusal = ""
        try:
            self._place.mkdir(parents=True, exist_ok=True)
            _own_namespace()
            _mount("tmpfs", self._place, "tmpfs", 0, f"size={SIZE_BYTES}")
        except OSError as error:
            self.refusal = f"no disk of its own for checkpoints: {error}"
            return
        (self._place / CHECKPOINTS).mkdir()

    @property
    def is_there(self) -> bool:
        return not self.refusal

    def attach(self) -> None:
        if self.is_there:
            (self._output_dir / CHECKPOINTS).symlink_to(self._place / CHECKPOINTS)

    def fill(self) -> int:
        size = max(shutil.disk_usage(self._place).free - SPARE_BYTES, 0)
        with (self._place / BALLAST).open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(size, 1))
        return size

    def free(self) -> None:
        (self._place / BALLAST).unlink(missing_ok=True)

    def keep(self) -> None:
        """Move checkpoints to the run's folder."""
        if not self.is_there or not (self._output_dir / CHECKPOINTS).is_symlink():
            return
        self.free()
        link, aside = self._output_dir / CHECKPOINTS, self._output_dir / ".kept"
        shutil.copytree(self._place / CHECKPOINTS, aside, symlinks=True)
        link.unlink()
        aside.rename(link)
        with suppress(OSError):
            _libc().umount2(str(self._place).encode(), 2)
            self._place.rmdir()


def _own_namespace() -> None:
    root = os.geteuid() == 0
    uid, gid = os.getuid(), os.getgid()
    if _libc().unshare(CLONE_NEWNS if root else CLONE_NEWNS | CLONE_NEWUSER):
        raise OSError(ctypes.get_errno(), f"unshare: {os.strerror(ctypes.get_errno())}")
    if not root:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _mount("none", Path("/"), None, MS_REC | MS_PRIVATE, None)


def _mount(source: str, target: Path, kind: str | None, flags: int, data: str | None) -> None:
    arguments = (
        source.encode(),
        str(target).encode(),
        kind.encode() if kind else None,
        flags,
        data.encode() if data else None,
    )
    if _libc().mount(*arguments):
        raise OSError(ctypes.get_errno(), f"mount {target}: {os.strerror(ctypes.get_errno())}")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
