"""An env in a process of its own, killed with everything that it started when it hangs or is not needed any more.

Invariants: the child leads a process group, which is killed whole; when the worker dies, by whatever means, its children see
their pipe end and kill their groups; only msgpack crosses the pipe.
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

from services.rollout.execution import EnvSpec, EnvTraits, StepResult
from services.rollout.failures import EpisodeError

log = logging.getLogger(__name__)

LENGTH = struct.Struct("<I")
LONGEST_MESSAGE = 64 * 1024 * 1024
"""Bytes; a child that announces more is taken for broken."""
CLOSE_S = 2.0
"""Time that an env has to close before it is killed."""


class ProcessEnv:
    """`EnvRunner` in a child process (`services.rollout.child`)."""

    def __init__(self, spec: EnvSpec) -> None:
        self._spec = spec
        self._child: asyncio.subprocess.Process | None = None
        self.healthy = True

    @property
    def pid(self) -> int | None:
        """Of the child, which is also its process group's id."""
        return self._child.pid if self._child else None

    async def start(self) -> EnvTraits:
        """See `EnvRunner.start`."""
        # A user's env may lie anywhere on this process's path.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "services.rollout.child"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,
                env=environment,
            )
        )
        try:
            self._child = await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._child = await starting
            await self._kill()
            raise
        traits = await self._ask("make", self._spec.reset_timeout_s, self._spec.env_type, dict(self._spec.env_config))
        return EnvTraits(*traits)

    async def reset(self, seed: int) -> str:
        """See `EnvRunner.reset`."""
        return str(await self._ask("reset", self._spec.reset_timeout_s, seed))

    async def step(self, action: str) -> StepResult:
        """See `EnvRunner.step`."""
        return StepResult(*await self._ask("step", self._spec.step_timeout_s, action))

    async def close(self) -> None:
        """See `EnvRunner.close`."""
        if self.healthy and self._child is not None:
            with suppress(EpisodeError):
                await self._ask("close", CLOSE_S)
        await self._kill()

    async def _ask(self, what: str, timeout_s: float, *args: Any) -> Any:
        """One command and its answer; anything but a result kills the child."""
        try:
            async with asyncio.timeout(timeout_s):
                ok, answer = await self._exchange([what, *args])
        except TimeoutError:
            await self._kill()
            raise EpisodeError(f"{what}_timeout", f"no answer in {timeout_s:g} s") from None
        except (OSError, EOFError, ValueError, TypeError, msgpack.UnpackException) as error:
            status = await self._kill()
            raise EpisodeError("env_crashed", f"at {what}, exit status {status}: {error}") from error
        except asyncio.CancelledError:
            await self._kill()
            raise
        if not ok:
            await self._kill()
            raise EpisodeError(f"{what}_error", str(answer))
        return answer

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
            raise ValueError(f"the env's process announces {length} bytes")
        ok, answer = msgpack.unpackb(await child.stdout.readexactly(length))
        return bool(ok), answer

    async def _kill(self) -> int | None:
        """Kill the child's process group and reap the child; its exit status."""
        self.healthy = False
        child, self._child = self._child, None
        if child is None:
            return None
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        if child.stdin is not None:
            child.stdin.close()
        return await asyncio.shield(child.wait())
