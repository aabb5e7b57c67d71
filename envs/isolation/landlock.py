"""Landlock: restriction of files, TCP ports and signals of this process and its children.

Needs Linux 5.13; later kernels restrict more (docs.kernel.org/userspace-api/landlock.html), none modes, owners and
times.
"""

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

from offbeat.envs.isolation.syscalls import KernelError, call

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE, IOCTL_DEV = 1, 2, 4, 8, 1 << 14, 1 << 15
READ = EXECUTE | READ_FILE | READ_DIR
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
RIGHTS_OF_ABI = ((1, (1 << 13) - 1), (2, 1 << 13), (3, TRUNCATE), (5, IOCTL_DEV))
TRUNCATE_SINCE, TCP_SINCE, SCOPES_SINCE = 3, 4, 6
BIND_AND_CONNECT, SOCKETS_AND_SIGNALS = 0b11, 0b11


def abi() -> int:
    """Return the kernel's Landlock version, or 0."""
    try:
        return call(CREATE_RULESET, None, 0, 1)
    except KernelError:
        return 0


def restrict(*, readable: Iterable[str], writable: Iterable[str], max_abi: int | None = None) -> int:
    """Allow reading and executing below `readable`, everything below `writable`; return the version used.

    max_abi: of an older kernel to emulate. Raises `KernelError` without Landlock.
    """
    version = abi() if max_abi is None else min(abi(), max_abi)
    handled = sum(rights for since, rights in RIGHTS_OF_ABI if version >= since)
    fields = [handled, BIND_AND_CONNECT if version >= TCP_SINCE else 0, SOCKETS_AND_SIGNALS]
    supported = fields[: 3 if version >= SCOPES_SINCE else 2 if version >= TCP_SINCE else 1]
    attributes = struct.pack(f"={len(supported)}Q", *supported)
    ruleset = call(CREATE_RULESET, ctypes.create_string_buffer(attributes, len(attributes)), len(attributes), 0)
    try:
        for rights, paths in ((READ, readable), (handled & ~IOCTL_DEV, writable)):
            for path in paths:
                _allow(ruleset, path, rights & handled)
        call(RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
    return version


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= FILE_RIGHTS
        call(ADD_RULE, ruleset, 1, ctypes.create_string_buffer(struct.pack("=Qi", rights, descriptor), 12), 0)
    finally:
        os.close(descriptor)
