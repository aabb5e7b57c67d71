"""CPU time of this process's descendants, by part of the mesh."""

from collections.abc import Iterable

import psutil

from offbeat.benchmarks.peer.cpu_meter import kind_of

MESH = ("worker", "replica", "engine", "idle parts")
"""`idle parts`: Ray, Serve's controller and proxy, Redis."""
KINDS = {"ray::ServeReplica:generation": "replica", "VLLM::EngineCore": "engine"}


def cpu_by_part(worker_pid: int, without: Iterable[int]) -> dict[str, float]:
    """Return seconds by part of `MESH`. without: processes of the floors, left out with their children."""
    left_out = {process.pid for pid in without for process in family(pid)}
    parts: dict[str, float] = dict.fromkeys(MESH, 0.0)
    for process in psutil.Process().children(recursive=True):
        if process.pid in left_out:
            continue
        try:
            part = "worker" if process.pid == worker_pid else KINDS.get(kind_of(process.cmdline()), "idle parts")
            parts[part] += sum(process.cpu_times()[:2])
        except psutil.Error:
            continue  # it ended meanwhile
    return parts


def family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)
