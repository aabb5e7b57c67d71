"""What tests of containers' networks need: podman, slirp4netns, nftables, and a server on an address of its own."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from offbeat.envs.sandbox import IsolationError
from offbeat.envs.sandbox.backend import check_sandbox
from offbeat.envs.sandbox.network import check_programs
from offbeat.envs.sandbox.shell import ShellLimits
from tests.envs.sandbox.images import require_image

SERVER = """
import http.server, os, socket
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"right\\n")
        if self.path == "/stop":
            os._exit(0)
    def log_message(self, *args):
        pass
silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
silent.bind(("0.0.0.0", 9999))
server = http.server.HTTPServer(("0.0.0.0", 8000), Handler)
print("ready", flush=True)
server.serve_forever()
"""
NEEDED = "nft add table inet x && ip link add near type veth peer name far"
SERVERS = "10.213."
"""Start of their addresses, which come and go with tests."""
DOWNLOAD = """
download() { exec 3<>"/dev/tcp/$1" && printf 'GET %s HTTP/1.0\\r\\n\\r\\n' "$2" >&3 && grep -qx right <&3; }
"""


class Server(NamedTuple):
    gateway: str
    """This machine's address beside it."""
    address: str
    port: int
    process: "subprocess.Popen[str]"

    @property
    def probe(self) -> str:
        return f"{self.address}:{self.port}"

    @property
    def path(self) -> str:
        """Of bash."""
        return f"{self.address}/{self.port}"


def require_network() -> str:
    """Return an image; skip the test where this machine has no programs or rights to connect containers of it.

    A connection that fails all the same fails the test.
    """
    image = require_image()
    try:
        check_programs()
        os.close(os.open("/dev/net/tun", os.O_RDWR))
        subprocess.run(["unshare", "--net", "sh", "-c", NEEDED], check=True, capture_output=True, text=True)
    except (IsolationError, OSError) as error:
        pytest.skip(str(error))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"rules or links of networks can't be made here: {error.stderr.strip()}")
    check_sandbox(ShellLimits(image=image, network="verifier", network_probe=()))
    return image


@contextmanager
def start_server() -> Iterator[Server]:
    """Serve `right` in a network namespace, at a private address that this machine reaches."""
    number = uuid.uuid4().int
    start, link = f"{SERVERS}{number % 256}.{(number >> 8) % 64 * 4}".rsplit(".", 1), f"offbeat{number >> 96:x}"[:15]
    gateway, address = (f"{start[0]}.{int(start[1]) + place}" for place in (1, 2))
    namespace = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo ready; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    inside = ("nsenter", "--target", str(namespace.pid), "--net", "--")
    process = None
    try:
        assert _first_line(namespace) == "ready\n"
        for command in (
            ("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(namespace.pid)),
            ("ip", "address", "add", f"{gateway}/30", "dev", link),
            ("ip", "link", "set", link, "up"),
            (*inside, "ip", "address", "add", f"{address}/30", "dev", "eth0"),
            (*inside, "ip", "link", "set", "eth0", "up"),
        ):
            subprocess.run(command, check=True)
        process = subprocess.Popen([*inside, sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
        assert _first_line(process) == "ready\n"
        yield Server(gateway, address, 8000, process)
    finally:
        subprocess.run(["ip", "link", "delete", link], check=False, capture_output=True)
        for each in (process, namespace):
            if each is not None:
                each.kill()
                each.communicate()


def _first_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()
