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
LONGEST_MESSAGE = 64 * 1024 * 1024
"""Bytes; a longer message means that the child is broken."""
MOST_PRINTED = 1024 * 1024
"""Bytes that a child may print in its life, because they end up in a log file."""
CHUNK = 64 * 1024
SLOW_S = 0.01
"""Pause between chunks of a child that printed too much, s: at most 6 MB/s."""


class ChildProcess:
    """One process that serves commands by `child_main`; one caller at a time."""

    def __init__(self, module: str, crash_reason: str) -> None:
        """crash_reason: reason of the `EpisodeError` if the child dies or violates the protocol."""
        self._module = module
        self._crash_reason = crash_reason
        self._child: asyncio.subprocess.Process | None = None
        self._listening: asyncio.Task[None] | None = None
        self.healthy = True

    @property
    def pid(self) -> int | None:
        """Process id, which is also the process group's id."""
        return self._child.pid if self._child else None

    async def start(self) -> None:
        """Start the process; no process is left if cancelled."""
        # A user's code may lie anywhere on this process's path.
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
            self._listening = asyncio.create_task(_forward(child), name="what a child prints")
        except asyncio.CancelledError:
            self._child = await starting
            await self.kill()
            raise

    async def ask(self, what: str, timeout_s: float, *args: Any) -> Any:
        """Send one command and return its answer; on any error, kill the child.

        Raises:
            EpisodeError: `<what>_error`, `<what>_timeout`, or the crash reason.
        """
        try:
            async with asyncio.timeout(timeout_s):
                ok, answer = await self._exchange([what, *args])
        except TimeoutError:
            await self.kill()
            raise EpisodeError(f"{what}_timeout", f"no answer in {timeout_s:g} s") from None
        except (OSError, EOFError, ValueError, TypeError, msgpack.UnpackException) as error:
            status = await self.kill()
            raise EpisodeError(self._crash_reason, f"at {what}, exit status {status}: {error}") from error
        except asyncio.CancelledError:
            await self.kill()
            raise
        if not ok:
            await self.kill()
            raise EpisodeError(f"{what}_error", str(answer))
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
            if self._listening is not None:
                self._listening.cancel()

    async def _exchange(self, command: list[Any]) -> tuple[bool, Any]:
        child = self._child
        assert child is not None, "start() comes first"
        assert child.stdin is not None
        assert child.stdout is not None
        message = cast(bytes, msgpack.packb(command))
        child.stdin.write(LENGTH.pack(len(message)) + message)
        await child.stdin.drain()
        (length,) = LENGTH.unpack(await child.stdout.readexactly(LENGTH.size))
        if length > LONGEST_MESSAGE:
            raise ValueError(f"the child announces {length} bytes")
        ok, answer = msgpack.unpackb(await child.stdout.readexactly(length))
        return bool(ok), answer


async def _forward(child: asyncio.subprocess.Process) -> None:
    """Forward the child's stderr up to a limit; throttle and drop the rest."""
    assert child.stderr is not None
    heard = 0
    while chunk := await child.stderr.read(CHUNK):
        heard += len(chunk)
        if heard <= MOST_PRINTED:
            os.write(2, chunk)
            continue
        if heard - len(chunk) <= MOST_PRINTED:
            logger.warning(
                "process %d has printed %d bytes: what it prints from here on is thrown away", child.pid, heard
            )
        await asyncio.sleep(SLOW_S)
