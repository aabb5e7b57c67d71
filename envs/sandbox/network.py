"""The internet for a container that was started without a network: slirp4netns, behind rules of nftables.

Invariants: the rules are there before the network, and a container has no right to change them. It reaches neither this
machine's addresses nor private ones but for `allowed_networks`. The network ends with the process that connected it.
Hosts are probed from a network of the same kind, in which no program of the policy's was.
"""

import os
import resource
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from ipaddress import IPv4Network, collapse_addresses
from pathlib import Path

import psutil

from offbeat.envs.sandbox.run import IsolationError
from offbeat.envs.sandbox.shell import OWN_NETWORK, ShellError, ShellLimits

PROGRAMS = {"slirp4netns": "slirp4netns", "nft": "nftables", "nsenter": "util-linux", "unshare": "util-linux"}
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
PROBE = Path(__file__).with_name("network_probe.py")
MAX_OPEN_FILES = 1024
"""Of slirp4netns, which has one for each connection, and memory that no limit of the container's counts."""
START_TIMEOUT_S = 20.0
PROBE_TIMEOUT_S = 10.0
"""Of a connection, and of a name."""


class NetworkError(RuntimeError):
    """A network that could not be connected, or does not reach a host of `network_probe`."""


class ContainerNetwork:
    def __init__(self, pid: int, limits: ShellLimits) -> None:
        """Connect the container of first process `pid`.

        Raises:
            NetworkError: it can't be connected.
            ShellError: the container has ended.
        """
        self._limits = limits
        with ExitStack() as stack:
            self._namespace = _open_namespace(pid)
            stack.callback(os.close, self._namespace)
            self._set_rules()
            self._slirp = _start_slirp(self._namespace, stack)
            self._opened = stack.pop_all()

    def probe(self) -> None:
        """Raise NetworkError unless each host of `network_probe` accepts a connection from the network."""
        for target in self._limits.network_probe:
            host, _, port = target.rpartition(":")
            if error := self._find_error(host, port):
                raise NetworkError(f"network_probe: {target} can't be reached from a container: {error}")

    def close(self) -> None:
        """Disconnect."""
        self._opened.close()

    def _run(self, *command: str, text: str = "", timeout_s: float) -> "subprocess.CompletedProcess[str]":
        """Run a program of this machine in the network namespace."""
        return subprocess.run(
            ["nsenter", f"--net=/proc/self/fd/{self._namespace}", "--", *command],
            input=text,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
            pass_fds=(self._namespace,),
        )

    def _set_rules(self) -> None:
        rules = write_rules(_own_networks(), self._limits.allowed_networks)
        try:
            result = self._run("nft", "-f", "-", text=rules, timeout_s=START_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NetworkError(f"nft: {error}") from error
        if result.returncode:
            raise NetworkError(f"nft: {(result.stderr.strip().splitlines() or ['no message'])[0]}")

    def _find_error(self, host: str, port: str) -> str:
        command = [sys.executable, "-I", "-S", str(PROBE), host, port, str(RESOLVER), str(PROBE_TIMEOUT_S)]
        try:
            result = self._run(*command, timeout_s=3 * PROBE_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            return str(error)
        return (result.stderr.strip().splitlines() or ["no message"])[-1] if result.returncode else ""


def check_network(limits: ShellLimits) -> None:
    """Raise NetworkError unless each host of `network_probe` can be reached from a network like a container's.

    It is new, as a policy's programs can exhaust ports and connections of their own.
    """
    if not limits.network_probe:
        return
    holder = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo ready; exec cat"],  # until the end of its input, so with this process
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    with holder:
        try:
            if holder.stdout is None or not holder.stdout.readline():
                raise NetworkError("unshare: a network namespace can't be made")
            network = ContainerNetwork(holder.pid, limits)
            try:
                network.probe()
            finally:
                network.close()
        except ShellError as error:
            raise NetworkError(f"unshare: {error}") from error
        finally:
            holder.kill()


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


def _open_namespace(pid: int) -> int:
    """Open a process' network namespace; raises ShellError if it has ended, NetworkError if that is this process' own."""
    try:
        namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        raise ShellError("connect: the container has ended") from None
    if os.fstat(namespace).st_ino == os.stat("/proc/self/ns/net").st_ino:
        os.close(namespace)
        raise NetworkError(f"process {pid} has this machine's network: podman or docker is not of this machine")
    return namespace


def _start_slirp(namespace: int, stack: ExitStack) -> "subprocess.Popen[bytes]":
    """Start slirp4netns, which `stack` ends, and this process' end, as that closes a pipe."""
    exit_read, exit_fd = os.pipe()
    stack.callback(os.close, exit_fd)
    ready_read, ready_write = os.pipe()
    options = ["--configure", "--mtu", "65520", "--cidr", str(OWN_NETWORK), "--disable-host-loopback"]
    options += ["--enable-sandbox", "--enable-seccomp", f"--exit-fd={exit_read}", f"--ready-fd={ready_write}"]
    with os.fdopen(ready_read, "rb") as ready, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                ["slirp4netns", *options, "--netns-type=path", f"/proc/self/fd/{namespace}", "tap0"],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                pass_fds=(exit_read, ready_write, namespace),
                start_new_session=True,
            )
        except OSError as error:
            raise NetworkError(f"slirp4netns: {error}") from error
        finally:
            os.close(exit_read)
            os.close(ready_write)
        stack.callback(_kill, process)
        poll = select.poll()
        poll.register(ready, select.POLLIN)
        if not poll.poll(1000 * START_TIMEOUT_S) or not ready.read(1):
            _kill(process)
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()
            raise NetworkError(f"slirp4netns: {lines[-1] if lines else 'it does not start'}")
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (MAX_OPEN_FILES, MAX_OPEN_FILES))
    return process


def _kill(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()


def _own_networks() -> set[str]:
    """Return this machine's IPv4 addresses: those of its interfaces, and those of its local routes alone."""
    found = {each.address for row in psutil.net_if_addrs().values() for each in row if each.family == socket.AF_INET}
    table = address = ""
    for line in Path("/proc/net/fib_trie").read_text().splitlines():
        words = line.split()
        if len(words) == 1:
            table = line
        elif words[0] == "|--":
            address = words[1]
        elif table == "Local:" and "LOCAL" in words:
            found.add(f"{address}{words[0]}")
    return found


def _join(networks: Iterable[str]) -> str:
    return ", ".join(map(str, collapse_addresses(map(IPv4Network, networks))))
