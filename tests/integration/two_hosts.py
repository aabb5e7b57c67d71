"""Two hosts on one machine: network, process and mount namespaces of their own, and a link between them that can be cut."""

import os
import secrets
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.paths import ROOT

ADDRESSES = ("10.77.0.1", "10.77.0.2")
# Ray keeps sessions in /tmp/ray and objects in /dev/shm, finds other Rays by their processes, and stops all that it finds
MOUNT = "mkdir -p /tmp/ray && mount -t tmpfs none /tmp/ray && mount -t tmpfs none /dev/shm"
ENTER = f"{MOUNT} && hostname {{name}} && exec {{command}}"


def problem() -> str:
    """Return why namespaces can't be made here; empty if they can."""
    if os.geteuid() or shutil.which("ip") is None:
        return "needs root and iproute2"
    name = f"ob-{secrets.token_hex(2)}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"no network namespaces: {done.stderr.strip()}"
    _ip("netns", "del", name)
    return ""


class TwoHosts:
    def __init__(self, folder: Path) -> None:
        """folder: current one of both hosts, which they share."""
        self._folder = folder
        mark = secrets.token_hex(2)
        self._bridge = f"ob{mark}"
        self.names = tuple(f"ob{mark}-{number}" for number in (1, 2))
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("link", "set", self._bridge, "up")
        for name, address in zip(self.names, ADDRESSES, strict=True):
            _ip("netns", "add", name)
            _ip("link", "add", f"v{name}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", f"v{name}", "master", self._bridge, "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _ip("-n", name, "link", "set", device, "up")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()  # and with it all processes of the namespace
            process.wait(timeout=30)
        for name in self.names:
            _ip("netns", "del", name)
        _ip("link", "del", self._bridge)

    def start(self, host: int, command: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Run a shell command on a host (0 or 1); its output goes to `host-N.log`."""
        name = self.names[host]
        own = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--mount", "--uts")
        with (self._folder / f"host-{host}.log").open("wb") as log:
            process = subprocess.Popen(
                ["ip", "netns", "exec", name, *own, "sh", "-c", ENTER.format(name=name, command=command)],
                cwd=self._folder,
                env={**os.environ, "PATH": f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}", **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._processes.append(process)
        return process

    def cut(self) -> None:
        """Let no packet pass between the hosts; none is told."""
        _ip("link", "set", f"v{self.names[1]}", "nomaster")

    def join(self) -> None:
        _ip("link", "set", f"v{self.names[1]}", "master", self._bridge)

    def run(self, host: int, *command: object) -> str:
        """Run a command in a host's network; return its output."""
        whole = ["ip", "netns", "exec", self.names[host], *map(str, command)]
        done = subprocess.run(whole, cwd=self._folder, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def reaches_head(self, port: int) -> bool:
        """Return whether the second host can connect to a port of the first."""
        connect = f"import socket; socket.create_connection(({ADDRESSES[0]!r}, {port}), timeout=1)"
        done = subprocess.run(
            ["ip", "netns", "exec", self.names[1], "python3", "-c", connect], capture_output=True, check=False
        )
        return done.returncode == 0

    def log(self, host: int) -> str:
        return (self._folder / f"host-{host}.log").read_text(errors="replace")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
