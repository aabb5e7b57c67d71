"""Process of Python agents (`runner.py`), in any Python; reused between episodes.

Invariants: a process that crashed, hung or broke the protocol is killed with its descendants and fails its episodes;
`ask` ends after its agent, also if cancelled again; agents' output reaches only the log.
"""

import asyncio
import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from offbeat.envs.class_path import current_path
from offbeat.services.errors import EpisodeError
from offbeat.services.rollout.child_process import MAX_MESSAGE_BYTES, forward_output

RUNNER = Path(__file__).with_name("runner.py")
LAST_OUTPUT_S = 1.0
"""Time to log an ended process's output."""
REASONS = {"error": "agent_error", "result": "agent_result", "cancelled": "agent_timeout"}
"""Kind of failure -> `EpisodeError.reason`."""


def agent_environment(python: str) -> dict[str, str]:
    """Return the environment of agents.

    python: empty for this interpreter; others get this one's path without installed packages.
    """
    here = [os.getcwd(), *(path for path in sys.path if path)]
    if not python:
        return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(here))}
    installed = tuple(os.path.realpath(prefix) for prefix in {sys.prefix, sys.base_prefix})
    own = [path for path in here if not os.path.realpath(path).startswith(installed) and not _holds_offbeat(path)]
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONHOME", "VIRTUAL_ENV")}
    folder = os.path.dirname(os.path.abspath(shutil.which(python) or python))
    programs = os.pathsep.join([folder, os.environ.get("PATH", os.defpath)])
    return {**kept, "PATH": programs, "PYTHONPATH": os.pathsep.join(dict.fromkeys(own))}


def _holds_offbeat(path: str) -> bool:
    return (Path(path) / "offbeat" / "__init__.py").is_file()


class AgentProcess:
    """Process started by the first episode.

    capacity: concurrent episodes. cancel_grace_s: for a cancelled coroutine to end.
    """

    def __init__(self, python: str = "", capacity: int = 1, cancel_grace_s: float = 2.0) -> None:
        self._python = python
        self._capacity = capacity
        self._cancel_grace_s = cancel_grace_s
        self._starting = asyncio.Lock()
        self._child: asyncio.subprocess.Process | None = None
        self._chores: list[asyncio.Task[None]] = []
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ids = itertools.count()
        self.num_episodes = 0
        self.healthy = True
        self.can_cancel = False
        """True once the agent is known to be a coroutine function."""

    @property
    def is_free(self) -> bool:
        return self.healthy and self.num_episodes < self._capacity

    async def ask(self, path: str, task: Mapping[str, Any], timeout_s: float) -> Any:
        """Run an episode; return the agent's value.

        timeout_s: includes the start.

        Raises:
            EpisodeError: `agent_error`, `agent_result`, `agent_timeout` or `agent_crashed`.
        """
        number = next(self._ids)
        self.num_episodes += 1
        try:
            async with asyncio.timeout(timeout_s):
                child = await self._start()
                self._answers[number] = asyncio.get_running_loop().create_future()
                request = {"id": number, "path": current_path(path), "task": task, "shared": self._capacity > 1}
                await self._send(child, request)
                answer = await self._answers[number]
        except TimeoutError:
            await complete(self._cancel(number))
            raise EpisodeError("agent_timeout", f"no answer in {timeout_s:g} s") from None
        except asyncio.CancelledError:
            await complete(self._cancel(number))
            raise
        except OSError as error:
            await self.kill()
            raise EpisodeError("agent_crashed", str(error)) from error
        finally:
            self.num_episodes -= 1
            self._answers.pop(number, None)
        if answer["children"] and self._capacity == 1:
            await self.kill()
        if "error" not in answer:
            return answer.get("result")
        raise EpisodeError(REASONS[answer["kind"]], str(answer["error"]), str(answer["trace"]))

    async def kill(self, why: str = "its process was killed") -> None:
        """Kill the process group and fail its episodes."""
        self.healthy = False
        child, self._child = self._child, None
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EpisodeError("agent_crashed", why))
                answer.exception()  # an episode that was cancelled does not await it
        if child is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        if child.stdin is not None:
            child.stdin.close()
        await asyncio.shield(child.wait())
        for chore in self._chores:
            if chore is not asyncio.current_task():
                chore.cancel()

    async def _start(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._child is not None:
                return self._child
            if not self.healthy:
                raise EpisodeError("agent_crashed", "its process was killed")
            starting = asyncio.ensure_future(self._execute())
            try:
                self._child = child = await asyncio.shield(starting)
            except asyncio.CancelledError:
                self._child = await starting
                await self.kill()
                raise
            self._chores = [
                asyncio.create_task(forward_output(child), name="agent output"),
                asyncio.create_task(self._read(child), name="agent answers"),
            ]
            return child

    async def _execute(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            *(self._python or sys.executable, str(RUNNER)),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
            env=agent_environment(self._python),
            limit=MAX_MESSAGE_BYTES,
        )

    async def _send(self, child: asyncio.subprocess.Process, message: Mapping[str, Any]) -> None:
        assert child.stdin is not None
        child.stdin.write(json.dumps(message).encode() + b"\n")
        await child.stdin.drain()

    async def _read(self, child: asyncio.subprocess.Process) -> None:
        assert child.stdout is not None
        why = ""
        try:
            while line := await child.stdout.readline():
                answer = json.loads(line)
                if "can_cancel" in answer:
                    self.can_cancel = True
                    continue
                waiting = self._answers.get(answer["id"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(cast(dict[str, Any], answer))
        except (ValueError, KeyError, TypeError) as error:  # ValueError: no JSON, or too long
            why = f"it broke the protocol: {error}"
        if not why:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            why = f"exit status {await child.wait()}"
            await asyncio.wait(self._chores[:1], timeout=LAST_OUTPUT_S)
        await self.kill(why)

    async def _cancel(self, number: int) -> None:
        """Cancel a coroutine; kill a process of a plain function, without others, or stuck."""
        has_ended = False
        try:
            has_ended = await self._cancel_coroutine(number)
        finally:
            if not has_ended or self._capacity == 1:
                await self.kill()

    async def _cancel_coroutine(self, number: int) -> bool:
        """Return whether it ended in time."""
        child, answer = self._child, self._answers.get(number)
        can_cancel = self.can_cancel or self._capacity > 1
        if not can_cancel or child is None or answer is None or not self.healthy:
            return False
        self._answers[number] = ended = asyncio.get_running_loop().create_future()
        with suppress(TimeoutError, OSError, EpisodeError):
            async with asyncio.timeout(self._cancel_grace_s):
                await self._send(child, {"cancel": number})
                await ended
                return True
        return False


async def complete(work: Coroutine[Any, Any, None]) -> None:
    """Await all of `work`, then raise a cancellation that came meanwhile."""
    task, cancellation = asyncio.create_task(work), None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation is not None:
        raise cancellation
    task.result()
