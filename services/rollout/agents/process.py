"""Process of Python agents (`runner.py`), in any Python; reused between episodes.

Invariants: a process that crashed, hung or broke the protocol is killed with its descendants and fails its episodes;
`ask` ends after its agent, also if cancelled again; agents' output reaches only the log.
"""

import asyncio
import itertools
import json
import sys
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from offbeat.envs.class_path import current_path
from offbeat.services.awake_clock import AwakeClock
from offbeat.services.errors import EpisodeError
from offbeat.services.rollout.agents.environment import agent_environment
from offbeat.services.rollout.child_process import MAX_MESSAGE_BYTES, end_child, forward_output

RUNNER = Path(__file__).with_name("runner.py")
REASONS = {"error": "agent_error", "result": "agent_result", "cancelled": "agent_timeout"}
"""Kind of failure -> `EpisodeError.reason`."""


class AgentProcess:
    """Process started by the first episode.

    capacity: concurrent episodes. cancel_grace_s: for a cancelled coroutine to end. clock: of episodes' time.
    """

    def __init__(
        self, python: str = "", capacity: int = 1, cancel_grace_s: float = 2.0, clock: AwakeClock | None = None
    ) -> None:
        self._clock = clock or AwakeClock()
        self._python = python
        self._capacity = capacity
        self._cancel_grace_s = cancel_grace_s
        self._starting = asyncio.Lock()
        self._child: asyncio.subprocess.Process | None = None
        self._output: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
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
            async with self._clock.timeout(timeout_s):
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
        await asyncio.shield(end_child(child, self._output))

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
            self._output = asyncio.create_task(forward_output(child), name="agent output")
            self._reading = asyncio.create_task(self._read(child, self._output), name="agent answers")
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

    async def _read(self, child: asyncio.subprocess.Process, output: "asyncio.Task[None]") -> None:
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
        if self._child is child:  # nothing has killed it
            await self.kill(why or f"exit status {await end_child(child, output)}")

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
