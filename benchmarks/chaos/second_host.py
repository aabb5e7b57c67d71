"""Second host on this machine: network namespaces joined by a cable, which can go silent.

This process and its children get one namespace, the host another; they share files, memory and /dev/shm.
"""

import ctypes
import os
from pathlib import Path
from urllib.parse import urlsplit

from offbeat.benchmarks.harness.namespaces import CableEnd, Namespaces, lay_cable, missing_program, run

NOBODY = "02:00:00:00:00:00"
"""MAC address that no end has."""
LOOPBACK_TABLE = 77
CLONE_NEWNET = 0x40000000


class SecondHost:
    def __init__(self) -> None:
        """Move the calling thread and its future children to the namespaces; `refusal` says why that failed.

        To be called before the process starts threads, which would stay in the machine's network.
        """
        self._holder: Namespaces | None = None
        self._ends: tuple[CableEnd, ...] = ()
        self._reached: set[str] = set()
        self.refusal = ""
        missing = missing_program("sysctl")
        if missing or os.geteuid() != 0:
            reason = f"there is no {missing}" if missing else "it needs root"
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
        return [*self._holder.enter("--net"), *command] if self._holder is not None else command

    def reach_redis(self, url: str) -> None:
        """Route the host's connections to Redis' port on loopback to this process's loopback; idempotent."""
        port = str(urlsplit(url).port)
        if port not in self._reached:
            rule = ("to", "127.0.0.1", "dport", port, "lookup", str(LOOPBACK_TABLE))
            self._ends[1].run("ip", "rule", "add", "pref", "10", *rule)
            self._reached.add(port)

    def partition(self) -> None:
        """Lose every packet between the hosts, in both directions and without an error."""
        for end in self._ends:
            link = ("lladdr", NOBODY, "dev", end.name, "nud", "permanent")
            end.run("ip", "neigh", "replace", end.peer_address, *link)

    def heal(self) -> None:
        for end in self._ends:
            end.run("ip", "neigh", "delete", end.peer_address, "dev", end.name)

    def close(self) -> None:
        """End the host's namespace once its processes have ended; idempotent."""
        if self._holder is not None:
            self._holder.close()
            self._holder = None

    def _connect(self) -> None:
        run("ip", "link", "set", "lo", "up")
        self._holder = Namespaces(("--net",))
        near, far = self._ends = CableEnd("near", 0), CableEnd("far", 1, self._holder)
        lay_cable(near, far)
        for end in self._ends:
            end.run("sysctl", "--quiet", "--write", f"net.ipv4.conf.{end.name}.route_localnet=1")
        # Rules of `reach_redis` have to precede the table of local addresses.
        far.run("ip", "rule", "add", "pref", "100", "lookup", "local")
        far.run("ip", "rule", "delete", "pref", "0")
        route = ("127.0.0.1", "via", near.address, "dev", far.name, "src", far.address)
        far.run("ip", "route", "add", *route, "table", str(LOOPBACK_TABLE))


def _check(result: int, call: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{call}: {os.strerror(ctypes.get_errno())}")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
