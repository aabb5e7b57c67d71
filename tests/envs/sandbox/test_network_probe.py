"""The probe of a network's hosts: what it asks a resolver, and how it reads the answer."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from offbeat.envs.sandbox.network_probe import resolve

ALIAS = b"\xc0\x0c\0\5\0\1\0\0\0\1\0\4\1b\xc0\x0e"
"""A record that names another name."""
ADDRESS = b"\1b\xc0\x0e\0\1\0\1\0\0\0\1\0\4\xc0\0\2\7"
SIX = b"\xc0\x0c\0\x1c\0\1\0\0\0\1\0\x10" + bytes(16)


@contextmanager
def answer(*records: bytes, code: int = 0, num_lost: int = 0) -> Iterator[tuple[tuple[str, int], list[bytes]]]:
    """Serve one answer, after some queries without one; yield the resolver's address and the queries."""
    queries: list[bytes] = []

    def serve() -> None:
        for number in range(num_lost + 1):
            query, sender = server.recvfrom(512)
            queries.append(query)
            if number == num_lost:
                head = query[:2] + bytes([0x81, 0x80 | code, 0, 1, 0, len(records), 0, 0, 0, 0])
                server.sendto(head + query[12:] + b"".join(records), sender)

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname(), queries
        thread.join()


@pytest.mark.parametrize("records", [(ADDRESS,), (ALIAS, ADDRESS), (SIX, ADDRESS)])
def test_the_first_ipv4_address_is_read(records: tuple[bytes, ...]):
    with answer(*records) as (resolver, queries):
        assert resolve("a.org", resolver, 60) == "192.0.2.7"
    assert queries[0][12:] == b"\1a\3org\0\0\1\0\1"


def test_a_lost_query_is_repeated():
    with answer(ADDRESS, num_lost=1) as (resolver, queries):
        assert resolve("a.org", resolver, 10) == "192.0.2.7"
    assert queries[0] == queries[1]


@pytest.mark.parametrize("records", [(), (SIX,)])
def test_a_name_without_an_address_is_an_error(records: tuple[bytes, ...]):
    with (
        answer(*records, code=3) as (resolver, _),
        pytest.raises(OSError, match=r"no IPv4 address of a\.org \(code 3\)"),
    ):
        resolve("a.org", resolver, 60)


def test_a_resolver_that_is_silent_is_named():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        with pytest.raises(OSError, match=r"the resolver, 127\.0\.0\.1, does not answer"):
            resolve("a.org", silent.getsockname(), 0.2)
