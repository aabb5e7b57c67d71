"""Interface of the generation service and its Ray Serve client."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from copy import copy
from typing import Any, Protocol

from grpc.aio import AioRpcError
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from offbeat.services.awake_clock import AwakeClock
from offbeat.services.errors import GenerationError, MeshError, RetryableError
from offbeat.services.generation.request_router import running_replicas
from offbeat.services.generation.resumption import ResumedCalls
from offbeat.services.generation.routing import ReplicaAssignments, ReplicaRoute, Unrouted
from offbeat.services.messages.codec import decode_completions, encode_requests
from offbeat.services.messages.types import Completion, GenerateRequest

DEPLOYMENT = "generation"
MAX_MESSAGE_BYTES = 2 << 20
"""Of a call over gRPC; Serve's limit is 4 MiB unless RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH is set."""
BYTES_PER_TOKEN = 16
"""Of an encoded completion: id, logprob, and spans of versions; a span per token takes half as much again."""
COMPLETION_BYTES = 128
"""Of an encoded completion without tokens, experts and texts."""
PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
"""Variables under which gRPC would send calls through a proxy; Ray's own calls ignore them."""


class GenerationClient(Protocol):
    """Token ids in, token ids out."""

    def route(self, requests: Sequence[GenerateRequest]) -> Sequence[ReplicaRoute]:
        """Split requests by the replicas that have the keys and values of their prompts."""
        ...

    def forget(self, episode: str) -> None:
        """Release the replica of an episode that is over, or of a request without one."""
        ...

    def avoid(self, replica_id: str) -> None:
        """Route to others for a while, if there are any: a call of this replica failed."""
        ...

    def generate(self, requests: Sequence[GenerateRequest], replica_id: str = "") -> AsyncIterator[list[Completion]]:
        """Sample requests; yield each completion once, as they finish, with `error` if refused. An empty list means that
        requests go to another replica, or wait until one wakes.

        replica_id: of a `ReplicaRoute`; any other samples if that one does not.

        Raises:
            RetryableError: the replica died or left routing; resend the requests not yielded.
        """
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests, which then yield `error`; ignore unknown ids."""
        ...


class NoGeneration(Unrouted):
    """`GenerationClient` of a run that samples nothing."""

    async def generate(
        self, requests: Sequence[GenerateRequest], replica_id: str = ""
    ) -> AsyncIterator[list[Completion]]:
        del replica_id
        raise GenerationError(f"{len(requests)} turn(s) can't be sampled: the run has no engines")
        yield []  # pyright: ignore[reportUnreachable]

    async def abort(self, request_ids: Sequence[str]) -> None:
        del request_ids


class ServeGenerationClient:
    """`GenerationClient` over a Serve handle; a streaming call carries many turns to one replica. Used in one event loop.

    Calls wait for the deployment. Raises `RayServeException` if Serve is not running.
    """

    def __init__(
        self, app: str, clock: AwakeClock | None = None, run_id: str = "", *, returns_routing: bool = False
    ) -> None:
        """clock: stands still while requests wait because all replicas sleep. run_id: names the run to an application
        that may serve others, too. returns_routing: whether completions have experts, whose size only replicas know.
        """
        self._run = {"run": run_id} if run_id else {}
        # Serve's own is shared by the process, and routed in the loop of whoever uses it first
        self._handle = copy(serve.get_deployment_handle(DEPLOYMENT, app))
        self._generate: dict[tuple[bool, str], Any] = {}
        """By whether arguments travel as Ray's objects, and by the preferred replica."""
        self._calls = ResumedCalls(self._call, clock or AwakeClock())
        self._avoids_grpc = returns_routing or any(os.environ.get(name) for name in PROXIES)
        self._assignments = ReplicaAssignments()

    def route(self, requests: Sequence[GenerateRequest]) -> Sequence[ReplicaRoute]:
        awake = [each for each in running_replicas(self._routed()) if each not in self._calls.asleep]
        return self._assignments.split(requests, awake)

    def avoid(self, replica_id: str) -> None:
        self._assignments.avoid(replica_id)

    def forget(self, episode: str) -> None:
        self._assignments.forget(episode)

    def generate(self, requests: Sequence[GenerateRequest], replica_id: str = "") -> AsyncIterator[list[Completion]]:
        return self._calls.generate(requests, replica_id)

    def _call(self, requests: Sequence[GenerateRequest], asleep: Sequence[str], replica_id: str) -> "_ServeCall":
        blob = encode_requests(requests)
        by_reference = self._avoids_grpc or not fits_message(requests, len(blob))
        handle = self._generate.get((by_reference, replica_id))
        if handle is None:
            handle = self._generate[by_reference, replica_id] = self._routed().options(
                method_name="generate", stream=True, session_id=replica_id, _by_reference=by_reference
            )
        known = {"asleep": asleep} if asleep else {}
        return _ServeCall(handle.remote(blob, **known, **self._run))

    def _routed(self) -> Any:
        """Return the handle, routed in this event loop: a thread of its own would cost a call as much CPU as the call."""
        if not self._handle.is_initialized:
            self._handle._init(_run_router_in_separate_loop=False)
        return self._handle

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Abort on every replica."""
        self._calls.withdraw(request_ids)
        try:
            await self._routed().broadcast("abort", list(request_ids), **self._run).results_async()
        except (RayError, RayServeException) as error:
            raise translate(error) from error


def split_messages(completions: Sequence[Completion]) -> Iterator[list[Completion]]:
    """Split completions into parts that gRPC carries, if each of them fits."""
    part, size = list[Completion](), 0
    for completion in completions:
        texts = len(completion.request_id) + len(completion.error)
        experts = 0 if completion.routing is None else completion.routing.nbytes
        more = BYTES_PER_TOKEN * len(completion.token_ids) + experts + texts + COMPLETION_BYTES
        if part and size + more > MAX_MESSAGE_BYTES:
            yield part
            part, size = [], 0
        part.append(completion)
        size += more
    if part:
        yield part


def fits_message(requests: Sequence[GenerateRequest], size: int) -> bool:
    """Return whether a call of `size` bytes and each of its completions, without experts, may travel by gRPC, and not as
    Ray's objects.
    """
    answer = BYTES_PER_TOKEN * max((each.sampling.max_new_tokens for each in requests), default=0)
    return max(size, answer) <= MAX_MESSAGE_BYTES


class _ServeCall:
    def __init__(self, call: Any) -> None:
        """call: Serve's streaming response."""
        self._call = call

    async def __aiter__(self) -> AsyncIterator[list[Completion]]:
        try:
            async for blob in self._call:
                yield decode_completions(blob)
        except Exception as error:
            raise translate(error) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise RetryableError("the replica cancelled the call") from None

    def cancel(self) -> None:
        self._call.cancel()


def translate(error: Exception) -> MeshError:
    """Convert an error of the replica, or of the way there, to the service's."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, MeshError):
        return cause
    if isinstance(cause, AioRpcError):
        return RetryableError(f"no replica answered: {cause.code().name}: {cause.details()}")
    if isinstance(cause, (RayError, RayServeException)):
        return RetryableError(f"no replica answered: {cause}")
    return GenerationError(f"the replica failed: {cause!r}")
