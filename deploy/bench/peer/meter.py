"""The CPU time of a process and all that it starts, second by second: what a side costs whatever else the machine does."""

import json
import threading
import time
from pathlib import Path

import psutil

CPU = "cpu.jsonl"
EVERY_S = 1.0


class CpuMeter:
    """Writes lines `{"time", "cpu_s"}` until `stop`; a process that ended keeps what it was last seen with."""

    def __init__(self, pid: int, path: Path) -> None:
        self._root = psutil.Process(pid)
        self._path = path
        self._seen: dict[tuple[int, float], float] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cpu meter", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Write no more."""
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        with self._path.open("w", encoding="utf-8") as out:
            while not self._stopped.wait(EVERY_S):
                try:
                    tree = [self._root, *self._root.children(recursive=True)]
                except psutil.NoSuchProcess:
                    return
                for process in tree:
                    self._look_at(process)
                out.write(json.dumps({"time": time.time(), "cpu_s": sum(self._seen.values())}) + "\n")
                out.flush()

    def _look_at(self, process: psutil.Process) -> None:
        try:
            times = process.cpu_times()
            self._seen[process.pid, process.create_time()] = times.user + times.system
        except psutil.Error:
            pass  # it ended meanwhile
