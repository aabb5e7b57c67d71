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
MULTIPROCESSING = ("sem.mp-*", "psm_*")
"""Semaphores and blocks of memory."""
TRACKER_S = 2.0
"""Time for resource trackers to clean up after their processes have exited."""


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def descendants(besides: Collection[int] = ()) -> list[psutil.Process]:
    """Return all living descendants, except those in `besides` and their descendants."""
    spared = set(besides)
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        if child.pid in spared:
            continue
        try:
            found += [child, *child.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    return [process for process in found if process.pid not in spared]


def end_descendants(grace_s: float, besides: Collection[int] = ()) -> int:
    """Terminate every descendant, kill the rest after `grace_s`, and return the number killed.

    Shared memory of killed processes is removed: by Python's resource trackers, which get time to exit, and otherwise here.

    besides: pids that are left alone, with their descendants.
    """
    held = shared_memory_held()
    for process in descendants(besides):
        _signal(process, kill=False)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline:
        if not _living(descendants(besides)):
            remove_left_behind(held)
            return 0
        time.sleep(0.05)
    held |= shared_memory_held()
    killed = _kill([each for each in _living(descendants(besides)) if not _is_resource_tracker(each)])
    deadline = time.monotonic() + TRACKER_S
    while _living(descendants(besides)) and time.monotonic() < deadline:
        # Who was forked between the look and the kill is killed here.
        killed |= _kill([each for each in _living(descendants(besides)) if not _is_resource_tracker(each)])
        time.sleep(0.02)
    killed |= _kill(_living(descendants(besides)))
    if left := _living(descendants(besides)):
        logger.error("processes that can't be killed: %s", [process.pid for process in left])
    remove_left_behind(held)
    return len(killed)


def shared_memory_held() -> set[Path]:
    """Return the files in shared memory that multiprocessing created for our descendants."""
    return _made_by_multiprocessing(descendants())[0]


def shared_memory_of_nobody() -> set[Path]:
    """Return the files in shared memory that multiprocessing created and no process of this machine uses."""
    return _made_by_multiprocessing(psutil.process_iter())[1]


def remove_left_behind(held: Collection[Path]) -> None:
    """Remove shared memory that `shared_memory_held` found before its processes were killed, if it still exists."""
    if held:
        for path in shared_memory_of_nobody().intersection(held):
            path.unlink(missing_ok=True)


def _made_by_multiprocessing(processes: Iterable[psutil.Process]) -> tuple[set[Path], set[Path]]:
    """Return multiprocessing's files that the processes have mapped, and the others.

    By inode: a process maps a semaphore before it gets its name.
    """
    # Listed first: what is made meanwhile would seem nobody's
    files = {path for pattern in MULTIPROCESSING for path in SHARED_MEMORY.glob(pattern)}
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


def _living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
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
