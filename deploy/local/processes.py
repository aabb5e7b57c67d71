"""Termination of all processes that this command has started, including indirect descendants.

Invariants: only descendants are signalled, by pid; orphaned descendants are reparented to this process, not to init.
"""

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
"""Semaphores and blocks of memory."""
RESOURCE_TRACKER_GRACE_S = 2.0
"""Time for resource trackers to clean up after their processes have exited."""


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def descendants(excluding: Collection[int] = ()) -> list[psutil.Process]:
    """Return all living descendants, except those in `excluding` and their descendants."""
    spared = set(excluding)
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        if child.pid in spared:
            continue
        try:
            found += [child, *child.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    return [process for process in found if process.pid not in spared]


def terminate_descendants(grace_s: float, excluding: Collection[int] = ()) -> int:
    """Terminate every descendant, kill the rest after `grace_s`, and return the number killed.

    Shared memory of killed processes is removed: by Python's resource trackers, which get time to exit, and otherwise here.

    besides: pids that are left alone, with their descendants.
    """
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
    killed = _kill([each for each in _exclude_zombies(descendants(excluding)) if not _is_resource_tracker(each)])
    deadline = time.monotonic() + RESOURCE_TRACKER_GRACE_S
    while _exclude_zombies(descendants(excluding)) and time.monotonic() < deadline:
        # Who was forked between the look and the kill is killed here.
        killed |= _kill([each for each in _exclude_zombies(descendants(excluding)) if not _is_resource_tracker(each)])
        time.sleep(0.02)
    killed |= _kill(_exclude_zombies(descendants(excluding)))
    if left := _exclude_zombies(descendants(excluding)):
        logger.error("processes that can't be killed: %s", [process.pid for process in left])
    remove_orphaned_shared_memory(held)
    return len(killed)


def find_shared_memory() -> set[Path]:
    """Return the files in shared memory that multiprocessing created for our descendants."""
    return _split_by_use(descendants())[0]


def find_orphaned_shared_memory() -> set[Path]:
    """Return the files in shared memory that multiprocessing created and no process of this machine uses."""
    return _split_by_use(psutil.process_iter())[1]


def remove_orphaned_shared_memory(held: Collection[Path]) -> None:
    """Remove shared memory that `find_shared_memory` found before its processes were killed, if it still exists."""
    if held:
        for path in find_orphaned_shared_memory().intersection(held):
            path.unlink(missing_ok=True)


def _split_by_use(processes: Iterable[psutil.Process]) -> tuple[set[Path], set[Path]]:
    """Return multiprocessing's files that the processes have mapped, and the others.

    By inode: a process maps a semaphore before it gets its name.
    """
    # Listed first: what is made meanwhile would seem nobody's
    files = {path for pattern in MULTIPROCESSING_PATTERNS for path in SHARED_MEMORY.glob(pattern)}
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
    """Return the processes that are not zombies; own zombie children are reaped."""
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
        logger.warning("may not end process %d", process.pid)
