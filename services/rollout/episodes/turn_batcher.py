"""Batches of ready turns in one generation call.

Invariants: a single turn is sent at once; none waits for another's completion; a cancelled one is removed, or aborted
if sent.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import replace

from offbeat.services.awake_clock import AwakeClock
from offbeat.services.errors import GenerationError, MeshError, RetryableError
from offbeat.services.generation.client import GenerationClient
from offbeat.services.generation.routing import ReplicaRoute
from offbeat.services.messages.types import Completion, GenerateRequest

logger = logging.getLogger(__name__)


class TurnBatcher:
    """Sender of turns, at most one call per replica in `coalesce_s`, or as many as `max_turns` needs."""

    def __init__(
        self,
        client: GenerationClient,
        coalesce_s: float,
        timeout_s: float | None = None,
        clock: AwakeClock | None = None,
        max_turns: int | None = None,
    ) -> None:
        """timeout_s: of a call, whose turns are then aborted; None: unlimited. clock: of the client. max_turns: per call."""
        self._client = client
        self.clock = clock or AwakeClock()
        self._coalesce_s = coalesce_s
        self._timeout_s = timeout_s
        self._max_turns = max_turns
        self._waiting: dict[str, asyncio.Future[Completion]] = {}
        self._unsent: dict[str, GenerateRequest] = {}
        self._to_abort: list[str] = []
        self._timer: asyncio.Handle | None = None
        self._next_send = 0.0
        self._calls: set[asyncio.Task[None]] = set()
        self.num_calls = 0

    async def sample(self, request: GenerateRequest) -> Completion:
        """Sample a turn.

        Raises:
            RetryableError: generation is unavailable; retry under another request id.
            GenerationError: the request was rejected.
            TimeoutError: no answer in time; retryable.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Completion] = loop.create_future()
        self._waiting[request.request_id] = answer
        self._unsent[request.request_id] = request
        self._schedule_send(loop)
        try:
            completion = await answer
        except asyncio.CancelledError:
            self._withdraw(request.request_id, loop)
            raise
        finally:
            self._waiting.pop(request.request_id, None)
        if completion.error:
            raise GenerationError(completion.error)
        return completion

    def forget(self, episode: str) -> None:
        """Release the replica of an episode that is over; requests of it that are still to be sent have none."""
        self._client.forget(episode)
        for request_id, request in self._unsent.items():
            if request.episode == episode:
                self._unsent[request_id] = replace(request, episode="", continues=False)

    async def close(self) -> None:
        if self._timer:
            self._timer.cancel()
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    def _schedule_send(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            return
        wait = self._next_send - loop.time()
        # Not before the next round of the loop: other turns that are ready now run first, and join.
        self._timer = loop.call_later(wait, self._send, loop) if wait > 0 else loop.call_soon(self._send, loop)

    def _send(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        self._next_send = loop.time() + self._coalesce_s
        requests, self._unsent = list(self._unsent.values()), {}
        request_ids, self._to_abort = self._to_abort, []
        if request_ids:
            self._begin(self._abort(request_ids))
        for replica_id, part in self._route(requests):
            size = self._max_turns or len(part)
            for start in range(0, len(part), size):
                self.num_calls += 1
                self._begin(self._call(part[start : start + size], replica_id))

    def _route(self, requests: Sequence[GenerateRequest]) -> Sequence[ReplicaRoute]:
        try:
            return self._client.route(requests) if requests else ()
        except Exception:
            logger.exception("turns can't be routed")
            return [ReplicaRoute("", requests)]  # the call answers them, if by its error

    def _begin(self, call: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _call(self, requests: Sequence[GenerateRequest], replica_id: str) -> None:
        error: Exception = RetryableError("generation ended without an answer")
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                async for completions in self._client.generate(requests, replica_id):
                    if not completions and self._timeout_s is not None:  # its engine sleeps: the limit starts again
                        limit.reschedule(asyncio.get_running_loop().time() + self._timeout_s)
                    for completion in completions:
                        answer = self._waiting.get(completion.request_id)
                        if answer is not None and not answer.done():
                            answer.set_result(completion)
        except MeshError as raised:
            error = raised
        except Exception as raised:
            if limit.expired():
                error = TimeoutError(f"no answer in {self._timeout_s:g} s")
            else:
                logger.exception("a generation call failed unexpectedly")
                error = GenerationError(f"{type(raised).__name__}: {raised}")
        for request in requests:
            if not request.episode:
                self._client.forget(request.request_id)
            answer = self._waiting.get(request.request_id)
            if answer is not None and not answer.done():
                if replica_id and isinstance(error, RetryableError | TimeoutError):
                    self._client.avoid(replica_id)
                answer.set_exception(error)
                if limit.expired():
                    self._to_abort.append(request.request_id)
        if self._to_abort:
            self._schedule_send(asyncio.get_running_loop())

    async def _abort(self, request_ids: Sequence[str]) -> None:
        try:
            await self._client.abort(request_ids)
        except MeshError as error:
            logger.info("could not abort %d turns: %s", len(request_ids), error)

    def _withdraw(self, request_id: str, loop: asyncio.AbstractEventLoop) -> None:
        if self._unsent.pop(request_id, None) is None:
            self._to_abort.append(request_id)
            self._schedule_send(loop)
