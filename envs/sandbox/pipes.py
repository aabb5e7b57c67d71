"""Descriptors that are opened together: all of them, or none."""

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager


def open_pipes() -> tuple[int, int, int, int]:
    """Return the ends of two pipes: read, write, read, write."""
    first = os.pipe()
    with closing_on_error(first):
        return (*first, *os.pipe())


def duplicate(first: int, second: int) -> tuple[int, int]:
    copy = os.dup(first)
    with closing_on_error((copy,)):
        return copy, os.dup(second)


@contextmanager
def closing_on_error(descriptors: Sequence[int]) -> Generator[None]:
    try:
        yield
    except BaseException:
        close_all(descriptors)
        raise


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
