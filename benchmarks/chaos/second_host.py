"""Second host on this machine: network namespaces joined by a cable, which can go silent.

This process and its children get one namespace, the host another; they share files, memory and /dev/shm. Needs root and
the commands of iproute2 and util-linux.
"""

import ctypes
import os
import subprocess
from pathlib import Path
from shutil import which
from urllib.parse import urlsplit

from offbeat.services.process import bind_to_thread, terminate

PROGRAMS = ("ip", "nsenter", "sysctl", "unshare")
ADDRESSES = {"near": "10.77.0.1", "far": "10.77.0.2"}
"""Cable's end -> address; near is this process's."""
NOBODY = "02:00:00:00:00:00"
"""MAC address that no end has."""
LOOPBACK_TABLE = 77
CLONE_NEWNET = 0x40000000
END_S = 5.0


class SecondHost:
    def __init__(self) -> None:
        """Move the calling thread and its future children to the namespaces; `refusal` says why that failed.

        To be called before the process starts threads, which would stay in the machine's network.
        """
        self._holder: subprocess.Popen[bytes] | None = None
        self._reached: set[str] = set()
        self.refusal = ""
        missing = [program for program in PROGRAMS if which(program) is None]
        if missing or os.geteuid() != 0:
            reason = f"there is no {missing[0]}" if missing else "it needs root"
            self.refusal = f"no network of its own for the second node: {reason}"
            return
        with Path("/proc/self/ns/net").open() as machine:
            try:
                _check(_libc().unshare(CLONE_NEWNET), "unshare")
                self._connect()
            except OSError as error:
                _check(_libc().setns(machine.fileno(), CLONE_NEWNET), "setns")
                self.close()
                self.refusal = f"no network of its own for the second node: {error}"

    @property
    def is_there(self) -> bool:
        return not self.refusal

    def command(self, command: list[str]) -> list[str]:
        """Return `command` to be run on the host."""
        return [*self._enter, *command] if self.is_there else command

    def reach_redis(self, url: str) -> None:
        """Route the host's connections to Redis' port on loopback to this process's loopback; idempotent."""
        port = str(urlsplit(url).port)
        if port not in self._reached:
            rule = ("to", "127.0.0.1", "dport", port, "lookup", str(LOOPBACK_TABLE))
            _run(*self._enter, "ip", "rule", "add", "pref", "10", *rule)
            self._reached.add(port)

    def partition(self) -> None:
        """Lose every packet between the hosts, in both directions and without an error."""
        for enter, end, peer in self._ends():
            _run(*enter, "ip", "neigh", "replace", ADDRESSES[peer], "lladdr", NOBODY, "dev", end, "nud", "permanent")

    def heal(self) -> None:
        for enter, end, peer in self._ends():
            _run(*enter, "ip", "neigh", "delete", ADDRESSES[peer], "dev", end)

    def close(self) -> None:
        """End the host's namespace once its processes have ended; idempotent."""
        if self._holder is not None:
            terminate(self._holder, END_S)
            self._holder = None

    @property
    def _enter(self) -> tuple[str, ...]:
        assert self._holder is not None
        return ("nsenter", "--net", "--target", str(self._holder.pid))

    def _ends(self) -> list[tuple[tuple[str, ...], str, str]]:
        return [((), "near", "far"), (self._enter, "far", "near")]

    def _connect(self) -> None:
        _run("ip", "link", "set", "lo", "up")
        self._holder = _hold_namespace()
        _run("ip", "link", "add", "near", "type", "veth", "peer", "name", "far", "netns", str(self._holder.pid))
        _run(*self._enter, "ip", "link", "set", "lo", "up")
        for enter, end, peer in self._ends():
            _run(*enter, "ip", "address", "add", f"{ADDRESSES[end]}/24", "dev", end)
            _run(*enter, "ip", "link", "set", end, "up")
            _run(*enter, "ip", "route", "add", "default", "via", ADDRESSES[peer])
            _run(*enter, "sysctl", "--quiet", "--write", f"net.ipv4.conf.{end}.route_localnet=1")
        # Rules of `reach_redis` have to precede the table of local addresses.
        _run(*self._enter, "ip", "rule", "add", "pref", "100", "lookup", "local")
        _run(*self._enter, "ip", "rule", "delete", "pref", "0")
        route = ("127.0.0.1", "via", ADDRESSES["near"], "dev", "far", "src", ADDRESSES["far"])
        _run(*self._enter, "ip", "route", "add", *route, "table", str(LOOPBACK_TABLE))


def _hold_namespace() -> "subprocess.Popen[bytes]":
    """Start a process with a network namespace of its own."""
    command = bind_to_thread([which("unshare") or "", "--net", "sh", "-c", "echo && exec cat"])
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stderr is not None
    if holder.stdout.readline() != b"\n":
        raise OSError(holder.stderr.read().decode().strip())
    return holder


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def _check(result: int, call: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{call}: {os.strerror(ctypes.get_errno())}")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
