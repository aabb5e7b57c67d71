"""Calls of a side that wants to outlast its time."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from offbeat.envs.dataset.peer import Peer, connect
from tests.waiting import PATIENCE_S

TIMEOUT_S = 0.3
REQUEST = b'["request","names",{"l":[]},{"d":[]}]\n'
SAME_HASHES = [number * (2**61 - 1) for number in range(40_000)]
"""Half a minute of CPU time as a set."""


@contextmanager
def connected(write: Callable[[int], object], timeout_s: float = TIMEOUT_S) -> Iterator[Peer]:
    """Connect to a program that reads nothing and writes in a thread."""
    program_reads, write_fd = os.pipe()
    read_fd, program_writes = os.pipe()

    def run() -> None:
        try:
            os.write(program_writes, b'["hello"]\n')
            write(program_writes)
        except OSError:  # the reader has gone
            pass

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield connect(read_fd, write_fd, timeout_s, PATIENCE_S)
    finally:
        os.close(read_fd)
        thread.join()
        for descriptor in (program_reads, write_fd, program_writes):
            os.close(descriptor)


def test_requests_without_end_are_out_of_time():
    def ask(descriptor: int) -> None:
        while True:
            os.write(descriptor, REQUEST)

    began = time.monotonic()
    with connected(ask) as peer, pytest.raises(TimeoutError):
        peer.request("names")
    assert time.monotonic() - began < 20
    with connected(ask, PATIENCE_S) as peer:
        peer.takes_requests = False
        with pytest.raises(PermissionError):
            peer.request("names")


def test_a_side_that_does_not_read_is_out_of_time():
    with connected(lambda _: None) as peer, pytest.raises(TimeoutError):
        peer.request("call", "x" * 1_000_000)


@pytest.mark.parametrize(
    "value",
    [
        {"o": ["fractions.Fraction", "1e999999999", None]},
        {"o": ["fractions.Fraction", 1.5]},
        {"o": ["os.system", "true"]},
        {"n": ["object", [], [1]]},
        {"n": ["V999999999", [], [1]]},
        {"n": ["int8", [1 << 40], [1]]},
        {"n": ["int8", [-1, 1], []]},
        {"n": ["int8", [1 << 40, 0], []]},
    ],
)
def test_values_that_are_not_plain_are_errors(value: object):
    answer = json.dumps(["value", value]).encode() + b"\n"
    with (
        connected(lambda descriptor: os.write(descriptor, answer), PATIENCE_S) as peer,
        pytest.raises((TypeError, ValueError, KeyError)),
    ):
        peer.request("names")


def test_numbers_of_equal_hashes_are_out_of_time():
    answer = json.dumps(["value", {"s": SAME_HASHES}]).encode() + b"\n"
    with connected(lambda descriptor: os.write(descriptor, answer)) as peer:
        began = time.thread_time()
        with pytest.raises(TimeoutError):
            peer.request("names")
        assert time.thread_time() - began < 5
    with connected(lambda descriptor: os.write(descriptor, answer), PATIENCE_S) as peer:
        peer.max_bytes = 1000
        with pytest.raises(ValueError, match="too long"):
            peer.request("names")
