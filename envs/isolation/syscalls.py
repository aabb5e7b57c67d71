"""System calls without a Python binding."""

import ctypes
import os
import platform
import signal

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
CAPABILITIES_V3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)

machine = platform.machine()


class KernelError(OSError):
    """Refusal of a call by the kernel."""


def call(number: int, *arguments: object) -> int:
    return _check(_libc.syscall(ctypes.c_long(number), *(_as_argument(argument) for argument in arguments)))


def prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)))


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags))


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    _check(
        _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode() or None)
    )


def detach(target: str) -> None:
    _check(_libc.umount2(target.encode(), 2))


def die_with_parent() -> None:
    """Request SIGKILL when the parent thread ends; to be repeated after a change of user."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def drop_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(CAPABILITIES_V3, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()))


def _as_argument(argument: object) -> object:
    return ctypes.c_long(argument) if isinstance(argument, int) else argument


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise KernelError(number, os.strerror(number))
    return result
