"""Two hosts on one machine: namespaces for network, processes, host name, mounts and IPC, joined by one cable."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import which

import psutil
import pytest

from tests.paths import ROOT

BIN = ROOT / ".venv" / "bin"
ADDRESSES = {"first": "10.77.0.1", "second": "10.77.0.2"}
INIT = """
set -e
hostname "$1"
ip link set lo up
mkdir -p /tmp/ray
mount --bind "$2" /tmp/ray
mount -t tmpfs shm /dev/shm
mount --bind "$3" /etc/hosts
mount --bind /dev/null /etc/resolv.conf
echo ready
while read -r _; do :; done
"""
"""Of a host's first process, which reaps orphans and ends with its stdin, and the host with it."""


@dataclass
class Host:
    """A host with its own loopback, /dev/shm and /tmp/ray; both see the other files under the same paths."""

    name: str
    address: str
    folder: Path
    pid: int
    """Of its first process."""

    def start(self, *command: object, log: Path, **environment: str) -> "subprocess.Popen[bytes]":
        with log.open("wb") as out:
            return subprocess.Popen(self._enter(*command), env=_environment(environment), stdout=out, stderr=out)

    def run(self, *command: object, **environment: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            self._enter(*command),
            check=False,
            env=_environment(environment),
            capture_output=True,
            text=True,
            timeout=60,
        )

    def plug(self) -> None:
        """Connect the host; its default route leads to the other one."""
        self._ip("address", "replace", f"{self.address}/24", "dev", "cable")
        self._ip("link", "set", "cable", "up")
        self._ip("route", "add", "default", "dev", "cable")

    def unplug(self) -> None:
        self._ip("link", "set", "cable", "down")

    def living(self, mark: str) -> list[psutil.Process]:
        """Return this host's processes whose command line holds `mark`."""
        network, found = os.readlink(f"/proc/{self.pid}/ns/net"), list[psutil.Process]()
        for process in psutil.process_iter():
            try:
                if mark in " ".join(process.cmdline()) and os.readlink(f"/proc/{process.pid}/ns/net") == network:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def _ip(self, *arguments: str) -> None:
        done = self.run("ip", *arguments)
        assert done.returncode == 0, done.stderr

    def _enter(self, *command: object) -> list[str]:
        return ["nsenter", "-t", str(self.pid), "-a", f"--wd={self.folder}", *map(str, command)]


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Start two hosts that share `folder`; the test is skipped where they can't be made."""
    for program in ("unshare", "nsenter", "ip"):
        if which(program) is None:
            pytest.skip(f"no {program}: hosts need util-linux and iproute2")
    processes: list[subprocess.Popen[str]] = []
    try:
        first, second = (_start_host(name, folder, processes) for name in ADDRESSES)
        ends = ("name", "cable", "netns", first.pid, "type", "veth", "peer", "name", "cable", "netns", second.pid)
        _run_or_skip("ip", "link", "add", *ends)
        for host in (first, second):
            host.plug()
        yield first, second
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _start_host(name: str, folder: Path, processes: "list[subprocess.Popen[str]]") -> Host:
    ray = folder / f"ray-{name}"
    ray.mkdir()
    namespaces = ("--net", "--pid", "--uts", "--ipc", "--mount", "--mount-proc", "--fork", "--kill-child")
    names = folder / f"hosts-{name}"
    others = "".join(f"{address} {other}.mesh\n" for other, address in ADDRESSES.items())
    names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n{others}")  # as Debian's installer does
    command = ["unshare", *namespaces, "bash", "-c", INIT, "bash", name, str(ray), str(names)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    processes.append(process)
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        pytest.skip(f"no namespaces: {process.communicate()[1].strip()}")
    (init,) = psutil.Process(process.pid).children()
    return Host(name, ADDRESSES[name], folder, init.pid)


def _run_or_skip(*command: object) -> None:
    done = subprocess.run([*map(str, command)], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"no cable between network namespaces: {done.stderr.strip()}")


def _environment(more: dict[str, str]) -> dict[str, str]:
    return {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), **more}
