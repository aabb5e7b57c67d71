"""Networks of containers: what they reach, what they never do, and that none outlives its process."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from pydantic import ValidationError

from offbeat.envs.sandbox import IsolationError
from offbeat.envs.sandbox.backend import check_sandbox
from offbeat.envs.sandbox.container import ContainerShell
from offbeat.envs.sandbox.container_engine import Image, run_command
from offbeat.envs.sandbox.network import NetworkError, check_programs, write_rules
from offbeat.envs.sandbox.shell import OWN_NETWORK, ShellLimits
from tests.envs.sandbox.networks import DOWNLOAD, SERVERS, Server, require_network, start_server
from tests.envs.sandbox.test_shell import bash
from tests.waiting import wait_until_sync

pytestmark = pytest.mark.slow
FOLDERS = ("/app", "/tmp")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"network": "verifier"}, "network verifier needs image: the kernel sandbox has no network"),
        ({"image": "a", "network": "task", "runtime": "runsc"}, "no effect with runtime runsc"),
        ({"image": "a", "network_probe": ["a:1"]}, "network_probe has no effect without network: verifier or task"),
        ({"image": "a", "network": "task", "network_probe": ["a"]}, "'a' is not a host and port, such as pypi.org:443"),
        ({"image": "a", "network": "task", "network_probe": ["-x:1"]}, "'-x:1' is not a host and port"),
        ({"image": "a", "network": "task", "allowed_networks": ["fd00::/8"]}, "Expected 4 octets"),
        (
            {"image": "a", "network": "task", "allowed_networks": ["198.18.0.0/15"]},
            "198.18.0.0/15 overlaps 198.19.213.0/24",
        ),
        ({"image": "a", "network": "host"}, "'none', 'verifier' or 'task'"),
    ],
)
def test_a_key_that_is_wrong_or_without_effect_is_refused(values: dict[str, object], says: str):
    with pytest.raises(ValidationError, match=says):
        ShellLimits.model_validate_json(json.dumps(values))


def test_containers_start_without_a_network_also_if_they_can_be_connected():
    image = Image(("docker",), "a", {}, ())
    for network in ("none", "verifier", "task"):
        words = run_command(image, "one", (), ShellLimits(image="a", network=network))
        assert words[words.index("--network") + 1] == "none"
        mounted = [word.rpartition("/envs/sandbox/")[2] for word in words if word.endswith(":ro")]
        assert mounted == (
            []
            if network == "none"
            else [
                "mounted/resolv.conf:/etc/resolv.conf:ro",
                "mounted/hosts:/etc/hosts:ro",
                "mounted/apt.conf:/etc/apt/apt.conf.d/zz-offbeat:ro",
            ]
        )


def test_the_rules_refuse_this_machine_before_they_allow_a_network_around_it():
    lines = [line.strip() for line in write_rules(["10.1.2.3"], ["10.1.0.0/16", "10.1.2.0/24"]).split("\n")]
    own, allowed = lines.index("ip daddr { 10.1.2.3/32 } reject"), next(i for i, x in enumerate(lines) if "10.1.0" in x)
    assert own < allowed
    assert lines[allowed] == "ip daddr { 10.1.0.0/16 } meta l4proto { tcp, udp } accept"
    assert "policy drop" in " ".join(lines)
    (private,) = (line for line in lines if "169.254.0.0/16" in line and "168.63.129.16/32" in line)
    assert lines.index(private) == allowed + 1
    assert private.endswith(" reject")


def test_a_machine_without_the_programs_is_told_which(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("os.geteuid", lambda: 0)
    with pytest.raises(
        IsolationError, match=r"not on PATH: slirp4netns \(package slirp4netns\), nft \(package nftables\)"
    ):
        check_programs()
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(IsolationError, match="connected as root alone"):
        check_programs()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    require_network()
    with start_server() as server:
        yield server


@pytest.fixture(scope="module")
def shell(server: Server) -> Iterator[ContainerShell]:
    """Of a container that may reach the server, but not the address of this machine beside it."""
    limits = ShellLimits(
        image=require_network(),
        network="verifier",
        allowed_networks=(server.address,),
        network_probe=(server.probe,),
    )
    shell = ContainerShell(FOLDERS, limits)
    yield shell
    shell.close()


def test_a_container_downloads_while_it_is_connected(shell: ContainerShell, server: Server):
    command = f"{DOWNLOAD}download {server.path} /"
    assert bash(shell, command).exit_code != 0
    network = shell.connect()
    assert bash(shell, command).exit_code == 0
    network.close()
    assert bash(shell, command).exit_code != 0
    assert bash(shell, "ls /sys/class/net").output == "lo\n"


@contextmanager
def local_route() -> Iterator[str]:
    """Yield an address of this machine that no interface has, as load balancers make them."""
    network = f"198.51.100.{uuid.uuid4().int % 64 * 4}"
    command = ["ip", "route", "add", "local", f"{network}/30", "dev", "lo"]
    subprocess.run(command, check=True)
    try:
        yield f"{network.rpartition('.')[0]}.{int(network.rpartition('.')[2]) + 1}"
    finally:
        command[2] = "delete"
        subprocess.run(command, check=True)


def test_it_reaches_no_address_of_this_machine_and_no_private_one(shell: ContainerShell, server: Server):
    """The listener has all of this machine's addresses, and the server answers on each port of its own."""
    found = {each.address for row in psutil.net_if_addrs().values() for each in row if each.family == socket.AF_INET}
    own = {server.gateway, *(address for address in found if not address.startswith(SERVERS))}
    with socket.create_server(("0.0.0.0", 0)) as listener, start_server() as other, local_route() as route:
        own.add(route)
        port = listener.getsockname()[1]
        targets = [
            f"{address}/{port}" for address in (*own, *(str(OWN_NETWORK[place]) for place in (2, 3, 100)), "127.0.0.53")
        ]
        for address in own:
            socket.create_connection((address, port)).close()
        socket.create_connection((other.address, other.port)).close()
        network = shell.connect()
        try:
            for target in (*targets, other.path):
                assert bash(shell, f"exec 3<>/dev/tcp/{target}").exit_code != 0, target
            for address in own - {"127.0.0.1"}:  # the container's own, of which no sender hears
                assert bash(shell, f"echo x > /dev/udp/{address}/{port}").exit_code != 0, address
            assert bash(shell, f"exec 3<>/dev/tcp/{server.path}").exit_code == 0
            assert bash(shell, f"echo x > /dev/udp/{server.path}").exit_code == 0
        finally:
            network.close()


