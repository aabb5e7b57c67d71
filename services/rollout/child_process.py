"""Child process that answers commands over pipes, in msgpack.

Invariants: it is killed with its process group; a worker's death closes the pipe, and children then kill their groups.
"""

import asyncio
import logging
import os
import signal
import struct
import sys
import time
from contextlib import suppress
from typing import Any, cast

import msgpack

from offbeat.services.awake_clock import AwakeClock
from offbeat.services.errors import EpisodeError

logger = logging.getLogger(__name__)

LENGTH = struct.Struct("<I")
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
MAX_PRINTED_BYTES = 1024 * 1024
"""Of a child's log, per `PRINT_INTERVAL_S`."""
PRINT_INTERVAL_S = 600.0
CHUNK = 64 * 1024
THROTTLE_S = 0.01
"""Pause per chunk beyond it."""
LAST_OUTPUT_S = 1.0
"""Time to log a killed child's output, whose pipe other processes may hold open."""


class ChildProcess:
    """Process of `child_main`; one caller at a time."""

    def __init__(self, module: str, crash_reason: str, *, quiet: bool = False, clock: AwakeClock | None = None) -> None:
        """crash_reason: `EpisodeError.reason` for death or protocol violation. quiet: drop output. clock: of timeouts."""
        self._clock = clock or AwakeClock()
        self._quiet = quiet
        self._module = module
        self._crash_reason = crash_reason
        self._child: asyncio.subprocess.Process | None = None
        self._forwarding: asyncio.Task[None] | None = None
        self.healthy = True
        self.is_busy = False
        """True while a command is being answered."""

    @property
    def pid(self) -> int | None:
        """Process and group id."""
        return self._child.pid if self._child else None

    async def start(self) -> None:
        """Start the process; cancellation leaves none."""
        # User code may be anywhere on this process's path.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                *(sys.executable, "-m", self._module),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL if self._quiet else asyncio.subprocess.PIPE,
                start_new_session=True,
                env=environment,
            )
        )
        try:
            child = await asyncio.shield(starting)
            self._child = child
            if not self._quiet:
                self._forwarding = asyncio.create_task(forward_output(child), name="child output")
        except asyncio.CancelledError:
            self._child = await starting
            await self.kill()
            raise

    async def ask(self, name: str, timeout_s: float, *args: Any) -> Any:
        """Return a command's answer; any error kills the child.

        Raises:
            EpisodeError: `<name>_error`, `<name>_timeout`, or the crash reason.
        """
        self.is_busy = True
        try:
            async with self._clock.timeout(timeout_s):
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
        finally:
            self.is_busy = False
        if not ok:
            await self.kill()
            message, trace = answer
            raise EpisodeError(f"{name}_error", str(message), str(trace))
        return answer

    async def kill(self) -> int | None:
        """Kill the group; return the exit status."""
        self.healthy = False
        child, self._child = self._child, None
        if child is None:
            return None
        return await asyncio.shield(end_child(child, self._forwarding))

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


async def end_child(child: asyncio.subprocess.Process, output: "asyncio.Task[None] | None") -> int:
    """Kill the process group and log its last output; return the exit status.

    Closes the pipes, which a process in a session of its own may hold open: until then asyncio reports no exit.
    """
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    if output is not None:
        await asyncio.wait({output}, timeout=LAST_OUTPUT_S)
        output.cancel()
    transport = child._transport  # pyright: ignore
    if (stdin := transport.get_pipe_transport(0)) and not stdin.is_closing():
        stdin.abort()  # `close` waits until all is written
    for number in (1, 2):
        if pipe := transport.get_pipe_transport(number):
            pipe.close()
    return await child.wait()


async def forward_output(child: asyncio.subprocess.Process) -> None:
    assert child.stderr is not None
    num_bytes, began = 0, time.monotonic()
    while chunk := await child.stderr.read(CHUNK):
        if time.monotonic() >= began + PRINT_INTERVAL_S:
            num_bytes, began = 0, time.monotonic()
        num_bytes += len(chunk)
        if num_bytes <= MAX_PRINTED_BYTES:
            os.write(2, chunk)
            continue
        if num_bytes - len(chunk) <= MAX_PRINTED_BYTES:
            logger.warning(
                "process %d has printed %d bytes in %.0f s; further output is dropped for %.0f s",
                *(child.pid, num_bytes, time.monotonic() - began, began + PRINT_INTERVAL_S - time.monotonic()),
            )
        await asyncio.sleep(THROTTLE_S)
