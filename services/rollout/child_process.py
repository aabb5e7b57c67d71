"""A child process that answers commands over its pipes, killed with all its descendants.

Invariants: the child leads a process group, which is killed as a whole; when the worker dies, its children see the end
of their pipe and kill their groups; only msgpack crosses the pipe.
"""

import asyncio
import logging
import os
import signal
import struct
import sys
from contextlib import suppress
from typing import Any, cast

import msgpack

from offbeat.services.errors import EpisodeError

logger = logging.getLogger(__name__)

LENGTH = struct.Struct("<I")
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Bytes; a longer message means that the child is broken."""
MAX_PRINTED_BYTES = 1024 * 1024
"""Bytes that a child may print in its life, because they end up in a log file."""
CHUNK = 64 * 1024
THROTTLE_S = 0.01
"""Pause between chunks of a child that printed too much, s: at most 6 MB/s."""


class ChildProcess:
    """One process that serves commands by `child_main`; one caller at a time."""

    def __init__(self, module: str, crash_reason: str) -> None:
        """crash_reason: reason of the `EpisodeError` if the child dies or violates the protocol."""
        self._module = module
        self._crash_reason = crash_reason
        self._child: asyncio.subprocess.Process | None = None
        self._forwarding: asyncio.Task[None] | None = None
        self.healthy = True

    @property
    def pid(self) -> int | None:
        """Process id, which is also the process group's id."""
        return self._child.pid if self._child else None

    async def start(self) -> None:
        """Start the process; no process is left if cancelled."""
        # User code may be anywhere on this process's path.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                *(sys.executable, "-m", self._module),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                env=environment,
            )
        )
        try:
            child = await asyncio.shield(starting)
            self._child = child
            self._forwarding = asyncio.create_task(_forward(child), name="child output")
        except asyncio.CancelledError:
            self._child = await starting
            await self.kill()
            raise

    async def ask(self, name: str, timeout_s: float, *args: Any) -> Any:
        """Send one command and return its answer; on any error, kill the child.

        Raises:
            EpisodeError: `<name>_error`, `<name>_timeout`, or the crash reason.
        """
        try:
            async with asyncio.timeout(timeout_s):
                ok, answer = await self._exchange([name, *args])
        except TimeoutError:
            await self.kill()
            raise EpisodeError(f"{name}_timeout", f"no answer in {timeout_s:g} s") from None
        except (OSError, EOFError, ValueError, TypeError, msgpack.UnpackException) as error:
            status = await self.kill()
            raise EpisodeError(self._crash_reason, f"at {name}, exit status {status}: {error}") from error
        except asyncio.CancelledError:
            await self.kill()
            raise
        if not ok:
            await self.kill()
            raise EpisodeError(f"{name}_error", str(answer))
        return answer

    async def kill(self) -> int | None:
        """Kill the process group and return the child's exit status."""
        self.healthy = False
        child, self._child = self._child, None
        if child is None:
            return None
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        if child.stdin is not None:
            child.stdin.close()
        try:
            return await asyncio.shield(child.wait())
        finally:
            if self._forwarding is not None:
                self._forwarding.cancel()

    async def _exchange(self, command: list[Any]) -> tuple[bool, Any]:
        child = self._child
        assert child is not None, "call start() first"
        assert child.stdin is not None
        assert child.stdout is not None
        message = cast(bytes, msgpack.packb(command))
        child.stdin.write(LENGTH.pack(len(message)) + message)
        await child.stdin.drain()
        (length,) = LENGTH.unpack(await child.stdout.readexactly(LENGTH.size))
        if length > MAX_MESSAGE_BYTES:
            raise ValueError(f"the child announces {length} bytes")
        ok, answer = msgpack.unpackb(await child.stdout.readexactly(length))
        return bool(ok), answer


async def _forward(child: asyncio.subprocess.Process) -> None:
    """Forward the child's stderr up to a limit; throttle and drop the rest."""
    assert child.stderr is not None
    num_bytes = 0
    while chunk := await child.stderr.read(CHUNK):
        num_bytes += len(chunk)
        if num_bytes <= MAX_PRINTED_BYTES:
            os.write(2, chunk)
            continue
        if num_bytes - len(chunk) <= MAX_PRINTED_BYTES:
            logger.warning("process %d has printed %d bytes; further output is dropped", child.pid, num_bytes)
        await asyncio.sleep(THROTTLE_S)
