"""Watch of Ray's head processes, whose death Ray notices late."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil

HEAD_PROCESSES = frozenset({"gcs_server", "raylet"})
CHECK_INTERVAL_S = 0.2


class HeadWatch:
    """Thread that calls `on_death(reason)` when a head process, our child, has died."""

    def __init__(self, on_death: Callable[[str], object]) -> None:
        self._on_death = on_death
        self._head: dict[str, psutil.Process] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="head watch", daemon=True).start()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Suspend the watch while the head is replaced."""
        with self._lock:
            yield
            self._head.clear()

    def stop(self) -> None:
        with self._lock:
            self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(CHECK_INTERVAL_S):
            with self._lock:
                dead = "" if self._stopped.is_set() else self._find_dead()
            if dead:
                self._on_death(f"Ray's {dead} was killed")
                return

    def _find_dead(self) -> str:
        if len(self._head) < len(HEAD_PROCESSES):
            self._head |= {name: child for name, child in _children() if name in HEAD_PROCESSES}
        return next((name for name, process in self._head.items() if not _is_alive(process)), "")


def _children() -> Iterator[tuple[str, psutil.Process]]:
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            yield child.name(), child


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
