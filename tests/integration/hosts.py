"""Two hosts on one machine: namespaces for network, processes, host name, mounts and IPC, joined by one cable."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from offbeat.benchmarks.harness.namespaces import ADDRESSES, CableEnd, Namespaces, lay_cable, missing_program
from tests.paths import ROOT

BIN = ROOT / ".venv" / "bin"
NAMES = ("first", "second")
OWN = ("--net", "--pid", "--uts", "--ipc", "--mount", "--mount-proc", "--fork", "--kill-child")
SETUP = """
hostname "$1"
mkdir -p /tmp/ray
mount --bind "$2" /tmp/ray
mount -t tmpfs shm /dev/shm
mount --bind "$3" /etc/hosts
mount --bind /dev/null /etc/resolv.conf
"""


@dataclass
class Host:
    """A host with its own loopback, /dev/shm and /tmp/ray; both see the other files under the same paths."""

    name: str
    folder: Path
    namespaces: Namespaces
    cable: CableEnd

    @property
    def address(self) -> str:
        return self.cable.address

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

    def living(self, mark: str) -> list[psutil.Process]:
        """Return this host's processes whose command line holds `mark`."""
        network, found = os.readlink(f"/proc/{self.namespaces.pid}/ns/net"), list[psutil.Process]()
        for process in psutil.process_iter():
            try:
                if mark in " ".join(process.cmdline()) and os.readlink(f"/proc/{process.pid}/ns/net") == network:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def _enter(self, *command: object) -> list[str]:
        return [*self.namespaces.enter("--all", f"--wd={self.folder}"), *map(str, command)]


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Start two hosts that share `folder`; the test is skipped where they can't be made."""
    if missing := missing_program():
        pytest.skip(f"no {missing}: hosts need util-linux and iproute2")
    with ExitStack() as started:
        try:
            first, second = (_start_host(place, folder, started) for place in range(2))
            lay_cable(first.cable, second.cable)
        except OSError as error:
            pytest.skip(f"no hosts of their own: {error}")
        yield first, second


def _start_host(place: int, folder: Path, started: ExitStack) -> Host:
    name = NAMES[place]
    ray, names = folder / f"ray-{name}", folder / f"hosts-{name}"
    ray.mkdir()
    others = "".join(f"{address} {other}.mesh\n" for other, address in zip(NAMES, ADDRESSES, strict=True))
    names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n{others}")  # as Debian's installer does
    namespaces = Namespaces(OWN, SETUP, name, ray, names)
    started.callback(namespaces.close)
    return Host(name, folder, namespaces, CableEnd("cable", place, namespaces))


def _environment(more: dict[str, str]) -> dict[str, str]:
    return {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), **more}
