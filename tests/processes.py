"""Processes that tests look at while they end."""

import psutil


def has_ended(pid: int) -> bool:
    """Return whether a process is gone, or a zombie; another process may reap it between two looks."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
