"""Turns that continue at other replicas when theirs goes to sleep.

Invariants: the tokens of a turn are kept with their logprobs and versions; each turn is answered once; none waits at a
sleeping replica while another one is awake.
"""

import asyncio
import logging
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from offbeat.services.awake_clock import AwakeClock
from offbeat.services.errors import MeshError
from offbeat.services.messages.routing import join_routing
from offbeat.services.messages.types import Completion, FinishReason, GenerateRequest

logger = logging.getLogger(__name__)

RETRY_INTERVAL_S = 2.0
"""Of requests that wait for a replica to wake: one may have started meanwhile."""


class ReplicaCall(Protocol):
    """Completions of one replica. If it goes to sleep, the call ends when it wakes."""

    def __aiter__(self) -> AsyncIterator[list[Completion]]: ...

    def cancel(self) -> None: ...


Call = Callable[[Sequence[GenerateRequest], Sequence[str], str], ReplicaCall]
"""(requests, ids of sleeping replicas, replica or empty) -> call to that replica, or else to one that is awake."""


class ResumedCalls:
    def __init__(self, call: Call, clock: AwakeClock) -> None:
        """clock: stands still while requests wait because all replicas sleep."""
        self._open = call
        self._clock = clock
        self._asleep: dict[str, asyncio.Task[None]] = {}
        """By replica id, a task that ends when the replica wakes."""
        self._between_calls: set[str] = set()
        """Ids of aborted requests, until they are sent again."""

    @property
    def asleep(self) -> Collection[str]:
        """Ids of sleeping replicas."""
        return self._asleep.keys()

    async def generate(
        self, requests: Sequence[GenerateRequest], replica_id: str = ""
    ) -> AsyncIterator[list[Completion]]:
        left = {request.request_id: request for request in requests}
        begun = {request_id: Completion(request_id) for request_id in left}
        while left:
            asleep, aborted = list(self._asleep), set[str]()
            replicas = set[str]()
            async with aclosing(self._call(list(left.values()), asleep, replica_id)) as batches:
                async for completions in batches:
                    finished: list[Completion] = []
                    for each in completions:
                        begun[each.request_id] = joined = join(begun[each.request_id], each)
                        if each.finish_reason is FinishReason.ABORT:
                            aborted.add(each.request_id)
                            replicas.add(each.replica_id)
                        else:
                            finished.append(joined)
                    if finished:
                        yield finished
            self._between_calls |= aborted
            try:
                if aborted:
                    yield []
                    if replicas <= set(asleep):
                        await self._wait_until_one_wakes()
                withdrawn = aborted - self._between_calls
            finally:
                self._between_calls -= aborted
            if withdrawn:
                yield [Completion(request_id, error="aborted") for request_id in withdrawn]
            again = [request for request in requests if request.request_id in aborted - withdrawn]
            left = {request.request_id: request_rest(request, begun[request.request_id]) for request in again}

    def withdraw(self, request_ids: Sequence[str]) -> None:
        """Do not send these requests again."""
        self._between_calls.difference_update(request_ids)

    async def _wait_until_one_wakes(self) -> None:
        with self._clock.stopped():
            if self._asleep:
                waits = list(self._asleep.values())
                await asyncio.wait(waits, timeout=RETRY_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)

    async def _call(
        self, requests: Sequence[GenerateRequest], asleep: Sequence[str], replica_id: str
    ) -> AsyncGenerator[list[Completion], None]:
        """Yield completions. One call to each sleeping replica stays open, to see it wake."""
        call = self._open(requests, asleep, "" if replica_id in asleep else replica_id)
        left, replicas, ended = len(requests), set[str](), False
        try:
            async for completions in call:
                left -= len(completions)
                replicas |= {each.replica_id for each in completions if each.replica_id}
                is_over = not left and bool(replicas)
                if is_over and replicas.isdisjoint(self._asleep):
                    ended = True
                    for replica_id in replicas:
                        self._asleep[replica_id] = asyncio.create_task(self._follow(replica_id, call))
                yield completions
                if is_over:
                    return
            ended = True
        except MeshError:
            ended = True
            raise
        finally:
            if not ended:  # the caller left: without this the replica would sample on
                call.cancel()

    async def _follow(self, replica_id: str, call: ReplicaCall) -> None:
        """Read a sleeping replica's call to its end."""
        try:
            async for _ in call:
                pass
        except MeshError as error:
            logger.info("replica %s did not wake: %s", replica_id, error)
        finally:
            del self._asleep[replica_id]


def request_rest(request: GenerateRequest, begun: Completion) -> GenerateRequest:
    """Return the request for what comes after the tokens of `begun`."""
    if not begun.token_ids:
        return request
    left = request.sampling.max_new_tokens - len(begun.token_ids)
    prompt = array("i", [*request.prompt, *begun.token_ids])
    sampling = replace(request.sampling, max_new_tokens=left)
    start = request.routing_start + (0 if begun.routing is None else len(begun.routing))
    return replace(request, prompt=prompt, sampling=sampling, num_answered=len(begun.token_ids), routing_start=start)


def join(begun: Completion, rest: Completion) -> Completion:
    """Return both as one completion, or the error of the rest."""
    if rest.error or not begun.token_ids:
        return rest
    length = len(begun.token_ids)
    spans = [span._replace(start=span.start + length, end=span.end + length) for span in rest.versions]
    return replace(
        rest,
        token_ids=begun.token_ids + rest.token_ids,
        logprobs=begun.logprobs + rest.logprobs,
        versions=(*begun.versions, *spans),
        routing=join_routing(begun.routing, rest.routing),
    )
