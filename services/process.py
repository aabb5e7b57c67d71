"""Child processes. Standard library only, as children import it at startup."""

import atexit
import ctypes
import gc
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, BinaryIO, cast

PR_SET_PDEATHSIG = 1
FIRST_PORT, LAST_PORT, PORT_TRIES = 20_000, 32_000, 100
"""Below the kernel's outgoing ports, above those of Ray's workers."""
DIE_WITH_PARENT = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, int(sys.argv[2]))
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[3], sys.argv[3:])
"""
"""Program that sets the death signal and executes a command; `preexec_fn` is unsafe with threads."""


@contextmanager
def uncollected_imports() -> Iterator[None]:
    """Import large libraries without collecting garbage, and exempt what they made from later collections.

    The collector would walk all that is imported again and again: a quarter of the CPU time of torch, DeepSpeed or vLLM.
    """
    enabled, count = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > count:  # else all that is new is what other threads made
            gc.freeze()
            atexit.register(gc.unfreeze)  # else Triton's bindings complain of leaks when the process ends
        if enabled:
            gc.enable()


@contextmanager
def uncollected() -> Iterator[None]:
    """Allocate many objects that stay without collecting garbage, which would walk them again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def freeze_started() -> None:
    """Collect garbage, and exempt what is left from later collections.

    Call when a service has started: a full collection walks the objects of torch, Ray and vLLM for 0.4 s.
    """
    gc.collect()
    gc.freeze()


def die_with_parent(parent: int | None = None, *, by: signal.Signals = signal.SIGKILL) -> None:
    """Signal this process when the thread that started it ends (Linux).

    parent: expected pid; exit with code 1 if it has ended.

    Raises:
        OSError: the kernel refuses.
    """
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(by), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def bind_to_thread(command: Sequence[str], *, by: signal.Signals = signal.SIGKILL) -> list[str]:
    return [sys.executable, "-IS", "-c", DIE_WITH_PARENT, str(os.getpid()), str(int(by)), *command]


def terminate(process: "subprocess.Popen[Any]", grace_s: float) -> bool:
    """Send SIGTERM, then SIGKILL, and reap; return False if killed."""
    process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    return True


def claim_stdout() -> BinaryIO:
    """Redirect stdout to stderr; return the original."""
    messages = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return messages


class JsonLines:
    """JSON objects over pipes, one per line."""

    def __init__(self, source: IO[bytes], sink: IO[bytes]) -> None:
        self._source = source
        self._sink = sink

    def send(self, message: Mapping[str, Any]) -> bool:
        """Send a message; return False if the peer has closed."""
        try:
            self._sink.write(json.dumps(message).encode() + b"\n")
            self._sink.flush()
        except BrokenPipeError:
            return False
        return True

    def receive(self) -> dict[str, Any] | None:
        """Wait for a message; return None once the peer has closed.

        Raises:
            ValueError: not a JSON object.
        """
        line = self._source.readline()
        if not line:
            return None
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError(f"not a JSON object: {line[:100]!r}")
        return cast(dict[str, Any], message)

    def close(self) -> None:
        with suppress(BrokenPipeError):
            self._sink.close()


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free TCP port below the ephemeral range, without reserving it."""
    for _ in range(PORT_TRIES):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((host, FIRST_PORT + secrets.randbelow(LAST_PORT - FIRST_PORT)))
            return int(probe.getsockname()[1])
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
