"""Termination of descendants, signalled only by pid, and removal of their shared memory."""

import ctypes
import logging
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

PR_SET_CHILD_SUBREAPER = 36
SHARED_MEMORY = Path("/dev/shm")
MULTIPROCESSING_PATTERNS = ("sem.mp-*", "psm_*")
RESOURCE_TRACKER_GRACE_S = 2.0


def adopt_orphans() -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def descendants(excluding: Collection[int] = ()) -> list[psutil.Process]:
    """Return all descendants but `excluding` and theirs."""
    spared = set(excluding)
    processes: list[psutil.Process] = []
    for child in psutil.Process().children():
        if child.pid in spared:
            continue
        try:
            processes += [child, *child.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    return [process for process in processes if process.pid not in spared]


def terminate_descendants(grace_s: float, excluding: Collection[int] = ()) -> int:
    """Terminate descendants, kill the rest after `grace_s`; return the number killed. excluding: spared with
    descendants."""
    held = find_shared_memory()
    for process in descendants(excluding):
        _signal(process, kill=False)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline:
        if not _exclude_zombies(descendants(excluding)):
            remove_orphaned_shared_memory(held)
            return 0
        time.sleep(0.05)
    held |= find_shared_memory()
    killed = _kill(
        [process for process in _exclude_zombies(descendants(excluding)) if not _is_resource_tracker(process)]
    )
    deadline = time.monotonic() + RESOURCE_TRACKER_GRACE_S
    while _exclude_zombies(descendants(excluding)) and time.monotonic() < deadline:
        # Also kills what was forked meanwhile.
        killed |= _kill(
            [process for process in _exclude_zombies(descendants(excluding)) if not _is_resource_tracker(process)]
        )
        time.sleep(0.02)
    killed |= _kill(_exclude_zombies(descendants(excluding)))
    if remaining := _exclude_zombies(descendants(excluding)):
        logger.error("can't kill processes %s", [process.pid for process in remaining])
    remove_orphaned_shared_memory(held)
    return len(killed)


def list_shared_memory() -> set[Path]:
    """Return multiprocessing's files in shared memory, of any process."""
    return {path for pattern in MULTIPROCESSING_PATTERNS for path in SHARED_MEMORY.glob(pattern)}


def find_shared_memory() -> set[Path]:
    """Return multiprocessing's files that descendants have mapped."""
    return _split_by_use(descendants())[0]


def find_orphaned_shared_memory() -> set[Path]:
    """Return unused multiprocessing files in shared memory."""
    return _split_by_use(psutil.process_iter())[1]


def remove_orphaned_shared_memory(held: Collection[Path]) -> None:
    if held:
        for path in find_orphaned_shared_memory().intersection(held):
            path.unlink(missing_ok=True)


def _split_by_use(processes: Iterable[psutil.Process]) -> tuple[set[Path], set[Path]]:
    """Return multiprocessing's files mapped by the processes, and the others.

    By inode, as a semaphore is mapped before it is named.
    """
    # Listed first: otherwise files created meanwhile would seem unused
    files = list_shared_memory()
    mapped: set[int] = set()
    for process in processes if files else ():
        with suppress(OSError):
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            mapped |= {int(line.split(maxsplit=5)[4]) for line in lines if str(SHARED_MEMORY) in line}
    held: set[Path] = set()
    for path in list(files):
        try:
            if path.stat().st_ino in mapped:
                held.add(path)
        except FileNotFoundError:
            files.remove(path)
    return held, files - held


def _kill(processes: Sequence[psutil.Process]) -> set[int]:
    for process in processes:
        _signal(process, kill=True)
    psutil.wait_procs(processes, timeout=1.0)
    return {process.pid for process in processes}


def _is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return any("resource_tracker" in part for part in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _exclude_zombies(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Reap zombie children; return the rest."""
    living: list[psutil.Process] = []
    for process in processes:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                process.wait(0)
            else:
                living.append(process)
        except (psutil.NoSuchProcess, psutil.TimeoutExpired):
            continue
    return living


def _signal(process: psutil.Process, *, kill: bool) -> None:
    try:
        process.kill() if kill else process.terminate()
    except psutil.NoSuchProcess:
        return
    except psutil.AccessDenied:
        logger.warning("no permission to signal process %d", process.pid)
