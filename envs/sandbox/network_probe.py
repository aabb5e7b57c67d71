"""Program of `network.py`, run in a container's network: asks the resolver for a host, and connects to it.

Names are asked of the resolver that a container has, as this machine's libc may know others.
"""

import os
import socket
import struct
import sys

IPV4 = 1
"""Type of a record."""
NUM_QUERIES = 2
"""Of UDP, which may lose one."""


def resolve(name: str, resolver: tuple[str, int], timeout_s: float) -> str:
    """Return an IPv4 address of a name; raises OSError if the resolver does not answer, or has none."""
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.rstrip(".").split("."))
    query = os.urandom(2) + b"\1\0\0\1\0\0\0\0\0\0" + labels + b"\0\0\1\0\1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.settimeout(timeout_s / NUM_QUERIES)
        asking.connect(resolver)
        for _ in range(NUM_QUERIES):
            asking.send(query)
            try:
                answer = asking.recv(4096)
            except TimeoutError:
                continue
            if answer[:2] == query[:2]:
                return _read_address(answer, len(query), name)
    raise OSError(f"the resolver, {resolver[0]}, does not answer")


def _read_address(answer: bytes, place: int, name: str) -> str:
    """place: the end of the question."""
    for _ in range(int.from_bytes(answer[6:8], "big")):
        while 0 < answer[place] < 0xC0:  # labels, before a pointer or an end
            place += 1 + answer[place]
        place += 2 if answer[place] else 1
        kind, _, _, length = struct.unpack_from("!HHIH", answer, place)
        place += 10 + length
        if kind == IPV4:
            return socket.inet_ntoa(answer[place - length : place])
    raise OSError(f"the resolver has no IPv4 address of {name} (code {answer[3] & 15})")


def main(host: str, port: str, resolver: str, timeout: str) -> None:
    try:
        address = socket.inet_ntoa(socket.inet_aton(host)) if host.replace(".", "").isdigit() else None
        address = address or resolve(host, (resolver, 53), float(timeout))
        socket.create_connection((address, int(port)), float(timeout)).close()
    except OSError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
