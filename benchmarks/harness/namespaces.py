"""Hosts on this machine: processes with namespaces of their own, and a cable between two networks.

Needs root and the commands of iproute2 and util-linux.
"""

import subprocess
from collections.abc import Sequence
from shutil import which

import psutil

from offbeat.services.process import bind_to_thread

PROGRAMS = ("ip", "nsenter", "unshare")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
"""Of a cable's two ends."""
HOLD = """
ip link set lo up
echo
while read -r _; do :; done
"""
"""Of the shell that holds the namespaces, reaps orphans, and ends with its stdin."""


class Namespaces:
    """Process with namespaces of its own, which others enter; it ends with the thread that made it."""

    def __init__(self, options: Sequence[str], script: str = "", *arguments: object) -> None:
        """options: of `unshare`. script: for the process's shell, before anything enters; gets the arguments.

        Raises:
            OSError: with the reason.
        """
        command = [
            which("unshare") or "",
            *options,
            "sh",
            "-c",
            f"set -e\n{script}\n{HOLD}",
            "sh",
            *map(str, arguments),
        ]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(bind_to_thread(command), stdin=pipe, stdout=pipe, stderr=pipe)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"\n":
            raise OSError(self._process.communicate()[1].decode().strip())
        children = psutil.Process(self._process.pid).children()
        self.pid = children[0].pid if children else self._process.pid
        """Of the shell, a child with `--fork`."""

    def enter(self, *options: str) -> tuple[str, ...]:
        """Return the command that runs another one in these namespaces. options: of `nsenter`, which of them."""
        return ("nsenter", *options, "--target", str(self.pid))

    def close(self) -> None:
        """End the process, and with a PID namespace all in it; idempotent."""
        self._process.kill()
        self._process.communicate()


class CableEnd:
    """An end of the cable in a network: the caller's, or that of namespaces."""

    def __init__(self, name: str, place: int, namespaces: Namespaces | None = None) -> None:
        """place: in `ADDRESSES`."""
        self.name = name
        self.address, self.peer_address = ADDRESSES[place], ADDRESSES[1 - place]
        self.link = ("name", name) if namespaces is None else ("name", name, "netns", str(namespaces.pid))
        self._enter = () if namespaces is None else namespaces.enter("--net")

    def run(self, *command: str) -> None:
        """Run a command in the end's network; raises `OSError`."""
        run(*self._enter, *command)

    def plug(self) -> None:
        """Connect the network; its default route leads to the other one."""
        self.run("ip", "address", "replace", f"{self.address}/24", "dev", self.name)
        self.run("ip", "link", "set", self.name, "up")
        self.run("ip", "route", "replace", "default", "via", self.peer_address)

    def unplug(self) -> None:
        self.run("ip", "link", "set", self.name, "down")


def lay_cable(first: CableEnd, second: CableEnd) -> None:
    """Join two networks and plug both ends; raises `OSError`."""
    run("ip", "link", "add", *first.link, "type", "veth", "peer", *second.link)
    first.plug()
    second.plug()


def missing_program(*more: str) -> str | None:
    return next((program for program in (*PROGRAMS, *more) if which(program) is None), None)


def run(*command: str) -> None:
    """Raises `OSError` with what a failing command wrote."""
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
