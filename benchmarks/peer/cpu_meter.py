"""CPU time of a process tree, per second and kind of process."""

import itertools
import json
import re
import threading
import time
from collections import defaultdict
from pathlib import Path

import psutil

CPU = "cpu.jsonl"
EVERY_S = 1.0
OTHER = "other"


class CpuMeter:
    """Writer of lines `{"time", "cpu_s", "by_kind"}`; ended processes keep their last value."""

    def __init__(self, pid: int, path: Path) -> None:
        self._root = psutil.Process(pid)
        self._path = path
        self._seen: dict[tuple[int, float], tuple[str, float]] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cpu meter", daemon=True)
        self._thread.start()

    def stop(self) -> None:
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
                by_kind: defaultdict[str, float] = defaultdict(float)
                for kind, used in self._seen.values():
                    by_kind[kind] += used
                line = {"time": time.time(), "cpu_s": sum(by_kind.values()), "by_kind": by_kind}
                out.write(json.dumps(line) + "\n")
                out.flush()

    def _look_at(self, process: psutil.Process) -> None:
        try:
            times = process.cpu_times()
            # Asked anew each time: a process of Ray names itself after it has started.
            kind = kind_of(process.cmdline())
            self._seen[process.pid, process.create_time()] = kind, times.user + times.system
        except psutil.Error:
            pass  # it ended meanwhile


def kind_of(command: list[str]) -> str:
    if not command:
        return OTHER
    if named := re.match(r"(ray|VLLM)::[A-Za-z]+(:[a-z]+)?", command[0]):
        return named[0]
    for option, module in itertools.pairwise(command):
        if option == "-m":
            return module
    name = next((part for part in command[1:2] if part.endswith(".py")), command[0])
    return Path(name.split()[0]).name or OTHER