def test_a_container_can_change_neither_names_nor_rules(shell: ContainerShell):
    network = shell.connect()
    try:
        assert bash(shell, 'grep -w "$HOSTNAME" /etc/hosts').exit_code == 0
        for command in ("echo x > /etc/resolv.conf", "rm /etc/hosts", "mv /etc/hosts /etc/x", "unshare -n true"):
            assert bash(shell, command).exit_code != 0
        assert bash(shell, "grep CapEff /proc/self/status").output.split() == ["CapEff:", "0" * 16]
    finally:
        network.close()


def test_a_host_that_does_not_answer_is_named(server: Server):
    values = {"image": require_network(), "network": "verifier", "allowed_networks": (server.address,)}
    probe = f"{server.address}:9"
    with pytest.raises(IsolationError, match=rf"network_probe: {probe} can't be reached from a container: .*refused"):
        check_sandbox(ShellLimits(**values, network_probe=(server.probe, probe)))
    with pytest.raises(IsolationError, match=r"none\.invalid:1 can't be reached"):
        check_sandbox(ShellLimits(**values, network_probe=("none.invalid:1",)))


def test_a_network_that_was_lost_is_noticed(shell: ContainerShell):
    network = shell.connect()
    try:
        network.probe()
        network._slirp.kill()
        network._slirp.wait()
        with pytest.raises(NetworkError, match="network_probe: "):
            network.probe()
    finally:
        network.close()


def test_a_process_with_many_open_files_connects(shell: ContainerShell, server: Server):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        network = shell.connect()
        assert bash(shell, f"{DOWNLOAD}download {server.path} /").exit_code == 0
        assert psutil.Process(network._slirp.pid).rlimit(resource.RLIMIT_NOFILE) == (1024, 1024)
        network.close()
    finally:
        for each in opened:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_connection_that_fails_leaves_nothing_open(shell: ContainerShell):
    network = shell.connect()
    before = os.listdir("/proc/self/fd")
    with pytest.raises(NetworkError, match="slirp4netns: "):  # as the container has the device
        shell.connect()
    assert os.listdir("/proc/self/fd") == before
    assert psutil.Process(network._slirp.pid) in psutil.Process().children()
    assert sum("slirp4netns" in " ".join(each.cmdline()) for each in psutil.Process().children()) == 1
    network.close()
    assert len(os.listdir("/proc/self/fd")) < len(before)


def test_a_second_close_closes_no_file_of_others(shell: ContainerShell):
    network = shell.connect()
    network.close()
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(16)]
    network.close()
    for each in opened:
        os.close(each)


OWN = """
import os, sys
from offbeat.envs.sandbox.network import ContainerNetwork, NetworkError
from offbeat.envs.sandbox.shell import ShellError, ShellLimits
try:
    ContainerNetwork(int(sys.argv[1]) or os.getpid(), ShellLimits(image="a", network="task"))
except (NetworkError, ShellError) as error:
    print(error)
"""


@pytest.mark.parametrize(("pid", "says"), [(0, "has this machine's network"), (1 << 22, "the container has ended")])
def test_no_network_but_a_containers_is_changed(pid: int, says: str):
    require_network()
    command = ["unshare", "--net", sys.executable, "-c", OWN, str(pid)]  # which it would cut off
    assert says in subprocess.run(command, capture_output=True, text=True, check=True).stdout


WORKER = """
import sys
from offbeat.envs.sandbox.container import ContainerShell
from offbeat.envs.sandbox.shell import ShellLimits
shell = ContainerShell(("/app",), ShellLimits(image=sys.argv[1], network="task", network_probe=()))
network = shell.connect()
print("connected", flush=True)
sys.stdin.read()
"""


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process ended, also if nothing has reaped it."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE or not process.is_running()
    except psutil.NoSuchProcess:
        return True


def test_a_killed_process_leaves_no_network():
    command = [sys.executable, "-c", WORKER, require_network()]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "connected\n"
        [slirp] = [each for each in psutil.Process(worker.pid).children() if "slirp4netns" in " ".join(each.cmdline())]
        os.kill(worker.pid, signal.SIGKILL)
        wait_until_sync(lambda: has_ended(slirp))
    finally:
        worker.kill()
        worker.communicate()
