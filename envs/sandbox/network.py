"""The internet for a container that was started without a network: slirp4netns, behind rules of nftables.

Invariants: the rules are there before the network, and a container has no right to change them. It reaches neither this
machine's addresses nor private ones but for `allowed_networks`. The network ends with the process that connected it.
"""

import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from ipaddress import IPv4Network, collapse_addresses
from pathlib import Path

import psutil

from offbeat.envs.sandbox.run import IsolationError
from offbeat.envs.sandbox.shell import OWN_NETWORK, ShellLimits

PROGRAMS = {"slirp4netns": "slirp4netns", "nft": "nftables", "nsenter": "util-linux"}
"""And the packages that have them."""
RESOLVER = OWN_NETWORK[3]
"""Of slirp4netns, which passes queries on to this machine's."""
PRIVATE = (
    *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24"),
    *("192.168.0.0/16", "198.18.0.0/15", "224.0.0.0/3"),
    "168.63.129.16/32",  # services of Azure's machines
)
"""Private, shared and link-local addresses, metadata of clouds among them, and those of groups."""
RULES = """
table inet offbeat
delete table inet offbeat
table inet offbeat {{
  chain output {{
    type filter hook output priority 0; policy drop;
    oifname "lo" accept
    ip daddr {resolver} meta l4proto {{ tcp, udp }} th dport 53 accept
    ip daddr {{ {own} }} reject
    {allowed}
    ip daddr {{ {private} }} reject
    meta nfproto ipv4 meta l4proto {{ tcp, udp }} accept
    reject
  }}
}}
"""
"""The first two lines remove what an earlier connection left."""
PROBE = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), float(sys.argv[3])).close()"
START_TIMEOUT_S = 20.0
PROBE_TIMEOUT_S = 10.0
"""Of a connection."""


class NetworkError(RuntimeError):
    """A network that could not be connected, or does not reach a host of `network_probe`."""


class ContainerNetwork:
    def __init__(self, pid: int, limits: ShellLimits) -> None:
        """Connect the container of first process `pid`; raises NetworkError, also without a host of `network_probe`."""
        self._enter = ("nsenter", "--target", str(pid), "--net", "--")
        self._limits = limits
        self._set_rules()
        self._exit_fd, self._slirp = _start_slirp(pid)
        try:
            self.probe()
        except BaseException:
            self.close()
            raise

    def probe(self) -> None:
        """Raise NetworkError unless each host of `network_probe` accepts a connection from the container's network."""
        for target in self._limits.network_probe:
            host, _, port = target.rpartition(":")
            if error := self._find_error(host, int(port)):
                raise NetworkError(f"network_probe: {target} can't be reached from the container: {error}")

    def close(self) -> None:
        """Disconnect."""
        self._slirp.kill()
        self._slirp.wait()
        os.close(self._exit_fd)

    def _set_rules(self) -> None:
        rules = write_rules(_own_addresses(), self._limits.allowed_networks)
        try:
            result = subprocess.run(
                [*self._enter, "nft", "-f", "-"],
                input=rules,
                capture_output=True,
                text=True,
                check=False,
                timeout=START_TIMEOUT_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NetworkError(f"nft: {error}") from error
        if result.returncode:
            raise NetworkError(f"nft: {(result.stderr.strip().splitlines() or ['no message'])[0]}")

    def _find_error(self, host: str, port: int) -> str:
        try:
            found = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)
        except OSError as error:
            return str(error)
        address = str(found[0][4][0])
        command = [*self._enter, sys.executable, "-I", "-S", "-c", PROBE, address, str(port), str(PROBE_TIMEOUT_S)]
        try:
            result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=2 * PROBE_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            return str(error)
        return (result.stderr.strip().splitlines() or ["no message"])[-1] if result.returncode else ""


def write_rules(own: Iterable[str], allowed: Iterable[str]) -> str:
    """Return the rules of nftables. own: this machine's addresses. allowed: private networks."""
    networks = _join(allowed)
    return RULES.format(
        resolver=RESOLVER,
        own=_join(own),
        allowed=f"ip daddr {{ {networks} }} meta l4proto {{ tcp, udp }} accept" if networks else "",
        private=_join(PRIVATE),
    )


def check_programs() -> None:
    """Raise IsolationError, with what to do, if this machine can't connect containers."""
    if os.geteuid():
        raise IsolationError("network: containers are connected as root alone; leave out `network`, or run as root")
    if missing := [f"{name} (package {package})" for name, package in PROGRAMS.items() if not shutil.which(name)]:
        raise IsolationError(f"network: not on PATH: {', '.join(missing)}; install them, or leave out `network`")
    if not Path("/dev/net/tun").exists():
        raise IsolationError("network: this machine has no /dev/net/tun, which slirp4netns needs (`modprobe tun`)")


def _start_slirp(pid: int) -> tuple[int, "subprocess.Popen[bytes]"]:
    """Start slirp4netns; return the end of a pipe, at whose close it ends, and so with this process."""
    exit_read, exit_fd = os.pipe()
    ready_read, ready_write = os.pipe()
    options = ["--configure", "--mtu", "65520", "--cidr", str(OWN_NETWORK), "--disable-host-loopback"]
    options += ["--enable-sandbox", "--enable-seccomp", f"--exit-fd={exit_read}", f"--ready-fd={ready_write}"]
    with os.fdopen(ready_read, "rb") as ready, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                ["slirp4netns", *options, str(pid), "tap0"],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                pass_fds=(exit_read, ready_write),
                start_new_session=True,
            )
        except OSError as error:
            os.close(exit_fd)
            raise NetworkError(f"slirp4netns: {error}") from error
        finally:
            os.close(exit_read)
            os.close(ready_write)
        if not select.select([ready], [], [], START_TIMEOUT_S)[0] or not ready.read(1):
            os.close(exit_fd)
            process.kill()
            process.wait()
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()
            raise NetworkError(f"slirp4netns: {lines[-1] if lines else 'it does not start'}")
    return exit_fd, process


def _own_addresses() -> set[str]:
    """Return this machine's IPv4 addresses."""
    return {each.address for row in psutil.net_if_addrs().values() for each in row if each.family == socket.AF_INET}


def _join(networks: Iterable[str]) -> str:
    return ", ".join(map(str, collapse_addresses(map(IPv4Network, networks))))
